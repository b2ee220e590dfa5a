"""Reuse for trainers that own their vLLM: a request's key, the earlier texts it may draft from, and its response kept.

`docs/adapters.md` says how.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specrl.rollout.cache.memory import Fingerprint, TrajectoryCache
from specrl.rollout.engines.vllm.wire import KeyedRequest
from specrl.rollout.keys import derive_key
from specrl.rollout.types import RolloutError, Trajectory

_TEXTS = 8  # earlier responses that travel with a request
_ANY_ID = 1 << 31  # the server leaves out ids that its model does not have


@dataclass(frozen=True, slots=True)
class Ticket:
    """One response that was asked for."""

    example_id: str
    sample_index: int
    visit: int
    turn: int
    """Of its conversation; 0 is the first."""
    request: KeyedRequest

    def add_to(self, extra_args: Mapping[str, Any] | None) -> dict[str, Any]:
        """The request's `SamplingParams.extra_args`, others' entries kept."""
        return {**(extra_args or {}), **self.request.extra_args()}


class ReuseSession:
    """Keys and drafts of a training run, for servers that serve keyed requests (rollout/engines/vllm/served.py).

    A prompt is known by its token ids. The key of a response is a hash of (seed, prompt, sample index, visit): every
    sample and every visit draws with fresh noise, and what is stored decides about time only. A later turn
    of a conversation is known by the prompt of the first turn and its own number, as its prompt
    holds responses that differ from visit to visit: so it finds the old texts of that turn, and has a key of its own.

        ticket = session.request(prompt_ids, visit=step, sample_index=3)
        params = SamplingParams(..., extra_args=ticket.add_to(None))
        ...                                             # the server answers with `tokens`
        session.finish(ticket, tokens)
        ticket = session.request(longer_ids, after=ticket)  # the conversation's next turn, if there is one

    Args:
        seed: of the run; all noise keys derive from it.
        group_size: responses to a prompt at one visit; needed where a trainer does not tell its visits.
        max_mb: memory bound of the stored responses, in units of 2^20 bytes.
    """

    def __init__(self, seed: int = 0, group_size: int = 0, max_mb: float = 512):
        self.seed, self.group_size = seed, group_size
        self.cache = TrajectoryCache(Fingerprint(), _ANY_ID, max_mb=max_mb)
        self._taken: dict[str, tuple[int, set[int]]] = {}
        """By prompt: its latest visit, and the samples given out at it."""
        self._asked: Counter[str] = Counter()

    def request(
        self, prompt: Sequence[int], *, visit: int | None = None, sample_index: int = 0, after: Ticket | None = None
    ) -> Ticket:
        """How the next response to `prompt` is drawn, and what it may draft from.

        Args:
            visit: a number that differs from visit to visit, such as the trainer's step. None counts the requests of
                the prompt: every `group_size` of them are a visit.
            sample_index: place in the prompt's group. If it is given out already, as when a prompt occurs twice in a
                batch, the next free one is taken.
            after: the conversation's last request, whose visit and sample this one has.
        """
        if after:
            example_id, sample_index, visit, turn = after.example_id, after.sample_index, after.visit, after.turn + 1
        else:
            example_id, sample_index, visit, turn = (
                *self._begin([int(token) for token in prompt], visit, sample_index),
                0,
            )
        group = f"{example_id}/{turn}" if turn else example_id
        own, others = self.cache.get(group, sample_index), self.cache.siblings(group, but=sample_index)
        texts = tuple(tuple(t.tokens) for t in [*([own] if own else []), *others][:_TEXTS])
        keyed = KeyedRequest(
            derive_key(self.seed, group, sample_index, visit), len(prompt), group, texts, own=0 if own else -1
        )
        return Ticket(example_id, sample_index, visit, turn, keyed)

    def finish(self, ticket: Ticket, tokens: Sequence[int]) -> None:
        """Keeps a response, or what there is of one, for the prompt's next visit."""
        if len(tokens):  # an aborted request may have none
            kept = Trajectory(tuple(tokens), ticket.request.key, "length", version=ticket.visit, step=ticket.visit)
            self.cache.merge([(ticket.request.group, ticket.sample_index, kept)])

    def _begin(self, prompt: list[int], visit: int | None, sample_index: int) -> tuple[str, int, int]:
        """Example id, sample and visit of a conversation that begins with `prompt`."""
        example_id = hashlib.blake2b(repr(prompt).encode(), digest_size=16).hexdigest()
        if visit is None:
            visit, sample_index = self._count(example_id)
        else:
            sample_index = self._free(example_id, visit, sample_index)
        return example_id, sample_index, visit

    def _count(self, example_id: str) -> tuple[int, int]:
        if self.group_size < 1:
            raise RolloutError(
                f"group_size={self.group_size}: to count visits, a session needs the trainer's responses per prompt"
            )
        asked = self._asked[example_id]
        self._asked[example_id] += 1
        return divmod(asked, self.group_size)

    def _free(self, example_id: str, visit: int, sample_index: int) -> int:
        latest, taken = self._taken.get(example_id, (visit, set()))
        if latest != visit:
            taken = set()
        while sample_index in taken:
            sample_index += 1
        taken.add(sample_index)
        self._taken[example_id] = visit, taken
        return sample_index
