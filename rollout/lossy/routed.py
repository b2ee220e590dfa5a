"""Step-level routing: a cheaper model drafts each reasoning step, a router decides which steps the policy writes.

Lossy: a kept draft step follows the draft model's distribution. For every token the completion records whether the
draft wrote it (`reused`) and its log-prob under the model that did (`behaviour_logprobs`).
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from specrl.rollout.drafting.drafting import check_vocab
from specrl.rollout.engines.base import Limits, SamplingParams
from specrl.rollout.engines.local.engine import LocalModel
from specrl.rollout.engines.local.memory import max_concurrent_rows
from specrl.rollout.engines.local.probe import packed_model
from specrl.rollout.engines.local.reader import Reader
from specrl.rollout.engines.response import Response, check_request, refuse_unusable
from specrl.rollout.lossy.router import Candidate, Router, Source, Step, StepEnd, decide
from specrl.rollout.types import Completion, EngineStats, Request
from specrl.rollout.verify import Accepted, TargetSamples, accept_exact

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Row(Response):
    """A response in progress. Log-probs are NaN while the policy has not read the token; `passes` are the policy's."""

    steps: list[Step] = field(default_factory=list)

    def fill_logprobs(self, samples: TargetSamples) -> None:
        """Takes the policy's log-probs of kept tokens from a pass over them."""
        for position, logprob in zip(range(samples.position, len(self.tokens)), samples.draft_logprobs, strict=False):
            self.logprobs[position] = logprob

    def keep(self, step: Step, eos_ids: frozenset[int]) -> int:
        """Appends a step and ends the response if necessary; returns how many of its tokens the draft wrote."""
        self.steps.append(step)
        drafted = len(step.tokens) if step.source == "draft" else 0
        self.passes -= 1  # `emit` counts one for each step, which may have taken more or none
        logprobs = step.policy_logprobs or [math.nan] * len(step.tokens)
        self.emit(Accepted(step.tokens, logprobs, behaviour=step.logprobs, drafted=drafted), eos_ids)
        return drafted


class RoutedEngine(LocalModel):
    """Generates step by step with two models of one vocabulary and a router.

    Both models sample with the request's key, so a routed response is a function of (weights, router, key), and a step
    of the policy is the one that plain decoding would write after the same prefix. If every step is escalated the
    response is the policy's own, token for token; if none is, the draft's.

    For a router that needs likelihoods the policy reads each draft step, in one pass over all rows. All of that pass is
    used: a kept step is not read again, and of an escalated step the policy keeps the tokens that it samples too and
    its own next token, as in exact speculative decoding.

    The policy also writes the step, counted in EngineStats.route_faults, if the router fails, or if the draft step is
    blank, longer than the cap, or from logits that are NaN or infinite.

    Args:
        model: the policy, shared with the trainer as in LocalModel.
        sampling: of both models.
        draft: a cheaper causal LM with the policy's vocabulary, which drafts the steps.
        router: decides which steps the policy writes.
        step_end: decides where a step ends.
        limits, own_weights: see LocalModel.

    Raises:
        RolloutError: the vocabularies differ.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        sampling: SamplingParams,
        *,
        draft: PreTrainedModel,
        router: Router,
        step_end: StepEnd,
        limits: Limits | None = None,
        own_weights: bool = False,
    ):
        super().__init__(model, sampling, limits, own_weights)
        self._draft = packed_model(draft, sampling, limits)
        check_vocab(self._draft.vocab, self.vocab)
        shorter = min(self.policy, self._draft, key=lambda model: model.context)
        self.context = shorter.context
        self._context_limit = shorter.limit
        self.router = router
        self.step_end = step_end
        self._warned = False

    def generate(self, requests: Sequence[Request]) -> tuple[list[Completion], EngineStats]:
        """See Engine.generate. Requests' drafters are not used: their texts are not the draft model's."""
        for request in requests:
            check_request(request, self.vocab, self.context, self._context_limit)
        stats = EngineStats()
        rows = [_Row(request, drafting=False, number=i) for i, request in enumerate(requests)]
        with self.policy.inference(), self._draft.inference():
            self._run_steps(rows, stats)
        return [row.completion(self.weight_version) for row in rows], stats

    def _run_steps(self, rows: list[_Row], stats: EngineStats) -> None:
        """Adds a step to every active row until all responses have ended; waiting rows replace those that end."""
        requests = [row.request for row in rows]
        size = max_concurrent_rows(requests, [self._draft, self.policy], len(rows))
        draft = Reader(self._draft, requests, size, self.tie_margin)
        policy = Reader(self.policy, requests, size, self.tie_margin)
        readers = (draft, policy)
        waiting = deque(rows)
        active: dict[int, _Row] = {}
        while waiting or active:
            new = [waiting.popleft() for _ in range(min(policy.free, len(waiting)))]
            active |= {row.number: row for row in new}
            for reader in readers:
                reader.admit({row.number: () for row in new})
            chosen = self._next_steps(draft, policy, active, stats)
            for row, step in zip(active.values(), chosen, strict=True):
                stats.accepted += row.keep(step, self.sampling.eos_ids)
            ended = {number: row for number, row in active.items() if row.finish}
            if ended:
                self._read_kept(policy, ended)
                for reader in readers:
                    reader.leave([*ended], compact=not waiting)
                active = {number: row for number, row in active.items() if not row.finish}
        for reader in readers:
            stats.passes += reader.passes
            stats.forward_tokens += reader.forward_tokens
            stats.ties += reader.ties

    def _next_steps(self, draft: Reader, policy: Reader, rows: dict[int, _Row], stats: EngineStats) -> list[Step]:
        """The next step of every row."""
        began = time.perf_counter()
        drafted = self._write("draft", draft, rows, {})
        stats.draft_s += time.perf_counter() - began
        stats.drafted += sum(len(step.tokens) for step in drafted.values())
        valid = [i for i, step in drafted.items() if self._valid(step)]
        begun: dict[int, Step] = {}
        if "likelihood" in self.router.needs:
            begun = self._read_drafts(policy, rows, {i: drafted[i] for i in valid}, stats)
        rivals: dict[int, Step] = {}
        if "rival" in self.router.needs:
            rivals = self._write_by_policy(policy, rows, begun, stats)
        escalated = set(rows) - set(valid)
        stats.route_faults += len(escalated)
        began = time.perf_counter()
        candidates = [Candidate(i, rows[i].request.prompt, rows[i].steps, drafted[i], rivals.get(i)) for i in valid]
        escalated |= self._decide(candidates, stats)
        stats.route_s += time.perf_counter() - began
        written = rivals or self._write_by_policy(policy, {i: rows[i] for i in sorted(escalated)}, begun, stats)
        stats.steps += len(rows)
        stats.escalated += len(escalated)
        return [written[i] if i in escalated else drafted[i] for i in rows]

    def _decide(self, candidates: list[Candidate], stats: EngineStats) -> set[int]:
        """The rows whose step the policy writes."""
        if not candidates:
            return set()
        decision = decide(self.router, candidates)
        stats.route_faults += decision.faults
        if decision.reason and not self._warned:
            log.warning("%s; the policy writes those steps. Further failures are only counted.", decision.reason)
            self._warned = True
        return {c.row for c, escalate in zip(candidates, decision.escalate, strict=True) if escalate}

    def _valid(self, step: Step) -> bool:
        return step.end == "eos" or (step.end == "separator" and not self.step_end.blank(step.tokens))

    def _read_drafts(
        self, policy: Reader, rows: dict[int, _Row], drafted: dict[int, Step], stats: EngineStats
    ) -> dict[int, Step]:
        """Sets the policy's log-probs of draft steps, in one pass; returns how the policy's own steps begin.

        They begin with the draft's tokens that the policy samples too, and the policy's token where the two differ.
        """
        began = time.perf_counter()
        samples = policy.follow({i: [*rows[i].tokens, *step.tokens] for i, step in drafted.items()}, last=False)
        refuse_unusable((sample.usable for sample in samples.values()), self.weight_version)
        begun = {}
        for i, sample in samples.items():
            step = drafted[i]
            first = len(rows[i].tokens) - sample.position
            step.policy_logprobs = sample.draft_logprobs[first:]
            end = first + accept_exact(sample.tokens[first:], step.tokens) + 1
            begun[i] = Step("policy", sample.tokens[first:end], sample.logprobs[first:end])
            rows[i].passes += 1
        stats.decode_s += time.perf_counter() - began
        return begun

    def _write_by_policy(
        self, policy: Reader, rows: dict[int, _Row], begun: dict[int, Step], stats: EngineStats
    ) -> dict[int, Step]:
        began = time.perf_counter()
        written = self._write("policy", policy, rows, begun)
        stats.decode_s += time.perf_counter() - began
        refuse_unusable((step.end != "broken" for step in written.values()), self.weight_version)
        for step in written.values():
            step.policy_logprobs = step.logprobs
        return written

    def _write(self, source: Source, reader: Reader, rows: dict[int, _Row], begun: dict[int, Step]) -> dict[int, Step]:
        """One step of each row by one model, continued from where it has begun."""
        steps = {i: begun.get(i) or Step(source) for i in rows}
        active = [i for i in rows if not (steps[i].tokens and self._ended(rows[i], steps[i]))]
        while active:
            samples = reader.follow({i: [*rows[i].tokens, *steps[i].tokens] for i in active})
            if source == "draft" and "entropy" in self.router.needs:
                entropies = reader.model.entropy(torch.stack([samples[i].hidden[-1] for i in active]))
                for i, entropy in zip(active, entropies, strict=True):
                    steps[i].entropies.append(entropy)
            for i in active:
                steps[i].tokens.append(samples[i].tokens[-1])
                steps[i].logprobs.append(samples[i].logprobs[-1])
                if source == "policy":
                    rows[i].passes += 1
                    rows[i].fill_logprobs(samples[i])
                if not samples[i].usable:
                    steps[i].end = "broken"
            active = [i for i in active if samples[i].usable and not self._ended(rows[i], steps[i])]
        return steps

    def _ended(self, row: _Row, step: Step) -> bool:
        """Whether the step has ended, also at the response's own cap; sets the reason."""
        end = self.step_end(step.tokens)
        if end is None and len(step.tokens) >= row.remaining:
            end = "cap"
        step.end = end or step.end
        return end is not None

    def _read_kept(self, policy: Reader, rows: dict[int, _Row]) -> None:
        """The policy's log-probs of the tokens of finished responses that it has not read, in one pass."""
        unread = {i: row.tokens for i, row in rows.items() if any(map(math.isnan, row.logprobs))}
        samples = policy.follow(unread, last=False)
        refuse_unusable((sample.usable for sample in samples.values()), self.weight_version)
        for i, sample in samples.items():
            rows[i].fill_logprobs(sample)
