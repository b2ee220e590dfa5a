"""Passes and tokens that speculation would save on stored responses, counted without a model.

    python -m specrl.replay run=DIR                  # a finished run: its trajectories, else its completions
    python -m specrl.replay data=PATH [model=NAME]   # .parquet or .jsonl with example_id, sample_index, step, tokens

Every response of a later epoch is generated again under the exact rule, with drafts from the earlier responses to its
prompt and from the tokens that the prompt's other rows have generated so far. Its tokens take the role of the sampled
tokens; the exact rule accepts draft tokens up to the first one that differs from the sampled token. With a fixed window
and `sources=[prefix,position]` the counts therefore equal the engine's. With more sources they are approximate, because
the engine chooses between sources by the acceptance of the drafts of all rows in a pass, and replay by that of the
preceding prompts. The prompt, contexts and redraws are not stored, so nothing is drafted from them. Seconds depend on
the machine and the batch; measure them with `python -m specrl.bench`.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from specrl.config.load import load_saved, run
from specrl.config.options import ConfigError
from specrl.config.schema import Config
from specrl.results import tables
from specrl.results.records import find_run, run_option
from specrl.rollout.drafting.budget import Budget
from specrl.rollout.drafting.suffix import PromptTexts, SuffixDrafter, propose
from specrl.rollout.sections import SOURCES, doc
from specrl.run.sources import parse

WINDOWS = (0, 8, 16, 32, 64)
"""Most draft tokens of a row in one pass; 0 means the complete old response."""
SUFFIXES = (".parquet", ".jsonl")
HEADER = "Passes and tokens, counted on stored text under the exact rule.\nSeconds need: python -m specrl.bench"
COLUMNS = ("window", "passes", "slowest", "tokens/pass", "drafted", "accepted", "rate", "reused")
NEEDED = "Needed are example_id, sample_index, step, and tokens (a list of ids) or completion (text)."


@dataclass
class ReplayOptions:
    run: str = run_option("run directory, or the name of a run in outputs")
    data: str = doc(
        "", "file or directory of .parquet or .jsonl with example_id, sample_index, step, and tokens or completion"
    )
    model: str = doc("", "whose tokenizer reads text stored without token ids; empty takes the run's, else tiny")
    sources: list[str] = field(
        default_factory=lambda: [*SOURCES], metadata={"help": "texts to draft from, as in rollout.sources"}
    )
    json: bool = doc(False, "print JSON instead of a table")


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
        texts_of, limits = [], []
        for i in going:
            text, at = visit.texts[i], rows[i][0]
            texts_of.append(text.tokens[:at])
            limits.append(min(window or longest, len(text.tokens) - at - 1 if text.capped else longest))
        proposed = propose([drafters[i] for i in going], texts_of, limits, cache(records.acceptance))
        drafts = dict(zip(going, proposed, strict=True))
        for i, draft in drafts.items():
            tokens, row = visit.texts[i].tokens, rows[i]
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
    for (_, example), found in groupby(ordered, key=attrgetter("step", "example_id")):
        new, old = tuple(found), stored[example]
        if old:
            yield Visit(new, tuple(sorted(old.values(), key=lambda text: (-text.step, text.sample_index))))
        old.update((text.sample_index, text) for text in new)


def summarise(
    texts: Iterable[Text], sources: Collection[str] = SOURCES, windows: Sequence[int] = WINDOWS
) -> dict[str, Any]:
    """The content of the report: the amount of text, plain decoding, and one row per window.

    Raises:
        ConfigError: no prompt has responses from two steps.
    """
    visits = list(revisits(texts))
    if not visits:
        raise ConfigError(
            "No prompt has texts of two steps, so there is nothing to draft from. Runs keep them with "
            "trainer.save_every=STEPS_PER_EPOCH trainer.keep_checkpoints=EPOCHS, or trainer.log_completions_every=1."
        )
    rows = [(text, visit.old(text)) for visit in visits for text in visit.texts]
    lengths, steps = [len(text.tokens) for text, _ in rows], [text.step for text, _ in rows]
    ages = [text.step - old.step for text, old in rows if old]
    counts = {window: [*_counted(visits, window, sources)] for window in windows}
    return {
        "rows": len(rows),
        "examples": len({text.example_id for text, _ in rows}),
        "tokens": sum(lengths),
        "steps": [min(steps), max(steps)],
        "draft_age": fmean(ages) if ages else None,
        "sources": list(sources),
        "plain": _line([Counts(length, 0, 0) for length in lengths], sum(lengths)),
        "windows": [{"window": window} | _line(each, sum(lengths)) for window, each in counts.items()],
    }


def _line(counts: Sequence[Counts], tokens: int) -> dict[str, Any]:
    passes, drafted, accepted = map(sum, zip(*counts, strict=True))
    found = {"passes_per_row": passes / len(counts), "passes_max": max(c.passes for c in counts)}
    found |= {"tokens_per_pass": tokens / passes, "drafted": drafted, "accepted": accepted}
    return found | {"acceptance": accepted / drafted if drafted else None, "reused_ratio": accepted / tokens}


def read_run(directory: Path, model: str = "") -> list[Text]:
    """The responses of a run: the trajectories of its checkpoints and its end or, without revisits, its completions."""
    from specrl.rollout.cache.record import unpack
    from specrl.rollout.cache.snapshot import SNAPSHOT, read_snapshot

    texts: dict[tuple[str, int, int], Text] = {}
    for place in (*directory.glob("checkpoints/checkpoint-*/trajectories"), directory / "trajectories"):
        if (place / SNAPSHOT).is_file():
            for example_id, sample_index, blob in read_snapshot(place)[1]:
                t = unpack(blob)
                texts[example_id, sample_index, t.step] = Text(
                    example_id, sample_index, t.step, tuple(t.tokens), t.finish == "length"
                )
    if any(revisits(texts.values())) or not any((directory / "completions").glob("step_*.parquet")):
        return list(texts.values())
    config = load_saved(directory)
    return read_files(directory / "completions", model or config.tokenizer or config.model)


def read_files(path: Path, model: str = "") -> list[Text]:
    """The responses in a .parquet or .jsonl file, or in all such files of a directory.

    Without a column `step`, the step is the number in the file's name, as in step_12.parquet. Without lists of token
    ids in a column `tokens`, the text of `completion` is tokenized, with EOS appended unless `finish` is `length`.
    """
    from specrl.run.policy import load_tokenizer

    files = sorted(f for f in path.iterdir() if f.suffix in SUFFIXES) if path.is_dir() else [path]
    if not files or not all(file.is_file() and file.suffix in SUFFIXES for file in files):
        raise ConfigError(f"No {' or '.join(SUFFIXES)} file at {path}. Give data=FILE, or a directory of such files.")
    texts, tokenizer = [], None
    for file in files:
        digits = re.search(r"(\d+)$", file.stem)
        number = digits[1] if digits else None
        for place, row in parse(file):
            row = {"step": number, **row}
            try:
                capped, tokens = row.get("finish") == "length", row.get("tokens")
                step = int(row["step"])
                if not isinstance(tokens, list):
                    tokenizer = tokenizer or load_tokenizer(Config(model=model or "tiny"))
                    end = [] if capped or tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
                    tokens = tokenizer(row["completion"], add_special_tokens=False)["input_ids"] + end
                texts.append(
                    Text(str(row["example_id"]), int(row["sample_index"]), step, tuple(map(int, tokens)), capped)
                )
            except (KeyError, TypeError, ValueError) as error:
                raise ConfigError(f"{place}: {type(error).__name__} {error}. {NEEDED}") from error
    return texts


def show(summary: dict[str, Any]) -> None:
    """Prints the header and the table."""
    from rich.console import Console

    first, last = summary["steps"]
    age = "" if summary["draft_age"] is None else f", drafts {summary['draft_age']:.1f} steps old on average"
    scope = f"{summary['rows']} rows of {summary['examples']} prompts, steps {first} to {last}{age}"
    rows = []
    for row in ({"window": "plain"} | summary["plain"], *summary["windows"]):
        cells = [f"{row['window'] or 'whole'}", f"{row['passes_per_row']:.1f}", f"{row['passes_max']}"]
        cells += [f"{row['tokens_per_pass']:.2f}", f"{row['drafted']}", f"{row['accepted']}"]
        rows.append([*cells, f"{row['acceptance'] or 0:.0%}", f"{row['reused_ratio']:.0%}"])
    tables.show(Console(), f"{HEADER}\n{scope}", COLUMNS, rows)


def main(options: ReplayOptions) -> int:
    if bool(options.run) == bool(options.data):
        raise ConfigError("Give either run=DIR or data=PATH. help=true explains both.")
    if unknown := [name for name in options.sources if name not in SOURCES]:
        raise ConfigError(f"sources has {unknown[0]!r}, which is none of {', '.join(SOURCES)}.")
    read, path = (read_run, find_run(options.run)) if options.run else (read_files, Path(options.data))
    summary = summarise(read(path, options.model), options.sources)
    if options.json:
        print(json.dumps({"options": asdict(options), "note": HEADER, **summary}))
    else:
        show(summary)
    return 0


if __name__ == "__main__":
    raise SystemExit(run(main, schema=ReplayOptions))
