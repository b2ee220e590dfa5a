"""Speculative decoding whose verification a judge relaxes: lossy, for fewer passes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack

import torch

from rollout.engines.base import Sampling
from rollout.engines.ragged import RaggedModel
from rollout.engines.rows import Row, check_request, ids, known
from rollout.engines.session import Fed, Session
from rollout.engines.transformers import TransformersEngine
from rollout.routers.judge import DraftToken, Judge, judged
from rollout.types import Completion, EngineStats, Request, RolloutError
from rollout.verify import accept_judged, judged_laws

DRAFT_TOKENS = 16  # of a pass, where none are asked for


class JudgedEngine(TransformersEngine):
    """Every pass verifies a draft of `window` tokens; a token stands when it is the draw, or when the judge allows it.

    A row drafts from its request's drafter (stored texts), else from the draft model, which draws with the same noise.
    The judge is asked about tokens that were written for the text before them, by a law that is known: the draft
    model's, and those of the slot's old text until the response leaves it, with the request's `draft_logprobs`. What it
    lets stand has that law's log-prob as its behaviour log-prob. All other drafts are verified exactly: what is kept of
    a text behind a token that was changed fits the rest worse than either text does.

    Args:
        model: the policy, shared with the trainer as in TransformersEngine.
        judge: decides about mismatches; where it fails nothing but the draw stands, counted in route_faults.
        draft: a cheaper causal LM with the same vocabulary; None drafts stored text only.
        window: draft tokens of a pass.
        The rest is TransformersEngine's.

    Raises:
        RolloutError: the vocabularies differ.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        sampling: Sampling,
        *,
        judge: Judge,
        draft: torch.nn.Module | None = None,
        window: int = DRAFT_TOKENS,
        tokens_per_pass: int = 4096,
        logits_mb: int = 256,
        **options,
    ):
        bounds = {"tokens_per_pass": tokens_per_pass, "logits_mb": logits_mb}
        super().__init__(model, sampling, **bounds, **options)
        self._draft = None if draft is None else RaggedModel(draft, sampling, **bounds)
        if self._draft is not None and self._draft.vocab != self.vocab:
            raise RolloutError(
                f"the draft model knows {self._draft.vocab} tokens and the policy {self.vocab}: its drafts would mean "
                "other texts. Use a draft model with the policy's tokenizer"
            )
        self.judge, self.window = judge, window

    def generate(self, requests: Sequence[Request]) -> tuple[list[Completion], EngineStats]:
        """See Engine.generate."""
        for request in requests:
            check_request(request, self.vocab, self.context, self.speculation, self.limit)
        stats = EngineStats()
        rows = [Row(request) for request in requests]
        with ExitStack() as stack:
            for model in (self._policy, self._draft):
                if model is not None:
                    stack.enter_context(model.inference())
            for i in range(0, len(rows), self.rows_per_batch):
                self._run_judged(rows[i : i + self.rows_per_batch], stats)
        return [row.completion(self.weight_version, "judged") for row in rows], stats

    def _run_judged(self, rows: list[Row], stats: EngineStats) -> None:
        """One batch: draft, verify, judge, emit."""
        prompts, keys = [row.request.prompt for row in rows], [row.request.key for row in rows]
        policy = Session(self._policy, prompts, keys, self.tie_margin)
        draft = self._draft and Session(self._draft, prompts, keys, 0.0)
        while rows:
            began = time.perf_counter()
            chains = self._propose_chains(draft, rows)
            drafted = time.perf_counter()
            fed = policy.feed({i: [*row.tokens, *chains[i].tokens] for i, row in enumerate(rows)})
            if not all(f.usable for f in fed.values()):
                raise RolloutError(
                    f"the policy returned NaN or infinite logits (weight version {self.weight_version}); "
                    "check the learning rate and the last update"
                )
            standing = self._judge(chains, fed, stats)
            for i, row in enumerate(rows):
                before = len(row.tokens)
                n = self._emit(row, chains[i], fed[i], standing[i])
                stats.drafted += len(chains[i].tokens)
                stats.accepted += n
                for session in (policy, draft):
                    if session:  # the row's last token is read with the next draft: its draw is verified against that
                        session.rollback(i, before + min(n, len(row.tokens) - before - 1))
            stats.draft_s += drafted - began
            stats.verify_s += time.perf_counter() - drafted
            alive = [i for i, row in enumerate(rows) if row.finish is None]
            if len(alive) < len(rows):
                for session in (policy, draft):
                    if session:
                        session.select(alive)
                rows = [rows[i] for i in alive]
        stats.passes += policy.passes
        stats.forward_tokens += policy.forward_tokens
        stats.ties += policy.ties

    def _propose_chains(self, draft: Session | None, rows: list[Row]) -> list[_Chain]:
        """What each row carries: stored text if it has any, else the draft model's."""
        chains = [_Chain() for _ in rows]
        for row, chain in zip(rows, chains, strict=True):
            limit = min(self.window, row.room - 1)
            if row.request.drafter and limit > 0:
                drafter = row.request.drafter
                found = known(ids(drafter, drafter.propose(tuple(row.tokens), limit + 1), limit + 1), self.vocab)
                chain.take(found, self._stored_laws(row, len(found)), limit)
        going = [i for i, chain in enumerate(chains) if draft and not chain.tokens and rows[i].room > 1]
        while going:
            fed = draft.feed({i: [*rows[i].tokens, *chains[i].tokens] for i in going})
            going = [i for i in going if fed[i].usable]
            for i in going:
                chains[i].draw(fed[i])
            going = [i for i in going if self._goes_on(rows[i], chains[i])]
        return chains

    def _stored_laws(self, row: Row, count: int) -> list[float]:
        """Log-probs of the laws that drew the stored tokens just proposed; NaN where they are not known."""
        request, start = row.request, len(row.tokens)
        intact = getattr(request.drafter, "source", "") == "prefix"
        known = list(request.draft_logprobs[start : start + count]) if intact and request.draft_logprobs else []
        return known + [float("nan")] * (count - len(known))

    def _goes_on(self, row: Row, chain: _Chain) -> bool:
        return len(chain.tokens) < min(self.window, row.room - 1) and chain.tokens[-1] not in self.sampling.eos_ids

    def _judge(self, chains: list[_Chain], fed: dict[int, Fed], stats: EngineStats) -> list[set[int]]:
        """Positions of each row's draft that may stand whatever the draw."""
        standing: list[set[int]] = []
        for i, chain in enumerate(chains):  # the laws of a whole batch would not fit the memory
            known = [j for j, logprob in enumerate(chain.logprobs) if logprob == logprob]
            verdicts, faults = judged(self.judge, self._seen(chain, fed[i], known) if known else [])
            stats.route_faults += faults
            standing.append({j for j, stands in zip(known, verdicts, strict=True) if stands})
        return standing

    def _seen(self, chain: _Chain, fed: Fed, places: list[int]) -> list[DraftToken]:
        """What the judge sees of the draft's tokens at `places`."""
        first = len(fed.draws) - len(chain.tokens) - 1
        read = [fed.hidden[first + j + 1] for j in places]
        if not self.judge.laws:
            return [DraftToken(hidden) for hidden in read]
        before = torch.stack([fed.hidden[first + j] for j in places])
        policy = self._policy.lm_head(before).float().log_softmax(-1)
        draft = [None] * len(places)
        if chain.hidden:
            draft = self._draft.lm_head(torch.stack([chain.hidden[j] for j in places])).float().log_softmax(-1)
        return [DraftToken(*token) for token in zip(read, policy, draft, strict=True)]

    def _emit(self, row: Row, chain: _Chain, fed: Fed, standing: set[int]) -> int:
        """Emits what stands and the draw after it; returns how many tokens of the draft stand.

        A draw that would leave an old text behind a draft that stands whole waits for the judge of the next pass.
        """
        first = len(fed.draws) - len(chain.tokens) - 1
        draws, own = fed.draws[first:], fed.logprobs[first:]
        n = accept_judged(draws, chain.tokens, standing)
        waits = n == len(chain.tokens) and chain.behind not in (None, draws[n]) and n + 1 < row.room
        drawn = [] if waits else [own[n]]
        text = fed.text_logprobs[first : first + n]
        behaviour = judged_laws(text, chain.logprobs, standing)
        tokens = [*chain.tokens[:n], *draws[n : n + len(drawn)]]
        count = row.emit(tokens, [*text, *drawn], [*behaviour, *drawn], n, self.sampling.eos_ids)
        return min(n, count)


class _Chain:
    """One row's draft, with the log-probs of the laws that drew it, and the draft model's hidden states."""

    __slots__ = ("behind", "hidden", "logprobs", "tokens")

    def __init__(self):
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.hidden: list[torch.Tensor] = []
        self.behind: int | None = None
        """The token that follows in the text, where a judge would be asked about it."""

    def take(self, tokens: Sequence[int], logprobs: Sequence[float], limit: int) -> None:
        """Stored text, of which `limit` tokens are carried, with NaN where the law that drew it is not known."""
        self.tokens, self.logprobs = list(tokens[:limit]), list(logprobs[:limit])
        self.behind = next((t for t, p in zip(tokens[limit:], logprobs[limit:], strict=True) if p == p), None)

    def draw(self, fed: Fed) -> None:
        """One more token of the draft model."""
        self.tokens.append(fed.draws[-1])
        self.logprobs.append(fed.logprobs[-1])
        self.hidden.append(fed.hidden[-1])
