"""Garbage collection while engines work."""

import gc
import sys

import pytest

from specrl.rollout import verify
from specrl.rollout.engines.base import container_bytes, gc_frozen
from tests.engines import local
from tests.rollout.golden import SAMPLING, requests_of


@pytest.fixture(autouse=True)
def nothing_frozen():
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_what_is_there_is_left_alone_and_given_back():
    with gc_frozen():
        assert gc.get_freeze_count() > 10_000
    assert gc.get_freeze_count() == 0
    with pytest.raises(KeyError), gc_frozen():
        raise KeyError
    assert gc.get_freeze_count() == 0


def test_an_engine_works_with_the_heap_at_rest(golden, monkeypatch):
    model, cases, _ = golden("llama")
    frozen, accepted = [], verify.accept_exact

    def accept(*of):
        if not frozen:  # counting them is slow
            frozen.append(gc.get_freeze_count())
        return accepted(*of)

    monkeypatch.setattr(verify, "accept_exact", accept)
    local(model, SAMPLING).generate(requests_of(cases))
    assert frozen[0] > 10_000
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({"memory.max": "1000\n", "memory.current": "400\n", "memory.stat": "anon 300\ninactive_file 50\n"}, 650),
        ({"memory.max": "max\n", "memory.current": "400\n", "memory.stat": "anon 300\n"}, sys.maxsize),
        (
            {
                "memory/memory.limit_in_bytes": "1000\n",
                "memory/memory.usage_in_bytes": "400\n",
                "memory/memory.stat": "inactive_file 9\ntotal_inactive_file 60\n",
            },
            660,
        ),
        ({}, sys.maxsize),
    ],
    ids=["version 2", "no limit", "version 1", "no container"],
)
def test_a_containers_limit_counts_as_memory(tmp_path, files, left):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert container_bytes(tmp_path) == left
