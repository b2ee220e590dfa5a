"""The real language model: a run with drafts is the run without, byte for byte, on each engine and under TRL."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

from specrl.config import load as cli
from specrl.run.data import load_examples
from specrl.run.policy import load_policy
from specrl.run.prompts import render
from specrl.run.smollm2 import PACKAGES
from tests.runs import ROOT, Recording, command, differences, free_port, logs, run
from tests.trainers.grpo.test_trl_vllm import ENVIRONMENT

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(any(find_spec(name) is None for name in PACKAGES), reason="needs SmolLM2: make smollm2"),
]
REAL = {
    "config": "grpo_smollm2",
    "model": "smollm2",
    "data": "arithmetic:single",
    "dataset__train_size": 2,
    "dataset__test_size": 2,
    "rollout__group_size": 2,
    "rollout__max_new_tokens": 10,
    "rollout__replay": 0.5,  # both kinds of drafts
    "trainer__epochs": 2,
    "trainer__prompts_per_step": 1,
    "trainer__rows_per_pass": 2,
    "trainer__save_every": 0,
    "trainer__learning_rate": 1e-5,
}


def real(folder, acceptance: str, **options) -> Recording:
    return run(folder, **REAL | {"name": acceptance, "rollout__acceptance": acceptance} | options)


def equal(folder, **options) -> Recording:
    """The run with drafts, after a comparison with the run without."""
    off, exact = real(folder, "off", **options), real(folder, "exact", **options)
    assert differences(off, exact) == []
    assert sum(step.reuse for step in exact.steps[2:]) > 0, "the second epoch drafts from the first"
    assert len({tuple(row) for step in exact.steps for row in step.tokens}) > 4
    return exact


def test_transformers(tmp_path):
    equal(tmp_path)


def test_vllm(tmp_path):
    pytest.importorskip("vllm", reason="needs the vllm extra")
    options = {"rollout__engine": "vllm", "rollout__kv_cache_mb": 256, "rollout__draft_tokens": 8}
    equal(tmp_path, trainer__correction="none", **options)  # it reads vLLM's log-probs, which a pass's size rounds


def test_flips_of_bf16_are_counted(tmp_path):
    options = {"dataset__train_size": 1, "rollout__max_new_tokens": 4, "rollout__measure_every": 1}
    record = real(tmp_path, "exact", trainer__precision="bf16", **options)
    counted = [log for log in logs(record) if "spec/flips_per_1k" in log]
    assert len(counted) == 2
    assert all(log["spec/compared_tokens"] > 0 for log in counted)
    for log in counted:
        per_1k = 1000 * log["spec/control_mismatches"] / log["spec/compared_tokens"]
        assert log["spec/flips_per_1k"] == pytest.approx(per_1k)


def test_prompts_vocabulary_and_end(tmp_path):
    config = cli.load(command(tmp_path, config="grpo_smollm2", model="smollm2"), training=False)
    model, tokenizer, eos_ids = load_policy(config)
    assert model.get_output_embeddings().weight.shape[0] == len(tokenizer) == 49152
    assert eos_ids == {tokenizer.convert_tokens_to_ids("<|im_end|>")}
    example = load_examples("arithmetic", config.dataset, "train", 0)[0]
    prompt = render(example, tokenizer, config.dataset)
    assert prompt.text.startswith("<|im_start|>system\n")
    assert prompt.text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert example.prompt.strip() in prompt.text
    assert tokenizer.decode(prompt.ids) == prompt.text


def test_trl_colocated(tmp_path):
    """A script of TRL's user with vLLM in its process, with drafts and without."""
    pytest.importorskip("vllm", reason="needs the vllm extra")
    script = [sys.executable, "-m", "tests.trainers.grpo.matrix", str(tmp_path), "colocate", "smollm2"]
    environment = ENVIRONMENT | {"MASTER_PORT": str(free_port()), "VLLM_CPU_KVCACHE_SPACE": "2"}
    done = subprocess.run(script, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "equal in" in done.stdout
