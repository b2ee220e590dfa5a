"""The options that differ between two parts of a run, and whether a resume may change them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from specrl.config.load import run_dir
from specrl.config.options import ConfigError, plain
from specrl.config.schema import Config
from specrl.rollout.checks import options, values


class Change(NamedTuple):
    """An option that differs between two configs."""

    key: str
    old: Any
    new: Any
    matters: bool
    """Whether the two runs would train differently, so that a resume must refuse the change."""

    def __str__(self) -> str:
        return f"{self.key}: {plain(self.old)} -> {plain(self.new)}"


MAY_CHANGE: dict[str, Callable[[Config, Config], bool]] = {
    "": lambda old, new: False,
    "free": lambda old, new: True,
    "acceptance": lambda old, new: {old.rollout.acceptance, new.rollout.acceptance} <= {"exact", "off"},
    "drafts": lambda old, new: new.rollout.acceptance not in ("judged", "routed"),  # which accept drafted text
    "old text": lambda old, new: not new.rollout.accepts_old_text,
    "length": lambda old, new: new.trainer.lr_schedule == "constant",
}
"""Whether an option may change on resume, by the `resume` of its field."""


def differences(old: Config, new: Config) -> list[Change]:
    """Every option that differs between two configs, in the order of declaration."""
    before = values(old)
    after = values(new)
    return [
        Change(key, before[key], after[key], matters=not MAY_CHANGE[option.resume](old, new))
        for key, option in options(Config).items()
        if before[key] != after[key]
    ]


def same_settings(saved: Config, now: Config) -> None:
    """Raises ConfigError if a run would be resumed with options that train differently."""
    changed = [change for change in differences(saved, now) if change.matters]
    if not changed:
        return
    rule = ""
    if any(options(Config)[change.key].resume == "length" for change in changed):
        rule = (
            f"trainer.lr_schedule={now.trainer.lr_schedule} spreads the learning rate over the length a run began "
            "with; only trainer.lr_schedule=constant can be made longer or shorter. Ctrl-C or SIGTERM ends a run "
            "early and saves it. "
        )
    raise ConfigError(
        f"resume=auto would go on with other settings than {run_dir(now)} began with: {'; '.join(map(str, changed))}. "
        f"{rule}Restore them, or start another name."
    )
