"""A worker without Ray: how rows are split, versions, errors, weights as bytes, and timeouts of calls to it."""

import os
import random
import time

import pytest
import torch

from specrl.rollout.config import RolloutConfig
from specrl.rollout.engines.base import EngineSpec, Probe
from specrl.rollout.types import EngineStats, Request, RolloutError
from specrl.rollout.workers.calls import LAST_PASS_S, WorkerHandle, merge_stats
from specrl.rollout.workers.worker import (
    RolloutWorker,
    WorkerInfo,
    split_work,
    to_arrays,
    to_tensors,
)
from tests.rollout.workers.faulty import EOS_IDS, build, requests_of


def loads(requests, shares):
    return [sum(requests[i].expected_tokens for i in share) for share in shares]


def random_requests(rng, prompts):
    return [
        Request([p], 0, 99, expected_tokens=cost)
        for p in range(prompts)
        for cost in [rng.randrange(1, 40)]
        for _ in range(rng.randrange(1, 4))
    ]


def test_shares_hold_every_row_once_whole_prompts_and_the_longest_first():
    rng = random.Random(0)
    for _ in range(40):
        requests = random_requests(rng, rng.randrange(1, 8))
        rng.shuffle(requests)
        shares = split_work(requests, rng.randrange(1, 6))
        assert sorted(i for share in shares for i in share) == list(range(len(requests)))
        prompts = [{tuple(requests[i].prompt) for i in share} for share in shares]
        assert sum(map(len, prompts)) == len({tuple(r.prompt) for r in requests})
        assert loads(requests, shares) == sorted(loads(requests, shares), reverse=True)
        assert all(shares)
    assert split_work([], 3) == []


def test_rows_of_unknown_length_count_with_their_cap():
    requests = [Request([0], 0, 30), Request([1], 0, 500, expected_tokens=10), Request([2], 0, 25)]
    assert split_work(requests, 2) in ([[1, 2], [0]], [[2, 1], [0]])


@pytest.fixture
def worker(build_model, tmp_path):
    build_model("llama").save_pretrained(tmp_path)
    spec = EngineSpec(model=str(tmp_path), eos_ids=EOS_IDS, rollout=RolloutConfig())
    worker = RolloutWorker(0)
    assert worker.run("start", build, spec, 1, None, 0, None) == WorkerInfo(os.getpid(), gpu="")
    return worker


def test_a_worker_refuses_other_versions(worker):
    assert len(worker.run("generate", 0, requests_of(2))[0]) == 2
    with pytest.raises(RolloutError, match="worker 0 has weight version 0, not 1"):
        worker.generate(1, requests_of(2))
    with pytest.raises(RolloutError, match="worker 0 has weight version 0, not 1"):
        worker.run("score", 1, [3, 4])


def test_a_worker_whose_update_failed_serves_no_version(worker, build_model):
    wrong = Probe((3, 4), (-99.0,), 1e-3)
    with pytest.raises(RolloutError, match="does not run the weights it was sent"):
        worker.run("update_weights", to_arrays(build_model("llama", 1).state_dict().items()), 0, wrong)
    with pytest.raises(RolloutError, match="worker 0 has weight version None, not 0"):
        worker.run("generate", 0, requests_of(2))


def test_weights_travel_bit_by_bit():
    tensors = {
        "float": torch.randn(3, 4).t(),
        "bf16": torch.randn(5).bfloat16(),
        "half": torch.randn(2, 2).half(),
        "scalar": torch.tensor(2.5),
        "int": torch.arange(4),
        "bool": torch.tensor([True, False]),
        "nan": torch.tensor([float("nan"), -0.0]),
    }
    back = dict(to_tensors(to_arrays(tensors.items())))
    assert list(back) == list(tensors)
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert back[name].shape == tensor.shape
        assert (
            back[name].contiguous().flatten().view(torch.uint8).equal(tensor.contiguous().flatten().view(torch.uint8))
        )


# Calls to a worker, with a clock that the test sets -------------------------------------------------------------------


class Actor:
    """Records its calls."""

    def __init__(self):
        self.called: list[str] = []

    def __getattr__(self, name):
        return Method(self.called, name)


class Method:
    def __init__(self, called, name):
        self.called, self.name = called, name

    def options(self, **_):
        return self

    def remote(self, *args):
        self.called.append(self.name)


@pytest.mark.parametrize(
    ("timeout", "stopped", "deadline"),
    [
        (1800, 300, 1800),  # it has hung since second 1, for example
        (1800, 1790, 1790 + LAST_PASS_S),
        (1800, 4000, 4000 + LAST_PASS_S),  # a long update of the trainer, during which the worker kept working
        (6, 4, 10),
    ],
)
def test_a_worker_that_is_stopped_keeps_the_deadline_it_began_with(monkeypatch, timeout, stopped, deadline):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    worker = WorkerHandle(0, Actor())
    worker.work_ahead(timeout, 3, [Request([1], 7, 9)])
    assert worker.deadline == timeout
    now[0] = stopped
    for _ in range(2):
        worker.halt(timeout)
        assert worker.deadline == deadline
        now[0] += 20
    assert worker.actor.called == ["run", "halt"], "it is told once"


def test_seconds_are_the_slowest_workers_and_counts_everyones():
    slow = EngineStats(passes=3, forward_tokens=5, decode_s=4.0)
    quick = EngineStats(passes=7, forward_tokens=9, decode_s=1.0, prefill_s=2.0)
    merged = merge_stats([slow, quick])
    assert (merged.passes, merged.forward_tokens) == (10, 14)
    assert (merged.decode_s, merged.prefill_s) == (4.0, 0.0), "they work in parallel"
