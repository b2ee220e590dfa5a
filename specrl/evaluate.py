"""Accuracy of a policy: `python -m specrl.evaluate run=DIR|config=NAME [model=PATH] [samples=8]`.

With run=DIR, the trained model of that run is evaluated with the run's config.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from specrl.config import load as cli
from specrl.config.options import ConfigError
from specrl.config.schema import Config
from specrl.results.records import find_run
from specrl.rollout.sections import doc
from specrl.rollout.types import CacheError, RolloutError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from specrl.rollout.cache.memory import TrajectoryCache
    from specrl.rollout.engines.base import Engine

logger = logging.getLogger(__name__)


@dataclass
class EvaluateConfig(Config):
    run: str = doc("", "run directory, or the name of a run in outputs: its config and, without model=, its model")
    samples: int = doc(8, "responses per prompt; where a reward is verifiable, pass@k for k = 1, 2, 4 ... up to this")
    split: Literal["test", "train"] = doc("test", "role of the prompts: test or train")

    @property
    def splits(self) -> tuple[Literal["train", "test"], ...]:
        return (self.split,)


class Serving(NamedTuple):
    """What a command that does not train generates with."""

    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    model: PreTrainedModel
    eos_ids: frozenset[int]

    @property
    def vocab_size(self) -> int:
        return self.model.get_output_embeddings().weight.shape[0]


@contextmanager
def serving(config: Config) -> Iterator[Serving]:
    """The policy of the config, loaded into an engine in this process, without the run's workers."""
    from specrl.rollout.build import build_engine
    from specrl.run.policy import engine_spec, load_policy

    config.cluster.num_workers = 0
    model, tokenizer, eos_ids = load_policy(config)
    shared = model.eval() if config.rollout.engine == "transformers" else None
    engine = build_engine(engine_spec(config, eos_ids), shared)
    try:
        yield Serving(engine, tokenizer, model, eos_ids)
    finally:
        engine.close()


def main(config: EvaluateConfig) -> int:
    from specrl.reward.loading import load_rewards
    from specrl.rollout.speculative import SpeculativeRollout
    from specrl.run import preflight
    from specrl.run.accuracy import evaluate

    (examples,) = preflight.check(config, training=False).values()
    with closing(load_rewards(config.reward)) as rewards, serving(config) as served:
        rollout = SpeculativeRollout(served.engine, None, config.rollout, config.seed, texts_of_run(config, served))
        metrics = evaluate(rollout, served.tokenizer, examples, rewards, config, config.samples)
    figures = {name: value for name, value in metrics.items() if not name.endswith("_s")}
    print(json.dumps({"model": config.model, "prompts": len(examples), "samples": config.samples, **figures}, indent=2))
    if "eval/reward" not in metrics:
        raise RolloutError(
            f"none of the {metrics['eval/failed']} responses could be scored, so there is no accuracy. "
            f"The first, {rewards.first_failure}"
        )
    return 0


def texts_of_run(config: EvaluateConfig, served: Serving) -> TrajectoryCache | None:
    """The texts of the run's last evaluation. Those that do not fit are left out with a warning: only time depends on
    them."""
    from specrl.run.accuracy import last_texts
    from specrl.trainers.checkpoint import EVALUATIONS

    folder = Path(find_run(config.run)) / EVALUATIONS if config.run else None
    try:
        return last_texts(config, served.tokenizer, served.vocab_size, served.eos_ids, folder)
    except CacheError as error:
        logger.warning("Nothing is drafted from the run's last evaluation: %s", error)
        return last_texts(config, served.tokenizer, served.vocab_size, served.eos_ids, None)


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
