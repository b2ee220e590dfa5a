"""Reads examples from GSM8K, MATH-500, any hub data set or local files, and maps their columns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from specrl.config.options import ConfigError
from specrl.reward.answers import last_box
from specrl.rollout.checks import suggestion
from specrl.rollout.durable import read_json

if TYPE_CHECKING:
    from specrl.config.schema import DatasetConfig

PRESETS = {"gsm8k": "openai/gsm8k:main", "math500": "HuggingFaceH4/MATH-500"}
SUFFIXES = (".jsonl", ".json", ".parquet")
ID_COLUMNS = ("id", "example_id", "unique_id", "uid")
PROMPT_COLUMNS = ("prompt", "question", "problem", "instruction", "query", "input")
ANSWER_COLUMNS = ("answer", "final_answer", "expected_answer", "ground_truth", "target", "label", "solution")
LOCAL_HINT = "data=PATH, a .jsonl or .parquet file or a directory with train.jsonl and test.jsonl"


def read(name: str, config: DatasetConfig, role: Literal["train", "test"]) -> list[dict]:
    """The examples of one split as keyword arguments of `Example`; `id` is "" if the data has none.

    Args: name, config: as in `load_examples`; role: what the split is used for.
    """
    rows = _rows(name, config.train_split if role == "train" else config.test_split, role)
    held = list(rows[0][1])
    prompt_column = _column(held, config.prompt_column, PROMPT_COLUMNS, "prompt", name)
    answer_column = _column(held, config.answer_column, ANSWER_COLUMNS, "answer", name)
    id_column = next((column for column in ID_COLUMNS if column in held), None)
    used = {prompt_column, answer_column, id_column, "prompt", "example_id", "answer"}
    examples = []
    for place, row in rows:
        prompt = row.get(prompt_column)
        chat = isinstance(prompt, list) and all(isinstance(m, dict) and {"role", "content"} <= set(m) for m in prompt)
        if not prompt or not (chat or isinstance(prompt, str)):
            raise ConfigError(f"{place}: '{prompt_column}' must be text or a chat, not {str(prompt)[:60]!r}.")
        given, own_id = row.get(answer_column), row.get(id_column)
        answer, fields = None, {key: value for key, value in row.items() if key not in used}
        if given not in (None, ""):
            answer = final_answer(str(given))
            if answer is not None or (answer_column == "solution" and not config.answer_column):
                fields = {"solution": str(given)} | fields
            else:
                answer = str(given).strip()
        own = "" if own_id is None else str(own_id)
        examples.append({"id": own, "prompt": prompt, "answer": answer, "fields": fields, "place": place})
    return examples


def _column(held: list[str], asked: str, usual: Sequence[str], what: str, name: str) -> str | None:
    """The column named in the options, or else the first with a usual name; None if no answer column is found."""
    if asked in held:
        return asked
    found = next((column for word in usual for column in held if column.lower() == word), None)
    if asked or (found is None and what == "prompt"):
        problem = f"no column '{asked}'.{suggestion(asked, held)}" if asked else f"no column {' or '.join(usual)}."
        raise ConfigError(f"{name} has {problem} It has: {', '.join(held)}. Set dataset.{what}_column to one of them.")
    return found


def final_answer(text: str) -> str | None:
    """The final answer of a worked solution: after `####` in its last line, or in the last \\boxed{}; else None.

    Thousands separators are removed after `####`: "1,080" becomes "1080".
    """
    if match := re.search(r"####[ \t]*(\S[^\n]*)\s*\Z", text):
        return re.sub(r"(?<=\d),(?=\d{3})", "", match[1].strip())
    box = last_box(text)
    return box and box[2].strip()


def on_hub(name: str) -> bool:
    """Whether `data=name` is downloaded from the hub."""
    path = Path(name).expanduser()
    local = path.exists() or path.suffix in SUFFIXES or path.is_absolute()
    return not local and (name in PRESETS or (name.count("/") == 1 and not name.startswith((".", "~"))))


def _rows(name: str, split: str, role: str) -> list[tuple[str, dict]]:
    """The rows of one split, each with its source for messages."""
    path = Path(name).expanduser()
    if path.exists():
        rows = _local(path, split, role)
    elif on_hub(name):
        rows = [(f"{name}, row {at}", row) for at, row in enumerate(_hub(PRESETS.get(name, name), split, role), 1)]
    elif path.suffix in SUFFIXES or "/" in name or name.startswith((".", "~")):
        raise ConfigError(_missing(path))
    else:
        known = ("arithmetic", *PRESETS)
        near = suggestion(name, known)
        raise ConfigError(f"No data named '{name}'.{near} Known: {', '.join(known)}; or {LOCAL_HINT}.")
    if not rows:
        raise ConfigError(f"{name} has no rows in its split '{split}'. Give one with some; see dataset.{role}_split.")
    return rows


def _missing(path: Path) -> str:
    """A message with the first part of `path` that does not exist and the existing name most similar to it."""
    while not path.parent.is_dir():
        path = path.parent
    near = get_close_matches(path.name, sorted(entry.name for entry in path.parent.iterdir()), 1, cutoff=0.5)
    return f"No file or directory {path}." + (f" Did you mean {path.parent / near[0]}?" if near else "")


def _local(path: Path, split: str, role: str) -> list[tuple[str, dict]]:
    """The rows of one split of a file or directory; `split` may be a slice such as train[:90%]."""
    if not (match := re.fullmatch(r"([^\[\]]+)(?:\[(-?\d+%?)?:(-?\d+%?)?\])?", split)):
        raise ConfigError(f"dataset.{role}_split={split} is no split. Write a name, or a part such as train[:90%].")
    base, holds, files = match[1], "test" if path.stem.startswith("test") else "train", [path]
    if path.is_dir():
        names = [f"{base}{dash}{suffix}" for dash in ("", "-*") for suffix in SUFFIXES]
        files = [file for folder in (path, path / "data") for name in names for file in sorted(folder.glob(name))]
        if not files:
            held = ", ".join(sorted(file.name for file in path.rglob("*") if file.suffix in SUFFIXES)) or "no data"
            raise ConfigError(f"{path} has no {' or '.join(names[:3])}; it holds {held}. Set dataset.{role}_split.")
    elif base not in (holds, path.stem):
        raise ConfigError(
            f"{path} is one file and serves as split '{holds}', not '{base}'. Set dataset.{role}_split={holds}, or a "
            f"part such as {holds}[90%:], or give a directory with train.jsonl and test.jsonl."
        )
    rows = [row for file in files for row in parse(file)]
    begin, end = (
        None if b is None else round(len(rows) * int(b[:-1]) / 100) if b[-1] == "%" else int(b)
        for b in match.groups()[1:]
    )
    return rows[begin:end]


def parse(path: Path) -> list[tuple[str, dict]]:
    """The rows of a file, each with its file and line, or its row number in formats other than .jsonl."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{path} is no data file: its name ends in none of {', '.join(SUFFIXES)}.")
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet as pq

            return [(f"{path}, row {at}", row) for at, row in enumerate(pq.read_table(path).to_pylist(), 1)]
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"Cannot read {path}: {str(error).splitlines()[0]}.") from error
    rows, by_line = [], path.suffix == ".jsonl"
    for at, chunk in enumerate(text.split("\n") if by_line else [text], 1):
        try:
            value = read_json(chunk.strip() or "[]")
        except ValueError as error:
            raise ConfigError(f"{path}, line {at}: not JSON ({error}).") from error
        found = value if isinstance(value, list) else [value]
        rows += [(f"{path}, line {at}" if by_line else f"{path}, row {n}", row) for n, row in enumerate(found, 1)]
    if bad := [row for _, row in rows if not isinstance(row, dict)]:
        raise ConfigError(f"{path} must hold objects with columns, not {str(bad[0])[:60]!r}.")
    return rows


def _hub(source: str, split: str, role: str) -> list[dict]:
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError

    hub_id, _, subset = source.partition(":")
    try:
        return load_dataset(hub_id, subset or None, split=split).to_list()
    except DatasetNotFoundError as error:
        raise ConfigError(f"The hub has no data set '{hub_id}', or it is private. Use {LOCAL_HINT}.") from error
    except OSError as error:
        raise ConfigError(f"Cannot reach the hub for '{hub_id}': this machine is offline. Use {LOCAL_HINT}.") from error
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{hub_id}: {reason} Set dataset.{role}_split, or a subset as data={hub_id}:NAME.") from error
