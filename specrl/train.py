"""Train a policy: `python -m specrl.train config=NAME [key=value ...]`."""

from __future__ import annotations

import time
from signal import SIGINT
from typing import TYPE_CHECKING

from specrl.config import load as cli
from specrl.config.rules import warnings
from specrl.config.schema import Config
from specrl.run import preflight
from specrl.trainers.grpo import spare_vllm

if TYPE_CHECKING:
    from specrl.run.monitor import Monitor
    from specrl.run.run import Run
    from specrl.run.run_dir import RunDir


def main(config: Config) -> int:
    """Runs the checks, the training and the report; returns the exit code."""
    examples = preflight.check(config)
    if __name__ == "__main__":
        spare_vllm()
    from specrl.run import run as runs  # importing torch takes seconds, so cheap checks come first
    from specrl.run.run_dir import RunDir

    stop = runs.StopOnSignal(config.trainer.steps_per_rollout)
    run_dir = RunDir(config)
    with run_dir.lock() as checkpoint, stop, runs.build(config, run_dir, checkpoint, **examples) as run:
        monitor = monitored(run, run_dir)
        run.train(stop)
        if stop.received:
            return stopped(run, stop.received, monitor)
        run.save()
        if stop.agree(run.trainer.accelerator.device):
            return stopped(run, stop.received)
        run.report()
    return 0


def monitored(run: Run, run_dir: RunDir) -> Monitor | None:
    """Saves the config and the environment, and lets a monitor watch the training. Only the main process has one."""
    if not run.is_main:
        watch(run, None)
        return None
    from specrl.run.monitor import Monitor
    from specrl.run.run_dir import environment

    config, rollouts = run.config, run.trainer.rollouts
    cli.save(config)
    now = environment(rollouts.policy.device.type, run.trainer.accelerator.num_processes)
    rounding = run_dir.keep_environment(now, resumed=run.checkpoint is not None)
    monitor = Monitor(
        run.path,
        run.steps,
        resumed_step=run.checkpoint.step if run.checkpoint else -1,
        compares_groups=config.trainer.compares_groups,
    )
    watch(run, monitor)
    for line in (rounding, *run.notes, rollouts.source.about_ahead(), *warnings(config)):
        if line:
            monitor.note(line)
    return monitor


def watch(run: Run, monitor: Monitor | None) -> None:
    """Adds a callback that passes metrics, previews and evaluations to the monitor.

    Processes without a monitor also take part in evaluations, because gathering sharded weights is a collective
    operation.
    """
    from specrl.run.accuracy import evaluate
    from specrl.run.completions import show, store
    from specrl.trainers.callbacks import Record

    options = run.config.trainer
    rollouts = run.trainer.rollouts
    tokenizer = run.tokenizer
    examples = run.test[: options.eval_prompts]

    def assess(step: int) -> None:
        due = step in (0, run.steps) or (options.eval_every and step % options.eval_every == 0)
        if not (due and examples):
            return
        began = time.perf_counter()
        rollouts.sync()
        if monitor:
            metrics = evaluate(rollouts.source, tokenizer, examples, run.rewards, run.config, samples=4, step=step)
            monitor.log_eval(step, metrics | {"timing_s/eval": time.perf_counter() - began})

    def after_step(step: int) -> None:
        due = step % options.log_completions_every == 0
        if monitor:
            batch = rollouts.train_batch
            assert batch is not None, "A step trains on a batch."
            if due:
                show(monitor.console, batch, tokenizer)
            if due or step in (1, run.steps):
                store(run.path / "completions" / f"step_{step}.parquet", batch, tokenizer)
        assess(step)

    write = monitor.log if monitor else lambda record: None
    run.trainer.add_callback(Record(write, after_step, before_training=lambda: assess(0)))


def stopped(run: Run, received: int, monitor: Monitor | None = None) -> int:
    """Reports a signal that ended the training or, without a monitor, arrived while saving; returns the exit code."""
    word, code = ("interrupted", cli.INTERRUPTED) if received == SIGINT else ("terminated", cli.TERMINATED)
    if monitor:
        monitor.note(f"{word} after step {run.trainer.state.global_step}, which is saved; resume=auto goes on")
    elif run.is_main:
        print(f"{word} after the model was saved; `python -m specrl.report run={run.path}` writes the report")
    return code


if __name__ == "__main__":
    raise SystemExit(cli.run(main))
