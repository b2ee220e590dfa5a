"""What speculation would save on stored text: passes and tokens, counted without a model.

    python -m specrl.replay run=DIR                  # a finished run: its trajectories, else its completions
    python -m specrl.replay data=PATH [model=NAME]   # .parquet or .jsonl: example_id, slot, step, tokens or completion

Every text of a later epoch is emitted again under the exact rule, with the earlier texts of its prompt as drafts, and
what the other rows of the prompt emit meanwhile. The later text plays the sampler's draws, which is what the rule makes
of it, so for a fixed window the counts are those of the engine. Seconds depend on the machine and the batch; they need
`python -m specrl.bench`.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from rollout.config import SOURCES, doc
from rollout.drafters.suffix import PromptTexts, SuffixDrafter
from specrl.config import load_saved, run
from specrl.options import ConfigError
from specrl.records import find_run, run_option

WINDOWS = (0, 8, 16, 32, 64)
"""Draft tokens of a row in one pass; 0 is the whole text."""
SUFFIXES = (".parquet", ".jsonl")
HEADER = "Passes and tokens, counted on stored text under the exact rule. Seconds need: python -m specrl.bench"
COLUMNS = ("window", "passes", "slowest", "tokens/pass", "drafted", "accepted", "rate", "reused")


class ReplayError(ConfigError):
    """The stored text cannot be replayed. One line: what, why, the remedy."""


@dataclass
class ReplayOptions:
    run: str = run_option("run directory, or the name of a run in outputs")
    data: str = doc("", "file or directory of .parquet or .jsonl with example_id, slot, step, and tokens or completion")
    model: str = doc("", "whose tokenizer reads text stored without token ids; empty takes the run's, else tiny")
    sources: list[str] = field(
        default_factory=lambda: list(SOURCES), metadata={"help": "texts to draft from, as in rollout.sources"}
    )
    json: bool = doc(False, "print JSON instead of a table")


@dataclass(frozen=True, slots=True)
class Text:
    """One stored response.

    Example: Text(example_id="ex-7", slot=0, step=12, tokens=(52, 17, 1), capped=False)
    """

    example_id: str
    slot: int
    step: int
    tokens: tuple[int, ...]
    capped: bool = False
    """Cut by the length cap, so that no draft reached beyond its last token but one."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What emitting one text, or several, took. The prefill of the prompt is not a pass."""

    passes: int
    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Visit:
    """The texts of one prompt in one step, where it has earlier texts."""

    texts: tuple[Text, ...]
    """By slot."""
    stored: tuple[Text, ...]
    """The last text of each slot before that step, newest step first, then by slot."""

    def old(self, text: Text) -> Text | None:
        """The earlier text of the slot."""
        return next((old for old in self.stored if old.slot == text.slot), None)


def count(visit: Visit, window: int, sources: Collection[str]) -> list[Counts]:
    """Emits the texts of a visit side by side: the engine's loop with known draws.

    A pass carries a draft of at most `window` tokens (0: all there are), keeps what agrees and emits one token more.
    """
    from rollout.verify import accept_exact  # lazy: it needs torch

    texts = PromptTexts([old.tokens for old in visit.stored], sources)
    longest = max(len(text.tokens) for text in (*visit.texts, *visit.stored))
    olds = [visit.old(text) for text in visit.texts]
    drafters = [SuffixDrafter(texts, old.tokens if old else None) for old in olds]
    rows = [[0, 0, 0, 0] for _ in visit.texts]  # position, passes, drafted, accepted
    while going := [i for i, text in enumerate(visit.texts) if rows[i][0] < len(text.tokens)]:
        drafts = {}
        for i in going:
            text, at = visit.texts[i], rows[i][0]
            limit = min(window or longest, len(text.tokens) - at - 1 if text.capped else longest)
            drafts[i] = drafters[i].propose(text.tokens[:at], limit)
        for i, draft in drafts.items():
            tokens, row = visit.texts[i].tokens, rows[i]
            agreed = accept_exact(tokens[row[0] :], draft)
            row[:] = row[0] + agreed + 1, row[1] + 1, row[2] + len(draft), row[3] + agreed
            if row[0] >= len(tokens):
                drafters[i].propose(tokens, 0)
    return [Counts(*row[1:]) for row in rows]


def revisits(texts: Iterable[Text]) -> Iterator[Visit]:
    """Every visit that could have been drafted, step by step."""
    stored: dict[str, dict[int, Text]] = defaultdict(dict)
    for _, batch in groupby(sorted(texts, key=attrgetter("step", "example_id", "slot")), key=attrgetter("step")):
        for example, found in groupby(batch, key=attrgetter("example_id")):
            new, old = tuple(found), stored[example]
            if old:
                yield Visit(new, tuple(sorted(old.values(), key=lambda text: (-text.step, text.slot))))
            old.update((text.slot, text) for text in new)


def summarise(
    texts: Iterable[Text], sources: Collection[str] = SOURCES, windows: Sequence[int] = WINDOWS
) -> dict[str, Any]:
    """The content of the report: how much text was replayed, plain decoding, and one row per window.

    Raises:
        ReplayError: no text has an earlier one of the same prompt.
    """
    found = list(revisits(texts))
    if not found:
        raise ReplayError(
            "No prompt has texts of two steps, so there is nothing to draft from. Runs keep them with "
            "trainer.save_every=STEPS_PER_EPOCH trainer.keep_checkpoints=EPOCHS, or trainer.log_completions_every=1."
        )
    rows = [(text, visit.old(text)) for visit in found for text in visit.texts]
    lengths = [len(text.tokens) for text, _ in rows]
    total = sum(lengths)
    plain = {"passes_per_row": fmean(lengths), "passes_max": max(lengths), "tokens_per_pass": 1.0}
    lines = []
    for window in windows:
        counts = [row for visit in found for row in count(visit, window, sources)]
        passes, drafted, accepted = (
            sum(getattr(c, name) for c in counts) for name in ("passes", "drafted", "accepted")
        )
        lines.append(
            {
                "window": window,
                "passes_per_row": passes / len(counts),
                "passes_max": max(c.passes for c in counts),
                "tokens_per_pass": total / passes,
                "drafted": drafted,
                "accepted": accepted,
                "acceptance": accepted / drafted if drafted else None,
                "reused_ratio": accepted / total,
            }
        )
    steps, ages = [text.step for text, _ in rows], [text.step - old.step for text, old in rows if old]
    return {
        "rows": len(rows),
        "examples": len({text.example_id for text, _ in rows}),
        "tokens": total,
        "steps": [min(steps), max(steps)],
        "draft_age": fmean(ages) if ages else None,
        "sources": list(sources),
        "plain": plain,
        "windows": lines,
    }


# Reading


def read_run(directory: Path, model: str = "") -> list[Text]:
    """The texts of a run: what its checkpoints' and final trajectories tell of several steps, else its completions."""
    from rollout.records import unpack
    from rollout.store import SNAPSHOT, open_snapshot

    places = [*directory.glob("checkpoints/checkpoint-*/trajectories"), directory / "trajectories"]
    texts: dict[tuple[str, int, int], Text] = {}
    for place in places:
        if not (place / SNAPSHOT).is_file():
            continue
        with open_snapshot(place) as (_, rows):
            for example_id, slot, blob in rows:
                t = unpack(blob)
                texts[example_id, slot, t.step] = Text(example_id, slot, t.step, t.tokens, t.finish == "length")
    if any(revisits(texts.values())) or not any((directory / "completions").glob("step_*.parquet")):
        return list(texts.values())
    return read_files(directory / "completions", model or _policy(directory))


def read_files(path: Path, model: str = "") -> list[Text]:
    """The texts of a .parquet or .jsonl file, or of all such files of a directory.

    Without a column `step` it is the number in the file's name, as in step_12.parquet. Without lists of ids in a column
    `tokens`, the text of `completion` is tokenised again, with the EOS added where `finish` is not `length`.
    """
    files = sorted(f for f in path.iterdir() if f.suffix in SUFFIXES) if path.is_dir() else [path]
    if not files or not all(file.is_file() and file.suffix in SUFFIXES for file in files):
        raise ReplayError(f"No {' or '.join(SUFFIXES)} file at {path}. Give data=FILE, or a directory of such files.")
    tokenise = None
    texts = []
    for file in files:
        number = re.search(r"(\d+)$", file.stem)
        for at, row in enumerate(_rows(file), 1):
            try:
                capped, tokens = row.get("finish") == "length", row.get("tokens")
                step = int(row["step"] if "step" in row else number[1])
                if not isinstance(tokens, list):
                    tokenise = tokenise or _tokeniser(model or "tiny")
                    tokens = tokenise(row["completion"], not capped)
                texts.append(Text(str(row["example_id"]), int(row["slot"]), step, tuple(map(int, tokens)), capped))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise ReplayError(
                    f"{file}, row {at}: {type(error).__name__} {error}. Needed are example_id, slot, step, and tokens "
                    "(a list of ids) or completion (text)."
                ) from error
    return texts


def _rows(file: Path) -> list[dict]:
    try:
        if file.suffix == ".parquet":
            import pyarrow.parquet as pq

            return pq.read_table(file).to_pylist()
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ReplayError(f"Cannot read {file}: {str(error).splitlines()[0]}.") from error


def _tokeniser(model: str):
    from transformers import AutoTokenizer

    from specrl.policy import TINY_PATH

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(TINY_PATH) if model == "tiny" else model)
    except (OSError, ValueError) as error:
        raise ReplayError(f"model={model} has no tokenizer here: {str(error).strip().splitlines()[0]}") from error
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return lambda text, ended: tokenizer(text, add_special_tokens=False)["input_ids"] + (end if ended else [])


def _policy(directory: Path) -> str:
    config = load_saved(directory)
    return config.tokenizer or config.model


# Words


def show(summary: dict[str, Any], console: Console | None = None) -> None:
    """Prints the header and the table."""
    console = console or Console(highlight=False)
    age = "" if summary["draft_age"] is None else f", drafts {summary['draft_age']:.1f} steps old on average"
    first, last = summary["steps"]
    scope = f"{summary['rows']} rows of {summary['examples']} prompts, steps {first} to {last}{age}"
    console.print(f"{HEADER}\n{scope}; passes per row, reused share of tokens", highlight=False, soft_wrap=True)
    table = Table(box=SIMPLE_HEAD)
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for row in ({"window": "plain"} | summary["plain"], *summary["windows"]):
        table.add_row(*_cells(row))
    console.print(table)


def _cells(row: dict[str, Any]) -> list[str]:
    window = "whole" if row["window"] == 0 else str(row["window"])
    cells = [window, f"{row['passes_per_row']:.1f}", str(row["passes_max"]), f"{row['tokens_per_pass']:.2f}"]
    if "drafted" not in row:
        return [*cells, "", "", "", ""]
    acceptance = "" if row["acceptance"] is None else f"{row['acceptance']:.0%}"
    return [*cells, f"{row['drafted']:,}", f"{row['accepted']:,}", acceptance, f"{row['reused_ratio']:.0%}"]


def main(options: ReplayOptions) -> int:
    if bool(options.run) == bool(options.data):
        raise ConfigError("Give either run=DIR or data=PATH. help=true explains both.")
    if unknown := [name for name in options.sources if name not in SOURCES]:
        raise ConfigError(f"sources has {unknown[0]!r}, which is none of {', '.join(SOURCES)}.")
    if options.run:
        texts = read_run(find_run(options.run), options.model)
    else:
        texts = read_files(Path(options.data), options.model)
    summary = summarise(texts, options.sources)
    if options.json:
        print(json.dumps({"options": asdict(options), "note": HEADER, **summary}))
    else:
        show(summary)
    return 0


if __name__ == "__main__":
    raise SystemExit(run(main, schema=ReplayOptions))
