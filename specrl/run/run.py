"""Builds a training run in order: policy, data, trajectory cache, rewards, engine, trainer, callbacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import PartialState
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from specrl.config.schema import Config
from specrl.reward.loading import load_rewards
from specrl.reward.set import RewardSet
from specrl.rollout.build import build_engine
from specrl.rollout.engines.base import Engine, EngineSpec
from specrl.rollout.reduction import Metric, count, mean
from specrl.rollout.speculative import SpeculativeRollout
from specrl.run import policy
from specrl.run.data import Example, left_out, to_dataset
from specrl.run.lora import adapter
from specrl.run.prompts import Prompt, chat_template, check_lengths, described, render
from specrl.run.run_dir import RunDir, data_digests, same_data
from specrl.run.stored_texts import StoredTexts
from specrl.trainers.callbacks import ShortHistory, StopOnSignal
from specrl.trainers.checkpoint import EVALUATIONS, TRAJECTORIES, Checkpoint, CompleteCheckpoint, writing
from specrl.trainers.conversations import Tools
from specrl.trainers.setup import Score, Setup

if TYPE_CHECKING:
    from specrl.trainers.grpo.trainer import GRPOTrainerWithReuse


@dataclass(frozen=True)
class Run:
    """A run whose engine, rewards and trainer are ready for use."""

    config: Config
    path: Path
    """The run's directory."""
    checkpoint: Checkpoint | None
    """The checkpoint that the run resumes from, if any."""
    trainer: GRPOTrainerWithReuse
    tokenizer: PreTrainedTokenizerBase
    rewards: RewardSet
    test: Sequence[Example]
    steps: int
    """Total number of optimiser steps, including those before a resume."""
    notes: Sequence[str]
    """Lines about the data that are printed when training begins."""

    @property
    def is_main(self) -> bool:
        """Whether this process writes the run's directory."""
        return self.trainer.accelerator.is_main_process

    def train(self, stop: StopOnSignal) -> None:
        """Trains until all steps are done or a signal arrives."""
        self.trainer.add_callback(stop)  # must be the last callback
        self.trainer.train(resume_from_checkpoint=str(self.checkpoint.path) if self.checkpoint else None)

    def save(self) -> None:
        """Writes the model, the trained drafter and the trajectory cache."""
        model = self.path / "model"
        rollouts = self.trainer.rollouts
        with writing(model):
            self.trainer.save_model(str(model))
        if not self.is_main:
            return
        with writing(self.path):
            self.tokenizer.save_pretrained(model)
            if rollouts.drafter_trainer:
                rollouts.drafter_trainer.save_model(self.path / "drafter")
        rollouts.source.save(self.path / TRAJECTORIES, self.path / EVALUATIONS, self.trainer.state.global_step)

    def report(self) -> None:
        """Writes and prints the report and the model card."""
        from specrl.results.card import write_card
        from specrl.results.report import write_report

        if self.is_main:
            report = write_report(self.path, plots=self.config.report.plots)
            write_card(self.path, report)
            report.show()
        self.trainer.accelerator.wait_for_everyone()  # a process that exits early breaks the others' connections


@contextmanager
def build(
    config: Config,
    run_dir: RunDir,
    checkpoint: Checkpoint | None,
    train: Sequence[Example],
    test: Sequence[Example] = (),
) -> Iterator[Run]:
    """Builds the run of `config` and closes its engine and rewards at the end of the `with` block.

    Args: checkpoint: the one that the first process resumes from; the other processes follow it.
    """
    set_seed(config.seed)
    model, tokenizer, eos_ids = policy.load_policy(config, policy.trained_dtype(config))
    checkpoint = run_dir.agreed(checkpoint, model.device)
    check_lengths([*train, *test], tokenizer, config.dataset, policy.prompt_limit(config, model))
    data = data_digests(chat_template(tokenizer, config.dataset), train=train, test=test)
    if checkpoint:
        data = same_data(checkpoint.marker()["data"], data, config.data)
    prompts = {example.id: render(example, tokenizer, config.dataset) for example in train}
    stored = StoredTexts.load(config, run_dir.path, tokenizer, model, eos_ids, checkpoint, data)

    with ExitStack() as stack:
        rewards = stack.enter_context(closing(load_rewards(config.reward)))
        if config.cluster.num_workers:
            from specrl.run.cluster import connect

            stack.enter_context(connect(config.cluster))

        def make_rollout(trained: PreTrainedModel) -> SpeculativeRollout:
            """The trainer calls this after it has wrapped the policy, for example with adapters."""
            engine = make_engine(config, policy.engine_spec(config, eos_ids), trained)
            stack.callback(engine.close)
            return SpeculativeRollout(
                engine, stored.cache, config.rollout, config.seed, stored.evaluations, stored.twin
            )

        setup = Setup(
            score=scorer(rewards, tokenizer, prompts),
            render=lambda row: prompts[row["example_id"]].ids,
            dataset=to_dataset(train),
            make_rollout=make_rollout,
            rollout=config.rollout,
            trainer=config.trainer,
            keeping=stored.keeping,
            tools=toolbox(config, tokenizer),
            max_turns=config.dataset.max_turns,
        )
        trainer = build_trainer(config, model, tokenizer, setup, run_dir.checkpoints)
        add_callbacks(config, trainer, data)
        if checkpoint:
            checkpoint.restore(trainer.rollouts)  # the trainer restores the weights itself when training begins
        notes = [*described(train[0], tokenizer, config.dataset), *left_out(config, len(train))]
        steps = config.trainer.total_steps(len(train))
        yield Run(config, run_dir.path, checkpoint, trainer, tokenizer, rewards, test, steps, notes)


def add_callbacks(config: Config, trainer: GRPOTrainerWithReuse, data: Mapping[str, str]) -> None:
    """Adds the draft model's trainer if it is trained, and the callbacks that complete checkpoints.

    Args: data: digests of the splits of the data set.

    Raises:
        RolloutError: the drafter cannot be trained.
    """
    rollouts = trainer.rollouts
    if config.trainer.drafter.train:
        from specrl.run.cotraining import train_drafter

        train_drafter(config, trainer)
    trainer.add_callback(ShortHistory())
    trainer.add_callback(CompleteCheckpoint(rollouts, config.trainer.keep_checkpoints, data))


def toolbox(config: Config, tokenizer: PreTrainedTokenizerBase) -> Tools | None:
    """The tools of `dataset.tools`, None if there are none."""
    if not config.dataset.tools:
        return None
    from specrl.run.toolbox import Toolbox

    return Toolbox(tokenizer, config.dataset)


def make_engine(config: Config, spec: EngineSpec, trained: PreTrainedModel) -> Engine:
    """The engine of the run: a pool of workers on the connected Ray cluster, or one engine in this process."""
    if config.cluster.num_workers:
        from specrl.rollout.workers.pool import RolloutPool

        return RolloutPool(spec, config.cluster, build_engine)
    shares_weights = config.rollout.engine == "transformers" and policy.trained_dtype(config) == spec.dtype
    return build_engine(spec, trained if shares_weights else None)


def build_trainer(
    config: Config, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, setup: Setup, checkpoints: Path
) -> GRPOTrainerWithReuse:
    """The trainer of `trainer.algorithm`. Args: checkpoints: the directory for its checkpoints."""
    from specrl.trainers.grpo.arguments import grpo_config
    from specrl.trainers.grpo.trainer import GRPOTrainerWithReuse

    trainer_class = GRPOTrainerWithReuse
    if config.trainer.algorithm == "ppo":
        from specrl.trainers.ppo.trainer import PPOTrainer

        trainer_class = PPOTrainer
    cpu = next(model.parameters()).device.type == "cpu"
    arguments = grpo_config(
        config.trainer,
        config.rollout,
        output_dir=checkpoints,
        seed=config.seed,
        cpu=cpu,
        world=PartialState(cpu=cpu).num_processes,
        trackers=config.report.trackers,
    )
    arguments.trust_remote_code = config.trust_remote_code
    if config.revision and config.trainer.beta:  # TRL loads the reference policy by its name
        arguments.model_init_kwargs = {"revision": config.revision}
    lora = adapter(config.lora, model) if config.lora.rank or config.lora.targets else None
    return trainer_class(model, arguments, tokenizer, setup, lora)


def scorer(rewards: RewardSet, tokenizer: PreTrainedTokenizerBase, prompts: Mapping[str, Prompt]) -> Score:
    """Returns a function that scores the responses to data set rows: the total rewards, and metrics of each reward.

    Args: prompts: rendered prompts by example id.
    """

    def score(rows: Sequence[dict], responses: Sequence[list]) -> tuple[list[float | None], dict[str, Metric]]:
        messages = any(isinstance(part, dict) for response in responses for part in response[:1])
        texts: Sequence[Any] = responses
        if not messages:
            texts = tokenizer.batch_decode([*responses], skip_special_tokens=True) if responses else []
        result = rewards.score([prompts[row["example_id"]].sample(text) for row, text in zip(rows, texts, strict=True)])
        metrics = {
            "reward/failed": count(sum(total is None for total in result.total)),
            "reward/timeouts": count(sum(result.timeouts.values())),
            "reward/over_limit": count(sum(result.over_limit.values())),
            "reward/reused_ratio": mean(sum(result.reused.values()), len(rows) * len(result.parts)),
        }
        for name, values in result.parts.items():
            known = [value for value in values if value is not None]
            metrics[f"rewards/{name}/mean"] = mean(sum(known), len(known))
        return result.total, metrics

    return score
