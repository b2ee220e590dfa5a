"""Cost against accuracy of step routers on held-out problems: `python benchmarks/routers.py config=arbitrage_math`.

Draft alone, policy alone, RSD, entropy, the learned router and the oracle, over thresholds and several noise seeds.
Cost is the share of tokens that the policy wrote, which does not depend on the machine, and seconds, which do. The
oracle's seconds mean nothing: it decodes both models everywhere and values every step by continuations.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rollout.config import doc
from specrl import config as cli
from specrl.config import Config

NORMAL_95 = 1.96
THRESHOLDS = {
    "rsd": (0.2, 0.4, 0.6, 0.8),
    "entropy": (0.05, 0.2, 0.4, 0.8),
    "arbitrage": (0.3, 0.5, 0.7, 0.9),
    "oracle": (0.0, 0.3),
}


@dataclass
class RouterBenchConfig(Config):
    seeds: int = doc(3, "noise seeds; every router answers every problem once with each")
    continuations: int = doc(4, "responses finished from a step to find its value, for the oracle")
    methods: str = doc("rsd,entropy,arbitrage,oracle", "routers to measure beside the two models alone")
    out: str = doc("", "write the figures to this JSON file, and the picture beside it")


@dataclass(frozen=True)
class Point:
    """One router at one threshold: means over seeds, with the half-width of a 95 % interval from all answers."""

    method: str
    threshold: float | None
    accuracy: float
    accuracy_pm: float
    policy_share: float
    """Tokens of the responses that the policy wrote / all tokens."""
    escalated: float
    seconds: float
    """Mean per seed, whole generation."""
    faults: int


def main(config: RouterBenchConfig) -> int:
    from reward.base import RewardSet
    from rollout.routers.arbitrage import ArbitrageRouter
    from rollout.routers.entropy import EntropyRouter
    from rollout.routers.oracle import OracleRouter
    from rollout.routers.pair import fingerprint
    from rollout.routers.rsd import RSDRouter
    from specrl.data import load_examples
    from specrl.routing import StepValues, advantage, load_pair, prm_scorer

    pair = load_pair(config)
    examples = load_examples(config.data, config.dataset, "test", config.seed)
    rewards = RewardSet.from_config(config.reward)
    folder, rule = Path(config.rollout.router.path), config.rollout.router
    bench = Bench(pair, examples, rewards, config.seeds)
    made = {
        "rsd": lambda: RSDRouter(prm_scorer(str(folder / "prm"), str(pair.policy.device), pair.tokenizer)),
        "entropy": lambda: EntropyRouter(0.0),
        "arbitrage": lambda: ArbitrageRouter.load(
            folder,
            draft=fingerprint(pair.draft),
            policy=fingerprint(pair.policy),
            separators=rule.step_separators,
        ),
        "oracle": lambda: OracleRouter(
            advantage(pair, StepValues(pair, rewards, config.continuations, config.seed + 1), examples)
        ),
    }
    points = [bench.alone("policy", pair.policy), bench.alone("draft", pair.draft)]
    for name in config.methods.split(","):
        engine = pair.routed(made[name]())
        for level in THRESHOLDS[name]:
            engine.router.threshold = 1 - level if name == "rsd" else level
            points.append(bench.routed(name, level, engine))
            print(points[-1], flush=True)
    rewards.close()
    show(points)
    if config.out:
        draw(points, Path(config.out).with_suffix(".png"))
        result = {"problems": len(examples), "seeds": config.seeds, "points": [asdict(p) for p in points]}
        Path(config.out).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


class Bench:
    """The same problems and keys for everyone."""

    def __init__(self, pair, examples: Sequence, rewards, seeds: int):
        self._pair, self._examples, self._rewards, self._seeds = pair, examples, rewards, seeds

    def alone(self, name: str, model) -> Point:
        return self._point(name, None, self._pair.plain(model), policy_share=float(name == "policy"))

    def routed(self, name: str, threshold: float, engine) -> Point:
        return self._point(name, threshold, engine)

    def _point(self, name: str, threshold: float | None, engine, policy_share: float | None = None) -> Point:
        scores, seconds, ours, tokens, steps, escalated, faults = [], [], 0, 0, 0, 0, 0
        for seed in range(self._seeds):
            began = time.perf_counter()
            done, stats = engine.generate(self._requests(seed))
            seconds.append(time.perf_counter() - began)
            scores += self._score(done)
            tokens += sum(len(c.tokens) for c in done)
            ours += sum(not reused for c in done for reused in c.reused)
            steps, escalated, faults = steps + stats.steps, escalated + stats.escalated, faults + stats.route_faults
        mean = statistics.fmean(scores)
        return Point(
            name,
            threshold,
            mean,
            NORMAL_95 * (mean * (1 - mean) / len(scores)) ** 0.5,
            ours / tokens if policy_share is None else policy_share,
            escalated / steps if steps else float(policy_share),
            statistics.fmean(seconds),
            faults,
        )

    def _requests(self, seed: int) -> list:
        from rollout.noise import derive_key
        from rollout.types import Request
        from specrl.data import render

        cap = self._pair.config.rollout.max_new_tokens
        return [
            Request(render(e, self._pair.tokenizer), derive_key(seed, e.id, 0, 0, "routers"), cap)
            for e in self._examples
        ]

    def _score(self, done: Sequence) -> list[float]:
        from reward.base import Sample

        texts = self._pair.tokenizer.batch_decode([c.tokens for c in done], skip_special_tokens=True)
        samples = [Sample(str(e.prompt), t, e.answer, e.fields) for e, t in zip(self._examples, texts, strict=True)]
        return [total for total in self._rewards.score(samples).total if total is not None]


def show(points: Sequence[Point]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for column in ("method", "threshold", "accuracy", "policy tokens", "escalated", "seconds", "faults"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for p in points:
        table.add_row(
            p.method,
            "" if p.threshold is None else f"{p.threshold:g}",
            f"{p.accuracy:.3f} ±{p.accuracy_pm:.3f}",
            f"{p.policy_share:.1%}",
            f"{p.escalated:.1%}",
            f"{p.seconds:.2f}",
            f"{p.faults}",
        )
    Console(width=110).print(table)


def draw(points: Sequence[Point], path: Path) -> None:
    """Accuracy over the policy's share of the tokens, and over seconds."""
    from matplotlib.figure import Figure

    from specrl.plots import BLACK, BLUE, GREY, ORANGE, RED, SKY

    colours = {"rsd": ORANGE, "entropy": GREY, "arbitrage": BLUE, "oracle": RED, "draft": SKY, "policy": BLACK}
    figure = Figure(figsize=(11, 4.4), dpi=150, layout="constrained")
    panels = figure.subplots(1, 2)
    keys, labels = ("policy_share", "seconds"), ("policy's share of tokens", "seconds")
    for panel, key, label in zip(panels, keys, labels, strict=True):
        for name, colour in colours.items():
            own = sorted((p for p in points if p.method == name), key=lambda p: getattr(p, key))
            if own and not (name == "oracle" and key == "seconds"):
                at, height = [getattr(p, key) for p in own], [p.accuracy for p in own]
                bars = [p.accuracy_pm for p in own]
                panel.errorbar(at, height, yerr=bars, fmt="o-", color=colour, label=name, markersize=4, capsize=2)
        panel.set_xlabel(label)
        panel.set_ylabel("accuracy on held-out problems")
        panel.grid(color="#E6E6E6", linewidth=0.8)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False, fontsize=8.5)
    figure.savefig(path, format="png")


if __name__ == "__main__":
    raise SystemExit(cli.run(main, schema=RouterBenchConfig, training=False))
