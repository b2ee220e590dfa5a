"""Step-level routing: a cheaper model drafts each reasoning step, a router decides which steps the policy writes.

Lossy: a kept draft step follows the draft's law, not the policy's. Every token says where it came from (`reused`) and
how likely its own law made it (`behaviour_logprobs`).
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch

from specrl.rollout.drafting.drafting import check_vocab
from specrl.rollout.engines.base import Limits, SamplingParams
from specrl.rollout.engines.local.engine import LocalModel
from specrl.rollout.engines.local.memory import max_concurrent_rows
from specrl.rollout.engines.local.probe import packed_model
from specrl.rollout.engines.local.reader import Reader
from specrl.rollout.engines.response import Response, check_request, refuse_unusable
from specrl.rollout.lossy.router import Router, decide
from specrl.rollout.lossy.steps import Candidate, Source, Step, StepEnd
from specrl.rollout.types import Completion, EngineStats, Request
from specrl.rollout.verify import Accepted, TargetSamples, accept_exact

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Row(Response):
    """One response in the making. Log-probs are NaN while the policy has not read the token; its passes count."""

    steps: list[Step] = field(default_factory=list)

    def read(self, fed: TargetSamples) -> None:
        """Takes the policy's log-probs of kept tokens from a pass over them."""
        for at, logprob in zip(range(fed.position, len(self.tokens)), fed.draft_logprobs, strict=False):
            self.logprobs[at] = logprob

    def keep(self, step: Step, eos_ids: Collection[int]) -> int:
        """Appends a step and ends the response where that is due; returns how many tokens of it are the draft's."""
        self.steps.append(step)
        drafted = len(step.tokens) if step.source == "draft" else 0
        self.passes -= 1  # `emit` counts one for each step, which may have taken more or none
        known = step.policy_logprobs or [math.nan] * len(step.tokens)
        self.emit(Accepted(step.tokens, known, step.logprobs, drafted), eos_ids)
        return drafted


@dataclass(frozen=True)
class Steps:
    """Who writes reasoning steps."""

    draft: torch.nn.Module
    """A cheaper causal LM with the policy's vocabulary."""
    router: Router
    """Decides which steps the policy writes."""
    step_end: StepEnd
    score: bool = True
    """Also let the policy read kept draft tokens, which training needs; else their `logprobs` are NaN."""


class RoutedEngine(LocalModel):
    """Generates step by step with two models of one vocabulary and a router.

    Both models draw with the request's key, so a routed response is a function of (weights, router, key) and a step
    that the policy writes is the one plain decoding would write after the same prefix. When every step is escalated the
    response is the policy's own, token for token; when none is, the draft's.

    A router that needs likelihoods has the policy read each draft step, in one pass over all rows. Nothing of that pass
    is thrown away: a step that stands is not read again, and of one that does not, the policy keeps what it draws too
    and its own next token, as in exact speculative decoding.

    The policy's path is also taken, and counted in EngineStats.route_faults, where the router fails, and where a draft
    step is no step: blank, longer than the cap, or from logits that are no numbers.

    Args:
        model: the policy, shared with the trainer as in LocalModel.
        sampling: of both models.
        steps: the cheaper model, the router and where a step ends.
        limits, own_weights: see LocalModel.

    Raises:
        RolloutError: the vocabularies differ.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        sampling: SamplingParams,
        steps: Steps,
        limits: Limits | None = None,
        own_weights: bool = False,
    ):
        super().__init__(model, sampling, limits, own_weights)
        self._draft = packed_model(steps.draft, sampling, limits)
        check_vocab(self._draft.vocab, self.vocab)
        self.context, self.limit = min((self.context, self.limit), (self._draft.context, self._draft.limit))
        self.router, self.step_end, self.score_drafts = steps.router, steps.step_end, steps.score
        self._warned = False

    def generate(self, requests: Sequence[Request]) -> tuple[list[Completion], EngineStats]:
        """See Engine.generate. Requests' own drafters are not asked: their texts are not the draft's."""
        for request in requests:
            check_request(request, self.vocab, self.context, self.limit)
        stats = EngineStats()
        rows = [_Row(request, drafting=False, number=i) for i, request in enumerate(requests)]
        with self.policy.inference(), self._draft.inference():
            self._run_steps(rows, stats)
        return [row.completion(self.weight_version) for row in rows], stats

    def _run_steps(self, rows: list[_Row], stats: EngineStats) -> None:
        """A step of every row in turn; rows that wait take the places of those that end."""
        requests = [row.request for row in rows]
        size = max_concurrent_rows(requests, [self._draft, self.policy], len(rows))
        draft, policy = (Reader(model, requests, size, self.tie_margin) for model in (self._draft, self.policy))
        waiting, going = deque(rows), {}
        while waiting or going:
            new = [waiting.popleft() for _ in range(min(policy.free, len(waiting)))]
            going |= {row.number: row for row in new}
            for reader in (draft, policy):
                reader.admit({row.number: () for row in new})
            chosen = self._choose(draft, policy, going, stats)
            for row, step in zip(going.values(), chosen, strict=True):
                stats.accepted += row.keep(step, self.sampling.eos_ids)
            if ended := {number: row for number, row in going.items() if row.finish}:
                if self.score_drafts:
                    self._read(policy, ended)
                for reader in (draft, policy):
                    reader.leave([*ended], compact=not waiting)
                going = {number: row for number, row in going.items() if not row.finish}
        for reader in (draft, policy):
            stats.passes += reader.passes
            stats.forward_tokens += reader.forward_tokens
            stats.ties += reader.ties

    def _choose(self, draft: Reader, policy: Reader, rows: dict[int, _Row], stats: EngineStats) -> list[Step]:
        """The next step of every row."""
        began = time.perf_counter()
        drafted = self._write("draft", draft, rows, {})
        stats.draft_s += time.perf_counter() - began
        stats.drafted += sum(len(step.tokens) for step in drafted.values())
        sound = [i for i, step in drafted.items() if self._sound(step)]
        read = sound if "likelihood" in self.router.needs else []
        begun = self._read_drafts(policy, rows, {i: drafted[i] for i in read}, stats)
        compared = rows if "rival" in self.router.needs else {}
        rivals = self._write_by_policy(policy, compared, begun, stats)
        wanted = set(rows) - set(sound)
        stats.route_faults += len(wanted)
        began = time.perf_counter()
        wanted |= self._ask(rows, drafted, rivals, sound, stats)
        stats.route_s += time.perf_counter() - began
        written = rivals or self._write_by_policy(policy, {i: rows[i] for i in sorted(wanted)}, begun, stats)
        stats.steps += len(rows)
        stats.escalated += len(wanted)
        return [written[i] if i in wanted else drafted[i] for i in rows]

    def _ask(
        self, rows: dict[int, _Row], drafted: dict, rivals: dict, sound: list[int], stats: EngineStats
    ) -> set[int]:
        """The rows among `sound` whose step the policy shall write."""
        if not sound:
            return set()
        decision = decide(
            self.router,
            [Candidate(i, rows[i].request.prompt, rows[i].steps, drafted[i], rivals.get(i)) for i in sound],
        )
        stats.route_faults += decision.faults
        if decision.reason and not self._warned:
            log.warning("%s; the policy writes those steps. Further failures are only counted.", decision.reason)
            self._warned = True
        return {i for i, escalate in zip(sound, decision.escalate, strict=True) if escalate}

    def _sound(self, step: Step) -> bool:
        return step.end in ("separator", "eos") and (step.end == "eos" or not self.step_end.blank(step.tokens))

    def _read_drafts(self, policy: Reader, rows: dict[int, _Row], drafted: dict[int, Step], stats: EngineStats) -> dict:
        """Notes the policy's log-probs of draft steps, in one pass; returns how its own steps begin.

        A beginning is what the policy draws as the draft did, and its own next token where they part.
        """
        began = time.perf_counter()
        found = policy.follow({i: [*rows[i].tokens, *step.tokens] for i, step in drafted.items()}, last=False)
        refuse_unusable((fed.usable for fed in found.values()), self.weight_version)
        begun = {}
        for i, fed in found.items():
            step, first = drafted[i], len(rows[i].tokens) - fed.position
            step.policy_logprobs = fed.draft_logprobs[first:]
            own = first + accept_exact(fed.tokens[first:], step.tokens) + 1
            begun[i] = Step("policy", fed.tokens[first:own], fed.logprobs[first:own])
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

    def _write(self, source: Source, reader: Reader, rows: dict[int, _Row], begun: dict) -> dict[int, Step]:
        """Lets one model write one step of each row, from where it has begun."""
        steps = {i: begun.get(i) or Step(source) for i in rows}
        going = [i for i in rows if not (steps[i].tokens and self._ended(rows[i], steps[i]))]
        while going:
            fed = reader.follow({i: [*rows[i].tokens, *steps[i].tokens] for i in going})
            if source == "draft" and "entropy" in self.router.needs:
                entropies = reader.model.entropy(torch.stack([fed[i].hidden[-1] for i in going]))
                for i, entropy in zip(going, entropies, strict=True):
                    steps[i].entropies.append(entropy)
            for i in going:
                steps[i].tokens.append(fed[i].tokens[-1])
                steps[i].logprobs.append(fed[i].logprobs[-1])
                if source == "policy":
                    rows[i].passes += 1
                    rows[i].read(fed[i])
                if not fed[i].usable:
                    steps[i].end = "broken"
            going = [i for i in going if fed[i].usable and not self._ended(rows[i], steps[i])]
        return steps

    def _ended(self, row: _Row, step: Step) -> bool:
        """Notes why the step ends, if it does; the row's own cap cuts it like a step's."""
        end = self.step_end(step.tokens)
        if end is None and len(step.tokens) >= row.remaining:
            end = "cap"
        step.end = end or step.end
        return end is not None

    def _read(self, policy: Reader, rows: dict[int, _Row]) -> None:
        """The policy's log-probs of what it has not read of finished responses, in one pass."""
        behind = {i: row.tokens for i, row in rows.items() if any(map(math.isnan, row.logprobs))}
        found = policy.follow(behind, last=False)
        refuse_unusable((fed.usable for fed in found.values()), self.weight_version)
        for i, fed in found.items():
            rows[i].read(fed)
