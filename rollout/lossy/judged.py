"""Speculative decoding whose verification a judge relaxes: lossy, for fewer passes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specrl.rollout.drafting.draft import Draft, ask_all
from specrl.rollout.drafting.drafting import Drafting, Policy, check_vocab
from specrl.rollout.engines.base import Limits, SamplingParams
from specrl.rollout.engines.local.drafter import ModelDrafter
from specrl.rollout.engines.response import Response
from specrl.rollout.lossy.judge import Judge, judged
from specrl.rollout.types import EngineStats, Request
from specrl.rollout.verify import Accepted, TargetSamples, exact

DRAFT_TOKENS = 16  # of a pass, where none are asked for


@dataclass(slots=True)
class JudgedDraft(Draft):
    """A draft of `logprobs` under the laws that drew it, NaN where these are not known."""

    states: Sequence[Tensor] = ()
    """The draft model's final hidden state before each token; empty for stored text."""
    behind: int | None = None
    """The token that follows in the text, where a judge would be asked about it in a pass to come."""

    def first(self, count: int) -> JudgedDraft:
        """At most the first `count` tokens."""
        laws = self.logprobs or ()
        behind = self.behind
        if count < len(self.tokens):
            behind = self.tokens[count] if laws[count] == laws[count] else None
        return JudgedDraft(list(self.tokens[:count]), self.source, laws[:count], self.states[:count], behind)


class DraftWithLogprobs(ModelDrafter):
    """A draft model that is asked for one token after another, and for the laws that it drew them from."""

    def follow(self, texts: Mapping[int, Sequence[int]]) -> dict[int, TargetSamples]:
        """See `Reader.follow`."""
        return self._reader.follow(texts)

    def law(self, states: Sequence[Tensor]) -> Tensor:
        """Log-probs [N, V] after final hidden states [H]."""
        return self.ragged.lm_head(torch.stack(states)).float().log_softmax(-1)


class Judged(Drafting):
    """Drafts for a judge, and the rule by which it lets them stand.

    A row drafts from its request's drafter (stored texts), else from the draft model, which draws with the same noise.
    The judge is asked about tokens that were written for the text before them, by a law that is known: the draft
    model's, and those of the sample's old text until the response leaves it, with the request's `draft_logprobs`. What
    it lets stand has that law's log-prob as its behaviour log-prob. All other drafts are verified exactly: what is kept
    of a text behind a token that was changed fits the rest worse than either text does.

    Args:
        judge: decides about mismatches; where it fails nothing but the draw stands, counted in route_faults.
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
        draft: torch.nn.Module | None = None,
        window: int = DRAFT_TOKENS,
        limits: Limits | None = None,
    ):
        super().__init__(model=None if draft is None else DraftWithLogprobs(draft, sampling, limits))
        self.judge, self.window, self._eos_ids, self._faults = judge, window, sampling.eos_ids, 0

    def attach(self, policy: Policy) -> None:
        self.vocab, self._head = policy.vocab, policy.lm_head
        if self.model:
            check_vocab(self.model.vocab, policy.vocab)

    def begin(self, requests: Sequence[Request]) -> None:
        self._faults = 0

    def propose(self, rows: Sequence[Response], stats: EngineStats) -> list[Draft]:
        """Stored text where the row has any, else the draft model's."""
        drafts = [self._stored(row) for row in rows]
        bare = [i for i, draft in enumerate(drafts) if not draft.tokens]
        going = [i for i in bare if self.model and self._goes_on(rows[i], ())]
        for i in going:
            drafts[i] = JudgedDraft([], "model", [], [])
        while going:
            drawn = self.model.follow({rows[i].number: [*rows[i].tokens, *drafts[i].tokens] for i in going})
            going = [i for i in going if drawn[rows[i].number].usable]
            for i in going:
                fed = drawn[rows[i].number]
                drafts[i].tokens.append(fed.draws[-1])
                drafts[i].logprobs.append(fed.logprobs[-1])
                drafts[i].states.append(fed.hidden[-1])
            going = [i for i in going if self._goes_on(rows[i], drafts[i].tokens)]
        return drafts

    def learn(
        self, row: Response, draft: Draft, tokens: Sequence[int], drafted: int, behind: Sequence[int] = ()
    ) -> None:
        """Nothing: drafts have one length."""

    def observe_pass(self, *_, **__) -> None:
        """Nothing: drafts have one length."""

    def end(self, rows: Sequence[Response], stats: EngineStats) -> None:
        stats.route_faults += self._faults

    def rule(self, key: int, draft: JudgedDraft, drawn: TargetSamples) -> Accepted:
        """See rollout.verify.Rule: a draft token stands when it is the draw, or when the judge allows it.

        A draw that would leave an old text behind a draft that stands whole waits for the judge of the next pass.
        """
        if not draft.tokens:
            return exact(key, draft, drawn)
        standing = self._standing(draft, drawn)
        n = accept_judged(drawn.draws, draft.tokens, standing)
        waits = n == len(draft.tokens) and draft.behind not in (None, drawn.draws[n])
        end = n + (not waits)
        text, own = drawn.text_logprobs[:n], drawn.logprobs[n:end]
        tokens = [*draft.tokens[:n], *drawn.draws[n:end]]
        return Accepted(tokens, [*text, *own], [*judged_laws(text, draft.logprobs or (), standing), *own], n)

    def _goes_on(self, row: Response, tokens: Sequence[int]) -> bool:
        """The draft model may write a token behind the draft `tokens` that it has written."""
        ended = row.finish is not None or not row.drafting or (tokens and tokens[-1] in self._eos_ids)
        return not ended and len(tokens) < min(self.window, row.room - 1)

    def _stored(self, row: Response) -> JudgedDraft:
        """What the row's own drafter has, and whose law drew it."""
        request, limit, first = row.request, min(self.window, row.room - 1), len(row.tokens)
        if row.finish is not None or not row.drafting or row.drafter is None or limit <= 0:
            return JudgedDraft()
        (text,) = ask_all([row.drafter], [row.tokens], [limit + 1], self.vocab, failed=lambda _, f: row.give_up(f))
        intact = text.source == "prefix" and request.draft_logprobs
        laws = list(request.draft_logprobs[first : first + len(text.tokens)]) if intact else []
        laws += [float("nan")] * (len(text.tokens) - len(laws))
        later = zip(text.tokens[limit:], laws[limit:], strict=True) if limit + 1 < row.room else ()
        behind = next((token for token, logprob in later if logprob == logprob), None)
        return JudgedDraft([*text.tokens[:limit]], text.source, laws[:limit], behind=behind)

    def _standing(self, draft: JudgedDraft, drawn: TargetSamples) -> set[int]:
        """Positions of the draft that may stand whatever the draw."""
        asked = [i for i, logprob in enumerate(draft.logprobs or ()) if logprob == logprob]
        if not asked:
            return set()
        verdicts, faults = judged(self.judge, *self._seen(draft, drawn, asked))
        self._faults += faults
        return {i for i, stands in zip(asked, verdicts, strict=True) if stands}

    def _seen(
        self, draft: JudgedDraft, drawn: TargetSamples, places: list[int]
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """What the judge sees of the draft's tokens at `places`, see `Judge.unimportant`."""
        read = drawn.hidden[[i + 1 for i in places]]
        if not self.judge.laws:
            return read, None, None
        policy = self._head(drawn.hidden[places]).float().log_softmax(-1)
        return read, policy, self.model.law([draft.states[i] for i in places]) if draft.states else None


def accept_judged(draws: Sequence[int], draft: Sequence[int], unimportant: Collection[int]) -> int:
    """Accepted draft tokens when a mismatch also stands where a judge calls it unimportant.

    Judge Decoding (arXiv 2501.19309): standard acceptance OR the judge's. With no position in `unimportant` this is
    `accept_exact`; else the output follows no law that can be written down, and must be measured.

    Args: unimportant: positions of the draft whose token may stand although it is not the draw.
    """
    n = 0
    while n < min(len(draws), len(draft)) and (draws[n] == draft[n] or n in unimportant):
        n += 1
    return n


def judged_laws(own: Sequence[float], drafted: Sequence[float], unimportant: Collection[int]) -> list[float]:
    """Behaviour log-probs of accepted draft tokens.

    Where a judge lets the draft stand, it stands whatever is drawn, so its law is the draft's even if it is the draw as
    well; elsewhere only the policy's own draw stands. Exact for judges that do not read the token itself.

    Args: own: log-probs under the policy; drafted: under the law that drew the draft; unimportant: see `accept_judged`.
    """
    return [drafted[i] if i in unimportant else logprob for i, logprob in enumerate(own)]
