"""Train a router between draft model and policy: `python -m specrl.train_router config=arbitrage_math out=DIR`.

Arbitrage (arXiv 2512.05033): an oracle compares the next steps of both models and continues with the better one; every
step becomes a training example. The value of a step is the mean reward of the policy's continuations, so no process
reward model is needed. The router written to `out` is a logistic regression on what the draft model tells of a step, so
that it decides before any pass of the policy.
"""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import dataclass
from typing import Literal

from specrl.config import load as cli
from specrl.config.options import ConfigError
from specrl.config.schema import Config
from specrl.rollout.sections import doc


@dataclass
class TrainRouterConfig(Config):
    out: str = doc("", "directory for the router and its report")
    continuations: int = doc(8, "responses finished from a step to find its value")

    @property
    def splits(self) -> tuple[Literal["train", "test"], ...]:
        return ("train",)


def main(config: TrainRouterConfig) -> int:
    from specrl.lossy.pair import load_pair
    from specrl.lossy.routing import StepValues, collect, train
    from specrl.reward.loading import load_rewards
    from specrl.rollout.lossy.pair import write_card
    from specrl.run import preflight

    preflight.check_out(config.out)
    if not config.rollout.drafter:
        raise ConfigError(
            "rollout.drafter is empty: routing needs a model that writes steps. Give a model directory, such as "
            "`python -m specrl.drafter out=DIR` writes"
        )
    (examples,) = preflight.check(config, training=False).values()
    pair = load_pair(config)
    with closing(load_rewards(config.reward)) as rewards:
        values = StepValues(pair, rewards, config.continuations, config.seed)
        records = collect(pair, values, examples)
    card = train(records, config)
    separators = config.rollout.routed.step_separators
    write_card(config.out, {"kind": "arbitrage", **pair.fingerprints(), "separators": separators, **card})
    print(json.dumps(card["report"], indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(cli.run(main, schema=TrainRouterConfig, training=False))
