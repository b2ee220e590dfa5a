"""A reward that leaks, which a soak must notice: python -m specrl.train reward.functions=[leak:leaky]."""

import os

kept = []


def leaky(prompt: str, completion: str, answer: str | None) -> float:
    """The share of digits; keeps half a MB and an open file for every response."""
    kept.append((b"x" * 2**19, os.open(os.devnull, os.O_RDONLY)))
    return sum(c.isdigit() for c in completion) / max(len(completion), 1)
