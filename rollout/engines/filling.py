"""Rows of the next batch in the passes of an engine that its own rows leave room in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from specrl.rollout.engines.response import Response
from specrl.rollout.types import AheadText, Request

TRIED = (64, 128, 256)
"""Tokens of a pass that `rollout.fill=auto` times."""
HARDLY = 1.1
"""How much longer a pass with so many tokens may take than one with one token."""
JOINING = "rows of the next batch join passes of fewer than {} tokens"


def chosen_fill(option: int | str, seconds: Callable[[int], float], on_cpu: bool) -> int:
    """`rollout.fill` in tokens. `auto` is the most of TRIED whose pass takes hardly longer than that of one token; 0 on
    a CPU.

    Args: seconds: of a pass of so many tokens.
    """
    if option != "auto":
        return int(option)
    if on_cpu:
        return 0
    alone = seconds(1)
    return max((tokens for tokens in TRIED if seconds(tokens) <= HARDLY * alone), default=0)


class FillsPasses:
    """What engines in the trainer's process have in common that are a WorksAhead."""

    fill = 0
    """Tokens up to which a pass takes no longer than with one; rows of the next batch have what is left of them."""
    others_at_work = staticmethod(lambda: False)
    """Asked when the rows of the batch have ended: whether another process still has some, which this one would wait
    for. Then rows of the next batch go on."""

    def __init__(self) -> None:
        self._announced: list[Request] = []
        self._texts: dict[int, AheadText] = {}

    @property
    def not_ahead(self) -> str:
        """See WorksAhead."""
        return "" if self.fill else "rollout.fill is 0, and there are no rollout workers (cluster.num_workers=0)"

    @property
    def how_ahead(self) -> str:
        """See WorksAhead."""
        return JOINING.format(self.fill)

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
