"""Conversion of a run's settings to vLLM's."""

import json
from types import SimpleNamespace

import pytest

from specrl.rollout.config import RolloutConfig
from specrl.rollout.engines.base import EngineSpec, SamplingParams
from specrl.rollout.types import RolloutError
from tests.rollout.engines.vllm.engines import needs_vllm

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
