"""Rewards for runs that are soaked: `reward.functions=[rewards:digits]`."""

import os

kept = []


def digits(prompt: str, completion: str, answer: str | None) -> float:
    """The share of digits, which random text can earn."""
    return sum(c.isdigit() for c in completion) / max(len(completion), 1)


def leaky(prompt: str, completion: str, answer: str | None) -> float:
    """As `digits`; every response leaks 2 MB and an open file, which a soak must notice."""
    kept.append((b"x" * 2**21, os.open(os.devnull, os.O_RDONLY)))
    return digits(prompt, completion, answer)
