"""How far rounding lets responses differ from plain decoding's with the same keys, and what that means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specrl.results.records import number
from specrl.results.savings import counted, total


@dataclass(frozen=True)
class Flips:
    """Draws that came out otherwise than in plain decoding: the first of each row, as another text follows it."""

    count: int
    tokens: int
    """That were compared: of each row up to and including its first flip."""
    position: float
    """Mean number of a row's tokens before its flip; 0 without one."""

    def told(self, dtype: str = "") -> str:
        """In a sentence. Args: dtype: of the weights that responses are drawn with, where it is known."""
        if not self.count:
            return f"none of {self.tokens:,} tokens differs from plain decoding's"
        rate = f"{1000 * self.count / self.tokens:.2g} of 1,000 tokens come out otherwise than in plain decoding"
        where = f"{counted(self.count, 'row')}, after {self.position:.0f} tokens on average"
        what = f"{f'in {dtype} ' * bool(dtype)}{rate} ({where})"
        return f"{what}: rounding, as between any two batch sizes of the same engine. The law is unchanged"


def flips(steps: Sequence[dict]) -> Flips | None:
    """Over the control steps among these; None where there is none."""
    if not (tokens := total(steps, "spec/compared_tokens")):
        return None
    found = [(number(record, "spec/control_mismatches"), number(record, "spec/flip_position")) for record in steps]
    found = [(count, position) for count, position in found if count]
    count = sum(count for count, _ in found)
    before = sum(count * position for count, position in found)
    return Flips(int(count), int(tokens), before / count if count else 0.0)
