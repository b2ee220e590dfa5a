"""The console script: `specrl COMMAND key=value ...` runs the module of that name with these words."""

from __future__ import annotations

import os
import runpy
import sys

from specrl.config.load import USAGE_ERROR
from specrl.rollout.checks import suggestion

COMMANDS = {
    "train": "train a policy",
    "report": "what a run saved, alone or against baseline=DIR",
    "evaluate": "pass@k and mean reward of a policy",
    "generate": "a policy's responses to a few prompts",
    "bench": "paired rollouts with drafts and without, before anything is trained",
    "replay": "what drafting would save on the stored responses of a run",
    "cache": "check or describe stored responses",
    "drafter": "distil a draft model or a head from a policy",
    "train_router": "train a step router",
    "train_judge": "train a judge of draft tokens",
    "env": "versions, hardware and settings for a bug report",
}


def main() -> int:
    """Runs the command that the first word names; an unknown one is an error with the nearest name."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in ("", "help", "--help", "-h"):
        width = max(map(len, COMMANDS))
        print("specrl COMMAND key=value ...; help=true explains a command\n")
        print("\n".join(f"  {command:{width}}  {text}" for command, text in COMMANDS.items()))
        return 0
    if name not in COMMANDS:
        print(f"error: no command '{name}'.{suggestion(name, COMMANDS)} Known: {', '.join(COMMANDS)}.", file=sys.stderr)
        return USAGE_ERROR
    sys.argv[:2] = [f"specrl {name}"]
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as with `python -m`, so that reward functions here can be imported
    runpy.run_module(f"specrl.{name}", run_name="__main__", alter_sys=True)
    return 0  # a command ends with its own exit code


if __name__ == "__main__":
    raise SystemExit(main())
