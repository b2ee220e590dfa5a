"""The run's settings as vLLM takes them."""

import importlib.util
from types import SimpleNamespace

import pytest

from rollout.config import RolloutConfig
from rollout.engines.base import EngineSpec

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: pip install 'specrl[vllm]'"),
]


@pytest.mark.parametrize(
    ("compile", "cpu", "eager"),
    [("auto", True, True), ("auto", False, False), ("on", True, False), ("off", False, True)],
)
def test_gpus_compile_and_capture_graphs_unless_told(monkeypatch, compile, cpu, eager):
    from rollout.engines.vllm import settings

    monkeypatch.setattr(settings, "current_platform", SimpleNamespace(is_cpu=lambda: cpu))
    spec = EngineSpec(eos_ids=frozenset(), rollout=RolloutConfig(engine="vllm"))
    assert spec.rollout.vllm.compile == "auto"
    spec.rollout.vllm.compile = compile
    assert settings.settings(spec)["enforce_eager"] is eager
