"""Accuracy of a policy: mean reward and pass@k of fresh responses.

pass@k is the unbiased estimator of Chen et al. 2021 (arXiv 2107.03374), 1 - C(n - c, k) / C(n, k). The responses are
sampled with keys that training never uses. The keys are the same at every evaluation, so each one drafts from the texts
of the last, which are kept apart from the trajectory cache of training.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from math import comb
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from specrl.rollout.cache.memory import Fingerprint, TrajectoryCache, load
from specrl.rollout.keys import derive_key
from specrl.rollout.types import Completion, EngineStats, Request, RolloutBatch, Row
from specrl.run import policy
from specrl.run.prompts import render, seen

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from specrl.config.schema import Config
    from specrl.reward.set import RewardSet
    from specrl.rollout.engines.base import Engine
    from specrl.rollout.speculative import SpeculativeRollout
    from specrl.run.data import Example

RIGHT = 1.0
"""Score that a verifiable reward gives a correct response."""


def requests(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, config: Config, use: str
) -> list[Request]:
    """A request for each example. Their keys depend on `use`, so no two uses share noise."""
    return [
        Request(
            render(example, tokenizer, config.dataset).ids,
            derive_key(config.seed, example.id, 0, 0, use),
            config.rollout.max_new_tokens,
        )
        for example in examples
    ]


def last_texts(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    eos_ids: frozenset[int],
    folder: Path | None,
    max_step: int | None = None,
) -> TrajectoryCache | None:
    """The responses of the last evaluation, for the next one to draft from; None unless the rule is `exact`.

    Args:
        folder: where they were saved; None for a run that has not evaluated.
        max_step: later responses are left out. None is for another run, whose steps begin at 0.

    Raises:
        CacheError: they were written with another tokenizer, template or data set.
    """
    if config.rollout.acceptance != "exact":
        return None
    fingerprint = Fingerprint(*policy.fingerprint(config, tokenizer))
    max_mb = config.rollout.cache.max_mb
    if folder is None:
        return TrajectoryCache(fingerprint, max_mb=max_mb)
    new_run = max_step is None
    return load(folder, fingerprint, vocab_size, eos_ids, max_step=max_step, max_mb=max_mb, new_run=new_run)


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Probability that at least one of k responses, sampled without replacement from n, is among the correct ones."""
    return 1.0 - comb(n - correct, k) / comb(n, k)


def evaluate(
    rollout: SpeculativeRollout,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    rewards: RewardSet,
    config: Config,
    samples: int,
    step: int = 0,
) -> dict[str, float]:
    """Mean reward, pass@k, mean response length, how many responses failed or have no score, and what it cost.

    Responses without a score are excluded from every metric, and a metric without any response is absent.

    pass@k uses only the scores of `rewards.verifiable`, where 1 is correct, not the total of all rewards. Without such
    a reward it is absent.
    """
    batch = None
    if config.dataset.tools:
        completions, texts, stats = _conversations(rollout.engine, tokenizer, examples, config, samples)
    else:
        batch, texts = _single_turns(rollout, tokenizer, examples, config, samples, step)
        completions = batch.completions
        stats = batch.stats
    asked = [example for example in examples for _ in range(samples)]
    scored = rewards.score(seen(asked, texts, tokenizer, config.dataset))
    valid = [total for total in scored.total if total is not None]
    lengths = [completion.sampled for completion in completions]
    metrics = {"eval/reward": fmean(valid)} if valid else {}
    metrics |= {"eval/mean_length": fmean(lengths), "eval/failed": len(completions) - len(valid)}
    if batch is not None:
        metrics |= cost(batch)
    if stats.steps:
        policy_tokens = sum(not reused for completion in completions for reused in completion.reused)
        metrics["eval/policy_tokens_ratio"] = policy_tokens / sum(lengths)
        metrics["eval/escalated_ratio"] = stats.escalated / stats.steps
    if not rewards.verifiable:
        return metrics
    groups: dict[int, list[bool]] = defaultdict(list)
    for number, score in enumerate(scored.parts[rewards.verifiable]):
        if score is not None:
            groups[number // samples].append(score >= RIGHT)
    return metrics | pass_rates(groups.values(), samples)


def _single_turns(
    rollout: SpeculativeRollout,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    config: Config,
    samples: int,
    step: int,
) -> tuple[RolloutBatch, list[str]]:
    """The responses, and their texts."""
    prompts = [(example.id, tuple(render(example, tokenizer, config.dataset).ids)) for example in examples]
    rows = [Row(*prompt) for prompt in prompts for _ in range(samples)]
    batch = rollout.generate(rows, visit=0, step=step, domain="eval")
    rollout.store(rows, batch, step=step, domain="eval")
    tokens = [completion.tokens for completion in batch.completions]
    return batch, tokenizer.batch_decode(tokens, skip_special_tokens=True)


def _conversations(
    engine: Engine, tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], config: Config, samples: int
) -> tuple[list[Completion], list, EngineStats]:
    """The conversations, decoded without drafts, and their messages."""
    from specrl.run.toolbox import conversations

    held, stats = conversations(engine, tokenizer, examples, config, samples)
    return [c.whole() for c in held], [c.messages for c in held], stats


def cost(batch: RolloutBatch) -> dict[str, float]:
    """Passes, tokens from drafts, and seconds of an evaluation."""
    done = batch.completions
    lengths = [len(completion.tokens) for completion in done]
    return {
        "eval/max_length": max(lengths),
        "eval/passes_per_row": fmean(completion.passes for completion in done),
        "eval/passes_max": max(completion.passes for completion in done),
        "eval/hit_rate": fmean(age is not None for age in batch.ages),
        "eval/reused_ratio": sum(sum(completion.reused) for completion in done) / sum(lengths),
        "eval/unchanged_ratio": fmean(batch.unchanged),
        "eval/gen_s": batch.total_s,
        "eval/lookup_s": batch.lookup_s,
        "eval/store_s": batch.store_s,
    }


def pass_rates(groups: Collection[Sequence[bool]], samples: int) -> dict[str, float]:
    """Mean pass@k for k = 1, 2, 4 ... up to `samples`.

    Each group holds, for one prompt, whether each response is correct. Prompts with fewer than k responses are excluded
    from pass@k, and a k that no prompt has enough responses for is left out.
    """
    rates, k = {}, 1
    while k <= samples:
        each = [pass_at_k(len(group), sum(group), k) for group in groups if len(group) >= k]
        if each:
            rates[f"eval/pass@{k}"] = fmean(each)
        k *= 2
    return rates
