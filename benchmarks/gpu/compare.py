"""Differences between texts sampled with equal noise."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from specrl.rollout.types import Completion
from specrl.rollout.verify import accept_exact


def differences(one: Sequence[Completion], other: Sequence[Completion]) -> dict[str, Any]:
    """Rows that differ, the position of their first difference, and how often a token differs after equal ones.

    A row counts up to its first difference, because the texts after it have different contexts.
    """
    agree = [accept_exact(a.tokens, b.tokens) for a, b in zip(one, other, strict=True)]
    firsts = [n for n, a, b in zip(agree, one, other, strict=True) if a.tokens != b.tokens]
    compared = sum(agree) + len(firsts)
    result = {"rows": len(agree), "differing_rows": len(firsts), "flips_per_1000_tokens": 1e3 * len(firsts) / compared}
    return result | {"first_difference": {"median": median(firsts), "least": min(firsts)} if firsts else None}
