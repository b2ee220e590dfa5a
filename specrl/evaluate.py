"""Accuracy of a policy: `python -m specrl.evaluate run=DIR|config=NAME [model=PATH] [samples=8]`.

With run=DIR it is the trained model of that run, under the run's config.
pass@k is the unbiased estimator of Chen et al. 2021 (arXiv 2107.03374), 1 - C(n - c, k) / C(n, k); avg@n is the mean
reward of all n samples. Evaluation has noise of its own and never touches the trajectory cache.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from math import comb
from typing import TYPE_CHECKING, Literal

from rollout.config import doc
from specrl.config import load as cli
from specrl.config.options import ConfigError
from specrl.config.schema import Config
from specrl.results.records import find_run, run_option

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from reward.set import RewardSet
    from rollout.engines.base import Engine
    from specrl.run.data import Example


@dataclass
class EvaluateConfig(Config):
    run: str = run_option("run directory, or the name of a run in outputs: its config and, without model=, its model")
    samples: int = doc(8, "responses per prompt; pass@k is reported for k = 1, 2, 4 ... up to this number")
    split: Literal["test", "train"] = doc("test", "role of the prompts: test or train")

    @property
    def splits(self) -> tuple[Literal["train", "test"], ...]:
        return (self.split,)


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Chance that at least one of k responses drawn from n, of which `correct` are right, is right."""
    return 1.0 - comb(n - correct, k) / comb(n, k)


def evaluate(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    rewards: RewardSet,
    *,
    samples: int,
    max_new_tokens: int,
    seed: int,
) -> dict[str, float]:
    """Mean reward, pass@k over the prompts, mean length and failures. A failed reward is left out, never a zero.

    A response counts as correct for pass@k when its total reward is at least the largest the weights allow, halved:
    with the 0/1 math reward, when it is right.
    """
    from reward.base import Sample
    from rollout.keys import derive_key
    from rollout.types import Request
    from specrl.run.data import render

    requests = [
        Request(render(example, tokenizer), derive_key(seed, example.id, i, 0, "eval"), max_new_tokens)
        for example in examples
        for i in range(samples)
    ]
    completions, stats = engine.generate(requests)
    texts = tokenizer.batch_decode([c.tokens for c in completions], skip_special_tokens=True)
    owners = [example for example in examples for _ in range(samples)]
    scored = rewards.score([Sample(str(e.prompt), t, e.answer, e.fields) for e, t in zip(owners, texts, strict=True)])
    valid = [total for total in scored.total if total is not None]
    metrics = {
        "eval/reward": sum(valid) / len(valid) if valid else float("nan"),
        "eval/mean_length": sum(len(c.tokens) for c in completions) / len(completions),
        "eval/failed": len(completions) - len(valid),
    }
    if stats.steps:
        own = sum(not reused for c in completions for reused in c.reused)
        metrics["eval/policy_tokens_ratio"] = own / sum(len(c.tokens) for c in completions)
        metrics["eval/escalated_ratio"] = stats.escalated / stats.steps
    threshold = max(sum(w for w in rewards.weights.values() if w > 0), 1e-9) / 2
    groups = [
        [total >= threshold for total in scored.total[i : i + samples] if total is not None]
        for i in range(0, len(completions), samples)
    ]
    return metrics | pass_rates(groups, samples)


def pass_rates(groups: Sequence[Sequence[bool]], samples: int) -> dict[str, float]:
    """Mean pass@k for k = 1, 2, 4 ... up to `samples`, over the prompts with k responses; True: a right one."""
    rates, k = {}, 1
    while k <= samples:
        each = [pass_at_k(len(group), sum(group), k) for group in groups if len(group) >= k]
        rates[f"eval/pass@{k}"] = sum(each) / len(each) if each else float("nan")
        k *= 2
    return rates


@contextmanager
def serving(config: Config) -> Iterator[tuple[Engine, PreTrainedTokenizerBase]]:
    """The engine of a command that trains nothing, and the policy's tokenizer."""
    from rollout.build import build_engine
    from specrl.lossy.routing import step_scorer
    from specrl.run.policy import engine_spec, load_policy

    model, tokenizer, eos_ids = load_policy(config)
    shared = model.eval() if config.rollout.engine == "transformers" else None
    engine = build_engine(engine_spec(config, eos_ids), shared, step_scorer(config))
    try:
        yield engine, tokenizer
    finally:
        engine.close()


def main(config: EvaluateConfig) -> int:
    from reward.loading import load_rewards
    from specrl.run import preflight

    (examples,) = preflight.check(config, training=False).values()
    how = {"samples": config.samples, "max_new_tokens": config.rollout.max_new_tokens, "seed": config.seed}
    rewards = load_rewards(config.reward)
    with closing(rewards), serving(config) as (engine, tokenizer):
        metrics = evaluate(engine, tokenizer, examples, rewards, **how)
    print(json.dumps({"model": config.model, "prompts": len(examples), "samples": config.samples, **metrics}, indent=2))
    return 0


def command(argv: Sequence[str]) -> int:
    """The command line, where run=DIR stands for config=DIR model=DIR/model."""
    try:
        words = _of_run(list(argv))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return cli.USAGE_ERROR
    return cli.run(main, words, EvaluateConfig, training=False)


def _of_run(argv: list[str]) -> list[str]:
    given = dict(word.partition("=")[::2] for word in argv)
    if not given.get("run"):
        return argv
    if "config" in given:
        raise ConfigError("run=DIR brings its own config. Give one of run=DIR and config=NAME.")
    folder = find_run(given["run"])
    if "model" not in given and not (folder / "model").is_dir():
        raise ConfigError(f"{folder} has no model: a run writes it when it ends. Give model=PATH too, or another run.")
    return [*argv, f"config={folder}", *([] if "model" in given else [f"model={folder / 'model'}"])]


if __name__ == "__main__":
    raise SystemExit(command(sys.argv[1:]))
