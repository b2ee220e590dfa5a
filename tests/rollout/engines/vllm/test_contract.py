"""The installed vLLM has all names that the engine uses, and a version without them is detected."""

import importlib.util

import pytest

from specrl.rollout.types import RolloutError

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="needs vLLM: pip install 'specrl[vllm]'"
)
SAMPLER = "vllm.v1.worker.gpu.sample.sampler.Sampler"


@pytest.mark.parametrize("runner", ["served", "v1", "v2"])
def test_the_installed_version_has_them(runner):
    from specrl.rollout.engines.vllm.contract import check

    check(runner)


@pytest.mark.parametrize("runner", ["served", "v1", "v2"])
def test_each_name_that_is_missing_is_named(runner, monkeypatch):
    from specrl.rollout.engines.vllm import contract

    for place in contract.NAMES[runner]:
        other = place.replace(place.rpartition(".")[2], "gone") if "." in place.partition(":")[2] else f"{place}Gone"
        monkeypatch.setattr(contract, "NAMES", {runner: {other: "self"}})
        with pytest.raises(RolloutError, match=f"{other.replace(':', '.')} is not there.*Install vllm==") as raised:
            contract.check(runner)
        assert "vllm 0." in str(raised.value)
        monkeypatch.undo()


def test_other_arguments_are_told(monkeypatch):
    from specrl.rollout.engines.vllm import contract

    def _sample_random(self, logits, generator):
        """A hypothetical later version of the method."""

    monkeypatch.setattr(f"{SAMPLER}._sample_random", _sample_random)
    with pytest.raises(RolloutError, match=r"_sample_random has \(self, logits, generator\).*rollout\.vllm\.runner=v1"):
        contract.check("v2")
    contract.check("v1")
