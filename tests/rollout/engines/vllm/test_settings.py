"""Conversion of a run's settings to vLLM's."""

import importlib.util
import json
from types import SimpleNamespace

import pytest

from specrl.rollout.config import RolloutConfig
from specrl.rollout.engines.base import EngineSpec, SamplingParams
from specrl.rollout.types import RolloutError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: pip install 'specrl[vllm]'"),
]


@pytest.mark.parametrize(
    ("compile", "cpu", "eager"),
    [("auto", True, True), ("auto", False, False), ("on", True, False), ("off", False, True)],
)
def test_gpus_compile_and_capture_graphs_unless_told(monkeypatch, compile, cpu, eager):
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

    given = speculation(spec, "v2")
    assert given["async_scheduling"] is True
    assert given["speculative_config"] == {"method": "eagle", "model": str(tmp_path), "num_speculative_tokens": 32}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    assert speculation(spec, "v2")["speculative_config"]["method"] == "draft_model"
    spec.rollout.drafter, spec.rollout.vllm.speculator = "", f"eagle={tmp_path}"
    assert speculation(spec, "v2")["speculative_config"]["method"] == "eagle"


@pytest.mark.parametrize("option", ["drafter", "speculator"])
def test_a_head_is_refused_where_the_host_drafts(spec, option, monkeypatch):
    from specrl.rollout.engines.vllm import settings

    monkeypatch.setattr(settings, "HAS_TRITON", False)
    if option == "speculator":
        spec.rollout.vllm.speculator, spec.rollout.drafter = f"eagle={spec.rollout.drafter}", ""
    said = (
        rf"{option}=.* leaves drafts to the device, which v1 asks the host for; nor does v2: it needs a GPU, or Triton"
    )
    with pytest.raises(RolloutError, match=said):
        settings.choose_runner(spec, SamplingParams(frozenset()))
