"""Configuration of a run: load it from `config=NAME key=value ...`, check it, explain it, keep it with the run.

No heavy imports: `help=true` must answer in about a second.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from reward.base import RewardError
from reward.config import RewardConfig
from rollout.config import ClusterConfig, RolloutConfig, doc
from rollout.types import RolloutError
from specrl import needs, options
from specrl.checks import problems
from specrl.help import help_text, updated_page
from specrl.options import ConfigError, suggestion
from trainers.config import TrainerConfig

USAGE_ERROR, RUN_ERROR, INTERRUPTED, TERMINATED = 2, 3, 130, 143


@dataclass
class DatasetConfig:
    train_split: str = doc("train", "split that training prompts are taken from")
    test_split: str = doc("test", "split that evaluation prompts are taken from")
    train_size: int = doc(0, "prompts of the training split; 0 takes all, data=arithmetic needs a number")
    test_size: int = doc(0, "prompts of the test split; 0 takes all, data=arithmetic needs a number")
    prompt_column: str = doc("", "column of the question; empty finds the usual names")
    answer_column: str = doc("", "column of the reference answer; empty finds the usual names")
    level: Literal["easy", "medium", "hard", "mixed"] = doc("mixed", "difficulty of data=arithmetic")
    system_prompt: str = doc("", "system message before each question; empty sends none")
    prompt_template: str = doc("", "text around each question, with {prompt} in its place; empty leaves it as it is")
    max_prompt_tokens: int = doc(512, "longest prompt in tokens; longer ones are refused before training")


@dataclass
class LoraConfig:
    rank: int = doc(0, "rank of the adapters; 0 trains all weights")
    alpha: float = doc(32.0, "scale of the adapters; the update is multiplied by alpha/rank")
    targets: list[str] = field(
        default_factory=list,
        metadata={"help": "names of the adapted layers; empty adapts all linear layers but the output head"},
    )


@dataclass
class ReportConfig:
    baseline: str = doc("", "run directory to compare with in the final report; empty compares with the control steps")
    plots: bool = doc(True, "draw report.png when matplotlib is installed")
    trackers: list[str] = field(
        default_factory=list, metadata={"help": "also log every step to these: tensorboard, trackio, wandb"}
    )


@dataclass
class Config:
    name: str = doc("", "name of the run and of its directory; the config file's name when not given")
    output_dir: str = doc("outputs", "directory that holds the run directories")
    seed: int = doc(0, "seed of weights, data order and rollout noise")
    resume: Literal["no", "auto"] = doc("no", "auto: go on from the newest checkpoint of this name, or start the run")
    model: str = doc("tiny", "policy: tiny (embedded, no download), a hub id or a local directory")
    tokenizer: str = doc("", "hub id or local directory; empty takes the model's")
    trust_remote_code: bool = doc(False, "let the model repository run its own Python code")
    revision: str = doc("", "branch, tag or commit of the model on the hub; empty takes its default")
    device: str = doc("auto", "auto, cpu, cuda or cuda:N")
    data: str = doc(
        "arithmetic", "arithmetic (generated), gsm8k, math500, a hub id, or a .jsonl/.parquet file or directory"
    )
    dataset: DatasetConfig = field(
        default_factory=DatasetConfig,
        metadata={"help": "which examples of `data` are used, and how they become prompts"},
    )
    lora: LoraConfig = field(
        default_factory=LoraConfig, metadata={"help": "low-rank adapters instead of full training"}
    )
    rollout: RolloutConfig = field(
        default_factory=RolloutConfig, metadata={"help": "generation and reuse of responses"}
    )
    trainer: TrainerConfig = field(
        default_factory=TrainerConfig, metadata={"help": "the policy-gradient update, checkpoints and evaluation"}
    )
    reward: RewardConfig = field(default_factory=RewardConfig, metadata={"help": "how responses are scored"})
    cluster: ClusterConfig = field(default_factory=ClusterConfig, metadata={"help": "rollout workers on a Ray cluster"})
    report: ReportConfig = field(default_factory=ReportConfig, metadata={"help": "the final report and trackers"})

    scores: ClassVar[bool] = True
    """Whether the command asks the rewards."""

    @property
    def splits(self) -> tuple[Literal["train", "test"], ...]:
        """What the command reads of the data."""
        return ("train", "test") if self.trainer.eval_prompts else ("train",)


def load(argv: Sequence[str], schema: type = Config, training: bool = True) -> Any:
    """Turn command-line words into a checked `schema` object, or into the text (str) to print instead of running.

    Args:
        argv: `config=NAME`, options, and `config=list`, `help=true`, `help=KEY` or `dry_run=true`.
        schema: `Config`, a dataclass that extends it, or any dataclass of options; only the first two need config=NAME.
        training: apply the rules that only training needs, such as temperature above 0.

    Raises:
        ConfigError: everything a user can put right; one line per problem.
    """
    values = options.parse(argv)
    topic, name, dry_run = (values.pop(key, "") for key in ("help", "config", "dry_run"))
    if topic not in ("", "false"):
        return help_text(topic, schema)
    if name == "list":
        return list_configs()
    if dry_run not in ("", "true", "false"):
        raise ConfigError(f"dry_run={dry_run}: expected true or false.")
    layers = [("", values)]
    if issubclass(schema, Config):
        path = find_config(name)
        layers = [("", {"name": path.stem}), (f"{path}: ", options.read_file(path, schema)), *layers]
    elif name:
        raise ConfigError(f"config={name} has no meaning here. help=true shows the options.")
    config = options.build(schema, *layers)
    if isinstance(config, Config) and (found := problems(config, training)):
        raise ConfigError("\n".join(found))
    if dry_run == "true":
        from specrl.preflight import summary

        return options.to_yaml(config) + (summary(config, training) if isinstance(config, Config) else "")
    return config


def find_config(name: str) -> Path:
    """The file of a config: a name (in ./configs, else among the packaged ones), a YAML file or a run directory."""
    known = known_configs()
    listed = f"Known: {', '.join(known) or 'none'}. Or give a path."
    if not name:
        raise ConfigError(f"No config given. Write config=NAME. {listed} help=true explains.")
    if name in known:
        return known[name]
    path = Path(name) / "config.yaml" if Path(name).is_dir() else Path(name)
    if path.is_file():
        return path
    what = f"No file {name}." if Path(name).suffix or os.sep in name else f"No config named '{name}'."
    raise ConfigError(f"{what}{suggestion(Path(name).stem, known)} {listed}")


def known_configs() -> dict[str, Path]:
    """Every named config and its file; ./configs goes before the packaged directory."""
    here = Path(__file__).parent
    packaged = next((folder for folder in (here / "configs", here.parent / "configs") if folder.is_dir()), here)
    files = [*packaged.glob("*.yaml"), *Path("configs").glob("*.yaml")]
    return dict(sorted((path.stem, path) for path in files))


def list_configs() -> str:
    """One line per named config: the name and the first comment line of its file."""
    lines = []
    for name, path in known_configs().items():
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        lines.append(f"{name:16}  {first.lstrip('# ') if first.startswith('#') else path}")
    return "\n".join(lines) or "No configs here. Give config=PATH."


def run_dir(config: Config) -> Path:
    """Directory of a run; not created here."""
    return Path(config.output_dir) / config.name


def save(config: Config) -> Path:
    """Write the resolved config into the run directory, whole or not at all, and return its path."""
    from rollout.durable import write_durably

    path = run_dir(config) / "config.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    text = f"# Resolved configuration of the run {config.name}\n{options.to_yaml(config)}"
    write_durably(path, text.encode())
    return path


def load_saved(path: str | Path, schema: type = Config) -> Any:
    """The config of a finished or interrupted run, from its directory or its config.yaml."""
    path = Path(path) / "config.yaml" if Path(path).is_dir() else Path(path)
    return options.build(schema, (f"{path}: ", options.read_file(path, schema)))


class Change(NamedTuple):
    """An option that differs between two configs."""

    key: str
    old: Any
    new: Any
    matters: bool
    """True when the two runs would not train the same way; such a change must not pass unnoticed in a resume."""

    def __str__(self) -> str:
        return f"{self.key}: {options.plain(self.old)} -> {options.plain(self.new)}"


NEUTRAL = re.compile(
    r"resume|output_dir|device|report\..*|cluster\..*"
    r"|rollout\.(cache\..*|budget\..*|rows_per_batch|tokens_per_pass|logits_mb|measure_every)"
    r"|trainer\.(rows_per_pass|gradient_checkpointing|save_.*|keep_.*|eval_.*|log_.*)"
    r"|reward\.(workers|memory_mb|timeout_s|start_timeout_s|max_failure_ratio)"
)


def differences(old: Config, new: Config) -> list[Change]:
    """Every option that two configs of a run do not share, in the order of declaration."""
    before, after = options.values(old), options.values(new)
    return [
        Change(key, before[key], value, _matters(key, before, after))
        for key, value in after.items()
        if value != before[key]
    ]


def _matters(key: str, before: dict[str, Any], after: dict[str, Any]) -> bool:
    law = after["rollout.law"]
    if key == "rollout.law":
        return not {before[key], law} <= {"exact", "off"}
    if key in ("rollout.budget.window", "rollout.cache.max_mb"):  # drafts decide nothing, judged text does
        return law == "judged"
    if key == "rollout.measure_every":
        return after["rollout.replay"] == "auto"  # whose keys follow from what control steps measure
    if key in ("rollout.drafter", "rollout.sources"):  # drafts decide nothing, unless their text stands
        return law in ("judged", "routed")
    if key in ("trainer.epochs", "trainer.max_steps"):
        return after["trainer.lr_schedule"] != "constant"
    return not NEUTRAL.fullmatch(key)


def run(
    main: Callable[[Any], int | None], argv: Sequence[str] | None = None, schema: type = Config, training: bool = True
) -> int:
    """The body of every entry point: load the configuration, call `main(config)`, return the exit code.

    Errors that a user can act on are printed as `error: ...` without a traceback; the codes are in `help=true`.
    """
    # By default libgomp spins for long at barriers, and one busy neighbour makes small models ten times slower.
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    try:
        loaded = load(sys.argv[1:] if argv is None else argv, schema, training)
        if isinstance(loaded, str):
            return _show(loaded)
        if isinstance(loaded, Config):
            needs.check(loaded)
        return main(loaded) or 0
    except ConfigError as error:
        return _complain(error, USAGE_ERROR)
    except (RewardError, RolloutError) as error:
        return _complain(error, RUN_ERROR)
    except KeyboardInterrupt as error:
        return _complain(str(error) or "interrupted", INTERRUPTED)


def _show(text: str) -> int:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough; keep the exit from flushing once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _complain(message: object, code: int) -> int:
    for line in str(message).splitlines():
        print(f"error: {line}", file=sys.stderr)
    return code


if __name__ == "__main__":
    target = Path(__file__).parents[1] / "docs" / "configuration.md"
    target.write_text(updated_page(target.read_text(encoding="utf-8"), Config), encoding="utf-8")
    print(f"renewed {target}")
