"""Judged verification in a run: where mismatches come from, what they are worth, and what a judge gains."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from specrl.options import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from reward.base import RewardSet
    from rollout.engines.base import Sampling
    from rollout.engines.judged import JudgedEngine
    from rollout.routers.judge import Judge
    from rollout.types import Request, Trajectory
    from specrl.data import Example
    from specrl.schema import Config
    from trainers.judge import Labels
    from trainers.mining import Propose

NORMAL_95 = 1.96


@dataclass(frozen=True)
class Policy:
    """The policy whose verification is judged, and how it samples."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling
    config: Config

    def engine(self, judge: Judge, draft: PreTrainedModel | None = None) -> JudgedEngine:
        """Verifies under a judge."""
        from rollout.engines.judged import JudgedEngine

        rollout = self.config.rollout
        bounds = {"rows_per_batch": rollout.rows_per_batch, "tokens_per_pass": rollout.tokens_per_pass}
        return JudgedEngine(self.model, self.sampling, judge=judge, draft=draft, **bounds)


@dataclass(frozen=True)
class Line:
    """One rule of verification on held-out problems."""

    rule: str
    accuracy: float
    change: float
    """Of the mean reward against the first rule, whose responses have the same keys."""
    change_pm: float
    """Half a 95 % interval of it, from the differences of the problems' means."""
    tokens_per_pass: float
    accepted_ratio: float
    """Accepted / drafted tokens."""


@dataclass(frozen=True)
class Stored:
    """A stored text with its problem."""

    example: Example
    problem: int
    """Its number; a fifth of the numbers is held out."""
    place: int
    """Among the texts of the problem."""
    trajectory: Trajectory


def read_cache(policy: Policy, examples: Sequence[Example], run: Path) -> list[Stored]:
    """What a run stored of the examples.

    Raises:
        ConfigError: nothing of them is there.
    """
    from rollout.cache import Fingerprint, TrajectoryCache
    from specrl.policy import fingerprint

    mark = Fingerprint(*fingerprint(policy.config, policy.tokenizer))
    vocabulary = policy.model.get_output_embeddings().weight.shape[0]
    place = run / "trajectories"
    cache = TrajectoryCache.load(place, mark, vocabulary, policy.sampling.eos_ids, max_mb=2**20)  # all there is
    found = [
        Stored(example, i, slot, trajectory)
        for i, example in enumerate(examples)
        for slot, trajectory in enumerate(cache.siblings(example.id))
    ]
    if not found:
        raise ConfigError(
            f"cache={run}: {place} holds {len(cache)} texts and none of the {len(examples)} training problems. "
            "Give a run that is finished, with its own data, dataset.level, dataset.train_size and seed."
        )
    return found


def collect_stored(policy: Policy, stored: Sequence[Stored], rewards: RewardSet, most: int) -> Labels:
    """Mismatches of stored texts with the policy's greedy responses."""
    from trainers.mining import while_followed

    propose = while_followed([row.trajectory.tokens for row in stored])
    return _mine(policy, [r.example for r in stored], [r.problem for r in stored], propose, rewards, most)


def collect(
    policy: Policy, draft: PreTrainedModel, examples: Sequence[Example], rewards: RewardSet, most: int
) -> Labels:
    """Mismatches of the draft model on the policy's greedy responses."""
    from rollout.engines.ragged import RaggedModel
    from specrl.data import render
    from trainers.mining import by_model

    greedy = replace(policy.sampling, temperature=0.0)
    ragged = RaggedModel(draft, greedy, tokens_per_pass=policy.config.rollout.tokens_per_pass)
    propose = by_model(ragged, [render(example, policy.tokenizer) for example in examples])
    return _mine(policy, examples, range(len(examples)), propose, rewards, most)


def _mine(policy: Policy, examples: Sequence[Example], problems, propose: Propose, rewards: RewardSet, most: int):
    from specrl.data import render
    from trainers.mining import Miner

    rollout = policy.config.rollout
    miner = Miner(policy.model, policy.sampling, rollout.max_new_tokens, rollout.tokens_per_pass)
    prompts = [render(example, policy.tokenizer) for example in examples]

    def reward(rows, texts):
        return score(policy, [examples[i] for i in rows], texts, rewards)

    return miner(prompts, problems, propose, reward, most)


def score(policy: Policy, examples: Sequence[Example], texts: Sequence[list[int]], rewards: RewardSet) -> list:
    """Total rewards of responses, None where there is none."""
    from reward.base import Sample

    said = policy.tokenizer.batch_decode(texts, skip_special_tokens=True)
    return rewards.score(
        [Sample(str(e.prompt), text, e.answer, e.fields) for e, text in zip(examples, said, strict=True)]
    ).total


def fresh_requests(policy: Policy, examples: Sequence[Example]) -> list[Request]:
    """One response to each example."""
    return [_request(policy, example, 0) for example in examples]


def _request(policy: Policy, example: Example, slot: int) -> Request:
    """A response to an example, with noise of its own."""
    from rollout.noise import derive_key
    from rollout.types import Request
    from specrl.data import render

    key = derive_key(policy.config.seed, example.id, slot, 0, "judge")
    return Request(render(example, policy.tokenizer), key, policy.config.rollout.max_new_tokens)


def stored_requests(policy: Policy, stored: Sequence[Stored]) -> list[Request]:
    """The stored texts as drafts of new responses."""
    from rollout.drafters.suffix import PromptTexts, SuffixDrafter

    made = []
    for row in stored:
        made.append(_request(policy, row.example, row.place))
        made[-1].drafter = SuffixDrafter(PromptTexts(), row.trajectory.tokens)
        made[-1].draft_logprobs = [0.0] * len(
            row.trajectory.tokens
        )  # only says that there is a law: nothing is trained
    return made


def compare(
    policy: Policy,
    engines: dict[str, JudgedEngine],
    examples: Sequence[Example],
    requests: Callable[[], list[Request]],
    rewards: RewardSet,
) -> list[Line]:
    """The rules on the same requests, the first one as the baseline.

    Args: requests: makes them anew, as drafters keep a state.
    """
    lines, baseline = [], []
    for name, engine in engines.items():
        done, stats = engine.generate(requests())
        totals = score(policy, examples, [c.tokens for c in done], rewards)
        baseline = baseline or totals
        differences = defaultdict(list)
        for example, total, before in zip(examples, totals, baseline, strict=True):
            if total is not None and before is not None:
                differences[example.id].append(total - before)
        changes = [fmean(found) for found in differences.values()]
        known = [total for total in totals if total is not None]
        lines.append(
            Line(
                name,
                fmean(known) if known else float("nan"),
                fmean(changes) if changes else float("nan"),
                NORMAL_95 * stdev(changes) / len(changes) ** 0.5 if len(changes) > 1 else float("nan"),
                sum(len(c.tokens) for c in done) / sum(c.passes for c in done),
                stats.accepted / stats.drafted if stats.drafted else 0.0,
            )
        )
    return lines
