"""What `dry_run=true` prints after the options that are set: the sizes of a run that does not begin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specrl.run import policy, preflight
from specrl.run.data import left_out
from specrl.run.prompts import check_lengths, described
from specrl.run.sources import on_hub

if TYPE_CHECKING:
    from specrl.config.schema import Config
    from specrl.run.data import Example


def summary(config: Config, training: bool = True) -> str:
    """The numbers of the run and its longest prompt, as comments.

    Nothing is downloaded, so data and models on the hub are named instead.

    Raises:
        ConfigError: as `preflight.check`; a model, tokenizer or device that cannot be used; prompts that are too long.
    """
    preflight.needs(config)
    examples = preflight.check(config, training, read=not on_hub(config.data))
    lines = ["All other options have their defaults; help=SECTION lists them."]
    lines += sizes(config, len(examples["train"]) if "train" in examples else None)
    if examples:
        lines.append(f"{', '.join(f'{len(found)} {split}' for split, found in examples.items())} prompts.")
    model = policy.on_hub(config.model) or policy.on_hub(config.tokenizer)
    if not model:
        lines += _prompts(config, [example for found in examples.values() for example in found])
    if far := [f"model={config.model}"] * model + [f"data={config.data}"] * on_hub(config.data):
        lines.append(f"Not looked at, as on the hub: {', '.join(far)}.")
    return "".join(f"# {line}\n" for line in lines).rstrip("\n")


def _prompts(config: Config, prompts: Sequence[Example]) -> list[str]:
    """What is to say of the prompts, once the policy can be used as the run would use it."""
    policy.device(config)
    tokenizer, model = policy.load_tokenizer(config), policy.outline(config)
    policy.ends(config, model, tokenizer)
    if config.lora.targets:
        from specrl.run.lora import check_targets

        check_targets(config.lora.targets, model)
    longest = check_lengths(prompts, tokenizer, config.dataset, policy.room(config, model))
    if not prompts:
        return []
    return [f"The longest prompt has {longest} tokens.", *described(prompts[0], tokenizer, config.dataset)]


def sizes(config: Config, count: int | None = None) -> list[str]:
    """The numbers that follow from the options. count: training prompts, where they are known."""
    prompts, group, cap = config.trainer.prompts_per_step, config.rollout.group_size, config.rollout.max_new_tokens
    rows = prompts * group
    lines = [f"{prompts} prompts x {group} responses = {rows} rows per step, at most {rows * cap:,} new tokens."]
    steps = config.trainer.max_steps
    if count := count or config.dataset.train_size:
        per_epoch = count // prompts * config.trainer.steps_per_rollout
        lines.append(f"{per_epoch} steps per epoch; {steps or per_epoch * config.trainer.epochs} steps.")
        lines += left_out(config, count)
    else:
        lines.append(f"{steps} steps." if steps else "The number of steps follows from the data.")
    if config.rollout.reuses:
        lines.append(f"The trajectory cache stays below {config.rollout.cache.max_mb} MB.")
    return lines
