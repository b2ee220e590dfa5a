"""Rewards for runs that are soaked: `reward.functions=[rewards:digits]`."""

import subprocess

kept = []


def digits(prompt: str, completion: str, answer: str | None) -> float:
    """The share of digits, which random text can earn."""
    return sum(c.isdigit() for c in completion) / max(len(completion), 1)


def leaky(prompt: str, completion: str, answer: str | None) -> float:
    """As `digits`; every response leaks 2 MB and a process in the reward worker, which a soak must notice."""
    kept.append((b"x" * 2**21, subprocess.Popen(["sleep", "3600"])))
    return digits(prompt, completion, answer)
