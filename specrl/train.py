"""Train a policy: `python -m specrl.train config=NAME [key=value ...]`."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrl import config as cli
from specrl.config import Config
from specrl.options import ConfigError

if TYPE_CHECKING:
    import torch

    from reward.base import RewardSet
    from rollout.cache import TrajectoryCache
    from rollout.engines.base import Engine
    from specrl.data import Example
    from trainers.base import Trainer


def main(config: Config) -> int:
    """The life of a run: claim its directory, load, evaluate, train, evaluate, save, report."""
    from specrl import preflight

    examples = preflight.check(config)
    run_dir, checkpoint = claim(config)

    from transformers import set_seed

    from reward.base import RewardSet
    from specrl import memory
    from specrl.card import write_card
    from specrl.data import check_lengths
    from specrl.env import ENVIRONMENT_FILE, machine
    from specrl.monitor import Monitor, to_json
    from specrl.policy import load_policy
    from specrl.report import write_report
    from trainers import checkpoint as checkpoints
    from trainers.callbacks import StopOnTerm

    set_seed(config.seed)
    model, tokenizer, eos_ids = load_policy(config)
    train, test = examples["train"], examples.get("test", [])
    context = getattr(model.config, "max_position_embeddings", None)
    room = context and context - config.rollout.max_new_tokens
    longest = check_lengths([*train, *test], tokenizer, config.dataset.max_prompt_tokens, room)
    cache = load_cache(config, tokenizer, model, eos_ids, checkpoint)
    with ExitStack() as closing:
        rewards = RewardSet.from_config(config.reward)
        closing.callback(rewards.close)
        make_engine = engine_factory(config, eos_ids, closing)
        trainer = build_trainer(config, model, tokenizer, train, make_engine, cache, rewards, run_dir)
        if checkpoint:
            trainer.stage.restore(checkpoints.stage_state(checkpoint))
            if trainer.cotraining:
                trainer.cotraining.load(checkpoints.drafter(checkpoint))
            if trainer.refit:
                trainer.refit.load(checkpoints.judge(checkpoint))
        if trainer.accelerator.is_main_process:  # one process writes the run directory
            cli.save(config)
            (run_dir / ENVIRONMENT_FILE).write_text(to_json(machine()) + "\n", encoding="utf-8")
            resumed = checkpoints.step_of(checkpoint) if checkpoint else None
            monitor = closing.enter_context(Monitor(run_dir, steps(config, len(train)), resumed_step=resumed))
            watch(trainer, config, monitor, tokenizer, test, rewards, run_dir)
            monitor.note(memory.sentence(memory.plan(config, model, longest), memory.free_mb(model.device)))
        trainer.add_callback(terminated := StopOnTerm(config.trainer.steps_per_rollout))
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        if terminated.received:
            if trainer.accelerator.is_main_process:
                monitor.note(f"terminated after step {trainer.state.global_step}, which is saved; resume=auto goes on")
            return cli.TERMINATED
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


def claim(config: Config) -> tuple[Path, Path | None]:
    """The run's directory, made if need be, and the checkpoint to go on from. A used name needs resume=auto."""
    from trainers.checkpoint import newest

    run_dir = cli.run_dir(config)
    saved = run_dir / "config.yaml"
    if saved.exists() and config.resume == "no":
        raise ConfigError(
            f"{run_dir} holds a run already. Give another name=..., go on with resume=auto, or remove the directory."
        )
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / ".writable").touch()
        (run_dir / ".writable").unlink(missing_ok=True)  # another process of this run may have been faster
    except OSError as error:
        raise ConfigError(f"output_dir={config.output_dir}: {run_dir} cannot be written: {error.strerror}.") from error
    if not saved.exists():
        return run_dir, None
    changed = [str(change) for change in cli.differences(cli.load_saved(saved), config) if change.matters]
    if changed:
        raise ConfigError(
            f"resume=auto would go on with other settings than {run_dir} began with: {'; '.join(changed)}. "
            "Restore them, or start another name."
        )
    return run_dir, newest(run_dir / "checkpoints")


def load_cache(config: Config, tokenizer, model, eos_ids: frozenset[int], checkpoint: Path | None):
    """The trajectory cache: of the checkpoint, of `rollout.cache.start_from`, or empty. None when nothing is reused."""
    from rollout.cache import Fingerprint, TrajectoryCache
    from specrl.policy import fingerprint
    from trainers.checkpoint import step_of, trajectories

    if config.rollout.acceptance == "off":
        return None
    options = config.rollout.cache
    mark = Fingerprint(*fingerprint(config, tokenizer))
    vocabulary = model.get_output_embeddings().weight.shape[0]
    start = trajectories(checkpoint) if checkpoint else Path(options.start_from)
    if options.clear or not (checkpoint or options.start_from):
        return TrajectoryCache(mark, vocabulary, eos_ids, max_mb=options.max_mb)
    if not start.is_dir():
        raise ConfigError(
            f"the trajectory cache {start} does not exist. "
            + ("Resume without it by rollout.cache.clear=true." if checkpoint else "Check rollout.cache.start_from.")
        )
    cache = TrajectoryCache.load(
        start,
        mark,
        vocabulary,
        eos_ids,
        max_step=step_of(checkpoint) if checkpoint else None,
        max_mb=options.max_mb,
        check_law=config.rollout.acceptance == "lenient",
        new_run=not checkpoint,
    )
    return cache


def engine_factory(config: Config, eos_ids: frozenset[int], closing: ExitStack) -> Callable[[torch.nn.Module], Engine]:
    """Makes the run's engine once the policy exists; `closing` ends it, and the Ray cluster it may need."""
    from rollout.engines import build_engine
    from specrl.policy import engine_spec
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
            shared = model if config.rollout.engine == "transformers" else None
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
) -> Trainer:
    """The trainer of the run, with everything plugged in."""
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
    trainer.add_callback(SaveCache(cache, config.rollout.cache, keep, trainer.stage.state, *learners))
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
