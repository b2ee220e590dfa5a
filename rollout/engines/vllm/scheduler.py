"""vLLM's schedulers: the synchronous one takes the tokens of a step at once, the asynchronous one varies draft lengths.

The latter, with a number of draft tokens of each request's own and a record of what stood, plans a step before the last
one's tokens are known, so what it goes by is a step old. Draft tokens are placeholders to it: what they are is known on
the device only.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.sched.utils import check_stop

from specrl.rollout.drafting.budget import AcceptanceBucket
from specrl.rollout.drafting.drafting import Drafting
from specrl.rollout.engines.vllm.room import LogitsBudget
from specrl.rollout.types import EngineStats

_AGAIN = 8  # steps without a draft after which a request tries again


@dataclass(slots=True)
class Seen:
    """What the scheduler saw of a request."""

    drafts: bool
    """It may carry drafts."""
    kind: AcceptanceBucket
    """What the worth of its next draft is estimated by."""
    emitted: list[int] = field(default_factory=list)
    """Tokens of each step."""
    rests: int = 0
    """Steps since it last carried a draft."""


@dataclass(kw_only=True)
class DraftLengths:
    """How many draft tokens requests carry, by what stood of those before.

    Requests go by vLLM's own ids; those that were not admitted carry none.

    Args:
        source: what proposes.
        drafting: its budget decides and learns.
        draft_tokens: most of a request in one step.
        room: draft tokens of all requests in one step; those that draft share it.
    """

    source: str
    drafting: Drafting
    draft_tokens: int
    room: LogitsBudget
    seen: dict[str, Seen] = field(default_factory=dict)
    """Requests that are admitted."""
    stats: EngineStats = field(default_factory=EngineStats)
    began: float = 0.0
    """When the step in progress began."""
    verifies: bool = False
    """It carries drafts."""

    def admit(self, name: str, drafts: bool) -> None:
        """Request `name` takes part. Args: drafts: it may carry some."""
        self.seen[name] = Seen(drafts, ("start", self.source))

    def lengths(self, names: Iterable[str]) -> dict[str, int]:
        """Draft tokens that each admitted request carries in its next step."""
        known = [name for name in names if name in self.seen]
        kinds = [self.seen[name].kind if self.seen[name].drafts else None for name in known]
        windows = self.drafting.budget.plan(kinds).windows
        drafting = sum(kind is not None and windows[kind] > 0 for kind in kinds)
        share = self.room.share(drafting, len(kinds), self.draft_tokens)
        lengths = {kind: min(share, n) for kind, n in windows.items()} | {None: 0}
        return {name: lengths[kind] for name, kind in zip(known, kinds, strict=True)}

    def drafted(self, name: str, drafted: int, accepted: int) -> None:
        """Of a request's `drafted` tokens the first `accepted` stood."""
        if (seen := self.seen.get(name)) and drafted:
            self.drafting.budget.observe_draft(seen.kind, drafted, accepted)
            self.stats.count(self.source, drafted, accepted)
            self.verifies = True
            state = "agreeing" if accepted == drafted else "diverged" if accepted else "lost"
            seen.kind, seen.rests = (state, self.source), -1

    def emitted(self, name: str, tokens: int) -> None:
        """A request's step drew so many tokens, those behind its end included."""
        if seen := self.seen.get(name):
            seen.emitted.append(tokens)
            seen.rests += 1
            if seen.rests >= _AGAIN:
                seen.kind, seen.rests = ("start", self.source), 0

    def passed(self, tokens: int) -> None:
        """A step of so many tokens is done."""
        if not self.seen:
            return  # of others: who knows when it began
        seconds, self.began = time.perf_counter() - self.began, time.perf_counter()
        self.stats.count_pass(tokens, seconds, self.verifies, tokens <= len(self.seen))  # with drafting on the device
        self.verifies = False
        self.drafting.observe_pass(tokens, seconds)


class HostScheduler(Scheduler):
    """For flows that emit nothing behind a response's end: of a step's tokens only the last can be it.

    vLLM's own looks at each of them, which takes longer than this package's hooks.
    """

    def _update_request_with_output(self, request, new_token_ids, is_stale=False):
        request.append_output_token_ids(new_token_ids)
        return new_token_ids, check_stop(request, self.max_model_len)


class DraftScheduler(AsyncScheduler):
    """Named as vLLM's `scheduler_cls`; does as its parent does until it has a watcher."""

    watcher: DraftLengths | None = None

    def _update_after_schedule(self, scheduler_output) -> None:
        super()._update_after_schedule(scheduler_output)
        if self.watcher is None:
            return
        going = [name for name in scheduler_output.num_scheduled_tokens if self.requests[name].spec_token_ids]
        set_lengths([self.requests[name] for name in going], self.watcher.lengths(going))

    def _update_request_with_output(self, request, new_token_ids, is_stale=False):
        if self.watcher is not None:
            self.watcher.emitted(request.request_id, len(new_token_ids))
        return super()._update_request_with_output(request, new_token_ids, is_stale)

    def make_spec_decoding_stats(self, spec_decoding_stats, *args, **counts):
        if self.watcher is not None:
            self.watcher.drafted(counts["request_id"], counts["num_draft_tokens"], counts["num_accepted_tokens"])
        return super().make_spec_decoding_stats(spec_decoding_stats, *args, **counts)

    def update_from_output(self, scheduler_output, model_runner_output):
        done = super().update_from_output(scheduler_output, model_runner_output)
        if self.watcher is not None and scheduler_output.total_num_scheduled_tokens:
            self.watcher.passed(scheduler_output.total_num_scheduled_tokens)
        return done


def set_lengths(requests: Iterable[Any], lengths: Mapping[str, int]) -> None:
    """Each of vLLM's requests carries so many draft tokens in its next step, and none behind its cap."""
    for request in requests:
        room = request.max_tokens - request.num_output_tokens - request.num_output_placeholders - 1
        request.spec_token_ids = [-1] * max(0, min(lengths.get(request.request_id, 0), room))
