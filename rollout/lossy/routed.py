"""Step-level routing: a cheaper engine drafts each reasoning step, a router decides which steps the policy writes.

Lossy: a kept draft step follows the draft model's distribution. For every token the completion records whether the
draft wrote it (`reused`) and its log-prob under the model that did (`behaviour_logprobs`).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor

from specrl.rollout.engines.base import Engine, HoldsSessions, Probe
from specrl.rollout.lossy.router import Candidate, Router, Source, Step, StepEnd, decide
from specrl.rollout.lossy.row import RoutedRow, follows
from specrl.rollout.types import Completion, EngineStats, Request, RolloutError, UnusableLogits

log = logging.getLogger(__name__)
DRIFT = 0.1, 0.5
"""Nats a token, and share of the usual gap, by which kept text may be less likely under the policy than when a learned
router was trained. Batches differ by less."""


class RoutedRollout:
    """An Engine that generates step by step with two engines of one vocabulary and a router.

    Both engines sample with the request's key, so a routed response is a function of (weights, router, key), and a step
    of the policy is the one that plain decoding would write after the same prefix. If every step is escalated the
    response is the policy's own, token for token; if none is, the draft's. Only this class knows text: engines get
    requests for tokens up to one that may end a step.

    A draft step that the router needs likelihoods of is read by the policy. If it is then escalated, the policy goes on
    from its own first token that differs; a step that was not read is verified exactly, as a draft.

    The policy also writes the step, counted in EngineStats.route_faults, if the router fails, or if the draft step is
    blank, longer than the cap, or from logits that are NaN or infinite. Such logits end the drafts of all rows of the
    step, as an engine returns no partial batch.

    Args:
        policy: an engine with the rule and the drafting of ReadOrVerify (rollout/lossy/text.py); updates go to it.
        draft: any engine, of a cheaper model with the policy's vocabulary and the same sampling params.
        router: decides which steps the policy writes.
        step_end: decides where a step ends.
    """

    def __init__(self, policy: Engine, draft: Engine, router: Router, step_end: StepEnd):
        self.policy = policy
        self.draft = draft
        self.router = router
        self.step_end = step_end
        self.own_weights = policy.own_weights
        self._said: set[str] = set()  # kinds of warnings that were given

    @property
    def weight_version(self) -> int:
        return self.policy.weight_version

    @property
    def updates(self) -> Any:
        """The policy's, if it receives weights; see Updates of rollout/engines/vllm/weights.py."""
        return getattr(self.policy, "updates", None)

    def update_weights(
        self, weights: Iterable[tuple[str, Tensor]] | None, version: int, probe: Probe | None = None
    ) -> None:
        """See Engine.update_weights; the draft keeps its weights."""
        self.policy.update_weights(weights, version, probe)

    def score(self, tokens: Sequence[int]) -> list[float]:
        """See Engine.score; under the policy."""
        return self.policy.score(tokens)

    def close(self) -> None:
        self.draft.close()
        self.policy.close()

    def generate(self, requests: Sequence[Request]) -> tuple[list[Completion], EngineStats]:
        """See Engine.generate. Requests' drafters are not used: their texts are not the draft model's."""
        stats = EngineStats()
        rows = {i: RoutedRow(request, drafting=False, number=i) for i, request in enumerate(requests)}
        with ExitStack() as stack:
            for engine, other in ((self.policy, self.draft), (self.draft, self.policy)):
                if isinstance(engine, HoldsSessions):
                    stack.enter_context(engine.session(requests, beside=other))
            while active := {i: row for i, row in rows.items() if not row.finish}:
                for i, step in self._next_steps(active, stats).items():
                    stats.accepted += active[i].keep(step, self.step_end.eos_ids)
            with _timed(stats, "decode_s"):
                self._read_kept(rows, stats)
        self._observe_drift(rows.values(), stats)
        return [row.completion(self.weight_version) for row in rows.values()], stats

    def _next_steps(self, rows: Mapping[int, RoutedRow], stats: EngineStats) -> dict[int, Step]:
        """The next step of every row."""
        drafted = {i: Step("draft") for i in rows}
        with _timed(stats, "draft_s"):
            self._write_draft(rows, drafted, stats)
        valid = {i: step for i, step in drafted.items() if self._valid(step)}
        begun = {i: Step("policy") for i in rows}
        with _timed(stats, "decode_s"):
            if "likelihood" in self.router.needs:
                begun |= self._read_drafts(rows, valid, stats)
            rivals: dict[int, Step] = {}
            if "rival" in self.router.needs:
                rivals = begun
                self._write("policy", rows, rivals, drafted, stats)
        candidates = [Candidate(i, rows[i].request.prompt, rows[i].steps, valid[i], rivals.get(i)) for i in valid]
        stats.route_faults += len(rows) - len(valid)
        with _timed(stats, "route_s"):
            escalated = (rows.keys() - valid.keys()) | self._decide(candidates, stats)
        with _timed(stats, "decode_s"):
            written = {i: begun[i] for i in rows if i in escalated}
            self._write("policy", rows, written, drafted, stats)
        stats.steps += len(rows)
        stats.escalated += len(escalated)
        return drafted | written

    def _decide(self, candidates: list[Candidate], stats: EngineStats) -> set[int]:
        """The rows whose step the policy writes."""
        if not candidates:
            return set()
        decision = decide(self.router, candidates)
        stats.route_faults += decision.faults
        if decision.reason:
            self._warn("router", f"{decision.reason}; the policy writes those steps. Further failures are only counted")
        return {c.row for c, escalate in zip(candidates, decision.escalate, strict=True) if escalate}

    def _valid(self, step: Step) -> bool:
        return step.end == "eos" or (step.end == "separator" and not self.step_end.blank(step.tokens))

    def _write_draft(self, rows: Mapping[int, RoutedRow], steps: dict[int, Step], stats: EngineStats) -> None:
        """Lets the draft write the steps; if its logits are unusable, those that have not ended are broken."""
        try:
            self._write("draft", rows, steps, {}, stats)
        except UnusableLogits as error:
            self._warn("draft", f"of the draft model: {error}. The policy writes those steps")
            for step in steps.values():
                step.end = step.end or "broken"
        stats.drafted += sum(len(step.tokens) for step in steps.values())

    def _write(
        self,
        source: Source,
        rows: Mapping[int, RoutedRow],
        steps: Mapping[int, Step],
        drafted: Mapping[int, Step],
        stats: EngineStats,
    ) -> None:
        """Lets one engine continue each step to its end.

        Args: drafted: steps with which the engine drafts, while it samples the same tokens.
        """
        engine = self.draft if source == "draft" else self.policy
        for i, step in steps.items():
            if step.tokens and not step.end:
                step.end = self._end(rows[i], step)
        while active := [i for i, step in steps.items() if not step.end]:
            asked = [self._request(rows[i], steps[i], drafted.get(i)) for i in active]
            for i, c in zip(active, self._generate(engine, asked, stats), strict=True):
                steps[i].extend(c.tokens, c.logprobs)
                steps[i].end = self._end(rows[i], steps[i])
                if source == "policy":
                    rows[i].passes += c.passes
                    steps[i].policy_logprobs = steps[i].logprobs

    def _request(self, row: RoutedRow, step: Step, drafted: Step | None) -> Request:
        """What continues a step up to a token that may end it."""
        begun = len(step.tokens)
        cap = min(self.step_end.max_tokens, row.remaining) - begun
        request = row.request_after(step.tokens, cap, self.step_end.stop_ids)
        if drafted and drafted.tokens[:begun] == step.tokens and (rest := drafted.tokens[begun:]):
            request.drafter = follows(rest)
        return request

    def _end(self, row: RoutedRow, step: Step):
        """Why a step has ended, also at the response's own cap; None if it has not."""
        return self.step_end(step.tokens) or ("cap" if len(step.tokens) >= row.remaining else None)

    def _read_drafts(
        self, rows: Mapping[int, RoutedRow], drafted: Mapping[int, Step], stats: EngineStats
    ) -> dict[int, Step]:
        """Sets the policy's log-probs of draft steps; returns how the policy's own steps begin.

        They begin with the draft's tokens that the policy samples too, and the policy's token where the two differ.
        """
        asked = {i: (rows[i].request_after((), len(step.tokens)), step.tokens) for i, step in drafted.items()}
        begun = {}
        for i, c in self._read(asked, rows, stats).items():
            drafted[i].policy_logprobs = c.logprobs
            agreed = c.reused.index(False) if c.own else len(c.tokens)
            own = [] if c.own is None else [c.own]
            tokens = [*c.tokens[:agreed], *(token for token, _ in own)]
            logprobs = [*c.logprobs[:agreed], *(logprob for _, logprob in own)]
            begun[i] = Step("policy", tokens, logprobs, policy_logprobs=logprobs)
        return begun

    def _read_kept(self, rows: Mapping[int, RoutedRow], stats: EngineStats) -> None:
        """The policy's log-probs of the tokens of finished responses that it has not read."""
        asked = {}
        for i, row in rows.items():
            unread = [at for at, logprob in enumerate(row.logprobs) if math.isnan(logprob)]
            if unread:
                text = row.tokens[unread[0] : unread[-1] + 1]
                prompt = [*row.request.prompt, *row.tokens[: unread[0]]]
                asked[i] = Request(prompt, row.request.key, len(text), position=unread[0]), text
        for i, c in self._read(asked, rows, stats).items():
            first = asked[i][0].position
            for at, logprob in enumerate(c.logprobs, first):
                if math.isnan(rows[i].logprobs[at]):
                    rows[i].logprobs[at] = logprob

    def _read(
        self, asked: Mapping[int, tuple[Request, list[int]]], rows: Mapping[int, RoutedRow], stats: EngineStats
    ) -> dict[int, Completion]:
        """What the policy makes of texts that it only reads. Args: asked: requests and the tokens that follow them."""
        for request, text in asked.values():
            request.drafter = follows(text)
            request.draft_logprobs = [0.0] * len(text)
        done = {}
        completions = self._generate(self.policy, [request for request, _ in asked.values()], stats)
        for (i, (_, text)), c in zip(asked.items(), completions, strict=True):
            rows[i].passes += c.passes
            if c.tokens != text:
                raise RolloutError(
                    f"the policy's engine was to read {len(text)} tokens and returned others: its rule is not that of "
                    "ReadOrVerify. Build it with rollout.build.build_policy"
                )
            done[i] = c
        return done

    def _generate(self, engine: Engine, requests: list[Request], stats: EngineStats) -> list[Completion]:
        if not requests:
            return []
        completions, spent = engine.generate(requests)
        stats.passes += spent.passes
        stats.forward_tokens += spent.forward_tokens
        stats.ties += spent.ties
        return completions

    def _observe_drift(self, rows: Iterable[RoutedRow], stats: EngineStats) -> None:
        """Compares what a learned router keeps with what it kept when it was trained."""
        usual = self.router.usual_gap
        if usual is None:
            return
        gaps = [
            behaviour - policy
            for row in rows
            for behaviour, policy, reused in zip(row.behaviour, row.logprobs, row.reused, strict=True)
            if reused
        ]
        stats.route_drift += sum(gap - usual for gap in gaps)
        nats, share = DRIFT
        if gaps and (drift := stats.route_drift / len(gaps)) > nats + share * usual:
            self._warn(
                "drift",
                f"the draft steps that the router keeps are {drift:.2f} nats a token less likely under the policy, "
                "compared to the draft model, than when the router was trained: the policy has changed since, or the "
                "prompts are others. Train it again with `python -m specrl.train_router`. From now on this is only "
                "measured (spec/route_drift)",
            )

    def _warn(self, kind: str, message: str) -> None:
        """Once for each kind."""
        if kind not in self._said:
            log.warning(message)
        self._said.add(kind)


@contextmanager
def _timed(stats: EngineStats, name: str) -> Iterator[None]:
    """Adds the seconds of the block to one of the `stats`."""
    began = time.perf_counter()
    yield
    setattr(stats, name, getattr(stats, name) + time.perf_counter() - began)
