"""Data sets of the Hugging Face hub, by short names or hub ids."""

from __future__ import annotations

from pathlib import Path

from specrl.config.options import ConfigError

PRESETS = {
    "gsm8k": "openai/gsm8k:main",
    "math500": "HuggingFaceH4/MATH-500",
    "deepscaler": "agentica-org/DeepScaleR-Preview-Dataset",
    "deepmath": "zwhe99/DeepMath-103K",
    "dapo_math": "open-r1/DAPO-Math-17k-Processed:en",
}
"""Short names of data sets. The last three have a split `train` only."""
PRESET_ANSWERS = {"dapo_math": "solution"}
"""Columns of the answers that have an unusual name."""
SUFFIXES = (".jsonl", ".parquet")
LOCAL_HINT = "data=PATH, a .jsonl or .parquet file or a directory with train.jsonl and test.jsonl"


def on_hub(name: str) -> bool:
    """Whether `data=name` is downloaded from the hub."""
    path = Path(name).expanduser()
    local = path.exists() or path.suffix in SUFFIXES or path.is_absolute()
    return not local and (name in PRESETS or (name.count("/") == 1 and not name.startswith((".", "~"))))


def hub_rows(name: str, split: str, role: str) -> list[dict]:
    """The rows of one split. Args: name: a preset, or a hub id with an optional `:subset`; role: `train` or `test`."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError

    hub_id, _, subset = PRESETS.get(name, name).partition(":")
    try:
        return load_dataset(hub_id, subset or None, split=split).to_list()
    except DatasetNotFoundError as error:
        raise ConfigError(f"The hub has no data set '{hub_id}', or it is private. Use {LOCAL_HINT}.") from error
    except OSError as error:
        raise ConfigError(f"Cannot reach the hub for '{hub_id}': this machine is offline. Use {LOCAL_HINT}.") from error
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{hub_id}: {reason} Set dataset.{role}_split, or a subset as data={hub_id}:NAME.") from error
