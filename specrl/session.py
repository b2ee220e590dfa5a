"""Reuse for trainers that run their own vLLM server: keys, drafts from earlier responses, and a store for new ones.

docs/adapters.md describes its use.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specrl.rollout.cache.memory import Fingerprint, TrajectoryCache
from specrl.rollout.engines.vllm.wire import KeyedRequest
from specrl.rollout.keys import derive_key, turn_id
from specrl.rollout.types import RolloutError, Trajectory

_TEXTS = 8  # most earlier responses that are sent with a request


@dataclass(frozen=True, slots=True)
class Ticket:
    """One requested response."""

    example_id: str
    sample_index: int
    visit: int
    turn: int
    """Number of the turn in its conversation, from 0."""
    request: KeyedRequest

    def add_to(self, extra_args: Mapping[str, Any] | None) -> dict[str, Any]:
        """The `SamplingParams.extra_args` of the request: the entries of `extra_args`, plus the key and the drafts."""
        return {**(extra_args or {}), **self.request.extra_args()}


class ReuseSession:
    """Keys and drafts of a training run, for servers that accept keyed requests (rollout/engines/vllm/served.py).

    A prompt is identified by its token ids. The key of a response is a hash of (seed, prompt, sample index, visit), so
    every sample and every visit has fresh noise, and stored responses affect only the speed. A later turn of a
    conversation is identified by the prompt of the first turn and the number of the turn, because its prompt contains
    responses that differ between visits. It therefore drafts from old responses of that turn and has a separate key.

        ticket = session.request(prompt_ids, visit=step, sample_index=3)
        params = SamplingParams(..., extra_args=ticket.add_to(None))
        ...                                             # the server answers with `tokens`
        session.finish(ticket, tokens)
        ticket = session.request(longer_ids, after=ticket)  # the conversation's next turn, if there is one

    Args:
        seed: seed of the run, from which all keys are derived.
        group_size: responses to a prompt at one visit; needed only if the trainer does not pass visits.
        max_mb: memory limit of the stored responses, in units of 2^20 bytes.
    """

    def __init__(self, seed: int = 0, group_size: int = 0, max_mb: float = 512):
        self.seed = seed
        self.group_size = group_size
        self.cache = TrajectoryCache(Fingerprint(), max_mb=max_mb)
        self._taken: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
        """By prompt and visit: the sample indices already used. All visits are kept, as they may overlap."""
        self._asked: Counter[str] = Counter()

    def request(
        self, prompt: Sequence[int], *, visit: int | None = None, sample_index: int = 0, after: Ticket | None = None
    ) -> Ticket:
        """The key of the next response to `prompt` and the earlier responses that it may draft from.

        Args:
            visit: a number that differs between visits, such as the trainer's step. None counts the requests for the
                prompt: every `group_size` of them are a visit.
            sample_index: index in the prompt's group. If it is already used at this visit, for example because a prompt
                occurs twice in a batch, the next free one is used.
            after: the conversation's previous request; this one gets the same visit and sample index.
        """
        if after:
            example_id = after.example_id
            sample_index = after.sample_index
            visit = after.visit
            turn = after.turn + 1
        else:
            ids = [int(token) for token in prompt]
            example_id = hashlib.blake2b(repr(ids).encode(), digest_size=16).hexdigest()
            turn = 0
            if visit is None:
                visit, sample_index = self._count(example_id)
            sample_index = self._free(example_id, visit, sample_index)
        group = turn_id(example_id, turn)
        previous = self.cache.get(group, sample_index)
        stored = [*([previous] if previous else []), *self.cache.siblings(group, but=sample_index)]
        keyed = KeyedRequest(
            derive_key(self.seed, group, sample_index, visit),
            len(prompt),
            group,
            tuple(tuple(trajectory.tokens) for trajectory in stored[:_TEXTS]),
            own=0 if previous else -1,
        )
        return Ticket(example_id, sample_index, visit, turn, keyed)

    def finish(self, ticket: Ticket, tokens: Sequence[int]) -> None:
        """Stores a response, which may be incomplete, for the prompt's next visit."""
        if len(tokens):  # an aborted request may have no tokens
            kept = Trajectory(tuple(tokens), ticket.request.key, "length", version=ticket.visit, step=ticket.visit)
            self.cache.merge([(ticket.request.group, ticket.sample_index, kept)])

    def _count(self, example_id: str) -> tuple[int, int]:
        if self.group_size < 1:
            raise RolloutError(
                f"group_size={self.group_size}: to count visits, a session needs the trainer's responses per prompt"
            )
        asked = self._asked[example_id]
        self._asked[example_id] += 1
        return divmod(asked, self.group_size)

    def _free(self, example_id: str, visit: int, sample_index: int) -> int:
        taken = self._taken[example_id, visit]
        while sample_index in taken:
            sample_index += 1
        taken.add(sample_index)
        return sample_index
