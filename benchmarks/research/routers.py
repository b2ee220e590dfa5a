"""Cost against accuracy of step routers on held-out problems.

    python -m benchmarks.research.routers config=arbitrage_math

Compares the draft model alone, the policy alone and every router over its thresholds and several noise seeds, on the
same problems and keys. Costs do not depend on the load of the machine: tokens that the policy wrote, and forward passes
of one response at a time, weighted by the layers of the model. Seconds of the routers that can serve are measured in
turn at one threshold each.

The oracle sees the policy's step before it decides, so its passes mean nothing and are left out.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path

import numpy as np

from benchmarks.research.curves import Curve, cost_saved
from specrl.config import load as cli
from specrl.config.schema import Config
from specrl.results import tables
from specrl.rollout.sections import doc
from specrl.rollout.types import EngineStats

NORMAL_95 = 1.96
THRESHOLDS = {
    "likelihood": (0.0, 1.0, 3.0, 6.0),
    "arbitrage": (0.15, 0.3, 0.5, 0.7, 0.85),
    "oracle": (0.0,),
}
UNSERVED = ("oracle",)  # its scores come from continuations
TIMED = {"likelihood": 1.0, "arbitrage": 0.3}  # against the policy alone, near its accuracy
ROWS = (1, 16)  # decoded together where seconds are measured
REPEATS = 5
GAPS = (0.5, 0.75, 0.9)  # of the way from the draft's accuracy to the policy's: where methods are compared


@dataclass
class RouterBenchConfig(Config):
    seeds: int = doc(4, "noise seeds; every router answers every problem once with each")
    continuations: int = doc(4, "responses finished from a step to find its value")
    methods: str = doc(",".join(THRESHOLDS), "routers to measure beside the two models alone")
    out: str = doc("", "write the figures to this JSON file, and the picture beside it")


@dataclass(frozen=True)
class Point:
    """One method at one threshold: means over problems and seeds, with the half-width of a 95 % interval."""

    method: str
    threshold: float | None
    accuracy: float
    accuracy_pm: float
    """From the spread of the problems' means."""
    policy_tokens: float
    """That the policy wrote, per response."""
    escalated: float
    passes: float | None
    """Per response: policy's + draft's, each weighted by its layers / the policy's; all have one width."""
    faults: int
    by_problem: dict[str, list[float]] = field(repr=False)
    """Mean `accuracy` and mean `tokens` by the policy of each problem."""


def main(config: RouterBenchConfig) -> int:
    from specrl.lossy.pair import load_pair
    from specrl.reward.loading import load_rewards
    from specrl.run.data import load_examples

    pair = load_pair(config)
    examples = load_examples(config.data, config.dataset, "test", config.seed)
    rewards = load_rewards(config.reward)
    bench = Bench(pair, examples, rewards, config.seeds)
    points = [bench.alone("draft", pair.draft), bench.alone("policy", pair.policy)]
    engines = {name: pair.routed(router) for name, router in routers(config, pair, examples, rewards).items()}
    for name, engine in engines.items():
        for level in THRESHOLDS[name]:
            engine.router.threshold = level
            points.append(bench.routed(name, level, engine))
            print(points[-1], flush=True)
    rewards.close()
    show(points)
    compared = compare(points)
    for c in compared:
        saved = f"{c['mean']:.1%} ({c['low']:.1%} to {c['high']:.1%})"
        print(f"at {c['gap']:.0%} of the gap {c['method']} saves {saved} of the policy's tokens against {c['rival']}")
    for name in engines.keys() & TIMED.keys():
        engines[name].router.threshold = TIMED[name]
    served = {"policy": pair.plain(pair.policy)} | {name: engines[name] for name in TIMED if name in engines}
    seconds = [timed(served, bench.requests(0), rows) for rows in ROWS]
    print(json.dumps(seconds, indent=2))
    if config.out:
        draw(points, Path(config.out).with_suffix(".png"))
        found = {"problems": len(examples), "seeds": config.seeds, "saved": compared, "seconds": seconds}
        found["points"] = [asdict(point) for point in points]
        Path(config.out).write_text(json.dumps(found) + "\n", encoding="utf-8")
    return 0


def routers(config: RouterBenchConfig, pair, examples: Sequence, rewards) -> dict:
    """The router of each method that was asked for."""
    from specrl.lossy.routing import StepValues, advantage
    from specrl.rollout.lossy.arbitrage import load_learned
    from specrl.rollout.lossy.pair import fingerprint
    from specrl.rollout.lossy.router import by_advantage, by_likelihood

    folder, separators = Path(config.rollout.routed.path), config.rollout.routed.step_separators
    values = StepValues(pair, rewards, config.continuations, config.seed + 2)

    def learned():
        return load_learned(
            folder, draft=fingerprint(pair.draft), policy=fingerprint(pair.policy), separators=separators
        )

    made = {
        "likelihood": lambda: by_likelihood(0.0),
        "arbitrage": learned,
        "oracle": lambda: by_advantage(advantage(pair, values, examples)),
    }
    return {name: made[name]() for name in config.methods.split(",")}


class Bench:
    """The same problems and keys for everyone."""

    def __init__(self, pair, examples: Sequence, rewards, seeds: int):
        self._pair, self._examples, self._rewards, self._seeds = pair, examples, rewards, seeds
        self._draft = pair.draft.config.num_hidden_layers / pair.policy.config.num_hidden_layers

    def alone(self, name: str, model) -> Point:
        return self.routed(name, None, self._pair.plain(model))

    def routed(self, name: str, threshold: float | None, engine) -> Point:
        scores, written, passes, total = [], [], 0.0, EngineStats()
        for seed in range(self._seeds):
            done, stats = engine.generate(self.requests(seed))
            total += stats
            passes += sum(c.passes for c in done) * (self._draft if name == "draft" else 1)
            scores.append(self._score(done))
            written.append([sum(not reused for reused in c.reused) if name != "draft" else 0 for c in done])
        accuracy, tokens = np.nanmean(scores, axis=0), np.mean(written, axis=0)
        answers = self._seeds * len(self._examples)
        passes += total.drafted * self._draft
        served = name not in UNSERVED
        return Point(
            name,
            threshold,
            float(accuracy.mean()),
            float(NORMAL_95 * accuracy.std(ddof=1) / len(accuracy) ** 0.5),
            float(tokens.mean()),
            total.escalated / total.steps if total.steps else float(name == "policy"),
            float(passes / answers) if served else None,
            total.route_faults,
            {"accuracy": accuracy.round(4).tolist(), "tokens": tokens.round(2).tolist()},
        )

    def requests(self, seed: int) -> list:
        from specrl.rollout.keys import derive_key
        from specrl.rollout.types import Request
        from specrl.run.prompts import render

        cap = self._pair.config.rollout.max_new_tokens
        return [
            Request(
                render(e, self._pair.tokenizer, self._pair.config.dataset).ids,
                derive_key(seed, e.id, 0, 0, "routers"),
                cap,
            )
            for e in self._examples
        ]

    def _score(self, done: Sequence) -> list[float]:
        """NaN for a response whose reward failed."""
        from specrl.run.prompts import seen

        texts = self._pair.tokenizer.batch_decode([c.tokens for c in done], skip_special_tokens=True)
        totals = self._rewards.score(seen(self._examples, texts, self._pair.tokenizer, self._pair.config.dataset)).total
        return [float("nan") if total is None else total for total in totals]


def timed(engines: dict, asked: Sequence, rows: int) -> dict:
    """Least seconds of a response with `rows` decoded together: wall clock, and of the processor. In turns."""
    asked, least = asked[: max(rows, 8)], dict.fromkeys(engines, (math.inf, math.inf))
    for _ in range(REPEATS):
        for name, engine in engines.items():
            began, used = time.perf_counter(), time.process_time()
            for first in range(0, len(asked), rows):
                engine.generate(asked[first : first + rows])
            took = (time.perf_counter() - began) / len(asked), (time.process_time() - used) / len(asked)
            least[name] = tuple(map(min, least[name], took))
    return {"rows": rows, **{name: {"wall": w, "processor": p} for name, (w, p) in least.items()}}


def curves(points: Sequence[Point]) -> dict[str, Curve]:
    """The thresholds of each method, and the two models alone as `ends`."""
    found = {}
    for name in dict.fromkeys(p.method for p in points):
        own = [p.by_problem for p in points if p.method == name]
        found[name] = Curve(np.array([p["accuracy"] for p in own]), np.array([p["tokens"] for p in own]))
    draft, policy = found.pop("draft"), found.pop("policy")
    ends = Curve(np.vstack([draft.accuracy, policy.accuracy]), np.vstack([draft.cost, policy.cost]))
    return {"ends": ends, **found}


def compare(points: Sequence[Point]) -> list[dict]:
    """Policy tokens that each method saves against each one before it at equal accuracy, with 95 % intervals.

    `chance` escalates at random: the straight line between the two models alone.
    """
    known = curves(points)
    known = {"chance": known["ends"], **known}
    ends = known.pop("ends")
    return [
        {"method": method, "rival": rival, "gap": gap, **asdict(cost_saved(known[method], known[rival], ends, gap))}
        for rival, method in combinations(known, 2)
        for gap in GAPS
    ]


def show(points: Sequence[Point]) -> None:
    from rich.console import Console

    whole = next(p.policy_tokens for p in points if p.method == "policy")
    rows = []
    for p in points:
        threshold = "" if p.threshold is None else f"{p.threshold:g}"
        passes = "" if p.passes is None else f"{p.passes:.1f}"
        shares = (f"{p.policy_tokens / whole:.1%}", f"{p.escalated:.1%}")
        rows.append((p.method, threshold, f"{p.accuracy:.3f} ±{p.accuracy_pm:.3f}", *shares, passes, f"{p.faults}"))
    columns = ("method", "threshold", "accuracy", "policy tokens", "escalated", "passes", "faults")
    tables.show(Console(width=110), "", columns, rows)


def draw(points: Sequence[Point], path: Path) -> None:
    """Accuracy over tokens of the policy, and over weighted passes."""
    from matplotlib.figure import Figure

    from specrl.results.plots import BLACK, BLUE, RED, SKY

    colours = {"draft": "#999933", "policy": BLACK}
    colours |= {"likelihood": SKY, "arbitrage": BLUE, "oracle": RED}
    keys = {
        "policy_tokens": "tokens of the policy per response",
        "passes": "passes per response, weighted by layers",
    }
    figure = Figure(figsize=(5 * len(keys), 4.4), dpi=110, layout="constrained")
    panels = figure.subplots(1, len(keys))
    for panel, (key, label) in zip(panels, keys.items(), strict=True):
        for name, colour in colours.items():
            own = [p for p in points if p.method == name and getattr(p, key) is not None]
            own.sort(key=lambda p: getattr(p, key))
            at, height = [getattr(p, key) for p in own], [p.accuracy for p in own]
            bars = [p.accuracy_pm for p in own]
            if own:
                panel.errorbar(at, height, yerr=bars, fmt="o-", color=colour, label=name, markersize=4, capsize=2)
        panel.set_xlabel(label)
        panel.set_ylabel("accuracy on held-out problems")
        panel.grid(color="#E6E6E6", linewidth=0.8)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False, fontsize=8.5)
    figure.savefig(path, format="png")


if __name__ == "__main__":
    raise SystemExit(cli.run(main, schema=RouterBenchConfig, training=False))
