"""Passes and tokens that speculation would save on a run's stored responses: `python -m benchmarks.replay run=DIR`.

No model is needed: every response of a later epoch is generated again under the exact rule, with its own tokens as the
policy's samples. With `sources=[prefix,position]` the counts equal the engine's. With more sources they are
approximate, because the engine learns acceptance from all rows of a pass, and replay from the preceding prompts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from specrl.config.load import run
from specrl.config.options import ConfigError
from specrl.results import tables
from specrl.results.records import find_run
from specrl.rollout.drafting.budget import Budget
from specrl.rollout.drafting.suffix import PromptTexts, SuffixDrafter, propose
from specrl.rollout.sections import SOURCES, doc, unknown_name

WINDOWS = (0, 8, 16, 32, 64)
"""Most draft tokens of a row in one pass; 0 means the complete old response."""
HEADER = "Passes and tokens, counted on stored text under the exact rule.\nSeconds need: python -m benchmarks.paired"
COLUMNS = ("window", "passes", "slowest", "tokens/pass", "drafted", "accepted", "rate", "reused")


@dataclass
class ReplayOptions:
    run: str = doc("", "run directory, or the name of a run in outputs")
    sources: list[str] = doc([*SOURCES], "texts to draft from, as in rollout.sources")


class Text(NamedTuple):
    """One stored response."""

    example_id: str
    sample_index: int
    step: int
    tokens: tuple[int, ...]
    capped: bool = False
    """Whether the length cap ended it. Drafts then end before its last token."""


class Counts(NamedTuple):
    """The cost of generating one response. The prefill of the prompt is not a pass."""

    passes: int
    drafted: int
    accepted: int


class Visit(NamedTuple):
    """The responses to one prompt in one step, by sample index. The prompt has earlier responses."""

    texts: tuple[Text, ...]
    stored: tuple[Text, ...]
    """The last response of each sample before that step, newest step first, then by sample index."""

    def old(self, text: Text) -> Text | None:
        """The earlier response with the same sample index."""
        return next((old for old in self.stored if old.sample_index == text.sample_index), None)


def count(visit: Visit, window: int, sources: Collection[str], records: Budget | None = None) -> list[Counts]:
    """Generates the responses of a visit in parallel, as the engine's loop would if it sampled the stored tokens.

    A pass verifies a draft of at most `window` tokens per row (0: no limit), accepts its matching prefix and emits one
    more token.

    Args: records: acceptance statistics for the choice of drafts, updated in place; None starts with empty ones.
    """
    from specrl.rollout.verify import accept_exact  # lazy: it needs torch

    records = records or Budget()
    texts = PromptTexts([old.tokens for old in visit.stored], sources)
    longest = max(len(text.tokens) for text in (*visit.texts, *visit.stored))
    olds = [visit.old(text) for text in visit.texts]
    drafters = [SuffixDrafter(texts, old.tokens if old else None) for old in olds]
    rows = [[0, 0, 0, 0] for _ in visit.texts]  # position, passes, drafted, accepted
    while going := [i for i, text in enumerate(visit.texts) if rows[i][0] < len(text.tokens)]:
        begun = []
        limits = []
        for i in going:
            text = visit.texts[i]
            at = rows[i][0]
            begun.append(text.tokens[:at])
            limits.append(min(window or longest, len(text.tokens) - at - 1 if text.capped else longest))
        proposed = propose([drafters[i] for i in going], begun, limits, cache(records.acceptance))
        drafts = dict(zip(going, proposed, strict=True))
        for i, draft in drafts.items():
            tokens = visit.texts[i].tokens
            row = rows[i]
            agreed = accept_exact(tokens[row[0] :], draft)
            row[:] = row[0] + agreed + 1, row[1] + 1, row[2] + len(draft), row[3] + agreed
            if draft:
                records.observe_draft((drafters[i].quality, drafters[i].source), len(draft), agreed)
            if row[0] >= len(tokens):
                drafters[i].propose(tokens, 0)
    return [Counts(*row[1:]) for row in rows]


def _counted(visits: Iterable[Visit], window: int, sources: Collection[str]) -> Iterator[Counts]:
    """The counts of all responses, with acceptance statistics that carry over from step to step."""
    records = Budget()
    for _, of_step in groupby(visits, key=lambda visit: visit.texts[0].step):
        records.next_rollout()
        for visit in of_step:
            yield from count(visit, window, sources, records)


def revisits(texts: Iterable[Text]) -> Iterator[Visit]:
    """Every visit to a prompt that has earlier responses, in order of steps."""
    stored: dict[str, dict[int, Text]] = defaultdict(dict)
    ordered = sorted(texts, key=attrgetter("step", "example_id", "sample_index"))
    for (_, example), group in groupby(ordered, key=attrgetter("step", "example_id")):
        new = tuple(group)
        old = stored[example]
        if old:
            yield Visit(new, tuple(sorted(old.values(), key=lambda text: (-text.step, text.sample_index))))
        old.update((text.sample_index, text) for text in new)


def summarise(
    texts: Iterable[Text], sources: Collection[str] = SOURCES, windows: Sequence[int] = WINDOWS
) -> dict[str, Any]:
    """The amount of text, and the totals of plain decoding and of each window.

    Raises:
        ConfigError: no prompt has responses from two steps.
    """
    visits = list(revisits(texts))
    if not visits:
        raise ConfigError(
            "No prompt has texts of two steps, so there is nothing to draft from. Runs keep them with "
            "trainer.save_every=STEPS_PER_EPOCH trainer.keep_checkpoints=EPOCHS, or trainer.log_completions_every=1."
        )
    rows = [text for visit in visits for text in visit.texts]
    lengths = [len(text.tokens) for text in rows]
    table = {"plain": [Counts(length, 0, 0) for length in lengths]}
    for window in windows:
        table[str(window or "whole")] = [*_counted(visits, window, sources)]
    return {
        "rows": len(rows),
        "prompts": len({text.example_id for text in rows}),
        "windows": [{"window": window} | _totals(counts, sum(lengths)) for window, counts in table.items()],
    }


def _totals(counts: Sequence[Counts], tokens: int) -> dict[str, Any]:
    passes, drafted, accepted = map(sum, zip(*counts, strict=True))
    return {
        "passes": passes / len(counts),
        "slowest": max(count.passes for count in counts),
        "tokens/pass": tokens / passes,
        "drafted": drafted,
        "accepted": accepted,
        "rate": accepted / drafted if drafted else 0.0,
        "reused": accepted / tokens,
    }


def read_run(directory: Path) -> list[Text]:
    """The responses of a run: the trajectories of its checkpoints and its end or, without revisits, its completions."""
    import pyarrow.parquet as pq

    from specrl.rollout.cache.record import unpack
    from specrl.rollout.cache.snapshot import SNAPSHOT, read_file

    texts: dict[tuple[str, int, int], Text] = {}
    for folder in (*directory.glob("checkpoints/checkpoint-*/trajectories"), directory / "trajectories"):
        if (folder / SNAPSHOT).is_file():
            for example_id, sample_index, blob in read_file(folder / SNAPSHOT)[1]:
                t = unpack(blob)
                text = Text(example_id, sample_index, t.step, tuple(t.tokens), t.finish == "length")
                texts[example_id, sample_index, t.step] = text
    if any(revisits(texts.values())):
        return list(texts.values())
    return [
        Text(row["example_id"], row["sample_index"], step, tuple(row["tokens"]), row["finish"] == "length")
        for file in (directory / "completions").glob("step_*.parquet")
        for step in [int(file.stem.removeprefix("step_"))]
        for row in pq.read_table(file).to_pylist()
    ]


def main(options: ReplayOptions) -> int:
    from rich.console import Console

    if not options.run:
        raise ConfigError("run is missing: the directory of a run, such as run=outputs/grpo_math")
    for name in options.sources:
        if name not in SOURCES:
            raise ConfigError(unknown_name("sources", name, SOURCES))
    summary = summarise(read_run(find_run(options.run)), options.sources)
    rows = []
    for row in summary["windows"]:
        cells = [row["window"], f"{row['passes']:.1f}", f"{row['slowest']}", f"{row['tokens/pass']:.2f}"]
        rows.append([*cells, f"{row['drafted']}", f"{row['accepted']}", f"{row['rate']:.0%}", f"{row['reused']:.0%}"])
    title = f"{HEADER}\n{summary['rows']} rows of {summary['prompts']} prompts"
    tables.show(Console(), title, COLUMNS, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(run(main, schema=ReplayOptions))
