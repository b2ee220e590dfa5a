"""One ReuseSession for all processes of a Ray job: an example may come to another worker at its next visit."""

from __future__ import annotations

from collections.abc import Sequence

import ray

from specrl.adapters.base import ReuseSession, Ticket


class SharedSession:
    """The job's session, in an actor of its own that the first process to ask makes; it ends with that process.

    Args: options: those of ReuseSession; the first process's count.
    """

    def __init__(self, name: str = "specrl-reuse", **options):
        actor = ray.remote(num_cpus=0)(ReuseSession)
        self._actor = actor.options(name=name, get_if_exists=True).remote(**options)

    async def request(self, prompt: Sequence[int], *, visit: int | None = None, slot: int = 0) -> Ticket:
        return await self._actor.request.remote(list(prompt), visit=visit, slot=slot)

    async def finish(self, ticket: Ticket, tokens: Sequence[int]) -> None:
        await self._actor.finish.remote(ticket, list(tokens))
