"""vLLM's asynchronous scheduler, with a number of draft tokens of each request's own and a record of what stood.

It plans a step before the last one's tokens are known, so what it goes by is a step old. Draft tokens are placeholders
to it: what they are is known on the device only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from vllm.v1.core.sched.async_scheduler import AsyncScheduler


class Watcher(Protocol):
    """Who is told, and asked. Requests go by vLLM's own ids; those that it does not know are none of its business."""

    def lengths(self, names: list[str]) -> dict[str, int]:
        """Draft tokens that each request carries in its next step."""

    def drafted(self, name: str, drafted: int, accepted: int) -> None:
        """Of a request's `drafted` tokens the first `accepted` stood."""

    def emitted(self, name: str, tokens: int) -> None:
        """A request's step drew so many tokens, those behind its end included."""

    def passed(self, tokens: int) -> None:
        """A step of so many tokens is done."""


class DraftScheduler(AsyncScheduler):
    """Named as vLLM's `scheduler_cls`; does as its parent does until it has a watcher."""

    watcher: Watcher | None = None

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
