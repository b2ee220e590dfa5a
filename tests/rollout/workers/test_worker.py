"""A worker without Ray: how rows are split, versions, errors, and weights as bytes."""

import os
import random

import pytest
import torch

from specrl.rollout.config import RolloutConfig
from specrl.rollout.engines.base import EngineSpec, Probe
from specrl.rollout.types import Request, RolloutError
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
