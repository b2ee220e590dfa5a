"""How weights are transferred, by the devices of trainer and engines."""

import pytest

from specrl.rollout.engines.transfer import Topology, choose_route

NOWHERE = ""


@pytest.mark.parametrize(
    ("route", "trainer", "workers", "engines", "more", "word"),
    [
        ("process", "A", ["A"], 0, {}, "in the trainer's process"),
        ("process", NOWHERE, [], 0, {}, "in the trainer's process"),
        ("memory", "A", ["A", "B"], 0, {"tensor_parallel": 2}, "tensor-parallel"),
        ("memory", NOWHERE, ["A", "B"], 0, {"tensor_parallel": 2}, "tensor-parallel"),
        ("ipc", "A", ["A"], 1, {}, "share the trainer's GPU"),
        ("ipc", "A", ["A", "A"], 2, {}, "share the trainer's GPU"),
        ("memory", "A", ["A"], 1, {"trainers": 2}, "not from 2"),
        ("nccl", "A", ["B"], 1, {}, "GPU of its own"),
        ("nccl", "A", ["B", "C", "D"], 3, {"trainers": 2}, "GPU of its own"),
        ("nccl", "A", ["B", "C", "D", "E"], 2, {"tensor_parallel": 2}, "GPU of its own"),
        ("memory", "A", ["B", "B"], 2, {}, "a GPU for each rank"),
        ("memory", "A", ["A", "B"], 2, {}, "a GPU for each rank"),
        ("memory", "A", ["B", NOWHERE], 2, {}, "without a GPU"),
        ("memory", NOWHERE, ["B", "C"], 2, {}, "trainer has no GPU"),
        ("memory", NOWHERE, [NOWHERE, NOWHERE], 2, {}, "trainer has no GPU"),
    ],
)
def test_the_route_follows_from_where_both_sides_are(route, trainer, workers, engines, more, word):
    chosen, why = choose_route(Topology(trainer=trainer, workers=tuple(workers), num_workers=engines, **more))
    assert chosen == route
    assert word in why
