"""A reward with a spread: with it every update moves the weights, also of a model that solves none of the problems.

A module of its own, as reward workers import it and must not import torch.
"""


def brevity(prompt: str, completion: str, answer: str | None, **fields) -> float:
    """1 for an empty response, less the longer it is, 0 from 400 characters on."""
    return max(0.0, 1 - len(completion) / 400)


brevity.deterministic = True
