"""Whole runs of conversations with a tool: drafts change the time alone, and the tool's tokens are not trained on."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers import AutoTokenizer

import specrl.run.run
from specrl.results.records import read_records
from specrl.rollout.build import build_engine
from specrl.trainers.conversations import Conversation
from tests.engines import Spare
from tests.runs import Recording, build_policy, differences, run

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ m['content'] }}{% for c in m['tool_calls'] or [] %}"
    "{{ c['function']['name'] }}{{ c['function']['arguments'] }}{% endfor %}{{ eos_token }}"
    "{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
)
CALL = {"type": "function", "function": {"name": "tell", "arguments": {"letter": "{letter}"}}}
RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "now?\n",
    "fields": {
        "content": {"content": "text"},
        "tool_calls": {
            "open_pattern": r"(?P<letter>\w)",
            "close_pattern": "<eos>",
            "repeats": True,
            "content": "text",
            "transform": CALL,
        },
    },
}
"""A random policy writes words and digits, the first of which is a call here."""
TOOLS = {
    "dataset__tools": "[tests.rewards:tell]",
    "dataset__max_turns": 3,
    "dataset__train_size": 4,
    "reward__functions": "[tests.rewards:told]",
    "rollout__max_new_tokens": 40,
    "trainer__prompts_per_step": 2,
    "trainer__epochs": 2,
}
PPO = {"config": "ppo_math", "rollout__measure_every": 2}
DAPO = {"config": "dapo_math", "trainer__max_steps": 2}


@cache
def model(**sizes) -> str:
    """The folder of a random policy that calls `tell`, removed when the tests end."""
    folder = Path(tempfile.mkdtemp(prefix="specrl-tools-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    build_policy(folder, **sizes)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, RESPONSE
    tokenizer.save_pretrained(folder)
    return str(folder)


def train(folder: Path, prepare=lambda trainer: None, **options) -> Recording:
    return run(folder, prepare, **TOOLS | {"model": model()} | options)


@pytest.fixture(scope="module")
def drafted(tmp_path_factory) -> Recording:
    """GRPO with control steps, a checkpoint and evaluations."""
    folder = tmp_path_factory.mktemp("drafted")
    options = {"rollout__measure_every": 2, "trainer__save_every": 2, "trainer__eval_prompts": 2}
    return train(folder, trainer__eval_every=2, trainer__log_completions_every=2, **options)


def last(record: Recording, name: str) -> float:
    return float(record.steps[-1].metrics[name])


@pytest.mark.slow
def test_grpo_is_the_run_without_drafts(drafted, tmp_path):
    plain = train(tmp_path, rollout__acceptance="off")
    assert differences(drafted, plain) == []
    assert drafted.steps[-1].reuse > 0.1
    assert last(drafted, "spec/reused_ratio_turn2") > 0
    assert last(drafted, "spec/control_mismatches") == 0
    assert last(drafted, "tools/call_frequency") > 1
    assert last(drafted, "tools/kept_ratio") > 0.5, "the tool is deterministic"
    keys = [key for step in drafted.steps for key in step.keys]
    assert len(set(keys)) == len(keys)


@pytest.mark.slow
def test_evaluations_and_previews_have_conversations(drafted, capsys):
    records, _ = read_records(drafted.folder / "metrics.jsonl")
    rewards = [record["eval/reward"] for record in records if "eval/reward" in record]
    assert len(rewards) == 3
    assert max(rewards) > 0.05, "a tool answered"
    import pyarrow.parquet as pq

    texts = pq.read_table(drafted.folder / "completions" / "step_4.parquet")["completion"].to_pylist()
    assert any(" coins now?" in text for text in texts)


@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_run(drafted, tmp_path):
    first = train(tmp_path, trainer__max_steps=2, trainer__save_every=2)
    rest = train(tmp_path, resume="auto")
    assert differences(drafted, first + rest) == []


@pytest.mark.slow
@pytest.mark.parametrize("options", [PPO, DAPO], ids=["ppo", "dapo"])
def test_other_algorithms_are_the_runs_without_drafts(options, tmp_path):
    exact, off = (train(tmp_path / a, rollout__acceptance=a, **options) for a in ("exact", "off"))
    assert differences(exact, off) == []
    assert any(0 in completion_mask for completion_mask in masks(exact))


def masks(record: Recording) -> list[list[int]]:
    """Of the last batch."""
    return [c.mask for c in record.trainer.rollouts.train_batch.batch.completions]


# Ahead ----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_first_turns_are_rolled_out_ahead_and_change_nothing(drafted, tmp_path):
    make = lambda spec, *_: Spare(build_engine(spec), 1 << 30)  # noqa: E731
    with mock.patch.object(specrl.run.run, "build_engine", make):
        got = train(tmp_path)
    assert differences(drafted, got) == []
    assert all(float(step.metrics["spec/ahead_mb"]) > 0 for step in got.steps[1:])
    assert all(float(step.metrics["spec/ahead_done_ratio"]) > 0.3 for step in got.steps[1:]), "of all turns' rows"


# What is trained on -------------------------------------------------------------------------------------------------


def gradients(folder: Path, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """Sizes of the gradients of the states that predict the tokens of tools, and those of the policy, in one step."""
    kept = []

    def prepare(trainer):
        def keep(decoder, args, options, output):
            if decoder.training and torch.is_grad_enabled():
                output.last_hidden_state.retain_grad()
                kept.append((options, output.last_hidden_state))

        trainer.rollouts.policy.base_model.register_forward_hook(keep, with_kwargs=True)

    record = train(folder, prepare, trainer__max_steps=1, **options)
    batch = record.trainer.rollouts.train_batch
    by_ids = {(*row.prompt, *c.tokens): (row, c) for row, c in zip(batch.rows, batch.batch.completions, strict=True)}
    of_tools, of_policy = [], []
    ((inputs, states),) = kept
    for ids, attention, sizes in zip(
        inputs["input_ids"], inputs["attention_mask"].bool(), states.grad.abs().sum(-1), strict=True
    ):
        row, completion = by_ids[tuple(ids[attention].tolist())]  # TRL shuffles the rows
        mask = torch.tensor(MASKS.get(id(completion), completion.mask)).bool()
        predicting = sizes[attention][len(row.prompt) - 1 : -1]
        of_tools.append(predicting[~mask])
        of_policy.append(predicting[mask])
    return torch.cat(of_tools), torch.cat(of_policy)


MASKS: dict[int, list[int]] = {}
"""The right masks of completions that have wrong ones, by their id."""


@pytest.mark.slow
@pytest.mark.parametrize("config", ["grpo_math", "ppo_math"])
def test_tokens_of_tools_are_not_trained_on(config, tmp_path):
    of_tools, of_policy = gradients(tmp_path, config=config)
    assert len(of_tools) > 10
    assert of_tools.max() == 0
    assert (of_policy > 0).float().mean() > 0.5


@pytest.mark.slow
def test_control_training_on_tokens_of_tools_is_found(tmp_path, monkeypatch):
    whole = Conversation.whole

    def unmasked(self):
        got = whole(self)
        MASKS[id(got)] = got.mask
        got.mask = [1] * len(got.tokens)
        return got

    monkeypatch.setattr(Conversation, "whole", unmasked)
    of_tools, _ = gradients(tmp_path)
    assert of_tools.max() > 0


# Other engines --------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_ray_workers_change_nothing(drafted, tmp_path):
    workers = {"cluster__num_workers": 2}
    spread = train(tmp_path, **workers)
    assert differences(drafted, spread) == []
    assert sum(step.metrics["timing_s/ahead"] for step in spread.steps) > 0, "its workers worked ahead"


@pytest.mark.long
def test_vllm_is_the_run_without_drafts(tmp_path):
    pytest.importorskip("vllm", reason="needs the vllm extra")
    vllm = {"rollout__engine": "vllm", "rollout__kv_cache_mb": 64, "rollout__draft_tokens": 8}
    options = vllm | {"model": model(head_dim=32)}
    exact, off = (train(tmp_path / a, rollout__acceptance=a, **options) for a in ("exact", "off"))
    assert differences(exact, off) == []
    assert exact.steps[-1].reuse > 0.1
