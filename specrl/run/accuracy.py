"""Accuracy of a policy: mean reward and pass@k of fresh responses.

pass@k is the unbiased estimator of Chen et al. 2021 (arXiv 2107.03374), 1 - C(n - c, k) / C(n, k). The responses are
sampled with keys that training never uses, and they neither read nor write the trajectory cache.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from math import comb
from statistics import fmean
from typing import TYPE_CHECKING

from specrl.rollout.keys import derive_key
from specrl.rollout.types import Request
from specrl.run.prompts import render, seen

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from specrl.config.schema import Config
    from specrl.reward.set import RewardSet
    from specrl.rollout.engines.base import Engine
    from specrl.run.data import Example

RIGHT = 1.0
"""Score that a verifiable reward gives a correct response."""


def requests(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, config: Config, use: str, samples: int = 1
) -> list[Request]:
    """`samples` requests for each example. Their keys depend on `use`, so no two uses share noise."""
    return [
        Request(
            render(example, tokenizer, config.dataset).ids,
            derive_key(config.seed, example.id, sample_index, 0, use),
            config.rollout.max_new_tokens,
        )
        for example in examples
        for sample_index in range(samples)
    ]


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Probability that at least one of k responses, sampled without replacement from n, is among the correct ones."""
    return 1.0 - comb(n - correct, k) / comb(n, k)


def evaluate(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    rewards: RewardSet,
    config: Config,
    samples: int,
) -> dict[str, float]:
    """Mean reward, pass@k, mean response length, and how many responses failed or have no score.

    Responses that failed or have no score are excluded from every metric, and a metric without any response is absent.

    pass@k uses only the scores of `rewards.verifiable`, where 1 is correct, not the total of all rewards. Without such
    a reward it is absent.
    """
    said: list = []
    if config.dataset.tools:
        from specrl.run.toolbox import conversations

        held, stats = conversations(engine, tokenizer, examples, config, "eval", samples)
        completions = [conversation.whole() for conversation in held]
        said = [c.messages for c, completion in zip(held, completions, strict=True) if not completion.failure]
    else:
        completions, stats = engine.generate(requests(examples, tokenizer, config, "eval", samples))
    done = [(number // samples, completion) for number, completion in enumerate(completions) if not completion.failure]
    if not done:
        return {"eval/failed": len(completions)}
    texts = said or tokenizer.batch_decode([completion.tokens for _, completion in done], skip_special_tokens=True)
    scored = rewards.score(seen([examples[prompt] for prompt, _ in done], texts, tokenizer, config.dataset))
    valid = [total for total in scored.total if total is not None]
    lengths = [completion.sampled for _, completion in done]
    metrics = {"eval/reward": fmean(valid)} if valid else {}
    metrics |= {"eval/mean_length": fmean(lengths), "eval/failed": len(completions) - len(valid)}
    if stats.steps:
        policy_tokens = sum(not reused for _, completion in done for reused in completion.reused)
        metrics["eval/policy_tokens_ratio"] = policy_tokens / sum(lengths)
        metrics["eval/escalated_ratio"] = stats.escalated / stats.steps
    if not rewards.verifiable:
        return metrics
    groups: dict[int, list[bool]] = defaultdict(list)
    for (prompt, _), score in zip(done, scored.parts[rewards.verifiable], strict=True):
        if score is not None:
            groups[prompt].append(score >= RIGHT)
    return metrics | pass_rates(groups.values(), samples)


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
