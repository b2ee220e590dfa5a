"""Responses of a step for people: on the console, and as completions/step_N.parquet."""

from __future__ import annotations

from itertools import groupby, islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from specrl.run.monitor import Monitor
    from trainers.refill import Scored


def show(monitor: Monitor, last: Scored, tokenizer: PreTrainedTokenizerBase, count: int) -> None:
    """Previews `count` responses, of as many prompts as there are, reused and new text told apart."""
    by_prompt: dict[str, list] = {}
    for done in zip(last.rows, last.batch.completions, last.rewards, strict=True):
        by_prompt.setdefault(done[0].example_id, []).append(done)
    turns = (done for turn in zip_longest(*by_prompt.values()) for done in turn if done)
    for row, completion, reward in islice(turns, count):
        runs = groupby(zip(completion.tokens, completion.reused, strict=True), key=lambda pair: pair[1])
        pieces = [(tokenizer.decode([t for t, _ in run], skip_special_tokens=True), reused) for reused, run in runs]
        monitor.preview(tokenizer.decode(row.prompt, skip_special_tokens=True), pieces, reward)


def store(path: Path, last: Scored, tokenizer: PreTrainedTokenizerBase) -> None:
    """Writes every response of the step with its reward and how much of it was reused."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    done = last.batch.completions
    table = pa.table(
        {
            "example_id": [row.example_id for row in last.rows],
            "slot": last.batch.slots,
            "prompt": tokenizer.batch_decode([list(row.prompt) for row in last.rows], skip_special_tokens=True),
            "completion": tokenizer.batch_decode([c.tokens for c in done], skip_special_tokens=True),
            "reward": pa.array(last.rewards, pa.float64()),
            "finish": [c.finish for c in done],
            "failure": [c.failure for c in done],
            "versions": [c.versions for c in done],
            "tokens": [c.tokens for c in done],
            "reused_tokens": [sum(c.reused) for c in done],
            "passes": [c.passes for c in done],
        }
    )
    path.parent.mkdir(exist_ok=True)
    pq.write_table(table, path)
