"""Training data of a judge, its fit, and its comparison with other rules on the same requests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import nan
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from specrl.config.options import ConfigError
from specrl.config.schema import Config
from specrl.lossy.fit import Labels, fit_judge
from specrl.lossy.mining import Miner, by_model, until_first_mismatch
from specrl.lossy.pair import Pair
from specrl.reward.set import RewardSet
from specrl.rollout.cache.memory import Fingerprint, load
from specrl.rollout.drafting.suffix import PromptTexts, SuffixDrafter
from specrl.rollout.engines.local.probe import packed_model
from specrl.rollout.keys import derive_key
from specrl.rollout.lossy.judge import Judge, JudgeHead
from specrl.rollout.types import Request
from specrl.run.data import Example
from specrl.run.policy import fingerprint
from specrl.run.prompts import render, seen

NORMAL_95 = 1.96


@dataclass(frozen=True)
class Drafted:
    """A problem with the draft of a response to it."""

    example: Example
    problem: int
    """Its number; a fifth of the numbers is held out."""
    sample_index: int = 0
    """Index of the draft among those of the problem."""
    text: Sequence[int] = ()
    """An old response; empty if the draft model drafts."""


def read_cache(pair: Pair, examples: Sequence[Example], run: Path) -> list[Drafted]:
    """The texts of the examples that a run has stored.

    Raises:
        ConfigError: there are none.
    """
    dependencies = Fingerprint(*fingerprint(pair.config, pair.tokenizer))
    vocabulary = pair.policy.get_output_embeddings().weight.shape[0]
    folder = run / "trajectories"
    cache = load(folder, dependencies, vocabulary, pair.sampling.eos_ids, max_mb=2**20)  # no limit
    drafts = [
        Drafted(example, i, sample_index, trajectory.tokens)
        for i, example in enumerate(examples)
        for sample_index, trajectory in enumerate(cache.siblings(example.id))
    ]
    if not drafts:
        raise ConfigError(
            f"cache={run}: {folder} holds {len(cache)} texts and none of the {len(examples)} training problems. "
            "Give a run that is finished, with its data, dataset.train_size and seed."
        )
    return drafts


def mismatches(pair: Pair, drafts: Sequence[Drafted], rewards: RewardSet, max_tries: int) -> Labels:
    """Mismatches of old texts, or else of the draft model, with the policy's greedy responses, and their importance.

    Args: max_tries: mismatches per response.
    """
    rollout = pair.config.rollout
    prompts = [render(d.example, pair.tokenizer, pair.config.dataset).ids for d in drafts]
    if pair.draft is None:
        propose = until_first_mismatch([d.text for d in drafts])
    else:
        greedy = replace(pair.sampling, temperature=0.0)
        propose = by_model(packed_model(pair.draft, greedy, rollout), prompts)
    miner = Miner(pair.policy, pair.sampling, rollout.max_new_tokens, rollout.tokens_per_pass)

    def reward(rows: Sequence[int], texts: Sequence[list[int]]) -> list[float | None]:
        return score(pair, [drafts[i].example for i in rows], texts, rewards)

    return miner(prompts, [d.problem for d in drafts], propose, reward, max_tries)


def score(
    pair: Pair, examples: Sequence[Example], texts: Sequence[Sequence[int]], rewards: RewardSet
) -> list[float | None]:
    """Total rewards of responses, None for one without a score."""
    responses = pair.tokenizer.batch_decode([[*text] for text in texts], skip_special_tokens=True)
    return rewards.score(seen(examples, responses, pair.tokenizer, pair.config.dataset)).total


def requests(pair: Pair, drafts: Sequence[Drafted]) -> list[Request]:
    """Requests with new keys, which draft from the old texts if there are any."""
    made = []
    for d in drafts:
        key = derive_key(pair.config.seed, d.example.id, d.sample_index, 0, "judge")
        prompt = render(d.example, pair.tokenizer, pair.config.dataset)
        request = Request(prompt.ids, key, pair.config.rollout.max_new_tokens)
        if d.text:
            request.drafter = SuffixDrafter(PromptTexts(), d.text)
            request.draft_logprobs = [0.0] * len(d.text)  # any number: judges are asked, and nothing is trained
        made.append(request)
    return made


def compare(pair: Pair, rules: Mapping[str, Judge], drafts: Sequence[Drafted], rewards: RewardSet) -> list[dict]:
    """A line for each rule, on the same requests; the first rule is the baseline.

    `accuracy`, and its `change` from the baseline, whose responses have the same keys; `change_pm` is half a 95 %
    interval of it, from the differences of the problems' means. `accepted_ratio` is accepted / drafted tokens.
    """
    lines = []
    baseline: list[float | None] = []
    for name, rule in rules.items():
        done, stats = pair.judged(rule).generate(requests(pair, drafts))
        totals = score(pair, [d.example for d in drafts], [c.tokens for c in done], rewards)
        baseline = baseline or totals
        differences = defaultdict(list)
        for d, total, base in zip(drafts, totals, baseline, strict=True):
            if total is not None and base is not None:
                differences[d.example.id].append(total - base)
        changes = [fmean(values) for values in differences.values()]
        known = [total for total in totals if total is not None]
        line = {
            "rule": name,
            "accuracy": fmean(known) if known else nan,
            "change": fmean(changes) if changes else nan,
            "change_pm": NORMAL_95 * stdev(changes) / len(changes) ** 0.5 if len(changes) > 1 else nan,
            "tokens_per_pass": sum(len(c.tokens) for c in done) / sum(c.passes for c in done),
            "accepted_ratio": stats.accepted / stats.drafted if stats.drafted else 0.0,
        }
        lines.append(line)
    return lines


def train(labels: Labels, config: Config, recall: float) -> tuple[JudgeHead, dict[str, Any]]:
    """The judge and a report. A fifth of the problems is held out.

    Raises:
        ConfigError: too few mismatches of one class.
    """
    fit = fit_judge(labels, recall)
    important = int(labels.important.sum())
    if fit is None:
        raise ConfigError(
            f"{len(labels)} mismatches, {important} of them important, are too few of one class to learn from. "
            f"Raise dataset.train_size={config.dataset.train_size}, or take drafts that differ more."
        )
    judge, area = fit
    return judge, {"mismatches": len(labels), "important": important, "roc_auc": area, "threshold": judge.threshold}
