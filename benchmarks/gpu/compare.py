"""Texts drawn with equal noise, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from specrl.rollout.types import Completion
from specrl.rollout.verify import accept_exact


def differences(one: Sequence[Completion], other: Sequence[Completion]) -> dict[str, Any]:
    """Rows that differ, where they do first, and how often a token differs behind equal ones.

    A row counts until its first difference, as its texts are different ones behind that.
    """
    agree = [accept_exact(a.tokens, b.tokens) for a, b in zip(one, other, strict=True)]
    firsts = [n for n, a, b in zip(agree, one, other, strict=True) if a.tokens != b.tokens]
    compared = sum(agree) + len(firsts)
    found = {"rows": len(agree), "differing_rows": len(firsts), "flips_per_1000_tokens": 1e3 * len(firsts) / compared}
    return found | {"first_difference": {"median": median(firsts), "least": min(firsts)} if firsts else None}
