"""In bf16 a policy learns as in fp32: its weights are float32, and only passes and rollouts are bf16."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.runs import policy, run

pytestmark = pytest.mark.slow
SLOW = {"trainer__learning_rate": 1e-6, "trainer__max_steps": 2, "rollout__max_new_tokens": 12}


def moved(record):
    """Share of the trained numbers that are not those of the initial policy any more."""
    initial = AutoModelForCausalLM.from_pretrained(policy()).state_dict()
    trained = record.weights
    changed = {
        name: (trained[name].float() != weight.to(trained[name].dtype).float()) for name, weight in initial.items()
    }
    return sum(c.sum().item() for c in changed.values()) / sum(c.numel() for c in changed.values())


def test_weights_move_in_bf16_as_in_fp32(tmp_path):
    fp32, pure = (run(tmp_path, name=name, trainer__precision=name, **SLOW) for name in ("fp32", "pure_bf16"))
    bf16 = run(tmp_path, name="bf16", report=True, trainer__precision="bf16", **SLOW)
    assert moved(fp32) > 0.9
    assert moved(bf16) >= 0.9 * moved(fp32)
    assert moved(pure) < 0.2, "control: bf16 weights do not change at this learning rate"
    assert bf16.trainer.rollouts.engine.model.dtype == torch.bfloat16, "rollouts read half the bytes"
    states = [value for state in bf16.trainer.optimizer.state.values() for value in state.values()]
    assert {value.dtype for value in states} == {torch.float32}
    saved = json.loads((tmp_path / "bf16" / "model" / "config.json").read_text())
    assert saved["dtype"] == "float32"
    assert "saved as float32" in (tmp_path / "bf16" / "model" / "README.md").read_text()


def test_adapters_learn_in_float32_beside_a_policy_in_bf16(tmp_path):
    record = run(tmp_path, trainer__precision="bf16", lora__rank=2, trainer__max_steps=2, rollout__max_new_tokens=12)
    model = record.trainer.accelerator.unwrap_model(record.trainer.model)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert {p.dtype for p in trained.values()} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert all(p.any() for name, p in trained.items() if "lora_B" in name), "they began at zero"
    assert not record.trainer.rollouts.engine.own_weights, "what is left alone needs no copy"


def test_tokens_of_the_bf16_copy_are_weighted_by_what_the_trainer_gives_them(tmp_path):
    options = {"trainer__max_steps": 1, "rollout__max_new_tokens": 12, "trainer__save_every": 0}
    for precision in ("bf16", "fp32"):
        run(tmp_path, name=precision, trainer__precision=precision, **options)
    bf16, fp32 = (
        json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[0]) for name in ("bf16", "fp32")
    )
    low, mean, high = (bf16[f"sampling/importance_sampling_ratio/{name}"] for name in ("min", "mean", "max"))
    assert low < mean < high
    assert abs(mean - 1) < 0.1
    assert "sampling/importance_sampling_ratio/mean" not in fp32
