"""The directory of a run: its lock, its checkpoints, and the checks that a run may be resumed."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from specrl.config.load import load_saved, run_dir
from specrl.config.options import ConfigError
from specrl.config.rules import same_settings
from specrl.config.schema import Config
from specrl.rollout.durable import open_lock, read_json, write_durably
from specrl.run.machine import ENVIRONMENT_FILE, machine
from specrl.trainers.checkpoint import Checkpoint, completed, newest, set_aside_damaged

if TYPE_CHECKING:
    import torch

    from specrl.run.data import Example

LOCK = "run.lock"
HOLDER = b"pid "
"""Prefix of the text in a lock file that is held."""
logger = logging.getLogger(__name__)


class RunDir:
    """The directory of the run that `config` names."""

    def __init__(self, config: Config):
        self._config = config
        self.path = run_dir(config)
        self.checkpoints = self.path / "checkpoints"

    @contextmanager
    def lock(self) -> Iterator[Checkpoint | None]:
        """Creates the directory if needed, holds its lock during a `with` block, and yields the checkpoint to resume.

        With several processes (RANK, as set by torchrun and accelerate) only the first one holds the lock and looks for
        the checkpoint; `agreed` sends it to the others. The kernel releases the lock however the process ends.

        Raises:
            ConfigError: another run holds the lock, the directory cannot be written, it holds a run and resume=no, or
                the options have changed.
            CheckpointError: all checkpoints are damaged.
        """
        if int(os.environ.get("RANK", 0)):
            yield None
            return
        lock = self._open_lock()
        try:
            locked = self._take(lock)
            try:
                yield self._checkpoint()
            finally:
                if locked:
                    with suppress(OSError):
                        os.ftruncate(lock, 0)
                        fcntl.flock(lock, fcntl.LOCK_UN)  # after a mere close, forked processes would still hold it
        finally:
            os.close(lock)

    def _open_lock(self) -> int:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            return open_lock(self.path / LOCK)
        except OSError as error:
            raise ConfigError(
                f"output_dir={self._config.output_dir}: {error.filename or self.path} cannot be written: "
                f"{error.strerror}. Check that path, or give another name=..."
            ) from error

    def _take(self, lock: int) -> bool:
        """Takes the lock and records its holder; False on a file system without locks. Raises ConfigError."""
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 200, 0).decode("utf-8", "replace") or "it has just started"
            raise ConfigError(
                f"{self.path} is in use by a running run ({holder}). Wait until it ends, stop it, or give another "
                "name=..."
            ) from None
        except OSError as error:
            logger.warning(
                "%s cannot be locked (%s): do not start this name again while this run is running.",
                self.path,
                error.strerror,
            )
            return False
        if os.pread(lock, len(HOLDER), 0) not in (b"", HOLDER):
            raise ConfigError(
                f"{self.path / LOCK} was not written by a run, and a run would overwrite it. Move it away, or give "
                "another name=..."
            )
        with suppress(OSError):  # a full disk
            os.ftruncate(lock, 0)
            holder = f"{os.getpid()} on {os.uname().nodename} since {time.strftime('%F %T')}"
            os.pwrite(lock, HOLDER + holder.encode(), 0)
        return True

    def _checkpoint(self) -> Checkpoint | None:
        """The checkpoint to resume from; None for a new run or one without checkpoints."""
        saved_config = self.path / "config.yaml"
        if not saved_config.exists():
            if completed(self.checkpoints):
                raise ConfigError(
                    f"{self.path} has checkpoints and no config.yaml to check them against. Give another name=..., or "
                    "remove the directory."
                )
            return None
        if self._config.resume == "no":
            raise ConfigError(
                f"{self.path} holds a run already. Give another name=..., resume it with resume=auto, or remove the "
                "directory."
            )
        same_settings(load_saved(saved_config), self._config)
        checkpoint = newest(self.checkpoints, text_decides=self._config.rollout.accepts_old_text)
        if checkpoint:
            set_aside_damaged(self.checkpoints, checkpoint)
        return checkpoint

    def agreed(self, checkpoint: Checkpoint | None, device: torch.device) -> Checkpoint | None:
        """The first process's checkpoint, broadcast to every process of the run."""
        if int(os.environ.get("WORLD_SIZE", 1)) == 1:
            return checkpoint
        import torch
        from accelerate import PartialState
        from accelerate.utils import broadcast

        communication = PartialState(cpu=device.type == "cpu").device
        step = torch.tensor(checkpoint.step if checkpoint else -1, device=communication)
        first_step = broadcast(step).item()
        return None if first_step < 0 else Checkpoint(self.checkpoints / f"checkpoint-{first_step}")

    def keep_environment(self, now: dict[str, Any], resumed: bool) -> str:
        """Saves the environment of a new run. Returns a warning if a resumed run may round sums differently."""
        path = self.path / ENVIRONMENT_FILE
        began = None
        if resumed:
            with suppress(OSError, ValueError):
                began = read_json(path.read_bytes())
        if not isinstance(began, dict):
            write_durably(path, (json.dumps(now, ensure_ascii=False) + "\n").encode())
            return ""
        before = rounding(began)
        after = rounding(now)
        changed = [
            f"{key}: {before[key]} -> {after[key]}" for key in after if before.get(key, after[key]) != after[key]
        ]
        if not changed:
            return ""
        return (
            f"This part of the run rounds sums differently from its beginning: {'; '.join(changed)}. The last bits of "
            "the weights may differ from an uninterrupted run's."
        )


def data_digests(chat_template: str = "", **splits: Sequence[Example]) -> dict[str, str]:
    """A digest of the ids, prompts, answers and fields, in order, of each split that is not empty.

    Args: chat_template: included because no option records its content.
    """
    digests = {}
    for split, examples in splits.items():
        digest = blake2b(chat_template.encode(), digest_size=16)
        for example in examples:
            row = [example.id, example.prompt, example.answer, example.fields]
            digest.update(json.dumps(row, sort_keys=True, default=_text).encode() + b"\n")
        if examples:
            digests[split] = digest.hexdigest()
    return digests


def same_data(began: Mapping[str, str], now: Mapping[str, str], name: str) -> dict[str, str]:
    """The digests of all splits. Raises ConfigError if a split has changed since the run began."""
    if changed := [split for split in now if began.get(split, now[split]) != now[split]]:
        raise ConfigError(
            f"resume=auto would go on with other data than the run began with: the {' and '.join(changed)} rows of "
            f"data={name} have changed, or the tokenizer's chat template. Restore the old ones, or start another name."
        )
    return {**began, **now}


def environment(device: str, processes: int) -> dict[str, Any]:
    """Content of environment.json: the machine and the other settings that affect how sums are rounded."""
    import torch

    return machine() | {"device": device, "processes": processes, "threads": torch.get_num_threads()}


def rounding(environment: dict[str, Any]) -> dict[str, str]:
    """The parts of an environment that can change the last bits of a sum."""
    versions = environment.get("versions", {})
    values: dict[str, Any] = {
        key: environment[key] for key in ("cpu", "gpus", "device", "processes", "threads") if key in environment
    }
    values |= {key: versions[key] for key in ("torch", "transformers") if key in versions}
    return {key: ", ".join(value) if isinstance(value, list) else str(value) for key, value in values.items()}


def _text(value: Any) -> str:
    """Text for a value without a JSON type, such as bytes or a date, without the memory address in some reprs."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
