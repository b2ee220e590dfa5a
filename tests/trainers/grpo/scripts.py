"""Scripts of TRL's users on the embedded policy, with `reusing`, and what their trainers generated.

The embedded policy solves word problems and ends with "#### N". A response template turns "#### N" into the tool call
`tell(total=N)`, and the tool answers with the next part of the story, so the policy itself writes several turns.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from datasets import Dataset, IterableDataset
from transformers import PrinterCallback
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from specrl import reusing
from specrl.rollout.config import RolloutConfig
from specrl.run.tasks import arithmetic
from specrl.tiny import load_tiny
from specrl.trainers.scored import Scored

A, B = "Tom has 3 apples and buys 4 more. How many has he?", "Ann had 9 pens and lost 2. How many are left?"
TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}{% if m['tool_calls'] %}{% for c in "
    "m['tool_calls'] %}{{ c['function']['name'] }}{{ c['function']['arguments'] }}{% endfor %}{% endif %}"
    "{{ eos_token }}{% endif %}{% endfor %}"
)
CALL = {"type": "function", "function": {"name": "tell", "arguments": {"total": "{total}"}}}
RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "now?\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"#### (?P<total>\d+)",
            "close_pattern": r"<eos>",
            "repeats": True,
            "content": "text",
            "transform": CALL,
        },
        "content": {"content": "text"},
    },
}
TRAINERS = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}


@dataclass
class Batch:
    """One call of TRL's `_generate`."""

    step: int
    training: bool
    turns: list[Scored]

    @property
    def tokens(self) -> list[list[int]]:
        """Of every row of every turn."""
        return [c.tokens for turn in self.turns for c in turn.batch.completions]

    @property
    def keys(self) -> list[int]:
        return [key for turn in self.turns for key in turn.batch.keys]

    @property
    def visits(self) -> list[int]:
        return self.turns[0].batch.visits

    @property
    def accepted(self) -> int:
        """Draft tokens that were accepted."""
        return sum(turn.batch.stats.accepted for turn in self.turns)


@dataclass
class Run:
    """A trainer with `reusing`, and the batches that it generated in this process."""

    trainer: Any
    batches: list[Batch] = field(default_factory=list)

    @property
    def keys(self) -> list[int]:
        return [key for batch in self.batches for key in batch.keys]

    @property
    def training(self) -> list[Batch]:
        return [batch for batch in self.batches if batch.training]

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return self.trainer.accelerator.unwrap_model(self.trainer.model).state_dict()

    def logged(self, name: str) -> list[float]:
        return [log[name] for log in self.trainer.state.log_history if name in log]


def make(folder, config: RolloutConfig | None = None, data=(A, B), kind="grpo", **options) -> Run:
    """A script with single turns. One prompt a batch unless `per_device_train_batch_size` is set."""
    evaluated = options.pop("evaluated", ())
    peft_config = options.pop("peft_config", None)
    policy = options.pop("policy", load_tiny)
    shape = {"num_generations": 4, "per_device_train_batch_size": 4, "max_completion_length": 16}
    return build(
        folder,
        config,
        kind,
        shape | {"shuffle_dataset": False} | options,
        reward_funcs=lambda completions, **_: [float(len(str(c)) % 7) for c in completions],
        train_dataset=data if isinstance(data, IterableDataset) else _dataset(data),
        eval_dataset=_dataset(evaluated) if evaluated else None,
        policy=policy,
        peft_config=peft_config,
    )


def _dataset(prompts) -> Dataset:
    return Dataset.from_list([{"prompt": prompt} for prompt in prompts])


def make_conversations(folder, config: RolloutConfig | None = None, tools="tools", **options) -> Run:
    """A script whose conversations have up to three turns. Args: tools: tools, async or environment."""
    prompts = [(p.prompt, p.answer) for p in arithmetic("train", 2, 0, "easy")]
    data = [{"prompt": [{"role": "user", "content": prompt}], "answer": answer} for prompt, answer in prompts]
    given: dict[str, Any] = {"environment_factory": Story, "reward_funcs": []}
    if tools != "environment":
        given = {"tools": [later if tools == "async" else tell], "reward_funcs": _turns}
    shape = {"num_generations": 4, "per_device_train_batch_size": 4, "max_completion_length": 360}
    return build(
        folder,
        config,
        "grpo",
        shape | {"max_tool_calling_iterations": 2, "seed": 1} | options,
        train_dataset=Dataset.from_list(data),
        eval_dataset=Dataset.from_list(data),
        **given,
    )


def build(folder, config, kind: str, options: dict[str, Any], policy=load_tiny, **given) -> Run:
    torch.manual_seed(0)
    model, tokenizer = policy()
    if "tools" in given or "environment_factory" in given:
        tokenizer.chat_template, tokenizer.response_template = TEMPLATE, RESPONSE
    common = {"learning_rate": 1e-4, "use_cpu": True, "bf16": False, "report_to": [], "save_strategy": "no"}
    common |= {"logging_steps": 1, "disable_tqdm": True}
    trainer_class, config_class = TRAINERS[kind]
    trainer = reusing(trainer_class, config)(
        model, args=config_class(str(folder), **common | options), processing_class=tokenizer, **given
    )
    trainer.remove_callback(PrinterCallback)
    run = Run(trainer)
    end = trainer.specrl.end

    def record() -> None:
        run.batches.append(Batch(trainer.state.global_step, trainer.model.training, list(trainer.specrl.turns)))
        end()

    trainer.specrl.end = record
    return run


def train(folder, config=None, resume=None, script=make, **options) -> Run:
    """A finished run. Args: script: `make` or `make_conversations`."""
    run = script(folder, config, **options)
    run.trainer.train(resume_from_checkpoint=resume)
    return run


def assert_equal(drafted: Run, plain: Run) -> None:
    """Two runs generated the same tokens with the same keys, and were trained to the same weights, bit for bit."""
    assert [batch.tokens for batch in drafted.batches] == [batch.tokens for batch in plain.batches]
    assert drafted.keys == plain.keys
    for name in ("loss", "reward", "grad_norm"):
        assert drafted.logged(name) == plain.logged(name)
    weights = plain.weights
    assert all(torch.equal(tensor, weights[name]) for name, tensor in drafted.weights.items())


def following(total: int) -> str:
    """The next part of the story: a problem of the policy's kind, decided by the number alone."""
    rng = random.Random(total)
    name, item = rng.choice(["Tom", "Ann", "Sam"]), rng.choice(["apples", "pens", "coins"])
    who = "She" if name == "Ann" else "He"
    steps = [f"{rng.choice(['buys', 'finds', 'wins'])} {rng.randint(10, 49)}" for _ in range(3)]
    # with the first words of a solution, or the policy, which never saw two stories, would answer "#### N" at once
    question = f"{name} has {total} {item}. {who} {', '.join(steps)}. How many {item} does {name} have now?"
    return f"\n{question}\n{who} {steps[0]}:"


def tell(total: int) -> str:
    """Tells the total so far.

    Args:
        total: how many there are.

    Returns: how the story goes on.
    """
    return following(total)


async def later(total: int) -> str:
    """Tells the total so far.

    Args:
        total: how many there are.

    Returns: how the story goes on.
    """
    return following(total)


later.__name__ = "tell"


class Story:
    """An environment with state: it ends after two parts, and scores by what it was told."""

    def reset(self, answer: str = "", **row) -> None:
        self.answer, self.totals = int(answer), []

    def tell(self, total: int) -> str:
        """Tells the total so far.

        Args:
            total: how many there are.

        Returns: how the story goes on.
        """
        self.totals.append(total)
        return following(total + len(self.totals)) if len(self.totals) < 3 else "\n"

    def get_reward(self) -> float:
        return float(bool(self.totals) and self.totals[0] == self.answer) + 0.1 * len(self.totals)


def _turns(completions, **_) -> list[float]:
    """The reward sees the whole conversation."""
    return [0.1 * len(messages) for messages in completions]
