"""Accuracy of a policy: `python -m specrl.evaluate run=DIR|config=NAME [model=PATH] [samples=8]`.

With run=DIR, the trained model of that run is evaluated with the run's config.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from specrl.config import load as cli
from specrl.config.options import ConfigError
from specrl.config.schema import Config
from specrl.results.records import find_run, run_option
from specrl.rollout.sections import doc
from specrl.rollout.types import RolloutError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from specrl.rollout.engines.base import Engine


@dataclass
class EvaluateConfig(Config):
    run: str = run_option("run directory, or the name of a run in outputs: its config and, without model=, its model")
    samples: int = doc(8, "responses per prompt; where a reward is verifiable, pass@k for k = 1, 2, 4 ... up to this")
    split: Literal["test", "train"] = doc("test", "role of the prompts: test or train")

    @property
    def splits(self) -> tuple[Literal["train", "test"], ...]:
        return (self.split,)


@contextmanager
def serving(config: Config) -> Iterator[tuple[Engine, PreTrainedTokenizerBase]]:
    """The engine of a command that does not train, and the policy's tokenizer."""
    from specrl.lossy.routing import step_scorer
    from specrl.rollout.build import build_engine
    from specrl.run.policy import engine_spec, load_policy

    model, tokenizer, eos_ids = load_policy(config)
    shared = model.eval() if config.rollout.engine == "transformers" else None
    engine = build_engine(engine_spec(config, eos_ids), shared, step_scorer(config))
    try:
        yield engine, tokenizer
    finally:
        engine.close()


def main(config: EvaluateConfig) -> int:
    from specrl.reward.loading import load_rewards
    from specrl.run import preflight
    from specrl.run.accuracy import evaluate

    (examples,) = preflight.check(config, training=False).values()
    with closing(load_rewards(config.reward)) as rewards, serving(config) as (engine, tokenizer):
        metrics = evaluate(engine, tokenizer, examples, rewards, config, config.samples)
    print(json.dumps({"model": config.model, "prompts": len(examples), "samples": config.samples, **metrics}, indent=2))
    if "eval/reward" not in metrics:
        raise RolloutError(
            f"none of the {metrics['eval/failed']} responses could be scored, so there is no accuracy. "
            "Try reward.max_failure_ratio=0, which stops at the first one that has no score and says why."
        )
    return 0


def command(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    return cli.run(main, argv, EvaluateConfig, training=False, words=of_run)


def of_run(argv: Sequence[str]) -> Sequence[str]:
    """The command line words, with config=DIR model=DIR/model added for run=DIR."""
    values = dict(word.partition("=")[::2] for word in argv)
    if not values.get("run"):
        return argv
    if "config" in values:
        raise ConfigError("run=DIR brings its own config. Give one of run=DIR and config=NAME.")
    folder = find_run(values["run"])
    if "model" in values:
        return [*argv, f"config={folder}"]
    if not (folder / "model").is_dir():
        raise ConfigError(f"{folder} has no model: a run writes it when it ends. Give model=PATH too, or another run.")
    return [*argv, f"config={folder}", f"model={folder / 'model'}"]


if __name__ == "__main__":
    raise SystemExit(command())
