"""Train a judge of draft tokens with the reward: `python -m specrl.train_judge config=judge_math out=DIR`.

AutoJudge (arXiv 2504.20039): at each mismatch of a draft, the draft's token replaces the policy's, and the policy
finishes the response. If the reward does not change, the mismatch is unimportant. A linear head on the policy's hidden
states learns to predict this. The drafts come from the draft model or, with cache=RUN, from the responses that a run
has stored, with the policy that the run ended with:

    python -m specrl.train_judge config=grpo_math model=outputs/run/model cache=outputs/run out=DIR

The report compares, on held-out problems, exact verification and the head.
"""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from specrl.config import load as cli
from specrl.config.options import ConfigError
from specrl.config.schema import Config
from specrl.rollout.sections import doc

TESTED = 1
"""Remainder by 5 of the problems that test a judge of stored texts; those with 0 choose its threshold."""


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
    from specrl.lossy.judging import Drafted, compare, mismatches, read_cache, train
    from specrl.lossy.pair import load_pair
    from specrl.reward.loading import load_rewards
    from specrl.rollout.lossy.judge import JudgeHead
    from specrl.run import preflight

    preflight.check_out(config.out)
    if bool(config.cache) == bool(config.rollout.drafter):
        raise ConfigError(
            "Give either cache=RUN, whose stored texts are judged, or rollout.drafter=DIR, such as "
            "`python -m specrl.drafter out=DIR` writes."
        )
    examples = preflight.check(config, training=False)
    pair = load_pair(config)
    with closing(load_rewards(config.reward)) as rewards:
        if config.cache:
            drafts = read_cache(pair, examples["train"], Path(config.cache))
            training = [draft for draft in drafts if draft.problem % 5 != TESTED]
            held_out = [draft for draft in drafts if draft.problem % 5 == TESTED]
        else:
            training = [Drafted(example, i) for i, example in enumerate(examples["train"])]
            held_out = [Drafted(example, i) for i, example in enumerate(examples["test"])]
        labels = mismatches(pair, training, rewards, config.mismatches)
        judge, report = train(labels, config, config.recall)
        exact = JudgeHead(judge.weight, judge.bias, 0.0)
        report["rules"] = compare(pair, {"exact": exact, "judge": judge}, held_out, rewards)
    fingerprints = pair.fingerprints()
    draft = config.cache or fingerprints["draft"]
    judge.save(config.out, {"policy": fingerprints["policy"], "draft": draft, "report": report})
    print(json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(cli.run(main, schema=TrainJudgeConfig, training=False))
