"""Which responses a run shows."""

from types import SimpleNamespace

import pytest

from specrl.run.completions import show


class Shown:
    def __init__(self):
        self.rewards = []

    def preview(self, prompt_text, pieces, reward):
        self.rewards.append(reward)


@pytest.mark.parametrize(
    ("count", "rewards"), [(1, [0]), (2, [0, 3]), (3, [0, 3, 1]), (5, [0, 3, 1, 4, 2]), (9, [0, 3, 1, 4, 2])]
)
def test_other_prompts_come_before_other_responses_to_the_same(count, rewards):
    rows = [SimpleNamespace(example_id=name, prompt=(1,)) for name in "aaabb"]
    done = [SimpleNamespace(tokens=[5], reused=[False]) for _ in rows]
    last = SimpleNamespace(rows=rows, batch=SimpleNamespace(completions=done), rewards=[0, 1, 2, 3, 4])
    tokenizer = SimpleNamespace(decode=lambda tokens, skip_special_tokens: str(tokens))
    shown = Shown()
    show(shown, last, tokenizer, count)
    assert shown.rewards == rewards
