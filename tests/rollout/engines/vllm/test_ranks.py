"""vLLM in each of several training processes: separate engines within the trainer's process group, which survives."""

import os

import pytest
import torch

from specrl.rollout.build import build_engine
from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.engines.local.engine import TransformersEngine
from specrl.rollout.types import RolloutError
from tests.rollout.engines.vllm.engines import RUNNER, needs_vllm, policy, spec_of
from tests.rollout.golden import EOS_IDS, prompts_and_caps, requests_of
from tests.runs import by_two_processes

pytestmark = needs_vllm
N, SHARES = 26, (slice(0, 19), slice(19, 26))

# Each process generates its share of the requests in one call or in seven, with old weights, with drafts and with new
# weights. Then it closes the engine and sums a number with the other process.
PROGRAM = """
import json, sys
from pathlib import Path
import torch
torch.distributed.init_process_group("gloo")
from specrl.rollout.build import build_engine
from tests.rollout.engines.vllm.test_ranks import N, SHARES
from tests.rollout.engines.vllm.engines import TEXT, policy, spec_of
from tests.rollout.golden import Script, prompts_and_caps, requests_of
from specrl.trainers.weights import send
from vllm.distributed import get_tp_group, get_world_group

folder, group, rank = Path(sys.argv[1]), torch.distributed.group.WORLD, torch.distributed.get_rank()
engine = build_engine(spec_of(folder / "policy"))

def generated(drafts=None):
    requests = requests_of(prompts_and_caps(N), drafts)[SHARES[rank]]
    size = len(requests) if rank == 0 else 1
    done, accepted = [], 0
    for at in range(0, len(requests), size):
        completions, stats = engine.generate(requests[at : at + size])
        done += [[c.tokens, c.logprobs, c.version] for c in completions]
        accepted += stats.accepted
    return done, accepted

results = {"old": generated()[0]}
right = [None] * N
right[SHARES[rank]] = [Script(tokens) for tokens, *_ in results["old"]]
results["drafted"], results["accepted"] = generated(right)
send(engine, policy("qwen3", seed=1), 1, TEXT)
results["new"] = generated()[0]
results["gpu"], results["shards"] = get_world_group().local_rank, get_tp_group().ranks
engine.close()
total = torch.tensor([rank + 1])
torch.distributed.all_reduce(total)
results["group"] = [torch.distributed.group.WORLD is group, torch.distributed.get_world_size(), total.item()]
(folder / f"rank{rank}.json").write_text(json.dumps(results))
torch.distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The results of the two processes."""
    folder = tmp_path_factory.mktemp("ranks")
    policy("qwen3").save_pretrained(folder / "policy")
    path = {"PYTHONPATH": os.environ["PYTHONPATH"]} if RUNNER == "v2" else {}  # which has Triton
    return by_two_processes(folder, PROGRAM, 240, **path)[0]


@pytest.mark.long
@pytest.mark.parametrize(("part", "seed", "version"), [("old", 0, 0), ("drafted", 0, 0), ("new", 1, 1)])
def test_each_rolls_out_its_rows_as_one_process_would(ranks, part, seed, version):
    engine = TransformersEngine(policy("qwen3", seed), SamplingParams(EOS_IDS))
    wanted, _ = engine.generate(requests_of(prompts_and_caps(N)))
    got = [response for rank in ranks for response in rank[part]]
    assert [tokens for tokens, *_ in got] == [c.tokens for c in wanted]
    for (_, logprobs, its_version), c in zip(got, wanted, strict=True):
        assert logprobs == pytest.approx(c.logprobs, abs=1e-4)
        assert its_version == version


@pytest.mark.long
def test_each_is_an_engine_within_the_trainers_group(ranks):
    for number, rank in enumerate(ranks):
        assert rank["new"] != rank["old"]
        assert rank["accepted"] > 20
        assert rank["gpu"] == number, "the device of its number"
        assert rank["shards"] == [number], "a model of its own"
        assert rank["group"] == [True, 2, 3], "the group stays the trainer's"


@pytest.fixture
def third_of_four(monkeypatch):
    """Makes this process look like one of a trainer's, as torchrun starts them."""
    for name, value in {"is_initialized": True, "get_world_size": 4, "get_rank": 2}.items():
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "2")
    return monkeypatch


def executor(tensor_parallel: int = 1) -> dict:
    from specrl.rollout.engines.vllm import settings

    return settings.executor(tensor_parallel)


LAUNCHED = {"distributed_executor_backend": "external_launcher"}


def test_an_engine_over_several_gpus_of_the_trainer_is_refused(third_of_four):
    with pytest.raises(RolloutError, match=r"tensor_parallel=2 .*4 processes.*tensor_parallel=1, or cluster.num_wor"):
        executor(2)
    assert executor() == LAUNCHED


@pytest.mark.parametrize(
    ("environment", "variable"),
    [
        ({"RANK": None}, "'RANK': None"),
        ({"LOCAL_RANK": None}, "'LOCAL_RANK': None"),
        ({"RANK": "0"}, "'RANK': '0'"),
    ],
)
def test_an_engine_that_does_not_know_its_gpu_does_not_start(third_of_four, environment, variable):
    for name, value in environment.items():
        third_of_four.delenv(name) if value is None else third_of_four.setenv(name, value)
    with pytest.raises(RolloutError, match=f"{variable}.* in process 2 of 4.*torchrun"):
        build_engine(spec_of("nowhere"))


def test_a_gpu_that_is_not_the_trainers_is_refused(third_of_four):
    third_of_four.setattr(torch.cuda, "is_available", lambda: True)
    third_of_four.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(RolloutError, match=r"LOCAL_RANK': '2'.* in process 2 of 4 on GPU 0"):
        executor()
    third_of_four.setattr(torch.cuda, "current_device", lambda: 2)
    assert executor() == LAUNCHED


def test_a_trainer_of_one_process_starts_vllm_as_ever(third_of_four):
    third_of_four.setattr(torch.distributed, "get_world_size", lambda: 1)
    assert executor(2) == {}
    third_of_four.setattr(torch.distributed, "is_initialized", lambda: False)
    assert executor(2) == {}
