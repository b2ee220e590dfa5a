"""Train a policy: `python -m specrl.train config=NAME [key=value ...]`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from signal import SIGINT
from typing import TYPE_CHECKING

from specrl.config import load as cli
from specrl.config.schema import Config
from specrl.run import preflight
from specrl.run.resume import environment, keep_environment, run_lock

if TYPE_CHECKING:
    from specrl.run.monitor import Monitor
    from specrl.run.setup import Run

PURE_BF16 = (
    "trainer.precision=pure_bf16: at trainer.learning_rate={:g} most steps are below the distance from one bf16 number "
    "to the next, so such weights hardly learn, and their reuse is flattered. trainer.precision=bf16 keeps fp32 weights"
)
AHEAD = "on, idle workers begin the next batch meanwhile"


def main(config: Config) -> int:
    """A run, from what is cheap to look at to its report; its exit code."""
    examples = preflight.check(config)
    from specrl.run import setup  # after it, as this takes seconds

    stop = setup.StopOnSignal(config.trainer.steps_per_rollout)
    with run_lock(config) as (folder, checkpoint), stop:
        with setup.parts(config, folder, checkpoint, **examples) as run:
            run.restore()
            with recorded(run) as monitor:
                run.train(stop)
                if stop.received:
                    return stopped(run, stop.received, monitor)
        save(run)
        if stop.agree(run.trainer.accelerator.device):
            return stopped(run, stop.received)
        return report(run)


@contextmanager
def recorded(run: Run) -> Iterator[Monitor | None]:
    """Records, previews and evaluations of the run inside; one process writes them, and None is there in the others."""
    if not run.is_main:
        watch(run, None)
        yield None
        return
    from specrl.run.monitor import Monitor
    from specrl.trainers.checkpoint import step_of

    config, policy, checkpoint = run.config, run.trainer.rollouts.policy, run.checkpoint
    cli.save(config)
    now = environment(policy.device.type, run.trainer.accelerator.num_processes)
    rounding = keep_environment(run.folder, now, resumed=checkpoint is not None)
    # without a checkpoint all steps come again, and so does the evaluation before them
    resumed_step = step_of(checkpoint) if checkpoint else -1
    groups = config.trainer.compares_groups
    with Monitor(run.folder, run.steps, resumed_step=resumed_step, compares_groups=groups) as monitor:
        if rounding:
            monitor.note(rounding)
        watch(run, monitor)
        for line in run.notes:
            monitor.note(line)
        monitor.note(f"Rollouts ahead: {f'off, as {why}' if (why := run.trainer.rollouts.source.not_ahead) else AHEAD}")
        if config.trainer.precision == "pure_bf16":
            monitor.note(PURE_BF16.format(config.trainer.learning_rate))
        yield monitor


def watch(run: Run, monitor: Monitor | None) -> None:
    """Hands metrics, previews and evaluations of the training to come to the monitor.

    A process without one takes part where another one evaluates: weights that are split are gathered from all.
    """
    from specrl.run.accuracy import evaluate
    from specrl.run.completions import show, store
    from specrl.trainers.callbacks import Record

    options, rollouts, tokenizer = run.config.trainer, run.trainer.rollouts, run.tokenizer
    examples = run.test[: options.eval_prompts]

    def assess(step: int) -> None:
        if not evaluates(run, step):
            return
        began = time.perf_counter()
        rollouts.sync()
        if monitor:
            metrics = evaluate(rollouts.engine, tokenizer, examples, run.rewards, run.config, samples=4)
            monitor.log_eval(step, metrics | {"timing_s/eval": time.perf_counter() - began})

    def after_step(step: int) -> None:
        due = step % options.log_completions_every == 0
        if monitor and due and options.log_completions:
            show(monitor.console, rollouts.last, tokenizer, options.log_completions)
        if monitor and (due or step in (1, run.steps)):
            store(run.folder / "completions" / f"step_{step}.parquet", rollouts.last, tokenizer)
        assess(step)

    write = monitor.log if monitor else lambda record: None
    run.trainer.add_callback(Record(write, after_step, before_training=lambda: assess(0)))


def evaluates(run: Run, step: int) -> bool:
    """Whether test prompts are evaluated after an optimiser step; 0 is before the first."""
    options = run.config.trainer
    due = step in (0, run.steps) or (options.eval_every and step % options.eval_every == 0)
    return bool(due and run.test[: options.eval_prompts])


def stopped(run: Run, received: int, monitor: Monitor | None = None) -> int:
    """Says what a signal ended, the training or, without a monitor, what comes after it; the exit code."""
    word, code = ("interrupted", cli.INTERRUPTED) if received == SIGINT else ("terminated", cli.TERMINATED)
    if monitor:
        monitor.note(f"{word} after step {run.trainer.state.global_step}, which is saved; resume=auto goes on")
    elif run.is_main:
        print(f"{word} after the model was saved; `python -m specrl.report run={run.folder}` writes the report")
    return code


def save(run: Run) -> None:
    """Writes what a run leaves behind: model, companions, trajectories."""
    from specrl.trainers.checkpoint import writing

    model, source = run.folder / "model", run.trainer.rollouts.source
    with writing(model):
        run.trainer.save_model(str(model))
    if not run.is_main:
        return
    with writing(run.folder):
        run.tokenizer.save_pretrained(model)
        for name, companion in run.trainer.rollouts.companions.items():
            companion.save_model(run.folder / name)
    if source.cache is not None:
        on_error = run.config.rollout.cache.on_write_error
        source.cache.save(run.folder / "trajectories", run.trainer.state.global_step, on_error)


def report(run: Run) -> int:
    """Writes and shows the report of a run that came to its end; the exit code."""
    from specrl.results.card import write_card
    from specrl.results.report import write_report

    if run.is_main:
        options = run.config.report
        made = write_report(run.folder, options.baseline or None, plots=options.plots)
        write_card(run.folder, made.summary)
        made.show()
    run.trainer.accelerator.wait_for_everyone()  # a process that left early would break the others' connections
    return 0


if __name__ == "__main__":
    raise SystemExit(cli.run(main))
