"""The options of a run. What each may hold, and when it may change on resume, stands beside it."""

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
    train_split: str = doc("train", "split that training prompts are taken from")
    test_split: str = doc("test", "split that evaluation prompts are taken from")
    train_size: int = doc(0, "prompts of the training split; 0 takes all, data=arithmetic needs a number")
    test_size: int = doc(0, "prompts of the test split; 0 takes all, data=arithmetic needs a number")
    prompt_column: str = doc("", "column of the question; empty finds the usual names")
    answer_column: str = doc("", "column of the reference answer; empty finds the usual names")
    level: Literal["easy", "medium", "hard", "mixed"] = doc("mixed", "difficulty of data=arithmetic")
    system_prompt: str = doc("", "system message before each question; empty sends none")
    prompt_template: str = doc("", "text around each question, with {prompt} in its place; empty leaves it as it is")
    chat_template: Literal["auto", "on", "off"] = doc(
        "auto",
        "the tokenizer's chat template around each prompt; auto: where the tokenizer has one; off: never, as for base "
        "models that have one all the same; on: always, so that a tokenizer without one is refused",
    )
    chat_template_kwargs: dict[str, str] = doc(
        {},
        "variables for the chat template, such as {enable_thinking: false}; a value is read as JSON where it is JSON, "
        "else as text",
    )
    max_prompt_tokens: int = doc(512, "longest prompt in tokens; longer ones are refused before training", low=1)

    def problems(self) -> Iterator[str]:
        """Sentences about options that are of no use."""
        if self.chat_template == "off" and self.chat_template_kwargs:
            name = next(iter(self.chat_template_kwargs))
            yield (
                f"dataset.chat_template_kwargs sets {name}, which has no effect with dataset.chat_template=off. Try "
                "dataset.chat_template=on, or leave it out."
            )
        if self.prompt_template and "{prompt}" not in self.prompt_template:
            yield f"dataset.prompt_template={self.prompt_template} has no {{prompt}}, the place of the question."


@dataclass
class LoraConfig:
    rank: int = doc(0, "rank of the adapters; 0 trains all weights")
    alpha: float = doc(32.0, "scale of the adapters; the update is multiplied by alpha/rank")
    targets: list[str] = doc([], "names of the adapted layers; empty adapts all linear layers but the output head")


@dataclass
class ReportConfig:
    baseline: str = doc("", "run directory to compare with in the final report; empty compares with the control steps")
    plots: bool = doc(True, "draw report.png when matplotlib is installed")
    trackers: list[str] = doc([], "also log every step to these: tensorboard, trackio, wandb")


@dataclass
class Config:
    name: str = doc("", "name of the run and of its directory; the config file's name when not given")
    output_dir: str = doc("outputs", "directory that holds the run directories", resume="free")
    seed: int = doc(0, "seed of weights, data order and rollout noise", high=2**32 - 1)
    resume: Literal["no", "auto"] = doc(
        "no", "auto: go on from the newest checkpoint of this name, or start the run", resume="free"
    )
    model: str = doc("tiny", "policy: tiny (embedded, no download), a hub id or a local directory")
    tokenizer: str = doc("", "hub id or local directory; empty takes the model's")
    trust_remote_code: bool = doc(False, "let the model repository run its own Python code")
    revision: str = doc("", "branch, tag or commit of the model on the hub; empty takes its default")
    device: str = doc("auto", "auto, cpu, cuda or cuda:N", resume="free")
    data: str = doc(
        "arithmetic", "arithmetic (generated), gsm8k, math500, a hub id, or a .jsonl/.parquet file or directory"
    )
    dataset: DatasetConfig = doc(DatasetConfig, "which examples of `data` are used, and how they become prompts")
    lora: LoraConfig = doc(LoraConfig, "low-rank adapters instead of full training")
    rollout: RolloutConfig = doc(RolloutConfig, "generation and reuse of responses")
    trainer: TrainerConfig = doc(TrainerConfig, "the policy-gradient update, checkpoints and evaluation")
    reward: RewardConfig = doc(RewardConfig, "how responses are scored")
    cluster: ClusterConfig = doc(ClusterConfig, "rollout workers on a Ray cluster", resume="free")
    report: ReportConfig = doc(ReportConfig, "the final report and trackers", resume="free")

    scores: ClassVar[bool] = True
    """Whether the command asks the rewards."""

    @property
    def splits(self) -> tuple[Literal["train", "test"], ...]:
        """What the command reads of the data."""
        return ("train", "test") if self.trainer.eval_prompts else ("train",)
