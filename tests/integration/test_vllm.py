"""Whole GRPO runs with vLLM as the engine: the training is the same with and without speculation."""

from unittest import mock

import pytest

import specrl.run.run
from specrl.rollout.build import build_engine
from specrl.rollout.types import RolloutError
from tests.engines import Spare
from tests.runs import SHORT, build_policy, differences, logs, policy, run

pytest.importorskip("vllm", reason="needs the vllm extra")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """As the policy of the other runs, with heads of a size that vLLM's attention knows."""
    return build_policy(tmp_path_factory.mktemp("policy"), head_dim=32)


def vllm(folder, model, prepare=lambda trainer: None, **options):
    engine = {"rollout__engine": "vllm", "rollout__kv_cache_mb": 64, "rollout__draft_tokens": 8}
    return run(folder, prepare, model=model, **SHORT | engine | options)


@pytest.fixture(scope="module")
def plain(tmp_path_factory, model):
    return vllm(tmp_path_factory.mktemp("plain"), model, rollout__acceptance="off")


def test_speculation_changes_nothing(tmp_path, model, plain):
    """With options of vLLM that the plain run has as `auto`."""
    options = {"runner": "v1", "compile": "off", "sleep": "false"}
    options = {f"rollout__vllm__{key}": value for key, value in options.items()}
    exact = vllm(tmp_path, model, rollout__measure_every=2, **options)
    assert differences(plain, exact) == []
    later = [step for step in exact.steps if step.step >= 2]
    assert all(step.reuse > 0.1 for step in later)
    assert all(log["spec/control_mismatches"] == 0 for log in logs(exact) if "spec/control_mismatches" in log)


def test_a_model_that_vllm_has_no_kernels_for_is_refused_in_one_line(tmp_path):
    with pytest.raises(RolloutError, match=r"head_dim=8.* try rollout\.engine=transformers") as refused:
        vllm(tmp_path, policy())
    assert "\n" not in str(refused.value)


def test_the_engine_is_measured_against_the_trainer_and_corrected(plain):
    for log in logs(plain):
        assert log["sampling/sampling_logp_difference/max"] < 1e-3, "other kernels, the same weights"
        assert log["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-3)
        assert log["timing_s/sync"] > 0


def test_lora_reaches_the_engine(tmp_path, model):
    record = vllm(tmp_path, model, lora__rank=4, trainer__learning_rate=1e-2)
    assert max(log["sampling/sampling_logp_difference/max"] for log in logs(record)) < 1e-3
    adapters = [
        w for n, w in record.trainer.accelerator.unwrap_model(record.trainer.model).named_parameters() if "lora_B" in n
    ]
    assert any(w.abs().max() > 1e-3 for w in adapters), "the adapters have moved"


def test_control_weights_that_are_not_sent(tmp_path, model):
    """Without its update the engine is caught by the probe, before it generates."""

    def sabotage(trainer):
        update = trainer.rollouts.engine.update_weights
        first = {}

        def stale(weights, version, probe=None):
            first.setdefault("weights", [(n, w.clone()) for n, w in weights])
            update(first["weights"], version, probe)

        trainer.rollouts.engine.update_weights = stale

    with pytest.raises(RolloutError, match="does not run the weights it was sent"):
        vllm(tmp_path, model, sabotage, trainer__learning_rate=1e-2)


def test_rows_of_the_next_batch_in_the_steps_of_this_one_change_nothing(tmp_path, model, plain):
    filled = vllm(tmp_path, model, rollout__fill=64, rollout__measure_every=2)
    assert differences(plain, filled) == []
    assert filled.steps[0].metrics["spec/ahead_tokens"] > 0
    assert sum(step.metrics["spec/ahead_ratio"] > 0 for step in filled.steps) >= 2
    assert all(log["spec/control_mismatches"] == 0 for log in logs(filled) if "spec/control_mismatches" in log)


def test_a_resumed_run_with_rollouts_ahead_is_the_uninterrupted_run(tmp_path, model, plain):
    with mock.patch.object(specrl.run.run, "build_engine", lambda spec, *_: Spare(build_engine(spec), 5)):
        first = vllm(tmp_path, model, trainer__max_steps=3, trainer__save_every=3)
        rest = vllm(tmp_path, model, resume="auto")
    assert differences(plain, first + rest) == []
    assert all(step.metrics["spec/ahead_ratio"] > 0 for step in first.steps[1:])


@pytest.mark.long
def test_reasoning_math_on_vllm_workers_with_rollouts_ahead_is_the_run_without_drafts(tmp_path, model):
    """The mission's set-up at its smallest: old texts, vLLM workers on Ray, the next batch begun ahead."""
    pytest.importorskip("ray", reason="needs the ray extra")
    small = {
        "config": "reasoning_math",
        "data": "arithmetic",
        "dataset__train_split": "train",
        "dataset__test_split": "test",
        "dataset__chat_template_kwargs": "{}",
        "dataset__prompt_template": "",
        "cluster__gpus_per_worker": 0,
        "trainer__precision": "fp32",
        "trainer__rows_per_pass": 4,
        "rollout__rows_per_batch": 8,
        "rollout__tokens_per_pass": 512,
    }
    exact = vllm(tmp_path, model, name="exact", cluster__num_workers=1, **small)
    off = vllm(tmp_path, model, name="off", cluster__num_workers=0, rollout__acceptance="off", **small)
    assert differences(off, exact) == []
    assert type(exact.trainer.rollouts.engine).__name__ == "RolloutPool"
    assert sum(step.metrics["timing_s/ahead"] for step in exact.steps) > 0, "its workers worked ahead"
    assert max(step.reuse for step in exact.steps) > 0.1
