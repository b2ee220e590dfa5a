"""The parts of a run, plugged together: policy, data, rewards, trajectories, engine, trainer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate import PartialState
from transformers import PreTrainedTokenizerBase, set_seed

from specrl.config.schema import Config
from specrl.reward.loading import load_rewards
from specrl.reward.set import RewardSet
from specrl.rollout.build import build_engine
from specrl.rollout.cache.memory import Fingerprint, TrajectoryCache
from specrl.rollout.engines.base import Engine
from specrl.rollout.reduction import Metric, count, mean
from specrl.rollout.speculative import SpeculativeRollout
from specrl.run.data import Example, left_out, to_dataset
from specrl.run.policy import engine_spec, fingerprint, load_policy, room, trained_dtype
from specrl.run.prompts import Prompt, chat_template, check_lengths, described, render
from specrl.run.resume import data_digests
from specrl.trainers import checkpoint as checkpoints
from specrl.trainers.callbacks import ShortHistory, StopOnSignal
from specrl.trainers.rollouts import Score, Setup

if TYPE_CHECKING:
    from specrl.trainers.grpo.trainer import GRPOTrainerWithReuse
    from specrl.trainers.ppo.trainer import PPOTrainer

    Trainer = GRPOTrainerWithReuse | PPOTrainer


@dataclass(frozen=True)
class Run:
    """A run whose parts live."""

    config: Config
    folder: Path
    checkpoint: Path | None
    """What it goes on from."""
    trainer: Trainer
    tokenizer: PreTrainedTokenizerBase
    rewards: RewardSet
    test: Sequence[Example]
    steps: int
    """Optimiser steps from beginning to end."""
    notes: Sequence[str]
    """What the console says of the data when training begins."""

    @property
    def is_main(self) -> bool:
        """Whether this process writes the run's directory."""
        return self.trainer.accelerator.is_main_process

    def restore(self) -> None:
        """Brings rollouts and companions to where the checkpoint left them; weights are the trainer's to restore."""
        if self.checkpoint:
            from specrl.trainers import resuming

            resuming.restore(self.checkpoint, self.trainer.rollouts)

    def train(self, stop: StopOnSignal) -> None:
        """All steps that are left, or those until a signal."""
        self.trainer.add_callback(stop)  # after all others
        self.trainer.train(resume_from_checkpoint=str(self.checkpoint) if self.checkpoint else None)


@contextmanager
def parts(
    config: Config, folder: Path, checkpoint: Path | None, train: Sequence[Example], test: Sequence[Example] = ()
) -> Iterator[Run]:
    """The run in `folder` with everything that it needs, which ends with the `with` block.

    Args: checkpoint: that the first process goes on from.
    """
    set_seed(config.seed)
    model, tokenizer, eos_ids = load_policy(config, trained_dtype(config))
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        from specrl.run.continued import agreed

        checkpoint = agreed(checkpoint, folder, model.device)
    check_lengths([*train, *test], tokenizer, config.dataset, room(config, model))
    data = data_digests(chat_template(tokenizer, config.dataset), train=train, test=test)
    if checkpoint:
        from specrl.run.continued import same_data
        from specrl.trainers import resuming

        data = same_data(resuming.data_digests(checkpoint), data, config.data)
    cache = load_cache(config, tokenizer, model, eos_ids, checkpoint)
    with ExitStack() as closing:
        rewards = load_rewards(config.reward)
        closing.callback(rewards.close)
        make_engine = engine_factory(config, eos_ids, closing)
        prompts = {e.id: render(e, tokenizer, config.dataset) for e in train}
        setup = Setup(
            score=scorer(rewards, tokenizer, prompts),
            render=lambda row: prompts[row["example_id"]].ids,
            dataset=to_dataset(train),
            make_rollout=lambda policy: SpeculativeRollout(make_engine(policy), cache, config.rollout, config.seed),
            rollout=config.rollout,
            trainer=config.trainer,
        )
        trainer = build_trainer(config, model, tokenizer, setup, folder)
        if config.rollout.drafter:
            from specrl.run.companions import companions
            from specrl.trainers.companions import TrainCompanions

            trainer.rollouts.companions |= companions(config, trainer.rollouts, trainer.accelerator)
            trainer.add_callback(TrainCompanions(trainer.rollouts.companions, trainer.note))
        trainer.add_callback(ShortHistory())
        trainer.add_callback(checkpoints.SaveCache(trainer.rollouts, config.trainer.keep_checkpoints, data))
        notes = [*described(train[0], tokenizer, config.dataset), *left_out(config, len(train))]
        yield Run(config, folder, checkpoint, trainer, tokenizer, rewards, test, steps(config, len(train)), notes)


def load_cache(
    config: Config, tokenizer, model, eos_ids: frozenset[int], checkpoint: Path | None
) -> TrajectoryCache | None:
    """The trajectory cache: of the checkpoint, of `rollout.cache.start_from`, or empty. None when nothing is reused."""
    if not config.rollout.reuses:
        return None
    options = config.rollout.cache
    mark = Fingerprint(*fingerprint(config, tokenizer))
    vocabulary = model.get_output_embeddings().weight.shape[0]
    if options.clear or not (checkpoint or options.start_from):
        return TrajectoryCache(mark, vocabulary, eos_ids, max_mb=options.max_mb)
    from specrl.run.continued import stored

    return stored(config, mark, vocabulary, eos_ids, checkpoint)


def engine_factory(config: Config, eos_ids: frozenset[int], closing: ExitStack) -> Callable[[torch.nn.Module], Engine]:
    """Makes the run's engine once the policy exists; `closing` ends it, and the Ray cluster it may need."""
    spec = engine_spec(config, eos_ids)
    if config.cluster.num_workers:
        from specrl.run.cluster import connect

        closing.enter_context(connect(config.cluster))
        from specrl.rollout.workers.pool import RolloutPool  # after `connect`, which says how to install Ray

    def make(model: torch.nn.Module) -> Engine:
        if config.cluster.num_workers:
            engine = RolloutPool(spec, config.cluster)
        else:
            scorer, one = None, config.rollout.engine == "transformers" and trained_dtype(config) == spec.dtype
            if config.rollout.acceptance == "routed":
                from specrl.lossy.routing import step_scorer

                scorer = step_scorer(config)
            engine = build_engine(spec, model if one else None, scorer)
        closing.callback(engine.close)
        return engine

    return make


def build_trainer(
    config: Config, model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, setup: Setup, folder: Path
) -> Trainer:
    """The trainer of the run in `folder`."""
    cpu = next(model.parameters()).device.type == "cpu"
    given = {
        "output_dir": folder / "checkpoints",
        "seed": config.seed,
        "cpu": cpu,
        "world": PartialState(cpu=cpu).num_processes,
        "trackers": config.report.trackers,
    }
    lora = None
    if config.lora.rank or config.lora.targets:
        from specrl.run.lora import adapter

        lora = adapter(config.lora, model)
    if config.trainer.algorithm == "ppo":
        from specrl.trainers.arguments import ppo_arguments
        from specrl.trainers.ppo.trainer import PPOTrainer

        args = ppo_arguments(config.trainer, config.rollout, steps(config, len(setup.dataset)), **given)
        return PPOTrainer(model, args, tokenizer, setup, lora)
    from specrl.trainers.grpo.trainer import GRPOTrainerWithReuse, grpo_config

    args = grpo_config(config.trainer, config.rollout, **given)
    return GRPOTrainerWithReuse(model, args, tokenizer, setup, lora)


def scorer(rewards: RewardSet, tokenizer: PreTrainedTokenizerBase, prompts: Mapping[str, Prompt]) -> Score:
    """Scores dataset rows with their responses: totals, and the metrics of each reward.

    Args: prompts: by example id.
    """

    def score(rows: Sequence[dict], responses: Sequence[list[int]]) -> tuple[list[float | None], dict[str, Metric]]:
        known, texts = ("prompt", "answer"), tokenizer.batch_decode(responses, skip_special_tokens=True)
        samples = [
            prompts[row["example_id"]].sample(text, row["answer"], {k: v for k, v in row.items() if k not in known})
            for row, text in zip(rows, texts, strict=True)
        ]
        result = rewards.score(samples)
        metrics = {
            "reward/failed": count(sum(total is None for total in result.total)),
            "reward/timeouts": count(sum(result.timeouts.values())),
            "reward/over_limit": count(sum(result.over_limit.values())),
            "reward/reused_ratio": mean(sum(result.reused.values()), len(rows) * len(result.parts)),
        }
        for name, values in result.parts.items():
            good = [value for value in values if value is not None]
            metrics[f"rewards/{name}/mean"] = mean(sum(good), len(good))
        return result.total, metrics

    return score


def steps(config: Config, prompts: int) -> int:
    """Optimiser steps of the run: max_steps, else all epochs; an incomplete last batch of an epoch is left out."""
    per_epoch = prompts // config.trainer.prompts_per_step * config.trainer.steps_per_rollout
    return config.trainer.max_steps or per_epoch * config.trainer.epochs
