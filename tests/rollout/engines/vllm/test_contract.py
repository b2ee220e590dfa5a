"""The installed vLLM has all names that the engine uses, and a version without them is detected."""

import importlib.util
from types import SimpleNamespace

import pytest

from specrl.rollout.types import RolloutError

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="needs vLLM: pip install 'specrl[vllm]'"
)


def skip_v2_of_an_older_version() -> None:
    """vLLM 0.31 has another Model Runner V2, so specrl takes V1 there."""
    import vllm

    if vllm.__version__.startswith("0.31"):
        pytest.skip("Model Runner V2 of vLLM 0.31 is another one")


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["served", "v1", "v2"])
def test_the_installed_version_has_them_and_each_that_is_missing_is_named(runner, monkeypatch):
    from specrl.rollout.engines.vllm import contract

    if runner == "v2":
        skip_v2_of_an_older_version()
    contract.check(runner)
    for path in contract.NAMES[runner]:
        gone = f"{path}Gone"
        monkeypatch.setattr(contract, "NAMES", {runner: {gone: "self"}})
        with pytest.raises(RolloutError, match=f"{gone.replace(':', '.')} is not there.*Install vllm=="):
            contract.check(runner)
        monkeypatch.undo()


def test_other_arguments_are_named(monkeypatch):
    from specrl.rollout.engines.vllm import contract

    skip_v2_of_an_older_version()

    def _sample_random(self, logits, generator):
        """A hypothetical later version of the method."""

    monkeypatch.setattr("vllm.v1.worker.gpu.sample.sampler.Sampler._sample_random", _sample_random)
    with pytest.raises(RolloutError, match=r"_sample_random has \(self, logits, generator\).*rollout\.vllm\.runner=v1"):
        contract.check("v2")
    contract.check("v1")


def test_without_the_names_of_v2_the_runner_is_v1(monkeypatch):
    """As with vLLM 0.31 on a GPU."""
    from specrl.rollout.config import RolloutConfig
    from specrl.rollout.engines.base import EngineSpec, SamplingParams
    from specrl.rollout.engines.vllm import contract, served, settings

    for module in (served, settings):
        monkeypatch.setattr(module, "HAS_TRITON", True)
    monkeypatch.setitem(contract.NAMES, "v2", {"vllm.v1.worker.gpu.of_a_later_version:Speculator": "propose"})
    monkeypatch.setattr(served, "envs", SimpleNamespace(VLLM_USE_V2_MODEL_RUNNER=None))
    spec = EngineSpec(eos_ids=frozenset(), rollout=RolloutConfig(engine="vllm"))
    assert settings.choose_runner(spec, SamplingParams(frozenset())) == "v1"
    assert served.engine_args() == served.ENGINE_ARGS["v1"]
    spec.rollout.vllm.runner = "v2"
    with pytest.raises(RolloutError, match=r"Speculator is not there.*use rollout\.vllm\.runner=v1$"):
        settings.choose_runner(spec, SamplingParams(frozenset()))
    monkeypatch.setitem(contract.NAMES, "v2", {})
    assert served.engine_args() == served.ENGINE_ARGS["v2"]
