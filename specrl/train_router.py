"""Learned router of a draft and a policy: `python -m specrl.train_router config=arbitrage_math [key=value ...]`.

Arbitrage (arXiv 2512.05033): responses are walked by the oracle, which sees both models' next step and continues with
the better one; every step visited becomes an example. A step's value is the mean reward of continuations by the policy,
so no process reward model is needed. `out` gets the router, a logistic regression on what the policy's likelihoods say
of a step.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rollout.config import doc
from specrl.config import load as cli
from specrl.config.options import ConfigError
from specrl.config.schema import Config

if TYPE_CHECKING:
    from rollout.lossy.steps import Candidate
    from specrl.lossy.pair import Pair
    from specrl.lossy.routing import StepValues
    from specrl.run.data import Example
    from trainers.lossy.router import Record

WALKS = {"oracle": 0.0, "draft": 1.0}  # advantage above which the walk goes on with the policy's step


@dataclass
class TrainRouterConfig(Config):
    out: str = doc("", "directory for the router, the steps visited and the report")
    continuations: int = doc(8, "responses finished from a step to find its value")

    @property
    def splits(self) -> tuple[Literal["train", "test"], ...]:
        return ("train",)


def main(config: TrainRouterConfig) -> int:
    from reward.loading import load_rewards
    from rollout.lossy.pair import fingerprint, write_card
    from specrl.lossy.pair import load_pair
    from specrl.lossy.routing import StepValues
    from specrl.run.data import load_examples
    from trainers.lossy.router import split

    if not config.out:
        raise ConfigError("out is missing: the directory to write the router to, such as out=outputs/router")
    if Path(config.out).is_dir() and any(Path(config.out).iterdir()):
        raise ConfigError(f"out={config.out} holds files already. Choose a directory that is new or empty.")
    if not config.rollout.drafter:
        raise ConfigError(
            "rollout.drafter is empty: routing needs a model that writes steps. Give a model directory, such as "
            "`python -m specrl.drafter out=DIR` writes"
        )
    pair = load_pair(config)
    examples = load_examples(config.data, config.dataset, "train", config.seed)
    with closing(load_rewards(config.reward)) as rewards:
        records = collect(pair, StepValues(pair, rewards, config.continuations, config.seed), examples)
        learning, held = split(records, 0.2, config.seed)
        again = revalued(pair, StepValues(pair, rewards, config.continuations, config.seed + 1), held, examples)
    weights, report = train(learning, held, again, config)
    card = {"kind": "arbitrage", "draft": fingerprint(pair.draft), "policy": fingerprint(pair.policy)}
    card |= {"separators": config.rollout.routed.step_separators, "weights": weights, "report": report}
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    write_card(out, card)
    lines = [json.dumps(asdict(record)) + "\n" for record in (*learning, *held)]
    (out / "steps.jsonl").write_text("".join(lines), encoding="utf-8")
    print(json.dumps(report, indent=2))
    return 0


def collect(pair: Pair, values: StepValues, examples: Sequence[Example]) -> list[Record]:
    """Every step of two walks per example, with the values of both models' steps.

    The oracle's walk is Arbitrage's. It hardly ever sees a response that has gone wrong, which a router at work does
    see, so the draft's own walk is recorded too (after DAgger, arXiv 1011.0686).
    """
    from rollout.lossy.scores import by_advantage, features
    from specrl.lossy.routing import advantage
    from specrl.run.accuracy import requests
    from trainers.lossy.router import Record

    records: dict[tuple[int, ...], Record] = {}  # by the text: two walks may begin alike

    def note(candidate: Candidate, example: Example, draft_value: float, policy_value: float) -> None:
        if isfinite(draft_value) and isfinite(policy_value):  # a step without a value teaches nothing
            before = (*candidate.prompt, *candidate.response)
            steps = tuple(candidate.step.tokens), tuple(candidate.rival.tokens)
            read = features(candidate)
            records[before + steps[0]] = Record(example.id, read, before, *steps, draft_value, policy_value)

    oracle = by_advantage(advantage(pair, values, examples, note))
    for walk, oracle.threshold in WALKS.items():
        _, stats = pair.routed(oracle).generate(requests(examples, pair.tokenizer, pair.config, walk))
        print(
            f"{walk} walk: {len(examples)} responses, {stats.steps} steps, {stats.route_faults} faults, "
            f"{values.decoded} tokens of continuations so far",
            flush=True,
        )
    return list(records.values())


def revalued(pair: Pair, values: StepValues, records: Sequence[Record], examples: Sequence[Example]) -> list[float]:
    """The advantages of visited steps, valued once more: their agreement bounds what a router can be seen to know."""
    from reward.process import Prefix
    from specrl.run.data import render

    owners = {example.id: example for example in examples}
    asked = []
    for record in records:
        example = owners[record.problem]
        start = len(render(example, pair.tokenizer))
        for step in (record.draft_step, record.policy_step):
            tokens, finished = (*record.before, *step), step[-1] in pair.sampling.eos_ids
            text = pair.tokenizer.decode(tokens[start:], skip_special_tokens=True)
            asked.append(Prefix(str(example.prompt), (text,), example.answer, example.fields, finished, tokens))
    found = values(asked)
    return [s_t - s_d for s_d, s_t in zip(found[::2], found[1::2], strict=True)]


def train(
    learning: Sequence[Record], held: Sequence[Record], again: Sequence[float], config: TrainRouterConfig
) -> tuple[list[float], dict[str, Any]]:
    """The router's weights, and the report on the steps in `held`.

    Args: again: their advantages, valued once more.

    Raises:
        ConfigError: too few steps of one kind.
    """
    import torch

    from rollout.lossy.scores import probability
    from trainers.lossy.fit import logistic, spearman
    from trainers.lossy.router import accuracy_by_class, curve

    gains = [r.advantage > 0 for r in learning]
    if len(set(gains)) < 2 or not held:
        raise ConfigError(
            f"dataset.train_size={config.dataset.train_size} gave {len(learning) + len(held)} steps, too few of one "
            "kind to learn from. Take more prompts, or a pair of models that differ more."
        )
    inputs = torch.tensor([r.features for r in learning], dtype=torch.float64)
    found, bias = logistic(inputs, torch.tensor(gains), ridge=1e-3)
    weights = [*found.tolist(), bias.item()]
    truth = [r.advantage for r in held]
    valued_twice = [(a, b) for a, b in zip(again, truth, strict=True) if isfinite(a)]
    scores, doubts = [probability(weights, r.features) for r in held], [r.features[0] for r in held]
    without_ties = torch.tensor(truth, dtype=torch.float64).argsort(stable=True).argsort().tolist()
    return weights, {
        "steps": len(learning) + len(held),
        "with_gain": sum(r.advantage > 0 for r in (*learning, *held)),
        "spearman": spearman(scores, truth),
        "spearman_of_likelihood": spearman(doubts, truth),
        "spearman_of_valuing_again": spearman(*zip(*valued_twice, strict=True)) if valued_twice else 0.0,
        "spearman_of_a_strict_order": spearman(without_ties, truth),  # most that a score can know of values that tie
        "escalated_of_gain_kept_of_rest": accuracy_by_class(scores, truth, 0.5),
        "curves": {
            "arbitrage": curve(scores, held),
            "likelihood": curve(doubts, held),
            "rsd on true values": curve([-r.draft_value for r in held], held),
            "oracle": curve(truth, held),
        },
    }


if __name__ == "__main__":
    raise SystemExit(cli.run(main, schema=TrainRouterConfig, training=False))
