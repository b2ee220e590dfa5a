"""What two configs of a run do not share, and whether it may go on with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from specrl.config.load import run_dir
from specrl.config.options import ConfigError, plain
from specrl.config.schema import Config
from specrl.rollout.checks import options, values

LENGTH = {"trainer.epochs", "trainer.max_steps"}


class Change(NamedTuple):
    """An option that differs between two configs."""

    key: str
    old: Any
    new: Any
    matters: bool
    """True when the two runs would not train the same way; such a change must not pass unnoticed in a resume."""

    def __str__(self) -> str:
        return f"{self.key}: {plain(self.old)} -> {plain(self.new)}"


MAY_CHANGE: dict[str, Callable[[Config, Config], bool]] = {
    "": lambda old, new: False,
    "free": lambda old, new: True,
    "acceptance": lambda old, new: {old.rollout.acceptance, new.rollout.acceptance} <= {"exact", "off"},
    "drafts": lambda old, new: new.rollout.acceptance not in ("judged", "routed"),  # else their text stands
    "old text": lambda old, new: not new.rollout.old_text_stands,
    "length": lambda old, new: new.trainer.lr_schedule == "constant",
}
"""Whether an option may differ in a resumed run, by the word that its field says of `resume`."""


def differences(old: Config, new: Config) -> list[Change]:
    """Every option that two configs of a run do not share, in the order of declaration."""
    before, after = values(old), values(new)
    return [
        Change(key, before[key], after[key], not MAY_CHANGE[option.metadata.get("resume", "")](old, new))
        for key, option in options(Config).items()
        if before[key] != after[key]
    ]


def same_settings(began: Config, now: Config) -> None:
    """Raises ConfigError when a run would go on with other options than it began with, and they matter."""
    changed = [change for change in differences(began, now) if change.matters]
    if not changed:
        return
    rule = ""
    if LENGTH & {change.key for change in changed}:
        rule = (
            f"trainer.lr_schedule={now.trainer.lr_schedule} spreads the learning rate over the length a run began "
            "with; only trainer.lr_schedule=constant can be made longer or shorter. Ctrl-C or SIGTERM ends a run "
            "early, saved. "
        )
    raise ConfigError(
        f"resume=auto would go on with other settings than {run_dir(now)} began with: {'; '.join(map(str, changed))}. "
        f"{rule}Restore them, or start another name."
    )
