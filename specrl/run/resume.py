"""What a start of a run asks of earlier ones: who holds its name, and whether it goes on as the same run."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrl.config import load as cli
from specrl.config.options import ConfigError
from specrl.config.schema import Config
from specrl.run.machine import ENVIRONMENT_FILE, machine

if TYPE_CHECKING:
    from specrl.run.data import Example

LOCK = "run.lock"
HOLDER = b"pid "
"""What the text in a held lock begins with."""
logger = logging.getLogger(__name__)


@contextmanager
def run_lock(config: Config) -> Iterator[tuple[Path, Path | None]]:
    """The run's directory, made if need be and held for the time of a `with` block, and the checkpoint to go on from.

    Of several processes of one run (RANK, as torchrun and accelerate set it) the first holds the directory and looks
    for the checkpoint; `agreed` tells the others.

    Raises:
        ConfigError: another run holds it, it cannot be written, it is used and resume=no, or the options have changed.
        CheckpointError: no checkpoint is sound.
    """
    run_dir = cli.run_dir(config)
    if int(os.environ.get("RANK", 0)):
        yield run_dir, None
        return
    with _held(run_dir, config.output_dir):
        yield run_dir, _checkpoint(config, run_dir)


@contextmanager
def _held(run_dir: Path, output_dir: str) -> Iterator[None]:
    """Locks the directory; the kernel frees it with this process, however it ends."""
    from specrl.rollout.durable import open_lock

    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = open_lock(run_dir / LOCK)
    except OSError as error:
        raise ConfigError(
            f"output_dir={output_dir}: {error.filename or run_dir} cannot be written: {error.strerror}. Check that "
            "path, or give another name=..."
        ) from error
    try:
        locked = _locked(lock, run_dir)
        try:
            yield
        finally:
            if locked:
                with suppress(OSError):
                    os.ftruncate(lock, 0)
                    fcntl.flock(lock, fcntl.LOCK_UN)  # closing would leave it to processes forked from this one
    finally:
        os.close(lock)


def _locked(lock: int, run_dir: Path) -> bool:
    """Takes the lock and writes who holds it; False on a file system without locks. Raises ConfigError."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock, 200, 0).decode("utf-8", "replace") or "it has just started"
        raise ConfigError(
            f"{run_dir} is in use by a run that lives ({holder}). Wait for its end, stop it, or give another name=..."
        ) from None
    except OSError as error:
        logger.warning(
            "%s cannot be locked (%s): do not start this name again while this run lives.", run_dir, error.strerror
        )
        return False
    if os.pread(lock, len(HOLDER), 0) not in (b"", HOLDER):
        raise ConfigError(
            f"{run_dir / LOCK} holds something that no run has written, and a run would write over it. Move it away, "
            "or give another name=..."
        )
    with suppress(OSError):  # a full disk
        os.ftruncate(lock, 0)
        os.pwrite(lock, HOLDER + f"{os.getpid()} on {os.uname().nodename} since {time.strftime('%F %T')}".encode(), 0)
    return True


def _checkpoint(config: Config, run_dir: Path) -> Path | None:
    """Where a directory that is ours goes on; None for a new run."""
    from specrl.trainers.checkpoint import marked

    saved, checkpoints = run_dir / "config.yaml", run_dir / "checkpoints"
    if saved.exists() and config.resume == "no":
        raise ConfigError(
            f"{run_dir} holds a run already. Give another name=..., go on with resume=auto, or remove the directory."
        )
    if not saved.exists():
        if marked(checkpoints):
            raise ConfigError(
                f"{run_dir} has checkpoints and no config.yaml to check them against. Give another name=..., or remove "
                "the directory."
            )
        return None
    from specrl.run.continued import sound

    return sound(config, saved, checkpoints)


def data_digests(chat_template: str = "", **splits: Sequence[Example]) -> dict[str, str]:
    """What of the data decides a run, by split, empty ones left out: ids, prompts, answers and fields, in order.

    Args: chat_template: that the prompts go through, whose content no option names.
    """
    found = {}
    for split, examples in splits.items():
        digest = blake2b(chat_template.encode(), digest_size=16)
        for example in examples:
            row = [example.id, example.prompt, example.answer, example.fields]
            digest.update(json.dumps(row, sort_keys=True, default=_text).encode() + b"\n")
        if examples:
            found[split] = digest.hexdigest()
    return found


def _text(value: Any) -> str:
    """A field that JSON has no type for, such as bytes or a date, without the address that some objects name."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def environment(device: str, processes: int) -> dict[str, Any]:
    """environment.json: the machine, and what else decides how sums are rounded."""
    import torch

    return machine() | {"device": device, "processes": processes, "threads": torch.get_num_threads()}


def keep_environment(run_dir: Path, now: dict[str, Any], resumed: bool) -> str:
    """Keeps the surroundings that a run began with in its directory; the rest says what a resumed run has otherwise.

    Returns one line, empty when nothing differs.
    """
    from specrl.rollout.durable import read_json, write_durably

    path, began = run_dir / ENVIRONMENT_FILE, None
    if resumed:
        with suppress(OSError, ValueError):
            began = read_json(path.read_bytes())
    if not isinstance(began, dict):
        write_durably(path, (json.dumps(now, ensure_ascii=False) + "\n").encode())
        return ""
    from specrl.run.continued import rounding

    return rounding(began, now)
