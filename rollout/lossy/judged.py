"""Speculative decoding whose verification a judge relaxes: lossy, for fewer passes."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedModel

from specrl.rollout.config import RolloutConfig
from specrl.rollout.drafting.draft import Draft, ask_all
from specrl.rollout.drafting.drafting import Drafting, check_vocab
from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.engines.local.drafter import ModelDrafter
from specrl.rollout.engines.local.model import PackedModel
from specrl.rollout.engines.response import Response
from specrl.rollout.lossy.judge import Judge
from specrl.rollout.types import EngineStats, Request
from specrl.rollout.verify import Accepted, TargetSamples, exact

log = logging.getLogger(__name__)
DRAFT_TOKENS = 16  # of a pass, by default
DRIFT = 0.2, 200
"""A change of the share of accepted mismatches that is worth a warning, and in at least how many mismatches."""


@dataclass(slots=True)
class JudgedDraft(Draft):
    """A draft with the log-probs under which its tokens were sampled, NaN where these are unknown."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    next_token: int | None = None
    """The stored text's token after the draft, if a judge will be asked about it in the next pass."""

    def first(self, count: int) -> JudgedDraft:
        """At most the first `count` tokens."""
        next_token = self.next_token
        if count < len(self.tokens):
            next_token = None if math.isnan(self.logprobs[count]) else self.tokens[count]
        return JudgedDraft(self.tokens[:count], self.source, self.logprobs[:count], next_token)


class DraftWithLogprobs(ModelDrafter):
    """A draft model that is asked for one token after another."""

    def follow(self, texts: Mapping[int, Sequence[int]]) -> dict[int, TargetSamples]:
        """See `Reader.follow`."""
        return self.reader.follow(texts)


class Judged(Drafting):
    """Drafts for a judge, and the rule by which it accepts them.

    A row drafts from its request's drafter (stored texts), else from the draft model, which samples with the same
    noise. The judge is asked about tokens that were written for the text before them, with known log-probs: the draft
    model's tokens, and those of the sample's old text until the response leaves it (the request's `draft_logprobs`). A
    token that it accepts has that log-prob as its behaviour log-prob. All other drafts are verified exactly: the rest
    of an old text after a changed token fits the new text worse than either text's own continuation.

    Args:
        judge: decides about mismatches; tokens on which it fails are verified exactly, counted in route_faults.
        sampling: of policy and draft model.
        draft: a cheaper causal LM with the same vocabulary; None drafts stored text only.
        window: draft tokens of a pass.
        limits: of the draft model.
    """

    reads_states = True

    def __init__(
        self,
        judge: Judge,
        sampling: SamplingParams,
        draft: PreTrainedModel | None = None,
        window: int = DRAFT_TOKENS,
        limits: RolloutConfig | None = None,
    ):
        self._writer = None if draft is None else DraftWithLogprobs(draft, sampling, limits)
        super().__init__(model=self._writer)
        self.judge = judge
        self.window = window
        self._eos_ids = sampling.eos_ids
        self._faults = 0
        self._mismatches = 0
        self._accepted = 0
        self._warned = False

    def attach(self, policy: PackedModel) -> None:
        self.vocab = policy.vocab
        if self._writer:
            check_vocab(self._writer.packed.vocab, policy.vocab)

    def begin(self, requests: Sequence[Request]) -> None:
        self._faults = self._mismatches = self._accepted = 0

    def propose(self, rows: Sequence[Response], stats: EngineStats) -> list[Draft]:
        """Stored text where the row has any, else the draft model's."""
        drafts = [self._stored(row) for row in rows]
        writing = [i for i, row in enumerate(rows) if not drafts[i].tokens and self._continues(row, ())]
        if self._writer is None:
            return [*drafts]
        for i in writing:
            drafts[i] = JudgedDraft(source="model")
        while writing:
            samples = self._writer.follow({rows[i].number: [*rows[i].tokens, *drafts[i].tokens] for i in writing})
            writing = [i for i in writing if samples[rows[i].number].usable]
            for i in writing:
                sample = samples[rows[i].number]
                drafts[i].tokens.append(sample.tokens[-1])
                drafts[i].logprobs.append(sample.logprobs[-1])
            writing = [i for i in writing if self._continues(rows[i], drafts[i].tokens)]
        return [*drafts]

    def learn(self, row: Response, draft: Draft, tokens: Sequence[int], drafted: int) -> None:
        """Does nothing: drafts have a fixed length."""

    def end(self, rows: Sequence[Response], stats: EngineStats) -> None:
        stats.route_faults += self._faults
        usual = self.judge.usual_share
        if usual is None:
            return
        stats.mismatches += self._mismatches
        drifted = self._accepted - usual * self._mismatches
        stats.judge_drift += drifted
        change, needed = DRIFT
        if self._mismatches >= needed and abs(drifted) > change * self._mismatches and not self._warned:
            self._warned = True
            log.warning(
                "the judge accepts %.2f of the mismatches, and accepted %.2f when it was trained: the policy has "
                "changed since, or the texts are others. Train it again with `python -m specrl.train_judge`. From now "
                "on this is only measured (spec/judge_drift)",
                self._accepted / self._mismatches,
                usual,
            )

    def rule(self, key: int, draft: Draft, samples: TargetSamples) -> Accepted:
        """An AcceptanceRule: a draft token is accepted if it equals the policy's sample, or if the judge allows it.

        If the whole draft is accepted and the policy's next sample differs from the old text's next token, that sample
        is not emitted: the next pass asks the judge about the old token.
        """
        if not draft.tokens or not isinstance(draft, JudgedDraft):
            return exact(key, draft, samples)
        unimportant = self._unimportant(draft, samples)
        n = accept_judged(samples.tokens, draft.tokens, unimportant)
        self._observe(draft, samples.tokens, unimportant, n)
        ask_later = n == len(draft.tokens) and draft.next_token not in (None, samples.tokens[n])
        end = n if ask_later else n + 1
        accepted = samples.draft_logprobs[:n]
        sampled = samples.logprobs[n:end]
        return Accepted(
            tokens=[*draft.tokens[:n], *samples.tokens[n:end]],
            logprobs=[*accepted, *sampled],
            behaviour=[*judged_logprobs(accepted, draft.logprobs, unimportant), *sampled],
            drafted=n,
        )

    def _observe(self, draft: JudgedDraft, samples: Sequence[int], unimportant: Collection[int], accepted: int) -> None:
        """Counts the mismatches that the judge decided about, of which the first that it refused ended the draft."""
        for i in range(min(accepted + 1, len(draft.tokens))):
            if draft.tokens[i] != samples[i] and not math.isnan(draft.logprobs[i]):
                self._mismatches += 1
                self._accepted += i in unimportant

    def _continues(self, row: Response, tokens: Sequence[int]) -> bool:
        """Whether the draft model writes another token after the draft `tokens`."""
        ended = row.finish is not None or not row.drafting or (tokens and tokens[-1] in self._eos_ids)
        return not ended and len(tokens) < min(self.window, row.remaining - 1)

    def _stored(self, row: Response) -> JudgedDraft:
        """The draft of the row's own drafter, with log-probs where it is still the sample's old text."""
        limit = min(self.window, row.remaining - 1)
        if row.finish is not None or not row.drafting or row.request.drafter is None or limit <= 0:
            return JudgedDraft()
        (text,) = ask_all([row.request.drafter], [row.tokens], [limit + 1], self.vocab)
        start = len(row.tokens)
        known = (row.request.draft_logprobs or ())[start : start + len(text.tokens)] if text.source == "prefix" else ()
        logprobs = [*known, *[math.nan] * (len(text.tokens) - len(known))]
        next_token = None
        if limit < len(text.tokens) and limit + 1 < row.remaining and not math.isnan(logprobs[limit]):
            next_token = text.tokens[limit]
        return JudgedDraft([*text.tokens[:limit]], text.source, logprobs[:limit], next_token=next_token)

    def _unimportant(self, draft: JudgedDraft, samples: TargetSamples) -> set[int]:
        """Positions of the draft that may be accepted whatever the policy samples."""
        positions = [i for i, logprob in enumerate(draft.logprobs) if not math.isnan(logprob)]
        if not positions:
            return set()
        hidden = samples.hidden[[i + 1 for i in positions]]
        try:
            verdicts: list[object] = list(self.judge.unimportant(hidden))
        except Exception:  # of a learned or user-written judge; exact verification is always right
            verdicts = []
        if len(verdicts) != len(positions):
            verdicts = [None] * len(positions)
        self._faults += sum(not isinstance(verdict, bool) for verdict in verdicts)
        return {i for i, verdict in zip(positions, verdicts, strict=True) if verdict is True}


def accept_judged(samples: Sequence[int], draft: Sequence[int], unimportant: Collection[int]) -> int:
    """Number of accepted draft tokens when mismatches that a judge calls unimportant are accepted too.

    Judge Decoding (arXiv 2501.19309): standard acceptance OR the judge's. With no position in `unimportant` this is
    `accept_exact`; else the distribution of the output has no closed form and must be measured.

    Args: unimportant: positions of the draft whose token is accepted whatever was sampled.
    """
    n = 0
    while n < min(len(samples), len(draft)) and (samples[n] == draft[n] or n in unimportant):
        n += 1
    return n


def judged_logprobs(policy: Sequence[float], drafted: Sequence[float], unimportant: Collection[int]) -> list[float]:
    """Behaviour log-probs of accepted draft tokens.

    Where a judge accepts the draft whatever is sampled, the token follows the draft's distribution, even if it equals
    the policy's sample; elsewhere only the policy's sample is accepted. Exact for judges that do not read the token
    itself.

    Args: policy, drafted: log-probs under the policy and under the distribution that the draft was sampled from;
        unimportant: see `accept_judged`.
    """
    return [drafted[i] if i in unimportant else logprob for i, logprob in enumerate(policy)]
