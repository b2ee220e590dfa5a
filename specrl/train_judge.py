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
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from rollout.config import doc
from specrl import config as cli
from specrl.config import Config
from specrl.options import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from reward.base import RewardSet
    from rollout.engines.base import Sampling
    from rollout.engines.judged import JudgedEngine
    from rollout.routers.judge import Judge, JudgeHead
    from rollout.types import Request, Trajectory
    from specrl.data import Example
    from trainers.judge import Labels
    from trainers.mining import Propose


SHUFFLES = 8  # controls: one direction of the hidden space may tell the classes apart by chance
NORMAL_95 = 1.96


@dataclass
class TrainJudgeConfig(Config):
    out: str = doc("", "directory for the judge and its report")
    cache: str = doc("", "run directory whose stored texts are the drafts; empty takes rollout.drafter")
    recall: float = doc(0.99, "share of the important mismatches that the threshold must catch")
    mismatches: int = doc(64, "mismatches tried per response")


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


def main(config: TrainJudgeConfig) -> int:
    from reward.base import RewardSet
    from rollout.engines import load_drafter
    from rollout.engines.base import Sampling
    from rollout.routers.judge import JudgeHead, KLJudge
    from rollout.routers.pair import fingerprint
    from specrl.data import load_examples
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
            tried, requests = [row.example for row in held], lambda: stored_requests(policy, held)
        else:
            labels = collect(policy, draft, examples, rewards, config.mismatches)
            tried = load_examples(config.data, config.dataset, "test", config.seed)
            requests = lambda: [request(policy, example, 0) for example in tried]  # noqa: E731
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


# Mining ----------------------------------------------------------------------------------------------------------


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
    from trainers.mining import at_positions

    propose = at_positions([row.trajectory.tokens for row in stored])
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


# Fitting and measuring -------------------------------------------------------------------------------------------


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


def request(policy: Policy, example: Example, slot: int) -> Request:
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
        made.append(request(policy, row.example, row.place))
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


if __name__ == "__main__":
    raise SystemExit(cli.run(main, schema=TrainJudgeConfig, training=False))
