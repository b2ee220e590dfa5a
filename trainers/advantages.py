"""Pure functions on rewards."""

from __future__ import annotations


def overlong_penalty(length: int, cap: int, buffer: int) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13): 0 up to cap - buffer, then linear to -1 at cap.

    Args: length of the response, cap and buffer in tokens; `buffer=0` never punishes.
    """
    if buffer <= 0 or length <= cap - buffer:
        return 0.0
    return max((cap - buffer - length) / buffer, -1.0)
