"""Which responses a run shows, and how."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from specrl.run import completions
from specrl.run.completions import pieces, show


def text_console(**options) -> Console:
    return Console(record=True, width=200, file=io.StringIO(), **options)


@pytest.mark.parametrize(
    ("count", "rewards"), [(1, [0]), (2, [0, 3]), (3, [0, 3, 1]), (5, [0, 3, 1, 4, 2]), (9, [0, 3, 1, 4, 2])]
)
def test_other_prompts_come_before_other_responses_to_the_same(count, rewards, monkeypatch):
    rows = [SimpleNamespace(example_id=name, prompt=(1,)) for name in "aaabb"]
    done = [SimpleNamespace(tokens=[5], reused=[False]) for _ in rows]
    last = SimpleNamespace(rows=rows, batch=SimpleNamespace(completions=done), rewards=[0, 1, 2, 3, 4])
    tokenizer = SimpleNamespace(decode=lambda tokens, skip_special_tokens: str(tokens))
    shown = []
    monkeypatch.setattr(completions, "preview", lambda console, prompt, pieces, reward: shown.append(reward))
    show(text_console(), last, tokenizer, count)
    assert shown == rewards


def test_a_character_of_several_tokens_is_in_the_piece_that_ends_it():
    text = "é 東 😀"
    tokenizer = SimpleNamespace(decode=lambda tokens, skip_special_tokens: bytes(tokens).decode(errors="replace"))
    tokens = [*text.encode()]
    for cut in range(1, len(tokens)):
        response = SimpleNamespace(tokens=tokens, reused=[at < cut for at in range(len(tokens))])
        assert "".join(part for part, _ in pieces(response, tokenizer)) == text
