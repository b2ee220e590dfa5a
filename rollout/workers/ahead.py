"""Which rows of the coming batch idle workers roll out ahead. Knows nothing of Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specrl.rollout.drafting.suffix import PromptTexts, SuffixDrafter
from specrl.rollout.types import AheadText, Request
from specrl.rollout.workers.worker import split_work


class Ahead:
    """The requests of at most one batch, those that a worker is busy with, and their texts so far."""

    def __init__(self) -> None:
        self._asked: dict[int, Request] = {}
        self._texts: dict[int, AheadText] = {}
        self._running: set[int] = set()
        self._seconds = 0.0

    def plan(self, requests: Sequence[Request]) -> None:
        """These requests are wanted instead of all earlier ones."""
        self._asked = {request.key: request for request in requests}

    def take(self) -> tuple[dict[int, AheadText], float]:
        """The texts so far by key, and the worker seconds that they took; nothing more is wanted then."""
        taken = self._texts, self._seconds
        self._asked, self._texts, self._seconds = {}, {}, 0.0
        return taken

    def share(self, workers: int) -> list[Request]:
        """Rows for one of so many workers: the longest share of the unfinished rows that no worker is busy with.

        Each continues its text so far.
        """
        waiting = [request for key, request in self._asked.items() if key not in self._running and not self._ended(key)]
        if not waiting:
            return []
        requests = [waiting[i] for i in split_work(waiting, workers)[0]]
        self._running |= {request.key for request in requests}
        return [following(r, self._texts[r.key].tokens) if r.key in self._texts else r for r in requests]

    def learn(self, requests: Sequence[Request], texts: Sequence[AheadText], seconds: float) -> None:
        """A worker has stopped, or finished all its rows, after so many seconds."""
        self.forget(requests)
        self._seconds += seconds
        for key, text in zip((request.key for request in requests), texts, strict=True):
            if text.tokens and key in self._asked:
                self._texts[key] = text.or_longer(self._texts.get(key))

    def forget(self, requests: Sequence[Request]) -> None:
        """No worker is busy with these rows any more."""
        self._running -= {request.key for request in requests}

    def _ended(self, key: int) -> bool:
        return key in self._texts and self._texts[key].finish is not None


def following(request: Request, ahead: Sequence[int]) -> Request:
    """The request with a drafter that follows its text from a rollout ahead."""
    before = request.drafter
    if not isinstance(before, SuffixDrafter):
        return replace(request, drafter=SuffixDrafter(PromptTexts(), keyed=ahead))
    return replace(request, drafter=SuffixDrafter(before.texts, keyed=ahead, twin=before.twin))
