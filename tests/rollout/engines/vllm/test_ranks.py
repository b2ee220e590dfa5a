"""vLLM in each of several training processes: what is refused. test_vllm_two_processes.py trains in two of them."""

import pytest
import torch

from specrl.rollout.build import build_engine
from specrl.rollout.types import RolloutError
from tests.rollout.engines.vllm.engines import needs_vllm, spec_of

pytestmark = needs_vllm


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
