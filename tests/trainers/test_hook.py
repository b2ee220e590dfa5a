"""ReuseRollouts in a plain GRPOTrainer: reuse changes nothing but time, prompts are told apart by their tokens."""

from __future__ import annotations

import copy

import pytest
import torch
from datasets import Dataset

import trainers.grpo  # noqa: F401 (silences TRL's remarks at import)
from rollout.config import RolloutConfig, RouterConfig
from rollout.types import RolloutError
from specrl.tiny import load_tiny
from trainers.hook import ReuseRollouts

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = ["Tom has 3 apples and buys 4 more. How many has he?", "Ann had 9 pens and lost 2. How many are left?"]


def train(tmp_path, config=None, prompts=PROMPTS, **options):
    """Weights, losses and each step's (tokens, reused tokens) of a plain GRPOTrainer's run of three epochs."""
    from trl import GRPOConfig, GRPOTrainer

    model, tokenizer = load_tiny()
    reuse, batches = ReuseRollouts(config), []

    def rollout(given, trainer):
        out = reuse(given, trainer)
        batches.append((out["completion_ids"], sum(sum(c.reused) for c in reuse.last.completions)))
        return out

    args = GRPOConfig(
        str(tmp_path),
        num_generations=4,
        per_device_train_batch_size=4 * len(prompts),
        num_train_epochs=3,
        max_completion_length=24,
        learning_rate=1e-4,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        **options,
    )
    data = Dataset.from_list([{"prompt": prompt} for prompt in prompts])
    trainer = GRPOTrainer(
        model,
        reward_funcs=lambda completions, **_: [float(len(c) % 7) for c in completions],
        args=args,
        train_dataset=data,
        processing_class=tokenizer,
        rollout_func=rollout,
    )
    trainer.train()
    weights = copy.deepcopy(trainer.model.state_dict())
    return weights, [log["loss"] for log in trainer.state.log_history if "loss" in log], batches


def test_reuse_changes_nothing_but_time(tmp_path):
    reused, losses, batches = train(tmp_path / "on")
    plain, plain_losses, plain_batches = train(tmp_path / "off", RolloutConfig(acceptance="off"))
    assert [tokens for tokens, _ in batches] == [tokens for tokens, _ in plain_batches]
    assert losses == plain_losses
    assert len(losses) == 3
    assert all(torch.equal(reused[name], plain[name]) for name in plain)
    assert all(count > 0 for _, count in batches[1:])
    assert all(count == 0 for _, count in plain_batches)


def test_control_another_seed_is_another_run(tmp_path):
    weights, _, batches = train(tmp_path / "0")
    other, _, others = train(tmp_path / "1", seed=7)
    assert batches[0][0] != others[0][0]
    assert not all(torch.equal(weights[name], other[name]) for name in weights)


def test_the_rows_of_a_group_differ_and_chats_are_rendered(tmp_path):
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    _, tokenizer = load_tiny()
    if tokenizer.chat_template is None:
        tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"

    class Trainer:
        processing_class = tokenizer

    from trainers.hook import _row

    rows = [_row(Trainer, prompt) for prompt in (*PROMPTS, *chats, PROMPTS[0])]
    assert rows[0] == rows[4] != rows[1]
    assert list(rows[2].prompt) == tokenizer(PROMPTS[0], add_special_tokens=False)["input_ids"]
    _, _, batches = train(tmp_path)
    assert len({tuple(tokens) for tokens in batches[0][0][:4]}) > 1


def test_equal_prompts_of_a_batch_are_drawn_apart(tmp_path):
    _, _, batches = train(tmp_path, prompts=[PROMPTS[0]] * 2)
    tokens = [tuple(t) for t in batches[0][0]]
    assert len(tokens) == 8
    assert tokens[:4] != tokens[4:]


def test_what_it_cannot_do_is_said():
    routed = RolloutConfig(acceptance="off", router=RouterConfig(kind="kl"))
    lossy = [RolloutConfig(acceptance=acceptance) for acceptance in ("lenient", "judged")]
    for config in (RolloutConfig(engine="vllm"), routed, *lossy):
        with pytest.raises(RolloutError, match=r"python -m specrl\.train"):
            ReuseRollouts(config)
