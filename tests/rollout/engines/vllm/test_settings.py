"""Conversion of a run's settings to vLLM's."""

import json
from types import SimpleNamespace

import pytest
import torch

from specrl.rollout.build import build_engine
from specrl.rollout.config import RolloutConfig
from specrl.rollout.engines.base import EngineSpec, SamplingParams
from specrl.rollout.types import RolloutError
from tests.rollout.engines.vllm.engines import needs_vllm, spec_of

pytestmark = needs_vllm


@pytest.mark.parametrize(
    ("compile", "cpu", "eager"),
    [("auto", True, True), ("auto", False, False), ("on", True, False), ("off", False, True)],
)
def test_gpus_compile_and_capture_graphs_by_default(monkeypatch, compile, cpu, eager):
    from specrl.rollout.engines.vllm import settings

    monkeypatch.setattr(settings, "current_platform", SimpleNamespace(is_cpu=lambda: cpu))
    spec = EngineSpec(eos_ids=frozenset(), rollout=RolloutConfig(engine="vllm"))
    assert spec.rollout.vllm.compile == "auto"
    spec.rollout.vllm.compile = compile
    assert settings.settings(spec)["enforce_eager"] is eager


def test_a_step_has_no_more_rows_than_tokens():
    from specrl.rollout.engines.vllm.settings import settings

    spec = EngineSpec(eos_ids=frozenset(), rollout=RolloutConfig(engine="vllm", rows_per_batch=64, tokens_per_pass=16))
    assert settings(spec)["max_num_seqs"] == 16, "vLLM refuses to start otherwise"


@pytest.fixture
def spec(tmp_path):
    """With a head as draft model."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["EagleLlamaForCausalLM"]}))
    return EngineSpec(eos_ids=frozenset(), rollout=RolloutConfig(engine="vllm", drafter=str(tmp_path)))


def test_a_head_is_another_method_than_a_draft_model(spec, tmp_path):
    from specrl.rollout.engines.vllm.settings import speculation

    arguments = speculation(spec, "v2")
    assert arguments["async_scheduling"] is False, "the host chooses between the head and the texts"
    assert arguments["scheduler_cls"].endswith("planned.PlannedScheduler")
    assert arguments["speculative_config"] == {"method": "eagle", "model": str(tmp_path), "num_speculative_tokens": 32}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    assert speculation(spec, "v2")["speculative_config"]["method"] == "draft_model"
    spec.rollout.drafter, spec.rollout.vllm.speculator = "", f"eagle={tmp_path}"
    assert speculation(spec, "v2")["speculative_config"]["method"] == "eagle"


@pytest.mark.parametrize(
    ("drafter", "vllm", "reason"),
    [
        (True, {}, "drafter=.* needs drafts that .*; nor does v2: it needs a GPU, or Triton"),
        (False, {"speculator": "eagle=DIR"}, "speculator=.* leaves drafts to the device.*nor does v2"),
        (False, {"tensor_parallel": 2}, "runner=v1 .*tensor_parallel=2 .*nor does v2"),
        (
            False,
            {"runner": "v2"},
            r"runner=v2 .* it needs a GPU, or Triton; use rollout\.vllm\.runner=v1",
        ),
    ],
)
def test_a_runner_that_does_not_work_here_is_refused(spec, monkeypatch, drafter, vllm, reason):
    from specrl.rollout.engines.vllm import settings

    monkeypatch.setattr(settings, "HAS_TRITON", False)
    if not drafter:
        spec.rollout.drafter = ""
    for name, value in vllm.items():
        setattr(spec.rollout.vllm, name, value)
    with pytest.raises(RolloutError, match=reason):
        settings.choose_runner(spec, SamplingParams(frozenset()))


# In each of several training processes -------------------------------------------------------------------------------


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
