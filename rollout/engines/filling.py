"""Rows of the next batch in the passes of an engine that its own rows leave room in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from specrl.rollout.engines.response import Response
from specrl.rollout.types import AheadText, Request

TRIED = (64, 128, 256)
"""Tokens of a pass that `rollout.fill=auto` times."""
HARDLY = 1.1
"""How much longer a pass with so many tokens may take than one with one token."""


class FillsPasses:
    """What engines in the trainer's process have in common that are a WorksAhead."""

    fill = 0
    """Tokens up to which a pass takes no longer than with one; rows of the next batch have what is left of them."""

    def __init__(self) -> None:
        self._announced: list[Request] = []
        self._texts: dict[int, AheadText] = {}

    def choose_fill(self, option: int | str, seconds: Callable[[int], float], on_cpu: bool) -> None:
        """Sets `fill`: `auto` is the most of TRIED tokens whose pass takes hardly longer than that of one; 0 on a CPU.

        Args:
            option: `rollout.fill`.
            seconds: of a pass of so many tokens.
        """
        if option != "auto":
            self.fill = int(option)
        elif not on_cpu:
            alone = seconds(1)
            self.fill = max((tokens for tokens in TRIED if seconds(tokens) <= HARDLY * alone), default=0)

    @property
    def not_ahead(self) -> str:
        """See WorksAhead."""
        return "" if self.fill else "rollout.fill is 0, and there are no rollout workers (cluster.num_workers=0)"

    @property
    def how_ahead(self) -> str:
        """See WorksAhead."""
        return f"rows of the next batch join passes of fewer than {self.fill} tokens"

    def begin(self, requests: Sequence[Request]) -> None:
        """See WorksAhead: the next call of `generate` decodes them beside its own rows."""
        self._announced = [*requests]

    def stop(self) -> tuple[dict[int, AheadText], float]:
        """See WorksAhead. They took no seconds but those of `generate`."""
        texts = self._texts
        self._texts = {}
        self._announced = []
        return texts, 0.0

    def take_announced(self) -> list[Request]:
        """The rows to be decoded beside those of this call."""
        announced, self._announced = self._announced, []
        return announced

    def keep(self, rows: Iterable[Response]) -> None:
        """The call has ended with these rows of the next batch, finished or not."""
        self._texts |= {row.request.key: AheadText(row.tokens, row.finish) for row in rows if row.tokens}


def joining(live: int, waiting: int, fill: int) -> int:
    """How many of the waiting rows of the next batch join `live` rows: several at a time, as each time is a pass."""
    count = min(fill - live, waiting)
    return count if count == waiting or count >= fill // 8 else 0
