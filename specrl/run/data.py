"""Examples for training and evaluation; `specrl/run/prompts.py` renders them as prompts.

An example's id is its name in the trajectory cache. It does not change while the example's content does not, even if
other examples are added or removed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Literal

from specrl.config.options import ConfigError
from specrl.run.tasks import arithmetic

if TYPE_CHECKING:
    from datasets import Dataset

    from specrl.config.schema import Config, DatasetConfig


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
    """The final answer without its derivation; None if the data has no answer."""
    fields: dict
    """The data's other columns, passed to reward functions by name."""
    place: str = field(default="", compare=False)
    """File and line, or data set and row, for messages; empty if the example was generated."""


def load_examples(name: str, config: DatasetConfig, split: Literal["train", "test"], seed: int) -> list[Example]:
    """The examples of one split, in the order of the source.

    Args:
        name: `arithmetic`, `gsm8k`, `math500`, a hub id (`owner/name` or `owner/name:subset`), or a local .jsonl, .json
            or .parquet file or a directory with one such file per split.
        config: the columns, the number of examples, and the text around each prompt.
        split: what the examples are used for; `train_split` and `test_split` map it to the source's name for it, which
            may be a slice such as `train[90%:]`.
        seed: selects the subset if train_size or test_size is set. A larger subset contains every smaller one.

    Raises:
        ConfigError: unknown source or split, no such file, hub not reachable, missing column, no rows, unusable row.
    """
    size = config.train_size if split == "train" else config.test_size
    key = f"dataset.{split}_size={size}"
    if name == "arithmetic":
        if size < 1:
            raise ConfigError(f"{key}: data=arithmetic is generated without end. Set a number, such as 256.")
        problems = arithmetic(split, size, seed, config.level)
        examples = [Example(p.id, p.prompt, p.answer, {"solution": p.solution}) for p in problems]
    else:
        from specrl.run.sources import read

        examples = _identified([Example(**found) for found in read(name, config, split)])
        if size > len(examples):
            raise ConfigError(f"{key}, but {name} has {len(examples)} rows there. Set {len(examples)}, or 0 for all.")
    kept = {e.id for e in sorted(examples, key=lambda e: _digest(f"{seed}/{e.id}"))[: size or None]}
    return [_framed(example, config) for example in examples if example.id in kept]


def left_out(config: Config, count: int) -> list[str]:
    """A sentence about the training prompts left over after the last full step of an epoch, if there are any."""
    per_step = config.trainer.prompts_per_step
    rest = count % per_step
    return [f"Each epoch leaves out {rest} of {count} prompts, as trainer.prompts_per_step is {per_step}."] * bool(rest)


def to_dataset(examples: Sequence[Example]) -> Dataset:
    """A data set for TRL with the columns prompt, example_id, answer and every field. Absent fields are None."""
    from datasets import Dataset

    columns = {"prompt": [e.prompt for e in examples], "example_id": [e.id for e in examples]}
    columns |= {"answer": [e.answer for e in examples]}
    for name in dict.fromkeys(name for example in examples for name in example.fields):
        values = [example.fields.get(name) for example in examples]
        mixed = len({type(value) for value in values if value is not None}) > 1  # an Arrow column has one type
        columns[name] = [None if value is None else str(value) for value in values] if mixed else values
    return Dataset.from_dict(columns)


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


def _framed(example: Example, config: DatasetConfig) -> Example:
    """Applies the prompt template and prepends the system message, which turns a plain prompt into a chat."""
    template, system = config.prompt_template or "{prompt}", config.system_prompt
    chat = not isinstance(example.prompt, str)
    asked: list[dict] = (
        [{"role": "user", "content": example.prompt}] if isinstance(example.prompt, str) else example.prompt
    )
    *before, last = asked
    messages = [*before, {**last, "content": template.replace("{prompt}", last["content"])}]
    if system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    return replace(example, prompt=messages if chat or system else messages[0]["content"])
