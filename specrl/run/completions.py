"""Shows the responses of a step on the console and writes them to completions/step_N.parquet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby, islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from rich.panel import Panel
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedTokenizerBase

    from specrl.rollout.types import Completion
    from specrl.trainers.scored import Scored

UNFINISHED = "\ufffd"
"""What the first tokens of a character are decoded to."""
PROMPT_TAIL = 400  # characters of a prompt shown in a preview


def show(console: Console, last: Scored, tokenizer: PreTrainedTokenizerBase, count: int = 2) -> None:
    """Previews `count` responses, from as many different prompts as possible."""
    by_prompt: dict[str, list] = {}
    for response in zip(last.rows, last.batch.completions, last.rewards, strict=True):
        by_prompt.setdefault(response[0].example_id, []).append(response)
    rounds = zip_longest(*by_prompt.values())
    ordered = (response for one_of_each in rounds for response in one_of_each if response)
    for row, completion, reward in islice(ordered, count):
        preview(console, _text(row.prompt, tokenizer), pieces(completion, tokenizer), reward)


def pieces(completion: Completion, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, bool]]:
    """The response as consecutive pieces (text, reused), each made of accepted draft tokens only or new tokens only.

    What tools answered is part of the new ones. A character of several tokens belongs to the piece in which it ends.
    """
    whole = _text(completion.tokens, tokenizer)
    found = []
    tokens = 0
    characters = 0
    for reused, run in groupby(completion.reused):
        tokens += len([*run])
        before = _text(completion.tokens[:tokens], tokenizer)
        end = len(whole) if tokens == len(completion.tokens) else len(before.rstrip(UNFINISHED))
        found.append((whole[characters:end], reused))
        characters = end
    return found


def _text(tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    text = tokenizer.decode([*tokens], skip_special_tokens=True)
    assert isinstance(text, str), "The ids of one sequence decode to one text."
    return text


def preview(console: Console, prompt: str, pieces: list[tuple[str, bool]], reward: float | None) -> None:
    """Prints one response with reused text dim and in «», and new text bright.

    Args: prompt: only its end is shown if it is long; reward: None if unknown.
    """
    prompt = prompt if len(prompt) <= PROMPT_TAIL else "…" + prompt[-PROMPT_TAIL:]
    body = Text.assemble((prompt.rstrip() + "\n", "cyan"))
    for text, reused in pieces:
        body.append(f"«{text}»" if reused else text, style="dim" if reused else "bold bright_white")
    score = "unknown" if reward is None or not math.isfinite(reward) else f"{reward:.2f}"
    title = f"completion | reward {score} | «reused» new"
    console.print(Panel(body, title=title, title_align="left", border_style="dim"))


def store(path: Path, last: Scored, tokenizer: PreTrainedTokenizerBase) -> None:
    """Writes every response of the step with its reward and its number of reused tokens."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    done = last.batch.completions
    table = pa.table(
        {
            "example_id": [row.example_id for row in last.rows],
            "sample_index": last.batch.sample_indices,
            "prompt": tokenizer.batch_decode([list(row.prompt) for row in last.rows], skip_special_tokens=True),
            "completion": tokenizer.batch_decode([c.tokens for c in done], skip_special_tokens=True),
            "reward": pa.array(last.rewards, pa.float64()),
            "finish": [c.finish for c in done],
            "versions": [c.versions for c in done],
            "tokens": [c.tokens for c in done],
            "reused_tokens": [sum(c.reused) for c in done],
            "passes": [c.passes for c in done],
        }
    )
    path.parent.mkdir(exist_ok=True)
    pq.write_table(table, path)
