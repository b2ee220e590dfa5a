"""Judge of draft tokens, mined from the verifiable reward: `python -m specrl.train_judge config=judge_math out=DIR`.

AutoJudge (arXiv 2504.20039): where a draft has another token than the policy, that token is put in and the policy
finishes the response; the same reward means that the token did not matter. A linear head on the policy's hidden states
learns to tell. Drafts are the draft model's, or with cache=RUN the texts that a run has stored, under the policy it
ended with:

    python -m specrl.train_judge config=grpo_math model=outputs/run/model cache=outputs/run out=DIR

The report compares exact verification, the head, a head trained on shuffled labels and, with a draft model, the KL rule
on held-out problems.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rollout.config import doc
from specrl import config as cli
from specrl.options import ConfigError
from specrl.schema import Config

if TYPE_CHECKING:
    from rollout.routers.judge import JudgeHead
    from trainers.judge import Labels


SHUFFLES = 8  # controls: one direction of the hidden space may tell the classes apart by chance


@dataclass
class TrainJudgeConfig(Config):
    out: str = doc("", "directory for the judge and its report")
    cache: str = doc("", "run directory whose stored texts are the drafts; empty takes rollout.drafter")
    recall: float = doc(0.99, "share of the important mismatches that the threshold must catch")
    mismatches: int = doc(64, "mismatches tried per response")

    @property
    def splits(self) -> tuple[Literal["train", "test"], ...]:
        return ("train",) if self.cache else ("train", "test")


def main(config: TrainJudgeConfig) -> int:
    from reward.base import RewardSet
    from rollout.engines import load_drafter
    from rollout.engines.base import Sampling
    from rollout.routers.judge import JudgeHead, KLJudge
    from rollout.routers.pair import fingerprint
    from specrl.data import load_examples
    from specrl.judging import Policy, collect, collect_stored, compare, fresh_requests, read_cache, stored_requests
    from specrl.policy import engine_spec, load_policy

    if not config.out:
        raise ConfigError("out is missing: the directory to write the judge to, such as out=outputs/judge")
    if bool(config.cache) == bool(config.rollout.drafter):
        raise ConfigError(
            "Give either cache=RUN, whose stored texts are judged, or rollout.drafter=DIR, such as "
            "`python -m specrl.drafter out=DIR` writes."
        )
    model, tokenizer, eos_ids = load_policy(config)
    rollout = config.rollout
    policy = Policy(
        model.eval(), tokenizer, Sampling(eos_ids, rollout.temperature, rollout.top_k, rollout.top_p), config
    )
    draft = load_drafter(engine_spec(config, eos_ids), model) if rollout.drafter else None
    examples = load_examples(config.data, config.dataset, "train", config.seed)
    rewards = RewardSet.from_config(config.reward)
    try:
        if draft is None:
            stored = read_cache(policy, examples, Path(config.cache))
            labels = collect_stored(policy, stored, rewards, config.mismatches)
            held = [row for row in stored if row.problem % 5 == 0]
            tried, requests = [row.example for row in held], partial(stored_requests, policy, held)
        else:
            labels = collect(policy, draft, examples, rewards, config.mismatches)
            tried = load_examples(config.data, config.dataset, "test", config.seed)
            requests = partial(fresh_requests, policy, tried)
        judge, shuffled, report = fit_judges(labels, config)
        exact = JudgeHead(judge.weight, judge.bias, 0.0)
        rules = {"exact": exact, "judge": judge, "shuffled labels": shuffled}
        rules |= {"KL rule": KLJudge()} if draft is not None else {}
        engines = {name: policy.engine(rule, draft) for name, rule in rules.items()}
        report["rules"] = [asdict(line) for line in compare(policy, engines, tried, requests, rewards)]
    finally:
        rewards.close()
    drafts = config.cache if draft is None else fingerprint(draft)
    judge.save(config.out, {"policy": fingerprint(model), "draft": drafts, "report": report})
    print(json.dumps(report, indent=2))
    return 0


def fit_judges(labels: Labels, config: TrainJudgeConfig) -> tuple[JudgeHead, JudgeHead, dict[str, Any]]:
    """The judge, the same fit to shuffled labels, and what is known of both. A fifth of the problems is held out.

    Raises:
        ConfigError: too few mismatches of one kind.
    """
    import torch

    from rollout.routers.judge import JudgeHead
    from trainers.judge import fit_judge

    generator = torch.Generator().manual_seed(config.seed)
    shuffles = [labels.important[torch.randperm(len(labels), generator=generator)] for _ in range(SHUFFLES)]
    fitted = [fit_judge(replace(labels, important=given), config.recall) for given in (labels.important, *shuffles)]
    if None in fitted:
        raise ConfigError(
            f"{len(labels)} mismatches, {int(labels.important.sum())} of them important, are too few of one kind to "
            f"learn from. Raise dataset.train_size={config.dataset.train_size}, or take drafts that differ more."
        )
    report = {
        "mismatches": len(labels),
        "important": int(labels.important.sum()),
        "roc_auc": fitted[0].roc_auc,
        "roc_auc_of_shuffled_labels": [f.roc_auc for f in fitted[1:]],
        "threshold": fitted[0].threshold,
    }
    judge, shuffled = (JudgeHead(f.weight, f.bias, f.threshold) for f in fitted[:2])
    return judge, shuffled, report


if __name__ == "__main__":
    raise SystemExit(cli.run(main, schema=TrainJudgeConfig, training=False))
