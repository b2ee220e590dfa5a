"""Delivery of weights to a pool's workers, over a link or through the store: what is chosen, walked and put when.

test_workers.py has a real pool that is linked.
"""

import pytest

from specrl.rollout.types import RolloutError
from specrl.rollout.workers.delivery import Delivery, choose_route
from specrl.rollout.workers.worker import WorkerInfo
from specrl.trainers.weights import PolicyWeights


def started(*gpus):
    return [WorkerInfo(i, "", tuple(each)) for i, each in enumerate(gpus)]


def delivery(puts=None, asked=None):
    """A delivery that records its puts and calls."""
    note = lambda method, args: asked is not None and asked.append((method, args))  # noqa: E731
    return Delivery(put=lambda arrays: puts.append(arrays) or len(puts), call=note, address="here")


@pytest.mark.parametrize(
    ("route", "trainer", "ranks", "trainers", "reason"),
    [
        ("ipc", "A", ["A"], 1, "share the trainer's GPU"),
        ("ipc", "A", ["A", "A"], 1, "share the trainer's GPU"),
        ("memory", "A", ["A"], 2, "not from 2"),
        ("nccl", "A", ["B"], 1, "GPU of its own"),
        ("nccl", "A", ["B", "C", "D"], 2, "GPU of its own"),
        ("memory", "A", ["B", "B"], 1, "a GPU for each rank"),
        ("memory", "A", ["A", "B"], 1, "a GPU for each rank"),
        ("memory", "A", ["B", ""], 1, "without a GPU"),
        ("memory", "", ["B", "C"], 1, "trainer has no GPU"),
    ],
)
def test_the_route_follows_from_the_gpus_of_both_sides(route, trainer, ranks, trainers, reason):
    chosen, why = choose_route(trainer, ranks, trainers)
    assert chosen == route
    assert reason in why


@pytest.fixture
def source(build_model):
    return PolicyWeights(build_model("qwen3", seed=1))


def test_the_store_gets_weights_when_they_are_first_asked_for_and_once(source):
    puts = []
    shipped = delivery(puts)
    assert shipped.stored() is None
    shipped.take(iter(source))
    assert puts == []
    assert [shipped.stored(), shipped.stored()] == [1, 1]
    assert puts[0].keys() == {meta.name for meta in source.metadata()}
    shipped.take(source)
    assert shipped.stored() == 2


def test_parts_of_a_policy_are_not_gathered_for_one_worker(source, senders):
    """The other processes would not take part, and this one would block."""
    puts = []
    shipped = delivery(puts, [])
    source.collective = True
    shipped.take(source)
    shipped.choose(started("A", "B"))
    shipped.send(1, None)
    with pytest.raises(RolloutError, match=r"nccl .* resume=auto"):
        shipped.stored()
    assert puts == []


def test_weights_that_can_be_walked_once_follow_a_link(source, senders):
    """A worker that is replaced in between gets them from the store."""
    puts = []
    shipped = delivery(puts, [])
    shipped.take(source)
    shipped.choose(started("A", "B"))
    shipped.send(1, None)
    assert shipped.linked
    shipped.take(iter(source))
    assert shipped.stored() == 1
    shipped.choose(started("A", "B"))
    assert shipped.route == "memory"
    assert shipped.stored() == 1
    assert puts[0].keys() == {meta.name for meta in source.metadata()}
