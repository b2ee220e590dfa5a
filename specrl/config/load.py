"""The configuration of a run: loaded from `config=NAME key=value ...`, checked, saved with the run.

This module imports nothing heavy: `help=true` must answer in about a second.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from specrl.config import options
from specrl.config.options import ConfigError
from specrl.config.rules import problems
from specrl.config.schema import Config
from specrl.reward.base import RewardError
from specrl.rollout.checks import misfits, suggestion
from specrl.rollout.types import RolloutError

USAGE_ERROR = 2
RUN_ERROR = 3
INTERRUPTED = 130
TERMINATED = 143


def load(argv: Sequence[str], schema: type = Config, training: bool = True) -> Any:
    """Turns command-line words into a checked `schema` object, or into a text to print instead of running.

    Args:
        argv: `config=NAME`, options, and `config=list`, `help=true`, `help=KEY` or `dry_run=true`.
        schema: `Config`, a dataclass that extends it, or any dataclass of options; only the first two need config=NAME.
        training: apply the rules that only training needs, such as temperature above 0.

    Raises:
        ConfigError: anything that the user can correct; one line per problem.
    """
    values = options.parse(argv)
    topic, name, dry_run = (values.pop(key, "") for key in options.COMMAND_WORDS)
    if topic not in ("", "false"):
        from specrl.config.help import help_text

        return help_text(topic, schema)
    if name == "list":
        from specrl.config.help import list_configs

        return list_configs(known_configs())
    if dry_run not in ("", "true", "false"):
        raise ConfigError(f"dry_run={dry_run}: expected true or false.")
    layers = [("", values)]
    if issubclass(schema, Config):
        path = find_config(name)
        layers = [("", {"name": path.stem}), (f"{path}: ", options.read_file(path, schema)), *layers]
    elif name:
        raise ConfigError(f"config={name} has no meaning here. help=true shows the options.")
    config: Any = options.build(schema, *layers)
    is_run = isinstance(config, Config)
    if wrong := problems(config, training) if is_run else misfits(config):
        raise ConfigError("\n".join(wrong))
    if dry_run != "true":
        return config
    from specrl.run.preflight import dry_run as sizes

    return options.to_yaml(config, changed=True) + (sizes(config, training) if is_run else "")


def find_config(name: str) -> Path:
    """The file of a config: a name (in ./configs, else among the packaged ones), a YAML file or a run directory."""
    known = known_configs()
    listed = f"Known: {', '.join(known) or 'none'}. Or give a path."
    if not name:
        raise ConfigError(f"No config given. Write config=NAME. {listed} help=true explains.")
    if name in known:
        return known[name]
    try:
        path = Path(name) / "config.yaml" if Path(name).is_dir() else Path(name)
        if path.is_file():
            return path
    except OSError as error:  # such as a name that is too long
        raise ConfigError(f"config={name:.60}: {error.strerror}. {listed}") from error
    what = f"No file {name}." if path.suffix or os.sep in name else f"No config named '{name}'."
    files = {str(file.with_suffix("")): file for file in path.parent.glob("*.y*ml") if file.is_file()}
    similar = get_close_matches(str(path.with_suffix("")), files, 1, cutoff=0.8)
    near = f" Did you mean '{files[similar[0]]}'?" if similar else suggestion(path.stem, known)
    raise ConfigError(f"{what}{near} {listed}")


def known_configs() -> dict[str, Path]:
    """Every named config and its file; one in ./configs hides a packaged one."""
    packaged = Path(__file__).parents[1] / "configs"
    files = [*packaged.glob("*.yaml"), *Path("configs").glob("*.yaml")]
    return dict(sorted((path.stem, path) for path in files))


def run_dir(config: Config) -> Path:
    """The directory of a run; it is not created here."""
    return Path(config.output_dir) / config.name


def save(config: Config) -> Path:
    """Writes the resolved config atomically into the run directory and returns its path."""
    from specrl.rollout.durable import write_durably

    path = run_dir(config) / "config.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    text = f"# Resolved configuration of the run {config.name}\n{options.to_yaml(config)}"
    write_durably(path, text.encode())
    return path


def load_saved(path: str | Path, schema: type = Config) -> Any:
    """The config of a finished or interrupted run, from its directory or its config.yaml."""
    path = Path(path) / "config.yaml" if Path(path).is_dir() else Path(path)
    return options.build(schema, (f"{path}: ", options.read_file(path, schema)))


def run(
    main: Callable[[Any], int | None],
    argv: Sequence[str] | None = None,
    schema: type = Config,
    training: bool = True,
    words: Callable[[Sequence[str]], Sequence[str]] = list,
) -> int:
    """The body of every entry point: loads the configuration, calls `main(config)`, returns the exit code.

    Errors that a user can correct are printed as `error: ...` without a traceback; `help=true` lists the exit codes.

    Args:
        argv: by default that of the process.
        schema, training: as for `load`.
        words: applied to argv before it is loaded.
    """
    # By default libgomp spins for long at barriers, and one busy neighbour makes small models ten times slower.
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    try:
        loaded = load(words(sys.argv[1:] if argv is None else argv), schema, training)
        if isinstance(loaded, str):
            _show(loaded)
            return 0
        if isinstance(loaded, Config):
            from specrl.run.preflight import needs  # not for help: it imports what reads data

            needs(loaded, training)
        return main(loaded) or 0
    except ConfigError as error:
        return _complain("\nerror: ".join(str(error).splitlines()), USAGE_ERROR)  # each line is a problem of its own
    except (RewardError, RolloutError) as error:
        return _complain(error, RUN_ERROR)
    except KeyboardInterrupt as error:
        return _complain(str(error) or "interrupted", INTERRUPTED)


def _show(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe; keep the exit from flushing again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(message: object, code: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return code
