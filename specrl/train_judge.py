"""Judge of draft tokens, mined from the verifiable reward: `python -m specrl.train_judge config=judge_math out=DIR`.

AutoJudge (arXiv 2504.20039): where the draft model would write another token than the policy, that token is put in and
the policy finishes the response; the same reward means that the token did not matter. A linear head on the policy's
hidden states learns to tell. The report compares exact verification, the head, a head trained on shuffled labels and
the KL rule on held-out problems.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from rollout.config import doc
from specrl import config as cli
from specrl.config import Config
from specrl.options import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from reward.base import RewardSet
    from rollout.engines.ragged import RaggedModel
    from rollout.routers.judge import Judge, JudgeHead
    from rollout.routers.mining import Mined
    from specrl.data import Example
    from specrl.routing import Pair


SHUFFLES = 8  # controls: one direction of the hidden space may tell the classes apart by chance


@dataclass
class TrainJudgeConfig(Config):
    out: str = doc("", "directory for the judge and its report")
    recall: float = doc(0.99, "share of the important mismatches that the threshold must catch")
    mismatches: int = doc(64, "mismatches tried per response")


@dataclass(frozen=True)
class Line:
    """One rule of verification on held-out problems."""

    rule: str
    accuracy: float
    tokens_per_pass: float
    accepted_ratio: float
    """Accepted / drafted tokens."""


def main(config: TrainJudgeConfig) -> int:
    from reward.base import RewardSet
    from rollout.routers.judge import JudgeHead, KLJudge
    from rollout.routers.pair import fingerprint
    from specrl.data import load_examples
    from specrl.routing import load_pair

    if not config.out:
        raise ConfigError("out is missing: the directory to write the judge to, such as out=outputs/judge")
    pair = load_pair(config)
    train, test = (load_examples(config.data, config.dataset, split, config.seed) for split in ("train", "test"))
    rewards = RewardSet.from_config(config.reward)
    try:
        judge, shuffled, report = fit_judges(*collect(pair, train, rewards, config), config)
        rules = {
            "exact": JudgeHead(judge.weight, judge.bias, 0.0),
            "judge": judge,
            "shuffled labels": shuffled,
            "KL rule": KLJudge(),
        }
        report["rules"] = [asdict(measure(name, rule, pair, test, rewards)) for name, rule in rules.items()]
    finally:
        rewards.close()
    judge.save(config.out, {"policy": fingerprint(pair.policy), "draft": fingerprint(pair.draft), "report": report})
    print(json.dumps(report, indent=2))
    return 0


def collect(
    pair: Pair, examples: Sequence[Example], rewards: RewardSet, config: TrainJudgeConfig
) -> tuple[list[Mined], Tensor]:
    """Mismatches of the draft model on the policy's greedy responses, and the policy's states [N, H] after each.

    Responses without a reward are left out: a wrong answer that stays wrong says nothing about a token.
    """
    import torch

    from rollout.routers.mining import mine
    from rollout.types import Request
    from specrl.data import render

    greedy = replace(pair, config=replace(config, rollout=replace(config.rollout, temperature=0.0)))
    engine, cap = greedy.plain(pair.policy), config.rollout.max_new_tokens
    policy, draft = greedy.ragged(pair.policy), greedy.ragged(pair.draft)
    prompts = [render(example, pair.tokenizer) for example in examples]

    def finish(prefixes: dict[int, list[int]]) -> dict[int, list[int]]:
        going = {i: p for i, p in prefixes.items() if len(p) < cap and not (p and p[-1] in pair.eos_ids)}
        done, _ = engine.generate([Request([*prompts[i], *p], 0, cap - len(p)) for i, p in going.items()])
        return prefixes | {i: [*p, *c.tokens] for (i, p), c in zip(going.items(), done, strict=True)}

    def propose(texts: dict[int, list[int]]) -> dict[int, list[int]]:
        return {i: draws for i, (draws, _) in zip(texts, read(draft, prompts, texts), strict=True)}

    own = list(finish({i: [] for i in range(len(examples))}).values())
    right = [bool(value) for value in score(pair, examples, own, rewards)]

    def answer(i: int, text: list[int]) -> float | None:
        return score(pair, [examples[i]], [text], rewards)[0] if right[i] else None

    mined = mine(own, propose, finish, answer, pair.eos_ids, config.mismatches)
    states = [
        read(policy, [prompts[m.row]], {0: list(m.prefix)})[0][1]
        for m in mined  # one at a time: few, and of very different lengths
    ]
    return mined, torch.stack(states) if states else torch.zeros(0, 1)


def read(model: RaggedModel, prompts: Sequence[Sequence[int]], texts: dict[int, list[int]]) -> list[tuple]:
    """For each text: the model's draw at every position of it, and the final hidden state [H] after its last token."""
    from rollout.engines.session import Session

    with model.inference():
        session = Session(model, [prompts[i] for i in texts], [0] * len(texts), 0.0)
        fed = session.feed(dict(enumerate(texts.values())))
        return [(fed[n].draws, fed[n].hidden[-1].float().clone()) for n in range(len(texts))]


def score(pair: Pair, examples: Sequence[Example], texts: Sequence[list[int]], rewards: RewardSet) -> list:
    """Total rewards of responses, None where there is none."""
    from reward.base import Sample

    said = pair.tokenizer.batch_decode(texts, skip_special_tokens=True)
    return rewards.score(
        [Sample(str(e.prompt), text, e.answer, e.fields) for e, text in zip(examples, said, strict=True)]
    ).total


def fit_judges(
    mined: Sequence[Mined], features: Tensor, config: TrainJudgeConfig
) -> tuple[JudgeHead, JudgeHead, dict[str, Any]]:
    """The judge, the same fit to shuffled labels, and what is known of both. A fifth of the problems is held out.

    Raises:
        ConfigError: too few mismatches of one kind.
    """
    import torch

    from rollout.routers.judge import JudgeHead
    from trainers.judge import fit_head, roc_auc, threshold_for_recall

    labels = torch.tensor([m.important for m in mined])
    held = torch.tensor([m.row % 5 == 0 for m in mined])
    counts = [int((kind & part).sum()) for kind in (labels, ~labels) for part in (held, ~held)]
    if min(counts) < 2:
        raise ConfigError(
            f"{len(mined)} mismatches, {int(labels.sum())} of them important, are too few of one kind to learn from. "
            f"Raise dataset.train_size={config.dataset.train_size}, or take a draft that differs more."
        )
    generator = torch.Generator().manual_seed(config.seed)
    shuffles = [labels[torch.randperm(len(labels), generator=generator)] for _ in range(SHUFFLES)]
    judges, areas = [], []
    for given in (labels, *shuffles):
        weight, bias, _ = fit_head(features[~held], given[~held], features[held], given[held])
        chances = (features[held] @ weight + bias).sigmoid().tolist()
        threshold = threshold_for_recall(chances, labels[held].tolist(), config.recall)
        judges.append(JudgeHead(weight, bias, threshold))
        areas.append(roc_auc(chances, labels[held].tolist()))
    report = {
        "mismatches": len(mined),
        "important": int(labels.sum()),
        "roc_auc": areas[0],
        "roc_auc_of_shuffled_labels": areas[1:],
        "threshold": judges[0].threshold,
    }
    return judges[0], judges[1], report


def measure(name: str, judge: Judge, pair: Pair, examples: Sequence[Example], rewards: RewardSet) -> Line:
    """Responses of one rule to every example, with the same keys for all rules."""
    from rollout.noise import derive_key
    from rollout.types import Request
    from specrl.data import render

    cap, seed = pair.config.rollout.max_new_tokens, pair.config.seed
    requests = [Request(render(e, pair.tokenizer), derive_key(seed, e.id, 0, 0, "judge"), cap) for e in examples]
    done, stats = pair.judged(judge).generate(requests)
    totals = [total or 0.0 for total in score(pair, examples, [c.tokens for c in done], rewards) if total is not None]
    passes = sum(c.passes for c in done)
    return Line(
        name,
        sum(totals) / len(totals) if totals else float("nan"),
        sum(len(c.tokens) for c in done) / passes,
        stats.accepted / stats.drafted if stats.drafted else 0.0,
    )


if __name__ == "__main__":
    raise SystemExit(cli.run(main, schema=TrainJudgeConfig, training=False))
