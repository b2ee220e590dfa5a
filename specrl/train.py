"""Train a policy: `python -m specrl.train config=NAME [key=value ...]`."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from signal import SIGINT
from typing import TYPE_CHECKING, Any

from specrl import config as cli
from specrl import preflight
from specrl.options import ConfigError
from specrl.resume import agreed, claimed, data_digests, keep_surroundings, same_data, surroundings
from specrl.schema import Config

if TYPE_CHECKING:
    import torch

    from reward.base import RewardSet
    from rollout.cache import TrajectoryCache
    from rollout.engines.base import Engine
    from specrl.data import Example
    from trainers.base import Trainer


PURE_BF16 = (
    "trainer.precision=pure_bf16: at trainer.learning_rate={:g} most steps are below the distance from one bf16 number "
    "to the next, so such weights hardly learn, and their reuse is flattered. trainer.precision=bf16 keeps fp32 weights"
)


def main(config: Config) -> int:
    """A run: what is cheap to look at, then what it does from the moment it holds its directory; its exit code."""
    examples = preflight.check(config)
    with claimed(config) as (run_dir, checkpoint):
        return live(config, run_dir, checkpoint, **examples)


def live(
    config: Config, run_dir: Path, checkpoint: Path | None, train: Sequence[Example], test: Sequence[Example] = ()
) -> int:
    """The life of a run: load, evaluate, train, evaluate, save, report."""
    from transformers import set_seed

    from reward.base import RewardSet
    from specrl import memory
    from specrl.card import write_card
    from specrl.data import check_lengths
    from specrl.monitor import Monitor
    from specrl.policy import load_policy, trained_dtype
    from specrl.report import write_report
    from trainers import checkpoint as checkpoints
    from trainers.callbacks import StopOnSignal

    set_seed(config.seed)
    model, tokenizer, eos_ids = load_policy(config, trained_dtype(config))
    checkpoint = agreed(checkpoint, run_dir, model.device)
    context = getattr(model.config, "max_position_embeddings", None)
    room = context and context - config.rollout.max_new_tokens
    longest = check_lengths([*train, *test], tokenizer, config.dataset.max_prompt_tokens, room)
    data = data_digests(train=train, test=test)
    if checkpoint:
        data = same_data(checkpoints.data_digests(checkpoint), data, config.data)
    cache = load_cache(config, tokenizer, model, eos_ids, checkpoint)
    with ExitStack() as closing:
        rewards = RewardSet.from_config(config.reward)
        closing.callback(rewards.close)
        make_engine = engine_factory(config, eos_ids, closing)
        trainer = build_trainer(config, model, tokenizer, train, make_engine, cache, rewards, run_dir, data)
        if checkpoint:
            trainer.stage.restore(checkpoints.stage_state(checkpoint))
            if trainer.cotraining:
                trainer.cotraining.load(checkpoints.drafter(checkpoint))
            if trainer.refit:
                trainer.refit.load(checkpoints.judge(checkpoint))
        if trainer.accelerator.is_main_process:  # one process writes the run directory
            cli.save(config)
            now = surroundings(model.device.type, trainer.accelerator.num_processes)
            rounding = keep_surroundings(run_dir, now, resumed=checkpoint is not None)
            # without a checkpoint all steps come again, and so does the evaluation before them
            resumed = checkpoints.step_of(checkpoint) if checkpoint else -1
            monitor = closing.enter_context(Monitor(run_dir, steps(config, len(train)), resumed_step=resumed))
            if rounding:
                monitor.note(rounding)
            watch(trainer, config, monitor, tokenizer, test, rewards, run_dir)
            monitor.note(memory.sentence(memory.plan(config, model, longest), memory.free_mb(model.device)))
            if config.trainer.precision == "pure_bf16":
                monitor.note(PURE_BF16.format(config.trainer.learning_rate))
        trainer.add_callback(stop := StopOnSignal(config.trainer.steps_per_rollout))
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        if stop.received:
            word, code = ("interrupted", cli.INTERRUPTED) if stop.received == SIGINT else ("terminated", cli.TERMINATED)
            if trainer.accelerator.is_main_process:
                monitor.note(f"{word} after step {trainer.state.global_step}, which is saved; resume=auto goes on")
            return code
    with checkpoints.writing(run_dir / "model"):
        trainer.save_model(str(run_dir / "model"))
    if trainer.accelerator.is_main_process:
        with checkpoints.writing(run_dir):
            tokenizer.save_pretrained(run_dir / "model")
            if trainer.cotraining:
                trainer.cotraining.drafter.save_pretrained(run_dir / "drafter")
        if cache is not None:
            cache.try_save(run_dir / "trajectories", trainer.state.global_step, config.rollout.cache.on_write_error)
            cache.close()
        report = write_report(run_dir, config.report.baseline or None, plots=config.report.plots)
        write_card(run_dir, report.summary)
        report.show()
    trainer.accelerator.wait_for_everyone()  # a process that left early would break the others' connections
    return 0


def load_cache(config: Config, tokenizer, model, eos_ids: frozenset[int], checkpoint: Path | None):
    """The trajectory cache: of the checkpoint, of `rollout.cache.start_from`, or empty. None when nothing is reused."""
    from rollout.cache import Fingerprint, TrajectoryCache
    from specrl.policy import fingerprint
    from trainers.checkpoint import step_of, trajectories

    if not config.rollout.reuses:
        return None
    options = config.rollout.cache
    mark = Fingerprint(*fingerprint(config, tokenizer))
    vocabulary = model.get_output_embeddings().weight.shape[0]
    start = trajectories(checkpoint) if checkpoint else Path(options.start_from)  # none there: cold, as after `off`
    if options.clear or not (checkpoint or options.start_from):
        return TrajectoryCache(mark, vocabulary, eos_ids, max_mb=options.max_mb)
    if not checkpoint and not start.is_dir():
        raise ConfigError(f"the trajectory cache {start} does not exist. Check rollout.cache.start_from.")
    cache = TrajectoryCache.load(
        start,
        mark,
        vocabulary,
        eos_ids,
        max_step=step_of(checkpoint) if checkpoint else None,
        max_mb=options.max_mb,
        check_law=config.rollout.law == "lenient",
        new_run=not checkpoint,
    )
    return cache


def engine_factory(config: Config, eos_ids: frozenset[int], closing: ExitStack) -> Callable[[torch.nn.Module], Engine]:
    """Makes the run's engine once the policy exists; `closing` ends it, and the Ray cluster it may need."""
    from rollout.engines import build_engine
    from specrl.policy import engine_spec, trained_dtype
    from specrl.routing import step_scorer

    spec = engine_spec(config, eos_ids)
    if config.cluster.num_workers:
        if (world := int(os.environ.get("WORLD_SIZE", 1))) > 1 and not config.cluster.address:
            raise ConfigError(
                f"{world} trainer processes cannot each start a Ray. Start one with "
                "`ray start --head` and set cluster.address=auto; each process then has cluster.num_workers workers."
            )
        from specrl.cluster import connect

        closing.enter_context(connect(config.cluster))
        from rollout.workers import RolloutPool  # after `connect`, which says how to install Ray

    def make(model: torch.nn.Module) -> Engine:
        if config.cluster.num_workers:
            engine = RolloutPool(spec, config.cluster)
        else:
            one = config.rollout.engine == "transformers" and trained_dtype(config) == spec.dtype
            shared = model if one else None
            engine = build_engine(spec, shared, step_scorer(config))
        closing.callback(engine.close)
        return engine

    return make


def build_trainer(
    config: Config,
    model,
    tokenizer,
    train: Sequence[Example],
    make_engine: Callable[[torch.nn.Module], Engine],
    cache: TrajectoryCache | None,
    rewards: RewardSet,
    run_dir: Path,
    data: dict[str, str],
) -> Trainer:
    """The trainer of the run, with everything plugged in. data: digests of its splits, for the checkpoints."""
    from accelerate import PartialState

    from specrl.data import render, to_dataset
    from specrl.policy import check_targets
    from trainers.callbacks import ShortHistory
    from trainers.checkpoint import SaveCache
    from trainers.collector import Setup

    prompts = {example.id: render(example, tokenizer) for example in train}
    cpu = next(model.parameters()).device.type == "cpu"
    given = {
        "output_dir": run_dir / "checkpoints",
        "seed": config.seed,
        "cpu": cpu,
        "world": PartialState(cpu=cpu).num_processes,
        "trackers": config.report.trackers,
    }
    if config.trainer.algorithm == "ppo":
        from trainers.arguments import ppo_arguments
        from trainers.ppo import PPOTrainer as trainer_class

        args = ppo_arguments(config.trainer, config.rollout, steps(config, len(train)), **given)
    else:
        from trainers.grpo import GRPOTrainerWithReuse as trainer_class
        from trainers.grpo import grpo_config

        args = grpo_config(config.trainer, config.rollout, **given)
    setup = Setup(
        score=scorer(rewards),
        render=lambda row: prompts[row["example_id"]],
        make_engine=make_engine,
        cache=cache,
        rollout=config.rollout,
        trainer=config.trainer,
        seed=config.seed,
    )
    check_targets(config.lora.targets, model)
    trainer = trainer_class(model, args, to_dataset(train), tokenizer, setup, adapter(config))
    keep = config.trainer.keep_checkpoints
    learners = (trainer.cotraining, trainer.refit)
    trainer.add_callback(ShortHistory())
    trainer.add_callback(SaveCache(cache, config.rollout.cache, keep, trainer.stage.state, *learners, data))
    return trainer


def scorer(
    rewards: RewardSet,
) -> Callable[[Sequence[dict], Sequence[str]], tuple[list[float | None], dict[str, float]]]:
    """Scores dataset rows with their responses: totals, and the metrics of each reward."""
    from reward.base import Sample

    def score(rows: Sequence[dict], texts: Sequence[str]) -> tuple[list[float | None], dict[str, float]]:
        known = ("prompt", "answer")
        result = rewards.score(
            [
                Sample(str(row["prompt"]), text, row["answer"], {k: v for k, v in row.items() if k not in known})
                for row, text in zip(rows, texts, strict=True)
            ]
        )
        metrics: dict[str, float] = {
            "reward/failed": sum(total is None for total in result.total),
            "reward/timeouts": sum(result.timeouts.values()),
            "reward/over_limit": sum(result.over_limit.values()),
            "reward/reused_ratio": sum(result.reused.values()) / max(1, len(rows) * len(result.parts)),
        }
        for name, values in result.parts.items():
            good = [value for value in values if value is not None]
            metrics[f"rewards/{name}/mean"] = sum(good) / len(good) if good else math.nan
        return result.total, metrics

    return score


def adapter(config: Config) -> Any | None:
    """The LoRA configuration, None for full training."""
    if not config.lora.rank:
        return None
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ConfigError(
            f"lora.rank={config.lora.rank} needs peft. Install it with: pip install 'specrl[peft]'"
        ) from error
    return LoraConfig(
        r=config.lora.rank, lora_alpha=config.lora.alpha, target_modules=config.lora.targets or "all-linear"
    )


def steps(config: Config, prompts: int) -> int:
    """Optimiser steps of the run: max_steps, else all epochs; an incomplete last batch of an epoch is left out."""
    per_epoch = prompts // config.trainer.prompts_per_step * config.trainer.steps_per_rollout
    return config.trainer.max_steps or per_epoch * config.trainer.epochs


def watch(
    trainer: Trainer, config: Config, monitor, tokenizer, test: Sequence[Example], rewards: RewardSet, run_dir: Path
) -> None:
    """Metrics, previews and evaluations during training."""
    from specrl.completions import show, store
    from specrl.evaluate import evaluate
    from trainers.callbacks import Record

    total = monitor.total_steps
    examples = test[: config.trainer.eval_prompts]

    def assess(step: int) -> None:
        if examples:
            trainer.sync_engine()
            metrics = evaluate(
                trainer.engine,
                tokenizer,
                examples,
                rewards,
                samples=4,
                max_new_tokens=config.rollout.max_new_tokens,
                seed=config.seed,
            )
            monitor.log_eval(step, metrics)

    def after_step(step: int) -> None:
        every = config.trainer.log_completions_every
        if config.trainer.log_completions and every and step % every == 0:
            show(monitor, trainer.last_rollout(), tokenizer, config.trainer.log_completions)
            store(run_dir / "completions" / f"step_{step}.parquet", trainer.last_rollout(), tokenizer)
        if step == total or (config.trainer.eval_every and step % config.trainer.eval_every == 0):
            assess(step)

    trainer.add_callback(Record(monitor.log, after_step, before_training=lambda: assess(0)))


if __name__ == "__main__":
    raise SystemExit(cli.run(main))
