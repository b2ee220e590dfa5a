r"""A reward of one's own: partial credit for a number near the right one.

    python examples/custom_reward.py                                        # try it on three texts
    python -m specrl.train config=grpo_math name=closeness \
        reward.functions=[math,examples.custom_reward:closeness] reward.weights=[1,0.2]
"""

from specrl.reward.base import Sample
from specrl.reward.answers import marked_answer
from specrl.reward.loading import FunctionReward


def closeness(prompt: str, completion: str, answer: str | None, **fields) -> float | None:
    """1 for the right whole number, less the further away; 0 for no number; None (no score) without a reference."""
    if answer is None:
        return None
    given = marked_answer(completion)
    if given is None or not given.lstrip("-").isdecimal():
        return 0.0
    return 1 / (1 + abs(int(given) - int(answer)))


closeness.deterministic = True  # the same text always gets the same number, so it is asked once a text

if __name__ == "__main__":
    texts = ("3 + 4 = 7\n#### 7", "3 + 4 = 8\n#### 8", "seven")
    scores = FunctionReward(closeness, "closeness")([Sample("What is 3 + 4?\n", text, "7") for text in texts])
    for text, score in zip(texts, scores, strict=True):
        print(f"{score:.2f}  {text!r}")
