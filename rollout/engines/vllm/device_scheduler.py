"""vLLM's asynchronous scheduler, with a draft length for each request.

It plans a step before the last one's tokens are known, so the acceptance that it plans with is a step old.
Draft tokens are placeholders to it: what they are is known on the device only.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from specrl.rollout.drafting.budget import AcceptanceBucket, State
from specrl.rollout.drafting.drafting import Drafting
from specrl.rollout.engines.vllm.logits import LogitsBudget
from specrl.rollout.types import EngineStats

_RETRY = 8  # steps without a draft after which a request tries again


@dataclass(slots=True)
class RequestProgress:
    """What the scheduler knows of a request."""

    drafts: bool
    """It may have drafts."""
    bucket: AcceptanceBucket
    """By which the acceptance of its next draft is estimated."""
    emitted: list[int] = field(default_factory=list)
    """Tokens of each step."""
    idle: int = 0
    """Steps since its last draft."""


@dataclass(kw_only=True)
class DraftLengths:
    """Draft tokens of each request, by how many of those before were accepted.

    Requests go by vLLM's own ids; those that were not admitted have no drafts.

    Args:
        source: what proposes.
        drafting: its budget decides and learns.
        draft_tokens: most of a request in one step.
        budget: draft tokens of all requests in one step; those that draft share it.
    """

    source: str
    drafting: Drafting
    draft_tokens: int
    budget: LogitsBudget
    requests: dict[str, RequestProgress] = field(default_factory=dict)
    """Those that are admitted."""
    stats: EngineStats = field(default_factory=EngineStats)
    began: float = 0.0
    """When the step in progress began."""
    verifies: bool = False
    """It verifies drafts."""
    decodes: bool = False
    """A request of it has tokens already."""

    def begin(self, weight_version: int = 0) -> None:
        """A rollout begins, or a server's work after a pause."""
        self.stats = EngineStats()
        self.budget.renew()
        self.began = time.perf_counter()

    def forget(self) -> None:
        """No request is left."""
        self.requests.clear()

    def admit(self, name: str, drafts: bool) -> None:
        """Request `name` takes part. Args: drafts: it may have some."""
        self.requests[name] = RequestProgress(drafts, ("start", self.source))

    def may_draft(self, name: str) -> bool:
        """Whether a request is admitted and may have drafts."""
        return name in self.requests and self.requests[name].drafts

    def lengths(self, names: Iterable[str]) -> dict[str, int]:
        """Draft tokens of each admitted request in its next step."""
        admitted = [name for name in names if name in self.requests]
        buckets = [self.requests[name].bucket if self.may_draft(name) else None for name in admitted]
        planned = self.drafting.budget.plan(buckets).lengths
        drafting = sum(bucket is not None and planned[bucket] > 0 for bucket in buckets)
        share = self.budget.share(drafting, len(buckets), self.draft_tokens)
        lengths = {bucket: min(share, n) for bucket, n in planned.items()} | {None: 0}
        return {name: lengths[bucket] for name, bucket in zip(admitted, buckets, strict=True)}

    def observe_draft(self, name: str, drafted: int, accepted: int) -> None:
        """Of a request's `drafted` tokens the first `accepted` were accepted."""
        if (request := self.requests.get(name)) and drafted:
            self.drafting.budget.observe_draft(request.bucket, drafted, accepted)
            self.stats.count(self.source, drafted, accepted)
            self.verifies = True
            state: State = "agreeing" if accepted == drafted else "diverged" if accepted else "lost"
            request.bucket = state, self.source
            request.idle = -1

    def observe_tokens(self, name: str, tokens: int) -> None:
        """A request's step sampled so many tokens, those after its end included."""
        if request := self.requests.get(name):
            self.decodes |= bool(request.emitted)
            request.emitted.append(tokens)
            request.idle += 1
            if request.idle >= _RETRY:
                request.bucket = "start", self.source
                request.idle = 0

    def observe_step(self, tokens: int) -> None:
        """A step of so many tokens is done."""
        if not self.requests:
            return  # the step was of other requests, and nobody measured when it began
        now = time.perf_counter()
        seconds, self.began = now - self.began, now
        # with the time of drafting on the device
        self.stats.count_pass(tokens, seconds, self.verifies, self.decodes)
        if self.decodes:
            self.drafting.budget.observe_pass(tokens, seconds)
        self.verifies = False
        self.decodes = False


class DraftScheduler(AsyncScheduler):
    """Named as vLLM's `scheduler_cls`; does as its parent does until `drafts` is set."""

    drafts: DraftLengths | None = None

    def _update_after_schedule(self, scheduler_output) -> None:
        super()._update_after_schedule(scheduler_output)
        if self.drafts is None:
            return
        scheduled = [self.requests[name] for name in scheduler_output.num_scheduled_tokens]
        drafting = [request for request in scheduled if request.spec_token_ids]
        lengths = self.drafts.lengths(request.request_id for request in drafting)
        set_lengths(drafting, lengths)
        # Plain rows, which speed is compared with, do not pay for a draft model. For others it reads what is emitted.
        least = int(any(self.drafts.may_draft(request.request_id) for request in scheduled))
        scheduler_output.num_spec_tokens_to_schedule = max(lengths.values(), default=0) or least

    def _update_request_with_output(self, request, new_token_ids, is_stale=False):
        if self.drafts is not None:
            self.drafts.observe_tokens(request.request_id, len(new_token_ids))
        return super()._update_request_with_output(request, new_token_ids, is_stale)

    def make_spec_decoding_stats(self, spec_decoding_stats, *args, **counts):
        if self.drafts is not None:
            drafted, accepted = counts["num_draft_tokens"], counts["num_accepted_tokens"]
            self.drafts.observe_draft(counts["request_id"], drafted, accepted)
        if self.requests[counts["request_id"]].priority > 0:  # of the next batch: vLLM's counters are of this one
            return spec_decoding_stats
        return super().make_spec_decoding_stats(spec_decoding_stats, *args, **counts)

    def update_from_output(self, scheduler_output, model_runner_output):
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self.drafts is not None and scheduler_output.total_num_scheduled_tokens:
            self.drafts.observe_step(scheduler_output.total_num_scheduled_tokens)
        return outputs


def set_lengths(requests: Iterable[Any], lengths: Mapping[str, int]) -> None:
    """Sets the draft tokens of each of vLLM's requests in its next step, none of them after its cap."""
    for request in requests:
        remaining = request.max_tokens - request.num_output_tokens - request.num_output_placeholders - 1
        request.spec_token_ids = [-1] * max(0, min(lengths.get(request.request_id, 0), remaining))
