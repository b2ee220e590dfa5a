"""The options of a run. Each field holds an option's type, default, description, limits, and when it may change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from specrl.reward.config import RewardConfig
from specrl.rollout.config import RolloutConfig
from specrl.rollout.sections import ClusterConfig, doc
from specrl.trainers.config import TrainerConfig


@dataclass
class DatasetConfig:
    train_split: str = doc("train", "split of the training prompts")
    test_split: str = doc("test", "split of the evaluation prompts")
    train_size: int = doc(0, "training prompts; 0 is all, but data=arithmetic needs a number")
    test_size: int = doc(0, "test prompts; 0 is all, but data=arithmetic needs a number")
    prompt_column: str = doc("", "column of the question, or outer.inner; empty tries the usual names")
    answer_column: str = doc("", "column of the reference answer, or outer.inner; empty tries the usual names")
    system_prompt: str = doc("", "system message before each question; empty sends none")
    prompt_template: str = doc("", "text in which each question replaces {prompt}; empty adds nothing")
    chat_template: Literal["auto", "on", "off"] = doc(
        "auto",
        "the tokenizer's chat template. auto: apply it if there is one; on: require one; off: never apply it, as for "
        "base models",
    )
    chat_template_kwargs: dict[str, str] = doc(
        {}, "variables of the chat template, such as {enable_thinking: false}; values are parsed as JSON if possible"
    )
    tools: list[str] = doc([], "functions that the policy may call, each module:function, in conversations")
    max_turns: int = doc(8, "most responses of a conversation with tools", low=1)
    tool_timeout_s: float = doc(30.0, "seconds for a call of a tool; then its answer is an error")
    max_prompt_tokens: int = doc(512, "longest prompt in tokens; longer ones are refused before training", low=1)

    def problems(self) -> Iterator[str]:
        """Messages for options of no use, with `<key>` for `key=value`."""
        if self.chat_template == "off" and self.chat_template_kwargs:
            yield (
                "<dataset.chat_template_kwargs> has no effect with <dataset.chat_template>. "
                "Try dataset.chat_template=on, or leave it out."
            )
        if self.tools and self.chat_template == "off":
            yield "<dataset.tools> needs a chat template, not <dataset.chat_template>. Try dataset.chat_template=on."
        if self.tools and not self.tool_timeout_s:
            yield "<dataset.tool_timeout_s> leaves no time for a call. Try dataset.tool_timeout_s=30."
        if self.prompt_template and "{prompt}" not in self.prompt_template:
            yield "<dataset.prompt_template> has no {prompt}, which the question replaces."


@dataclass
class LoraConfig:
    rank: int = doc(0, "rank of the adapters; 0 trains all weights")
    alpha: float = doc(32.0, "the adapters' output is multiplied by alpha/rank")
    targets: list[str] = doc([], "adapted layers; empty adapts all linear layers except the output layer")


@dataclass
class ReportConfig:
    plots: bool = doc(True, "draw report.png if matplotlib is installed")
    trackers: list[str] = doc([], "also log every step to tensorboard, trackio or wandb")


@dataclass
class Config:
    name: str = doc("", "name of the run and its directory; by default the config's")
    output_dir: str = doc("outputs", "directory of the run directories")
    seed: int = doc(0, "seed of weights, data order and rollout noise", high=2**32 - 1)
    resume: Literal["no", "auto"] = doc("no", "auto: continue from the newest checkpoint of this name, if there is one")
    model: str = doc("tiny", "policy: tiny or tiny_tools (included), smollm2 (a package), a hub id or a directory")
    tokenizer: str = doc("", "hub id or local directory; empty uses the model's")
    trust_remote_code: bool = doc(False, "allow the model repository to run its code")
    revision: str = doc("", "branch, tag or commit of the model on the hub")
    device: str = doc("auto", "auto, cpu, cuda or cuda:N")
    data: str = doc(
        "arithmetic",
        "arithmetic (generated), arithmetic:LEVEL (single: one step; easy, medium, hard; large: up to five digits, for "
        "a calculator), gsm8k, math500, deepscaler, deepmath, dapo_math, a hub id, a .jsonl/.parquet file or directory",
    )
    dataset: DatasetConfig = doc(DatasetConfig, "which examples of `data` are used, and how they become prompts")
    lora: LoraConfig = doc(LoraConfig, "low-rank adapters instead of full training")
    rollout: RolloutConfig = doc(RolloutConfig, "generation and reuse of responses")
    trainer: TrainerConfig = doc(TrainerConfig, "the policy-gradient update, checkpoints and evaluation")
    reward: RewardConfig = doc(RewardConfig, "how responses are scored")
    cluster: ClusterConfig = doc(ClusterConfig, "rollout workers on a Ray cluster")
    report: ReportConfig = doc(ReportConfig, "the final report and trackers")

    scores: ClassVar[bool] = True
    """Whether the command computes rewards."""

    @property
    def generated(self) -> bool:
        """Whether the data are generated."""
        return self.data.partition(":")[0] == "arithmetic"

    @property
    def splits(self) -> tuple[Literal["train", "test"], ...]:
        """The splits of the data that the command reads."""
        return ("train", "test") if self.trainer.eval_prompts else ("train",)
