"""Formulas of `benchmarks.research.scaling`: seconds of a weight sync, and of a step with rollouts ahead.

Pure functions of measured numbers; nothing here measures, and nothing needs Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import numpy as np

MODELS = {"0.5B": 0.5e9, "1.5B": 1.5e9, "7B": 7e9}  # parameters, sent as bfloat16
MB = 1e6
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000)  # workers
RATIOS = (0.5, 1, 2, 4)  # rollout over the rest of a step
HISTORY = {"factor": 2.51, "source": "rollouts from epoch 2 on, e1a98e3; 2.63 in benchmarks/results/whole-runs.json"}
"""By how much drafts of old text shorten a plain rollout; tail and work are taken to shrink alike."""

Point = Mapping[str, float]


@dataclass(frozen=True)
class Shared:
    """Seconds of what workers share: `tail + work / workers`. The slowest row's passes do not shrink, the work does."""

    tail_s: float
    work_s: float

    def over(self, workers: int) -> float:
        return self.tail_s + self.work_s / workers

    def times(self, factor: float) -> Shared:
        return Shared(self.tail_s * factor, self.work_s * factor)


@dataclass(frozen=True)
class Terms:
    """What a step is made of, in seconds; the same workers and the same trainer, whatever runs when."""

    rollout: Shared
    rest_s: float
    """Everything else: rewards, log-probs, update. It does not depend on the workers."""
    verify: Shared
    """Rolling out again what was rolled out with the weights of one update before, as a draft."""
    sync_s: float
    sync_s_per_worker: float

    def sync(self, workers: int) -> float:
        return self.sync_s + self.sync_s_per_worker * workers


def step(terms: Terms, workers: int) -> dict[str, float]:
    """Seconds of a step. With n workers, g(n) the rollout, u the rest, v(n) the verification and sync(n) the weights:

        synchronous    g + u + sync            workers wait for the update, the trainer for the rollout
        ahead          max(g, u) + v min(1, u / g) + sync
                                               workers begin the next batch during u, then verify what there is of it
        one step off   max(g, u) + sync        the next batch is trained on as it is: text of stale weights

    Where g > u only the share u / g of the batch is there to be verified, and the part g - u is decoded after it. One
    step off is asynchronous training, which is another run: a lower bound.
    """
    g, u, v, sync = terms.rollout.over(workers), terms.rest_s, terms.verify.over(workers), terms.sync(workers)
    ahead = max(g, u) + v * min(1.0, u / g) + sync
    return {"synchronous_s": g + u + sync, "ahead_s": ahead, "one_step_off_s": max(g, u) + sync}


def with_history(terms: Terms) -> Terms:
    """The same step where rollouts draft from the texts of earlier epochs."""
    return replace(terms, rollout=terms.rollout.times(1 / HISTORY["factor"]))


def at_ratio(terms: Terms, workers: int, ratio: float) -> Terms:
    """Longer or shorter texts, so that so many workers take `ratio` times the rest; the verification goes with them."""
    factor = ratio * terms.rest_s / terms.rollout.over(workers)
    return replace(terms, rollout=terms.rollout.times(factor), verify=terms.verify.times(factor))


def step_report(points: Sequence[Point], sync: Mapping[str, float], mb: float) -> dict[str, Any]:
    """The measured terms, the formula of a step fitted to them, and its results. Args: as of `fit_terms`."""
    terms = fit_terms(points, sync, mb)
    return {
        "measured": points,
        "law": {**asdict(terms), "largest_relative_error": misfit(terms, points), "history": HISTORY},
        "by_ratio": list(steps_by_ratio(terms)),
        "by_workers": list(steps_by_workers(terms, [p["workers"] for p in points])),
    }


def steps_by_ratio(terms: Terms) -> Iterator[dict[str, float | bool]]:
    """Steps whose plain rollout takes each of RATIOS times the rest, at each number of workers: all extrapolated."""
    for workers, ratio, history in product(COUNTS, RATIOS, (False, True)):
        scaled = at_ratio(terms, workers, ratio)
        seconds = step(with_history(scaled) if history else scaled, workers)
        yield {"workers": workers, "ratio": ratio, "history": history, "extrapolated": True, **seconds}


def steps_by_workers(terms: Terms, measured: Sequence[int]) -> Iterator[dict[str, float | bool]]:
    """Steps of the measured batch, its work fixed in total. Args: measured: numbers of workers."""
    for workers, history in product(COUNTS, (False, True)):
        used = with_history(terms) if history else terms
        yield {
            "workers": workers,
            "history": history,
            "extrapolated": history or workers not in measured,
            "rollout_s": used.rollout.over(workers),
            "verify_s": used.verify.over(workers),
            "sync_s": used.sync(workers),
            **step(used, workers),
        }


def fit_terms(points: Sequence[Point], sync: Mapping[str, float], mb: float) -> Terms:
    """Args: points: with `workers`, `rollout_s`, `rest_s` and `verify_s`; sync: what `fit_sync` found; mb: of weights.

    The rest is the mean of all points, as the workers have no part in it.
    """
    shared = {"tail_s": lambda p: 1.0, "work_s": lambda p: 1 / p["workers"]}
    rollout, verify = (
        Shared(**least_squares(shared, [{**p, "seconds": p[name]} for p in points])[0])
        for name in ("rollout_s", "verify_s")
    )
    none, one = predict_sync(sync, mb, 0), predict_sync(sync, mb, 1)
    return Terms(rollout, sum(p["rest_s"] for p in points) / len(points), verify, none, one - none)


def misfit(terms: Terms, points: Sequence[Point]) -> float:
    """Largest relative error of the rollout and the verification at the points."""
    return max(
        abs(shared.over(p["workers"]) / p[name] - 1)
        for p in points
        for name, shared in (("rollout_s", terms.rollout), ("verify_s", terms.verify))
    )


def fit_sync(points: Sequence[Point]) -> dict[str, float]:
    """The formula t = a + mb / put + workers * (b + mb / copy)."""
    terms = {
        "a_s": lambda p: 1.0,
        "put_s_per_mb": lambda p: p["mb"],
        "b_s_per_worker": lambda p: p["workers"],
        "copy_s_per_worker_mb": lambda p: p["workers"] * p["mb"],
    }
    found, error = least_squares(terms, points)
    return {**found, "largest_relative_error": error}


def least_squares(
    terms: Mapping[str, Callable[[Point], float]], points: Sequence[Point]
) -> tuple[dict[str, float], float]:
    """Weights of the terms whose sum is nearest to each point's `seconds`, and the largest relative error.

    Relative errors are squared, and no weight is negative.
    """
    names = list(terms)
    while True:
        matrix = np.array([[terms[name](p) / p["seconds"] for name in names] for p in points])
        solution = np.linalg.lstsq(matrix, np.ones(len(points)), rcond=None)[0]
        if (solution >= 0).all():
            break
        names.pop(int(solution.argmin()))
    found = dict.fromkeys(terms, 0.0) | dict(zip(names, solution.tolist(), strict=True))
    return found, float(np.abs(matrix @ solution - 1).max())


def predict_sync(formula: Mapping[str, float], mb: float, workers: int) -> float:
    per_worker = formula["b_s_per_worker"] + mb * formula["copy_s_per_worker_mb"]
    return formula["a_s"] + mb * formula["put_s_per_mb"] + workers * per_worker


def extrapolate_sync(formula: Mapping[str, float]) -> list[dict[str, float | str]]:
    """Seconds by the formula, far outside what was measured and as if all workers shared one machine's memory bus."""
    return [
        {"model": name, "workers": workers, "seconds": predict_sync(formula, 2 * parameters / MB, workers)}
        for (name, parameters), workers in product(MODELS.items(), (1, 2, 4, 8, 16, 64))
    ]
