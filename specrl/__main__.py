"""The console script: `specrl COMMAND key=value ...` runs the module of that name with these words."""

from __future__ import annotations

import os
import runpy
import sys

from specrl.config.help import COMMANDS
from specrl.config.load import USAGE_ERROR
from specrl.rollout.checks import suggestion


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
