"""The rules options must keep. A broken one is a sentence: the value given, the reason, the nearest legal value."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from difflib import get_close_matches
from importlib.util import find_spec

from specrl.config.options import plain
from specrl.config.schema import Config
from specrl.rollout.checks import broken_rules, misfits, options, values
from specrl.trainers.config import TrainerConfig

TRACKERS = ("tensorboard", "trackio", "wandb")
"""Names of trackers, which are also those of the packages they need."""


def problems(config: Config, training: bool = True) -> list[str]:
    """Every rule that the options break. With `training=False` (evaluation) greedy and single responses are legal."""
    if wrong := misfits(config):
        return wrong
    found = [*broken_rules(config), *_run_rules(config)]
    if config.trainer.drafter.train or config.rollout.drafter or config.rollout.acceptance in ("judged", "routed"):
        from specrl.config.drafted import cotraining_rules, standing_rules

        found += [*cotraining_rules(config), *standing_rules(config, training)]
    found += [*_algorithm_rules(config), *_law_rules(config), *_size_rules(config)]
    return [*found, *_training_rules(config), *_tracker_rules(config)] if training else found


def _run_rules(c: Config) -> Iterator[str]:
    if not re.fullmatch(r"\w[\w.+=-]*", c.name):
        legal = re.sub(r"[^\w.+=-]+", "-", c.name).strip("-.+=") or "run"
        yield f"name={c.name} must be a plain file name. Try name={legal}."
    for key in ("model", "data", "output_dir"):
        if not getattr(c, key):
            yield f"{key} must not be empty. help={key} says what it can be."
    needed = {"train_size": 96, "test_size": 64} if c.trainer.eval_prompts else {"train_size": 96}
    for key, near in needed.items():
        if c.data == "arithmetic" and not getattr(c.dataset, key):
            yield f"dataset.{key}=0 takes all, but data=arithmetic has no end. Try dataset.{key}={near}."
    for key in ("train_split", "test_split"):
        if c.data == "arithmetic" and "[" in (split := getattr(c.dataset, key)):
            yield f"dataset.{key}={split} has no effect with data=arithmetic, which draws its prompts. Leave it out."


def _law_rules(c: Config) -> Iterator[str]:
    """What the loss is told of the text's law."""
    r, t = c.rollout, c.trainer
    if r.lossy and t.old_logprobs == "trainer":
        yield (
            f"trainer.old_logprobs=trainer with rollout.acceptance={r.acceptance} would hide that accepted tokens are "
            "off-policy. Try trainer.old_logprobs=engine."
        )
    if not r.lossy and r.engine == "transformers" and t.correction not in ("none", TrainerConfig.correction):
        yield (
            f"trainer.correction={t.correction} has no effect with rollout.acceptance={r.acceptance}, whose tokens are "
            "on-policy. Leave it out, or take rollout.acceptance=lenient or rollout.engine=vllm."
        )
    if (t.old_logprobs == "engine" or r.lossy) and (r.top_p < 1 or r.top_k):
        instead = "" if r.lossy else ", or trainer.old_logprobs=trainer"
        yield (
            f"rollout.top_p={r.top_p} with rollout.top_k={r.top_k} needs the trainer's own log-probs: the engine's are "
            "relative to the kept tokens, which biases the ratio by the kept mass (trl #6789). "
            f"Try rollout.top_p=1 rollout.top_k=0{instead}."
        )


def _size_rules(c: Config) -> Iterator[str]:
    gpus, shards, cap = c.cluster.gpus_per_worker, c.rollout.vllm.tensor_parallel, c.rollout.max_new_tokens
    if c.cluster.num_workers and c.rollout.engine == "vllm" and 0 < gpus < shards:
        yield (
            f"rollout.vllm.tensor_parallel={shards} needs as many GPUs in each worker, not "
            f"cluster.gpus_per_worker={gpus:g}. Try cluster.gpus_per_worker={shards}."
        )
    if c.trainer.overlong_tokens(cap) >= cap:
        yield (
            f"trainer.overlong_buffer={c.trainer.overlong_buffer} must be below rollout.max_new_tokens={cap}. "
            f"Try trainer.overlong_buffer={cap // 5}."
        )
    if c.trainer.precision == "pure_bf16" and c.lora.rank:
        yield (
            f"trainer.precision=pure_bf16 has no meaning with lora.rank={c.lora.rank}: adapters are float32 in any "
            "case. Try trainer.precision=bf16."
        )


def _algorithm_rules(c: Config) -> Iterator[str]:
    """Options that another algorithm would ignore are refused."""
    algorithm, now = c.trainer.algorithm, values(c)
    for key, option in options(Config).items():
        only = option.metadata.get("only")
        if only and (only == "ppo") != (algorithm == "ppo") and now[key] != option.default:
            yield f"{key}={plain(now[key])} has no effect with trainer.algorithm={algorithm}. Leave it out."


def _tracker_rules(c: Config) -> Iterator[str]:
    for name in c.report.trackers:
        if name not in TRACKERS:
            near = (get_close_matches(name, TRACKERS, 1, cutoff=0) or TRACKERS)[0]
            yield f"report.trackers has {name!r}, which is none of {', '.join(TRACKERS)}. Did you mean {near}?"
        elif find_spec(name) is None:
            yield f"report.trackers={plain(c.report.trackers)} needs {name}. Install it with: pip install {name}"


def _training_rules(c: Config) -> Iterator[str]:
    prompts, group, per_pass = c.trainer.prompts_per_step, c.rollout.group_size, c.trainer.rows_per_pass
    if prompts * group % c.trainer.minibatches:
        yield (
            f"prompts_per_step={prompts} with group_size={group} gives {prompts * group} rows, not divisible by "
            f"trainer.minibatches={c.trainer.minibatches}. Try trainer.minibatches="
            f"{max(n for n in range(1, c.trainer.minibatches) if prompts * group % n == 0)}."
        )
    elif per_pass and c.trainer.minibatches > 1 and prompts * group // c.trainer.minibatches % per_pass:
        rows = prompts * group // c.trainer.minibatches
        yield (
            f"trainer.rows_per_pass={per_pass} does not divide the {rows} rows of each of trainer.minibatches="
            f"{c.trainer.minibatches}. Try trainer.rows_per_pass={_near_divisors(rows, per_pass)}."
        )
    elif per_pass and prompts * group % per_pass:
        step = per_pass // math.gcd(per_pass, group)
        low = prompts // step * step
        near = [f"prompts_per_step={low + step} ({(low + step) * group})"] + [f"{low} ({low * group})"] * (low > 0)
        yield (
            f"prompts_per_step={prompts} with group_size={group} gives {prompts * group} rows, not divisible by "
            f"{per_pass} rows per pass. Try trainer.rows_per_pass={_near_divisors(prompts * group, per_pass)}, or "
            f"{' or '.join(near)}."
        )
    if 0 < c.dataset.train_size < prompts:
        yield (
            f"dataset.train_size={c.dataset.train_size} is below trainer.prompts_per_step={prompts}: there would be no "
            f"step. Try trainer.prompts_per_step={c.dataset.train_size}."
        )
    if group == 1 and (c.trainer.algorithm != "ppo" or c.trainer.advantage == "rloo"):
        what = "trainer.advantage=rloo" if c.trainer.algorithm == "ppo" else f"trainer.algorithm={c.trainer.algorithm}"
        yield f"rollout.group_size=1 gives {what} no other response to compare with. Try rollout.group_size=8."
    if c.rollout.temperature == 0:
        yield (
            "rollout.temperature=0 gives all responses of a group the same text, so there is nothing to learn from. "
            "Try rollout.temperature=1."
        )


def _near_divisors(rows: int, per_pass: int) -> str:
    """The divisors of `rows` next to `per_pass`, below and above."""
    below = max(n for n in range(1, min(rows, per_pass) + 1) if rows % n == 0)
    above = next((n for n in range(per_pass, rows + 1) if rows % n == 0), below)
    return " or ".join(dict.fromkeys((str(below), str(above))))
