"""Examples for training and evaluation, from generated problems, GSM8K, MATH-500, any hub data set or local files.

An example's id is its name in the trajectory cache. It does not change while the example's content does not, even if
other examples are added or removed. `specrl/run/prompts.py` renders examples as prompts.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from difflib import get_close_matches
from hashlib import blake2b
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from specrl.config.options import ConfigError
from specrl.reward.answers import marked_answer
from specrl.reward.spelling import normal_number
from specrl.rollout.checks import suggestion
from specrl.rollout.durable import read_json
from specrl.run.hub import LOCAL_HINT, PRESET_ANSWERS, PRESETS, SUFFIXES, hub_rows, on_hub
from specrl.run.tasks import GENERATED, arithmetic

if TYPE_CHECKING:
    from datasets import Dataset

    from specrl.config.schema import Config, DatasetConfig

ID_COLUMNS = ("id", "example_id", "unique_id", "uid")
PROMPT_COLUMNS = ("prompt", "question", "problem", "instruction", "query", "input")
ANSWER_COLUMNS = (
    *("answer", "final_answer", "expected_answer", "ground_truth", "reward_model.ground_truth", "target", "label"),
    *("output", "solution"),
)
SHORT = 100
"""Characters of a line that is an answer although nothing marks it as one."""


@dataclass(frozen=True)
class Example:
    """One prompt with its reference answer.

    Example: Example(id="9f3c...", prompt="What is 6 * 7?", answer="42", fields={"solution": "6 * 7 = 42\\n#### 42"})
    """

    id: str
    """Unique in its split."""
    prompt: str | list[dict]
    """Plain text, or chat messages with `role` and `content`."""
    answer: str | None
    """The final answer without its derivation; None if the row has no answer."""
    fields: dict
    """The data's other columns, passed to reward functions by name; None where the row has no such column."""
    source: str = field(default="", compare=False)
    """File and line, or data set and row, for messages; empty if the example was generated."""


def load_examples(name: str, config: DatasetConfig, split: Literal["train", "test"], seed: int) -> list[Example]:
    """The examples of one split, in the order of the source.

    Args:
        name: one of GENERATED or of PRESETS, a hub id (`owner/name` or `owner/name:subset`), or a local .jsonl or
            .parquet file or a directory with one such file per split.
        config: the columns (`outer.inner` names a part of one), the number of examples, and the text around each
            prompt.
        split: what the examples are used for; `train_split` and `test_split` map it to the source's name for it, which
            may be a slice such as `train[90%:]`.
        seed: selects the subset if train_size or test_size is set. A larger subset contains every smaller one.

    Raises:
        ConfigError: unknown source or split, no such file, hub not reachable, missing column, no rows, unusable row.
    """
    size = config.train_size if split == "train" else config.test_size
    if name in GENERATED:
        problems = arithmetic(split, size, seed, GENERATED[name])
        examples = [Example(p.id, p.prompt, p.answer, {"solution": p.solution}) for p in problems]
    else:
        source_split = config.train_split if split == "train" else config.test_split
        examples = _identified(_examples(name, _rows(name, source_split, split), config))
        if size > len(examples):
            raise ConfigError(
                f"dataset.{split}_size={size}, but {name} has {len(examples)} rows there. "
                f"Try dataset.{split}_size={len(examples)}, or 0 for all."
            )
    chosen = {e.id for e in sorted(examples, key=lambda e: _digest(f"{seed}/{e.id}"))[: size or None]}
    return [framed(example, config) for example in examples if example.id in chosen]


def left_out(config: Config, count: int) -> list[str]:
    """A sentence about the training prompts left over after the last full step of an epoch, if there are any."""
    per_step = config.trainer.prompts_per_step
    rest = count % per_step
    return [f"Each epoch leaves out {rest} of {count} prompts, as trainer.prompts_per_step is {per_step}."] * bool(rest)


def to_dataset(examples: Sequence[Example]) -> Dataset:
    """A data set for TRL whose rows are the examples, by id: `example_id`, `prompt`, `answer` and the fields.

    The rows are looked up and not stored, as the types of Arrow would change values, such as 1 beside "hard" or 0.5.
    """
    from datasets import Dataset

    rows = {e.id: {"example_id": e.id, "prompt": e.prompt, "answer": e.answer, **e.fields} for e in examples}

    def looked_up(batch: dict[str, list[str]]) -> dict[str, list]:
        found = [rows[name] for name in batch["example_id"]]
        return {column: [row[column] for row in found] for column in found[0]}

    return Dataset.from_dict({"example_id": [*rows]}).with_transform(looked_up)


def _examples(name: str, rows: Sequence[tuple[str, dict]], config: DatasetConfig) -> list[Example]:
    """The examples of rows and their sources; `id` is "" if the data has none."""
    columns = _columns([row for _, row in rows])
    prompt_column = _column(columns, config.prompt_column, PROMPT_COLUMNS, "prompt", name)
    answer_option = config.answer_column or PRESET_ANSWERS.get(name, "")
    answer_column = _column(columns, answer_option, ANSWER_COLUMNS, "answer", name)
    id_column = next((column for column in ID_COLUMNS if column in columns), None)
    used = {prompt_column, answer_column, id_column, "prompt", "example_id", "answer"}
    alpaca = prompt_column == "instruction" and "input" in columns and not config.prompt_column
    others = [
        column for column in columns if column not in used and "." not in column and not (alpaca and column == "input")
    ]
    worked = answer_column == "solution" and not answer_option
    examples = []
    for source, row in rows:
        prompt = _prompt(source, prompt_column, _value(row, prompt_column))
        if alpaca and row.get("input"):
            prompt = f"{prompt}\n\n{row['input']}"
        fields = {column: row.get(column) for column in others}
        text = _answer(source, answer_column, _value(row, answer_column))
        marked = marked_answer(text) if text else None
        if marked and normal_number(marked):
            marked = marked.replace(",", "")  # "1,080", as functions of users read numbers
        derived = worked and text and (len(text) > SHORT or "\n" in text)
        answer = marked or (None if derived else text)
        fields = {"solution": text if marked or worked else None} | fields
        row_id = row.get(id_column)
        examples.append(Example("" if row_id is None else str(row_id), prompt, answer, fields, source))
    return examples


def _prompt(source: str, column: str | None, prompt: Any) -> str | list[dict]:
    """The question of a row as text or chat. Raises ConfigError, which names the row.

    A chat that ends with the assistant is continued if it is a prompt. In another column it is a whole conversation,
    whose last answer is the solution and is left out.
    """
    if isinstance(prompt, str) and prompt:
        return prompt
    if not (isinstance(prompt, list) and prompt and all(isinstance(m, dict) and "role" in m for m in prompt)):
        raise ConfigError(f"{source}: '{column}' must be text or a chat, not {str(prompt)[:60]!r}.")
    chat = [{**message, "content": _content(source, column, message)} for message in prompt]
    if column != "prompt" and len(chat) > 1 and chat[-1]["role"] == "assistant":
        return chat[:-1]
    return chat


def _content(source: str, column: str | None, message: dict) -> str:
    """The text of a message; text parts are joined, and a message that only calls tools has none."""
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "".join(str(part.get("text", "")) for part in content)
    if content is None and message.get("tool_calls"):
        return ""
    if isinstance(content, str):
        return content
    shown = json.dumps(content, default=str)[:60]
    raise ConfigError(f"{source}: the content of each message of '{column}' must be text, not {shown}.")


def _answer(source: str, column: str | None, value: Any) -> str | None:
    """A reference answer as text, by its value: 1e-05 is "0.00001", a list is "1, 3", and NaN is no answer."""
    if isinstance(value, list):
        return ", ".join(text for item in value if (text := _answer(source, column, item))) or None
    if isinstance(value, dict):
        raise ConfigError(
            f"{source}: the answer '{column}' has parts: {', '.join(map(str, value))}. Name the one that is the "
            f"answer, such as dataset.answer_column={column}.{next(iter(value), 'value')}."
        )
    if value is None or value != value:
        return None
    if isinstance(value, float) and isfinite(value):
        return f"{Decimal(repr(value)):f}".removesuffix(".0")
    return str(value).strip() or None


def _columns(rows: Sequence[dict]) -> list[str]:
    """The names of the columns of all rows, then of their parts as `outer.inner`."""
    columns = {column: None for row in rows for column in row}
    parts = {
        f"{outer}.{inner}": None
        for row in rows
        for outer, value in row.items()
        if isinstance(value, dict)
        for inner in value
    }
    return [*columns, *parts]


def _value(row: dict, column: str | None) -> Any:
    """What a row has in a column, or in a part of one; None if it has none."""
    if column is None or column in row:
        return row.get(column)
    outer, _, inner = column.partition(".")
    part = row.get(outer)
    return part.get(inner) if isinstance(part, dict) else None


def _column(columns: list[str], option: str, usual: Sequence[str], role: str, name: str) -> str | None:
    """The column named by the option, or else the first with a usual name; None if there is no answer column."""
    if option in columns:
        return option
    usual_column = next((column for word in usual for column in columns if column.lower() == word), None)
    if option or (usual_column is None and role == "prompt"):
        missing = f"'{option}'.{suggestion(option, columns)}" if option else f"{' or '.join(usual)}."
        raise ConfigError(
            f"{name} has no column {missing} It has: {', '.join(columns)}. Set dataset.{role}_column to one of them."
        )
    return usual_column


def _identified(examples: list[Example]) -> list[Example]:
    """Assigns ids: the data's ids if different examples have different ones, else content hashes.

    Duplicates get the suffixes "#2", "#3" and so on.
    """
    hashes = [_digest(json.dumps([example.prompt, example.answer], sort_keys=True)) for example in examples]
    names = [example.id for example in examples]
    if "" in names or len(set(zip(names, hashes, strict=True))) > len(set(names)):
        names = hashes
    seen: Counter[str] = Counter()
    unique = []
    for example, name in zip(examples, names, strict=True):
        seen[name] += 1
        unique.append(replace(example, id=name if seen[name] == 1 else f"{name}#{seen[name]}"))
    return unique


def _digest(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()


def framed(example: Example, config: DatasetConfig) -> Example:
    """The example with the prompt template around its question and the system message before it.

    The question is the text, or the last user message of a chat. A system message makes a chat of a text.

    Raises:
        ConfigError: there is a template, and the chat has no user message.
    """
    template = config.prompt_template or "{prompt}"
    if isinstance(example.prompt, str):
        text = template.replace("{prompt}", example.prompt)
        if not config.system_prompt:
            return replace(example, prompt=text)
        messages = [{"role": "user", "content": text}]
    else:
        messages = [*example.prompt]
        asked = [at for at, message in enumerate(messages) if message["role"] == "user"]
        if config.prompt_template and not asked:
            raise ConfigError(f"{example.source}: the chat has no user message for dataset.prompt_template.")
        if asked:
            question = messages[asked[-1]]
            messages[asked[-1]] = {**question, "content": template.replace("{prompt}", question["content"])}
    if config.system_prompt and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": config.system_prompt}, *messages]
    return replace(example, prompt=messages)


def _rows(name: str, split: str, role: str) -> list[tuple[str, dict]]:
    """The rows of one split, each with its file and line, or data set and row."""
    path = Path(name).expanduser()
    if path.exists():
        rows = _local(path, split, role)
    elif on_hub(name):
        rows = [(f"{name}, row {at}", row) for at, row in enumerate(hub_rows(name, split, role), 1)]
    elif path.suffix in SUFFIXES or "/" in name or name.startswith((".", "~")):
        raise ConfigError(_missing(path))
    else:
        known = (*GENERATED, *PRESETS)
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
    base, *bounds = match.groups()
    file_split = "test" if path.stem.startswith("test") else "train"
    files = [path]
    if path.is_file() and path.suffix not in SUFFIXES:
        raise ConfigError(f"{path} is no data file: its name ends in none of {', '.join(SUFFIXES)}.")
    if path.is_dir():
        names = [f"{base}{dash}{suffix}" for dash in ("", "-*") for suffix in SUFFIXES]
        files = [file for folder in (path, path / "data") for name in names for file in sorted(folder.glob(name))]
        if not files:
            present = ", ".join(sorted(file.name for file in path.rglob("*") if file.suffix in SUFFIXES)) or "no data"
            raise ConfigError(f"{path} has no {' or '.join(names[:2])}; it holds {present}. Set dataset.{role}_split.")
    elif base not in (file_split, path.stem):
        raise ConfigError(
            f"{path} is one file and serves as split '{file_split}', not '{base}'. Set dataset.{role}_split="
            f"{file_split}, or a part such as {file_split}[90%:], or give a directory with train.jsonl and test.jsonl."
        )
    rows = [row for file in files for row in _parsed(file)]
    begin, end = (_position(bound, len(rows)) for bound in bounds)
    return rows[begin:end]


def _position(bound: str | None, count: int) -> int | None:
    """One bound of a slice of `count` rows: None, a number of rows, or a percentage, rounded as `datasets` does."""
    if bound is None:
        return None
    return round(count * int(bound[:-1]) / 100) if bound.endswith("%") else int(bound)


def _parsed(path: Path) -> list[tuple[str, dict]]:
    """The rows of a file, each with its file and line, or its row number in parquet."""
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet as pq

            return [(f"{path}, row {number}", row) for number, row in enumerate(pq.read_table(path).to_pylist(), 1)]
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError) as error:
        raise ConfigError(f"Cannot read {path}: {str(error).splitlines()[0]}.") from error
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = read_json(line)
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: not JSON ({error}).") from error
        if not isinstance(row, dict):
            raise ConfigError(f"{path}, line {number}: must be an object with columns, not {line[:60]!r}.")
        rows.append((f"{path}, line {number}", row))
    return rows
