"""The session of a real Ray job: what one process stored, another one drafts with."""

import asyncio
import importlib.util

import pytest

from rollout.sections import ClusterConfig
from specrl.run.cluster import connect

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'specrl[ray]'"),
]


def visit(number):
    """A response to the same prompt by whatever process this runs in: (slot, key, own text)."""
    from specrl.adapters.base import SharedSession

    async def one():
        session = SharedSession(seed=3)
        ticket = await session.request([1, 2], visit=number)
        await session.finish(ticket, [number, 7])
        return ticket.slot, ticket.request.key, ticket.request.texts[ticket.request.own :][:1]

    return asyncio.run(one())


def test_all_processes_of_a_job_share_one_session():
    with connect(ClusterConfig(num_workers=1, object_store_mb=80)):
        import ray

        from specrl.adapters.base import SharedSession

        made = SharedSession(seed=3)  # lives as long as this does
        here, there = visit, lambda number: ray.get(ray.remote(num_cpus=0)(visit).remote(number))
        done = [here(1), there(1), here(2), there(3)]
        del made
    assert [slot for slot, _, _ in done] == [0, 1, 0, 0], "the same visit: another slot"
    assert len({key for _, key, _ in done}) == 4
    assert [text for _, _, text in done[2:]] == [((1, 7),), ((2, 7),)]
