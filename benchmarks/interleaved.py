"""Several rollouts at once in one process, a forward pass each in turn.

A machine that others use too runs half as fast for seconds at a time, so rollouts one after the other do not compare.
Here whatever slows the machine slows all of them. Each has a clock of its own, which stands while others have their
turn.
"""

from __future__ import annotations

import gc
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from itertools import chain
from typing import TYPE_CHECKING
from unittest import mock

from specrl.rollout.drafting.budget import Budget
from specrl.rollout.engines.base import gc_frozen
from specrl.rollout.types import RolloutBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Rollout = Callable[[], RolloutBatch]


class Turns:
    """Runs rollouts in a thread each, one at a time. Called, it is `clock` without the waits of the calling thread."""

    def __init__(self, rollouts: Sequence[Rollout], clock: Callable[[], float]):
        self._rollouts = rollouts
        self._clock = clock
        self._queue = deque(range(len(rollouts)))  # the first one runs
        self._changed = threading.Condition()
        self._thread = threading.local()  # number of its rollout, and the seconds that it has waited

    def __call__(self) -> float:
        return self._clock() - getattr(self._thread, "waited_s", 0.0)

    def run(self, number: int) -> RolloutBatch:
        """What this rollout returns."""
        self._thread.number = number
        self._thread.waited_s = 0.0
        self._wait()
        try:
            return self._rollouts[number]()
        finally:
            with self._changed:
                self._queue.remove(number)
                self._changed.notify_all()

    def pass_on(self) -> None:
        """Lets the next one run. Returns when it is this thread's turn again."""
        with self._changed:
            self._queue.rotate(-1)
            self._changed.notify_all()
        self._wait()

    def _wait(self) -> None:
        began = self._clock()
        with self._changed:
            self._changed.wait_for(lambda: self._queue[0] == self._thread.number)
        self._thread.waited_s += self._clock() - began


def possible(engine: str, model: PreTrainedModel) -> bool:
    """Not on GPUs, which run behind the process, nor with vLLM, whose sleep mode allows one engine a process."""
    return engine == "transformers" and model.device.type == "cpu"


def sharing(model: PreTrainedModel) -> PreTrainedModel:
    """Another model of the same tensors: an engine sets the attention and the mode of its model during a rollout."""
    return deepcopy(model, {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())})


def interleaved(*rollouts: Rollout) -> list[RolloutBatch]:
    """What the rollouts return. Each must have its own transformers engine on a CPU, and its own model (`sharing`).

    Objects are frozen once for all: a rollout that meets frozen objects counts them, which takes as long as ten passes.
    Passes of a few milliseconds compare only with OMP_NUM_THREADS=1, as each thread has an OpenMP team of its own.
    """
    turns = Turns(rollouts, time.perf_counter)
    observe_pass = Budget.observe_pass

    def passing(*args, **kwargs):
        observe_pass(*args, **kwargs)
        turns.pass_on()

    with (
        gc_frozen(),
        mock.patch.object(gc, "get_freeze_count", return_value=1),
        mock.patch.object(Budget, "observe_pass", passing),
        mock.patch.object(time, "perf_counter", turns),
        ThreadPoolExecutor(len(rollouts)) as pool,
    ):
        return list(pool.map(turns.run, range(len(rollouts))))
