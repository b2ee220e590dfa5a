"""Learned router of a draft and a policy: `python -m specrl.train_router config=arbitrage_math [key=value ...]`.

Arbitrage (arXiv 2512.05033): responses are walked by the oracle, which sees both models' next step and continues with
the better one; every step visited becomes an example. A step's value is the mean reward of continuations by the policy,
so no process reward model is needed. `out` gets the router and, in `prm`, the process reward model that RSD would use,
trained on the same steps.
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
from specrl.config import Config
from specrl.options import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from reward.base import RewardSet
    from rollout.routers.arbitrage import Tags
    from rollout.steps import Candidate
    from specrl.data import Example
    from specrl.routing import Pair
    from trainers.router import Record

TAGS = {"draft": "0:", "policy": "1:"}  # before each step of the router's input; digits are in every vocabulary


@dataclass
class TrainRouterConfig(Config):
    out: str = doc("", "directory for the router, its process reward model, the steps visited and the report")
    base: Literal["policy", "draft"] = doc("policy", "weights the classifiers start from; draft is faster to ask")
    continuations: int = doc(8, "responses finished from a step to find its value")
    classifier_epochs: int = doc(8, "passes over the balanced examples; the best one is kept")
    classifier_learning_rate: float = doc(1e-3, "peak of one rise and fall; about 1e-5 for models of a billion")
    classifier_batch: int = doc(32, "examples per optimiser step")


def main(config: TrainRouterConfig) -> int:
    from reward.base import RewardSet
    from specrl.data import load_examples
    from specrl.routing import load_pair

    if not config.out:
        raise ConfigError("out is missing: the directory to write the router to, such as out=outputs/router")
    if Path(config.out).is_dir() and any(Path(config.out).iterdir()):
        raise ConfigError(f"out={config.out} holds files already. Choose a directory that is new or empty.")
    pair = load_pair(config)
    examples = load_examples(config.data, config.dataset, "train", config.seed)
    rewards = RewardSet.from_config(config.reward)
    try:
        records, tags = collect(pair, examples, rewards, config)
    finally:
        rewards.close()
    print(json.dumps(train(pair, records, tags, config), indent=2))
    return 0


def collect(
    pair: Pair, examples: Sequence[Example], rewards: RewardSet, config: TrainRouterConfig
) -> tuple[list[Record], Tags]:
    """Every step that the oracle visits on one response per example, with the values of both models' steps."""
    from rollout.noise import derive_key
    from rollout.routers.arbitrage import encode
    from rollout.routers.oracle import OracleRouter
    from rollout.types import Request
    from specrl.data import render
    from specrl.routing import StepValues, advantage
    from trainers.router import Record

    tags = {source: pair.tokenizer(text)["input_ids"] for source, text in TAGS.items()}
    records: list[Record] = []

    def note(candidate: Candidate, example: Example, draft_value: float, policy_value: float) -> None:
        if isfinite(draft_value) and isfinite(policy_value):  # a step without a value teaches nothing
            before = (*candidate.prompt, *candidate.response)
            steps = tuple(candidate.step.tokens), tuple(candidate.rival.tokens)
            read = tuple(encode(candidate, tags))
            records.append(Record(example.id, read, before, *steps, draft_value, policy_value))

    values = StepValues(pair, rewards, config.continuations, config.seed)
    oracle = OracleRouter(advantage(pair, values, examples, note))
    cap = config.rollout.max_new_tokens
    keys = [derive_key(config.seed, example.id, 0, 0, "walk") for example in examples]
    requests = [Request(render(e, pair.tokenizer), key, cap) for e, key in zip(examples, keys, strict=True)]
    _, stats = pair.routed(oracle).generate(requests)
    print(
        f"{len(examples)} responses, {stats.steps} steps, {stats.route_faults} faults, {values.decoded} tokens of "
        f"continuations, {sum(r.advantage > 0 for r in records)} of {len(records)} steps gain by escalating"
    )
    return records, tags


def train(pair: Pair, records: Sequence[Record], tags: Tags, config: TrainRouterConfig) -> dict[str, Any]:
    """Fits router and process reward model, writes both with the steps and the report, and returns the report."""
    from rollout.routers.arbitrage import classify
    from rollout.routers.pair import fingerprint, write_card
    from trainers.router import Fit, accuracy_by_class, balanced, fit, split

    learning, held = split(records, 0.2, config.seed)
    options = Fit(config.classifier_epochs, config.classifier_learning_rate, config.classifier_batch, seed=config.seed)
    chosen = balanced(learning, config.seed)
    if not chosen or not held:
        raise ConfigError(
            f"dataset.train_size={config.dataset.train_size} gave {len(records)} steps, too few of one kind to learn "
            "from. Take more prompts, or a pair of models that differ more."
        )
    router = classifier(pair, config)
    gains = [float(r.advantage > 0) for r in chosen]
    inputs, truth = [r.tokens for r in held], [r.advantage for r in held]
    by_epoch = fit(router, [r.tokens for r in chosen], gains, inputs, truth, options)
    scores = classify(router, inputs)
    prm = classifier(pair, config)
    prm_by_epoch = fit(prm, *_valued(learning), *_valued(held), options)
    report = {
        "steps": len(records),
        "with_gain": sum(r.advantage > 0 for r in records),
        "spearman_by_epoch": by_epoch,
        "spearman": max(by_epoch),
        "escalated_of_gain_kept_of_rest": accuracy_by_class(scores, truth, 0.5),
        "prm_spearman": max(prm_by_epoch),
        "curve": curve(scores, held),
    }
    card = {
        "kind": "arbitrage",
        "draft": fingerprint(pair.draft),
        "policy": fingerprint(pair.policy),
        "separators": config.rollout.router.step_separators,
        "tags": tags,
        "report": report,
    }
    for model, folder in ((router, Path(config.out)), (prm, Path(config.out) / "prm")):
        model.save_pretrained(folder)
        pair.tokenizer.save_pretrained(folder)
    write_card(config.out, card)
    lines = [json.dumps(asdict(record)) + "\n" for record in records]
    (Path(config.out) / "steps.jsonl").write_text("".join(lines), encoding="utf-8")
    return report


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


def curve(scores: Sequence[float], records: Sequence[Record]) -> list[dict[str, float]]:
    """What a threshold would escalate of the held-out steps, and the mean value of the steps that then stand."""
    points = []
    for threshold in (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
        escalated = [score > threshold for score in scores]
        values = [r.policy_value if e else r.draft_value for e, r in zip(escalated, records, strict=True)]
        points.append(
            {"threshold": threshold, "escalated": sum(escalated) / len(scores), "value": sum(values) / len(values)}
        )
    return points


if __name__ == "__main__":
    raise SystemExit(cli.run(main, schema=TrainRouterConfig, training=False))
