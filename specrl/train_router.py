"""Learned router of a draft and a policy: `python -m specrl.train_router config=arbitrage_math [key=value ...]`.

Arbitrage (arXiv 2512.05033): responses are walked by the oracle, which sees both models' next step and continues with
the better one; every step visited becomes an example. A step's value is the mean reward of continuations by the policy,
so no process reward model is needed. `out` gets the router, a logistic regression on what the policy's likelihoods say
of a step, and in `prm` the process reward model that RSD would use, a text classifier trained on the same steps.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rollout.config import doc
from specrl import config as cli
from specrl.options import ConfigError
from specrl.schema import Config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rollout.steps import Candidate
    from specrl.data import Example
    from specrl.routing import Pair, StepValues
    from trainers.router import Record

WALKS = {"oracle": 0.0, "draft": 1.0}  # advantage above which the walk goes on with the policy's step


@dataclass
class TrainRouterConfig(Config):
    out: str = doc("", "directory for the router, its process reward model, the steps visited and the report")
    base: Literal["policy", "draft"] = doc("policy", "weights the reward model starts from; draft is faster to ask")
    continuations: int = doc(8, "responses finished from a step to find its value")
    classifier_epochs: int = doc(8, "passes of the reward model over the valued steps; the best one is kept")
    classifier_learning_rate: float = doc(1e-3, "peak of one rise and fall; about 1e-5 for models of a billion")
    classifier_batch: int = doc(32, "examples per optimiser step")

    @property
    def splits(self) -> tuple[Literal["train", "test"], ...]:
        return ("train",)


def main(config: TrainRouterConfig) -> int:
    from reward.base import RewardSet
    from specrl.data import load_examples
    from specrl.routing import StepValues, load_pair
    from trainers.router import split

    if not config.out:
        raise ConfigError("out is missing: the directory to write the router to, such as out=outputs/router")
    if Path(config.out).is_dir() and any(Path(config.out).iterdir()):
        raise ConfigError(f"out={config.out} holds files already. Choose a directory that is new or empty.")
    pair = load_pair(config)
    examples = load_examples(config.data, config.dataset, "train", config.seed)
    rewards = RewardSet.from_config(config.reward)
    try:
        records = collect(pair, StepValues(pair, rewards, config.continuations, config.seed), examples, config)
        learning, held = split(records, 0.2, config.seed)
        again = revalued(pair, StepValues(pair, rewards, config.continuations, config.seed + 1), held, examples)
    finally:
        rewards.close()
    print(json.dumps(train(pair, learning, held, again, config), indent=2))
    return 0


def collect(pair: Pair, values: StepValues, examples: Sequence[Example], config: TrainRouterConfig) -> list[Record]:
    """Every step of two walks per example, with the values of both models' steps.

    The oracle's walk is Arbitrage's. It hardly ever sees a response that has gone wrong, which a router at work does
    see, so the draft's own walk is recorded too (after DAgger, arXiv 1011.0686).
    """
    from rollout.noise import derive_key
    from rollout.routers.arbitrage import features
    from rollout.routers.oracle import OracleRouter
    from rollout.types import Request
    from specrl.data import render
    from specrl.routing import advantage
    from trainers.router import Record

    records: dict[tuple[int, ...], Record] = {}  # by the text: two walks may begin alike

    def note(candidate: Candidate, example: Example, draft_value: float, policy_value: float) -> None:
        if isfinite(draft_value) and isfinite(policy_value):  # a step without a value teaches nothing
            before = (*candidate.prompt, *candidate.response)
            steps = tuple(candidate.step.tokens), tuple(candidate.rival.tokens)
            read = features(candidate)
            records[before + steps[0]] = Record(example.id, read, before, *steps, draft_value, policy_value)

    oracle = OracleRouter(advantage(pair, values, examples, note))
    cap = config.rollout.max_new_tokens
    for walk, oracle.threshold in WALKS.items():
        keys = [derive_key(config.seed, example.id, 0, 0, walk) for example in examples]
        requests = [Request(render(e, pair.tokenizer), key, cap) for e, key in zip(examples, keys, strict=True)]
        _, stats = pair.routed(oracle).generate(requests)
        print(
            f"{walk} walk: {len(examples)} responses, {stats.steps} steps, {stats.route_faults} faults, "
            f"{values.decoded} tokens of continuations so far",
            flush=True,
        )
    return list(records.values())


def revalued(pair: Pair, values: StepValues, records: Sequence[Record], examples: Sequence[Example]) -> list[float]:
    """The advantages of visited steps, valued once more: their agreement bounds what a router can be seen to know."""
    from reward.process import Prefix
    from specrl.data import render

    owners = {example.id: example for example in examples}
    asked = []
    for record in records:
        example = owners[record.problem]
        start = len(render(example, pair.tokenizer))
        for step in (record.draft_step, record.policy_step):
            tokens, finished = (*record.before, *step), step[-1] in pair.eos_ids
            text = pair.tokenizer.decode(tokens[start:], skip_special_tokens=True)
            asked.append(Prefix(str(example.prompt), (text,), example.answer, example.fields, finished, tokens))
    found = values(asked)
    return [s_t - s_d for s_d, s_t in zip(found[::2], found[1::2], strict=True)]


def train(
    pair: Pair,
    learning: Sequence[Record],
    held: Sequence[Record],
    again: Sequence[float],
    config: TrainRouterConfig,
) -> dict[str, Any]:
    """Fits the router and the process reward model, writes both with the steps and the report, and returns the report.

    Args: again: the advantages of the steps in `held`, valued once more.
    """
    from rollout.routers.arbitrage import ArbitrageRouter
    from trainers.router import Fit, accuracy_by_class, classify, fit, logistic, spearman

    options = Fit(config.classifier_epochs, config.classifier_learning_rate, config.classifier_batch, seed=config.seed)
    gains = [r.advantage > 0 for r in learning]
    if len(set(gains)) < 2 or not held:
        raise ConfigError(
            f"dataset.train_size={config.dataset.train_size} gave {len(learning) + len(held)} steps, too few of one "
            "kind to learn from. Take more prompts, or a pair of models that differ more."
        )
    router = ArbitrageRouter(weights := logistic([r.features for r in learning], gains))
    prm = classifier(pair, config)
    prm_by_epoch = fit(prm, *_valued(learning), *_valued(held), options)
    truth = [r.advantage for r in held]
    valued_twice = [(a, b) for a, b in zip(again, truth, strict=True) if isfinite(a)]
    scores = [router.probability(r.features) for r in held]
    rewards = classify(prm, [(*r.before, *r.draft_step) for r in held])
    report = {
        "steps": len(learning) + len(held),
        "with_gain": sum(r.advantage > 0 for r in (*learning, *held)),
        "spearman": spearman(scores, truth),
        "spearman_of_likelihood": spearman([r.features[0] for r in held], truth),
        "spearman_of_valuing_again": spearman(*zip(*valued_twice, strict=True)) if valued_twice else 0.0,
        "spearman_of_a_strict_order": spearman(_strict(truth), truth),
        "escalated_of_gain_kept_of_rest": accuracy_by_class(scores, truth, 0.5),
        "prm_spearman": max(prm_by_epoch),
        "curves": {
            "arbitrage": curve(scores, held),
            "likelihood": curve([r.features[0] for r in held], held),
            "rsd": curve([-reward for reward in rewards], held),
            "rsd on true values": curve([-r.draft_value for r in held], held),
            "oracle": curve(truth, held),
        },
    }
    write(pair, weights, prm, [*learning, *held], report, config)
    return report


def write(pair: Pair, weights, prm, records: Sequence[Record], report: dict, config: TrainRouterConfig) -> None:
    """Everything a router's directory holds."""
    from rollout.routers.pair import fingerprint, write_card

    for part in (prm, pair.tokenizer):
        part.save_pretrained(Path(config.out) / "prm")
    card = {
        "kind": "arbitrage",
        "draft": fingerprint(pair.draft),
        "policy": fingerprint(pair.policy),
        "separators": config.rollout.routed.step_separators,
        "weights": weights,
        "report": report,
    }
    write_card(config.out, card)
    draw(report["curves"], Path(config.out) / "report.png")
    lines = [json.dumps(asdict(record)) + "\n" for record in records]
    (Path(config.out) / "steps.jsonl").write_text("".join(lines), encoding="utf-8")


def classifier(pair: Pair, config: TrainRouterConfig) -> PreTrainedModel:
    """A new two-class head on a copy of one model's weights, in float32."""
    import torch
    from transformers import AutoModelForSequenceClassification

    source = {"policy": pair.policy, "draft": pair.draft}[config.base]
    shape = copy.deepcopy(source.config)
    shape.num_labels = 2
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = AutoModelForSequenceClassification.from_config(shape, dtype=torch.float32)
    try:
        model.base_model.load_state_dict(source.base_model.state_dict())
    except RuntimeError as error:  # an early exit has fewer layers than its configuration says
        raise ConfigError(f"base={config.base}: the draft's layers are the policy's. Take base=policy.") from error
    return model.to(pair.policy.device)


def _valued(records: Sequence[Record]) -> tuple[list[tuple[int, ...]], list[float]]:
    """Texts that end with a step, by either model, and their values: what a process reward model learns."""
    found = {(*r.before, *r.draft_step): r.draft_value for r in records}
    found |= {(*r.before, *r.policy_step): r.policy_value for r in records}
    return list(found), list(found.values())


def _strict(values: Sequence[float]) -> list[float]:
    """A number per value, in their order but without ties: most a router's score can know of values that tie."""
    order = sorted(range(len(values)), key=values.__getitem__)
    place = {i: float(rank) for rank, i in enumerate(order)}
    return [place[i] for i in range(len(values))]


def curve(scores: Sequence[float], records: Sequence[Record]) -> list[dict[str, float]]:
    """Mean value of the steps that stand when the policy writes a share of them, those with the highest scores."""
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    points = []
    for tenth in range(11):
        count = round(tenth * len(order) / 10)
        values = [records[i].policy_value for i in order[:count]] + [records[i].draft_value for i in order[count:]]
        points.append({"escalated": count / len(order), "value": sum(values) / len(values)})
    return points


def draw(curves: dict[str, list[dict[str, float]]], path: Path) -> None:
    """Value of the held-out steps over the share that the policy writes; nothing without matplotlib."""
    from specrl.plots import BLUE, GREY, ORANGE, RED, SKY

    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(6, 4.2), dpi=120, layout="constrained")
    panel = figure.subplots()
    for (name, points), colour in zip(curves.items(), (BLUE, SKY, ORANGE, GREY, RED), strict=True):
        panel.plot([p["escalated"] for p in points], [p["value"] for p in points], "o-", color=colour, label=name)
    panel.set_xlabel("share of steps written by the policy")
    panel.set_ylabel("mean value of the held-out steps")
    panel.legend(frameon=False, fontsize=8.5)
    panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png")


if __name__ == "__main__":
    raise SystemExit(cli.run(main, schema=TrainRouterConfig, training=False))
