"""One of two runs whose steps take turns: `python -m benchmarks.ahead_run SOCKET config=NAME key=value ...`.

benchmarks/ahead.py starts both. The rollout workers have the second usable core, everything else has the first.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from contextlib import suppress
from functools import partial

import psutil
from transformers import TrainerCallback

from benchmarks.ahead import TURNS_FILE
from specrl.config import load as cli
from specrl.config.schema import Config
from specrl.rollout.types import RolloutError
from specrl.run import preflight
from specrl.run import run as runs
from specrl.run.run_dir import RunDir
from specrl.train import monitored
from specrl.trainers.grpo import spare_vllm


class Baton:
    """Held by one of two processes. The other waits for it, and keeps it once the holder has ended.

    Args: descriptor: of one end of a pair of sockets.
    """

    def __init__(self, descriptor: int):
        os.set_inheritable(descriptor, False)  # or processes that outlive this one would keep it open
        self.socket = socket.socket(fileno=descriptor)

    def wait(self) -> None:
        with suppress(ConnectionError):
            self.socket.recv(1)

    def pass_on(self) -> None:
        with suppress(ConnectionError):
            self.socket.send(b".")


class Turns(TrainerCallback):
    """Runs a rollout and its updates, a turn, only while it has the baton; `done` has what each took.

    A turn ends with the weights on their way to the workers, with which the next rollout would begin: so its workers
    stop rolling out ahead, keep the result, and idle while the other run has its turn. The last turn has no
    such end, and is left out.
    """

    def __init__(self, run: runs.Run, baton: Baton):
        self._rollouts, self._baton = run.trainer.rollouts, baton
        self._updates = run.config.trainer.steps_per_rollout
        self._began = 0.0
        self.done: list[dict[str, float]] = []

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        if state.global_step % self._updates:
            return
        if state.global_step:
            before = time.perf_counter()
            self._rollouts.sync()
            now = time.perf_counter()
            first = state.global_step - self._updates + 1
            self.done.append({"step": first, "seconds": now - self._began, "sync": now - before})
            self._baton.pass_on()
        self._baton.wait()
        self._began = time.perf_counter()


def main(config: Config, descriptor: int) -> int:
    """The run without its report; TURNS_FILE of its folder has its turns.

    Raises:
        RolloutError: it cannot roll out ahead, or a worker was replaced, so that its seconds mean nothing.
    """
    baton, examples = Baton(descriptor), preflight.check(config)
    spare_vllm()
    run_dir = RunDir(config)
    with run_dir.lock() as checkpoint, runs.build(config, run_dir, checkpoint, **examples) as run:
        source = run.trainer.rollouts.source
        if config.rollout.ahead != "off" and not source.runs_ahead:
            raise RolloutError(f"nothing can be rolled out ahead: {source.not_ahead}")
        pin(config.cluster.num_workers)
        turns = Turns(run, baton)
        run.trainer.add_callback(turns)  # before the one that times the steps
        monitored(run, run_dir)
        with runs.StopOnSignal(config.trainer.steps_per_rollout) as stop:
            run.train(stop)
        if source.engine.replaced:
            raise RolloutError(f"{source.engine.replaced} rollout workers died; start again")
        run.save()
        (run.path / TURNS_FILE).write_text(json.dumps(turns.done), encoding="utf-8")
    return 0


def pin(workers: int) -> None:
    """Gives all threads of the rollout workers the second core that this process may use, all others the first.

    Raises:
        RolloutError: there are not so many workers among the processes of the run.
    """
    first, second = sorted(os.sched_getaffinity(0))[:2]
    this = psutil.Process()
    pinned = 0
    for process in (this, *this.children(recursive=True)):
        with suppress(psutil.NoSuchProcess, ProcessLookupError):  # it ends just now
            is_worker = "RolloutWorker" in " ".join(process.cmdline())
            for thread in process.threads():
                os.sched_setaffinity(thread.id, {second if is_worker else first})
            pinned += is_worker
    if pinned != workers:
        raise RolloutError(
            f"{pinned} of {workers} rollout workers are processes of this run. Leave cluster.address out"
        )


if __name__ == "__main__":
    raise SystemExit(cli.run(partial(main, descriptor=int(sys.argv[1])), sys.argv[2:]))
