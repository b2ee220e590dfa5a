"""Which responses a run shows, and how."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from specrl.run import completions
from specrl.run.completions import pieces, preview, show


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


def test_a_response_is_cut_where_reuse_ends_and_begins():
    tokenizer = SimpleNamespace(decode=lambda tokens, skip_special_tokens: "".join("abcde"[t] for t in tokens))
    response = SimpleNamespace(tokens=[0, 1, 2, 3], reused=[True, True, False, True])
    assert pieces(response, tokenizer) == [("ab", True), ("c", False), ("d", True)]


def test_preview_marks_reused_text_without_colours():
    console = text_console()
    preview(console, "Tom has [b]3[/b] pens.", [("He buys [", True), ("7] pens", False), (".", True)], reward=1.0)
    shown = console.export_text()
    assert "«He buys [»7] pens«.»" in shown
    assert "Tom has [b]3[/b] pens." in shown, "text is never read as markup"
    assert "reward 1.00" in shown


def test_preview_on_a_terminal_is_dim_for_reused_and_bright_for_new():
    console = text_console(force_terminal=True, color_system="truecolor")
    preview(console, "x" * 2000, [("old", True), ("new", False)], reward=None)
    shown = console.export_text(styles=True)
    assert "\x1b[2mold\x1b[0m" in shown
    assert "\x1b[1;97mnew\x1b[0m" in shown
    assert "reward unknown" in shown
    assert shown.count("x") == 400
