"""What `dry_run=true` prints after the options: the sizes of a run that does not begin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specrl.run import policy, preflight
from specrl.run.prompts import check_lengths, described
from specrl.run.sources import on_hub

if TYPE_CHECKING:
    from specrl.config.schema import Config


def summary(config: Config, training: bool = True) -> str:
    """The numbers of the run and its longest prompt, as comments.

    Nothing is downloaded, so data and models on the hub are named instead.

    Raises:
        ConfigError: as `preflight.check`; a tokenizer or a device that cannot be used; prompts that are too long.
    """
    preflight.needs(config)
    examples = preflight.check(config, training, read=not on_hub(config.data))
    lines = [sizes(config, len(examples["train"]) if "train" in examples else None)]
    lines += [f"{len(found)} prompts in split {split}." for split, found in examples.items()]
    model = policy.on_hub(config.model) or policy.on_hub(config.tokenizer)
    if not model:
        policy.device(config)
        tokenizer, context = policy.load_tokenizer(config), policy.context(config)
        room = context and context - config.rollout.max_new_tokens
        prompts = [example for found in examples.values() for example in found]
        longest = check_lengths(prompts, tokenizer, config.dataset, room)
        if prompts:
            lines += [f"The longest prompt has {longest} tokens.", *described(prompts[0], tokenizer, config.dataset)]
    if far := [f"model={config.model}"] * model + [f"data={config.data}"] * on_hub(config.data):
        lines.append(f"Not looked at, as on the hub: {', '.join(far)}.")
    return "".join(f"# {line}\n" for line in lines).rstrip("\n")


def sizes(config: Config, count: int | None = None) -> str:
    """One sentence with the numbers that follow from the options. count: training prompts, where they are known."""
    prompts, group, cap = config.trainer.prompts_per_step, config.rollout.group_size, config.rollout.max_new_tokens
    rows = prompts * group
    text = f"{prompts} prompts x {group} responses = {rows} rows per step, at most {rows * cap:,} new tokens"
    steps = config.trainer.max_steps
    if count := count or config.dataset.train_size:
        per_epoch = count // prompts * config.trainer.steps_per_rollout
        text += f"; {per_epoch} steps per epoch"
        steps = steps or per_epoch * config.trainer.epochs
    text += f"; {steps} steps" if steps else "; the number of steps follows from the data"
    return f"{text}; the trajectory cache stays below {config.rollout.cache.max_mb} MB."
