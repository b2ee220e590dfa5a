"""The installed vLLM has all names that the engine uses, and a version without them is detected."""

import importlib.util

import pytest

from specrl.rollout.types import RolloutError

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="needs vLLM: pip install 'specrl[vllm]'"
)


@pytest.mark.parametrize("runner", ["served", "v1", "v2"])
def test_the_installed_version_has_them_and_each_that_is_missing_is_named(runner, monkeypatch):
    from specrl.rollout.engines.vllm import contract

    contract.check(runner)
    for path in contract.NAMES[runner]:
        gone = f"{path}Gone"
        monkeypatch.setattr(contract, "NAMES", {runner: {gone: "self"}})
        with pytest.raises(RolloutError, match=f"{gone.replace(':', '.')} is not there.*Install vllm=="):
            contract.check(runner)
        monkeypatch.undo()


def test_other_arguments_are_named(monkeypatch):
    from specrl.rollout.engines.vllm import contract

    def _sample_random(self, logits, generator):
        """A hypothetical later version of the method."""

    monkeypatch.setattr("vllm.v1.worker.gpu.sample.sampler.Sampler._sample_random", _sample_random)
    with pytest.raises(RolloutError, match=r"_sample_random has \(self, logits, generator\).*rollout\.vllm\.runner=v1"):
        contract.check("v2")
    contract.check("v1")
