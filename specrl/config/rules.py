"""The rules between options of different sections, and which options a resume may change.

A message names the value, the reason and the nearest legal value; in it `<key>` stands for `key=value`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from specrl.config.options import ConfigError
from specrl.config.schema import Config
from specrl.rollout.checks import broken_rules, filled, misfits, options, plain, values
from specrl.rollout.sections import unknown_name
from specrl.trainers.config import TrainerConfig

TRACKERS = ("tensorboard", "trackio", "wandb")
"""Trackers, by the names of their packages."""
HIGH_LEARNING_RATE = 2e-5
LONG_RESPONSE = 8192  # tokens, from which on KV memory bounds the rows of the transformers engine
DRAFTER = "Try rollout.drafter=DIR with a model or head that `python -m specrl.drafter out=DIR` makes"


def problems(config: Config, training: bool = True) -> list[str]:
    """A message for every rule that the options break. Without `training`, greedy and single responses are legal."""
    if wrong := misfits(config):
        return wrong
    rules = [_run_rules, _tool_rules, _drafter_rules, _algorithm_rules, _logprob_rules, _size_rules]
    if training:
        rules += [_training_rules, _batch_rules, _tracker_rules]
    shown = values(config)
    return [*broken_rules(config), *(filled(message, shown) for rule in rules for message in rule(config))]


def warnings(config: Config) -> list[str]:
    """A sentence for each combination of options that is legal and most probably a mistake."""
    rate = config.trainer.learning_rate
    sentences = []
    if config.trainer.precision == "pure_bf16":
        sentences.append(
            f"trainer.precision=pure_bf16: at trainer.learning_rate={rate:g} most steps are smaller than the distance "
            "between neighbouring bf16 numbers, so the weights hardly learn, and the reuse that is measured is too "
            "high. Try trainer.precision=bf16, which keeps fp32 weights."
        )
    if config.model not in ("tiny", "tiny_tools") and not config.lora.rank and rate > HIGH_LEARNING_RATE:
        sentences.append(
            f"trainer.learning_rate={rate:g} is high for training all weights of model={config.model}: language models "
            f"usually lose their abilities above {HIGH_LEARNING_RATE:g}. Try trainer.learning_rate=1e-6, as in "
            "config=grpo."
        )
    if config.rollout.engine == "transformers" and config.rollout.max_new_tokens > LONG_RESPONSE:
        sentences.append(
            f"rollout.max_new_tokens={config.rollout.max_new_tokens} with rollout.engine=transformers: this engine "
            "reserves the KV memory of the longest possible response for every row, so few rows run at a time. Try "
            "rollout.engine=vllm, which allots it in blocks as a response grows."
        )
    return sentences


def _run_rules(c: Config) -> Iterator[str]:
    if not re.fullmatch(r"\w[\w.+=-]*", c.name):
        legal = re.sub(r"[^\w.+=-]+", "-", c.name).strip("-.+=") or "run"
        yield f"<name> must be a plain file name. Try name={legal}."
    for key in ("model", "data", "output_dir"):
        if not getattr(c, key):
            yield f"{key} must not be empty. help={key} says what it can be."
    if not c.generated:
        return
    for key, near in {"train_size": 96, "test_size": 64}.items():
        if not getattr(c.dataset, key) and (key == "train_size" or c.trainer.eval_prompts):
            yield f"<dataset.{key}> takes all, but data=arithmetic has no end. Try dataset.{key}={near}."
    for key in ("train_split", "test_split"):
        if "[" in getattr(c.dataset, key):
            yield f"<dataset.{key}> has no effect with data=arithmetic, which generates its prompts. Leave it out."


def _tool_rules(c: Config) -> Iterator[str]:
    if not c.dataset.tools:
        return
    if c.rollout.lossy:
        yield "<dataset.tools> cannot be combined with <rollout.acceptance>. Try rollout.acceptance=exact."
    if c.rollout.replay:
        yield "<dataset.tools> cannot be combined with <rollout.replay>. Try rollout.replay=0."
    if c.trainer.drafter.train:
        yield "<dataset.tools> cannot be combined with <trainer.drafter.train>. Try trainer.drafter.train=false."


def _drafter_rules(c: Config) -> Iterator[str]:
    r = c.rollout
    train = c.trainer.drafter.train
    if r.drafter == "head" and not train:
        yield "<rollout.drafter> is untrained: none of its drafts would be accepted. Try trainer.drafter.train=true."
    if train and not r.drafter:
        yield f"<trainer.drafter.train> has no draft model. {DRAFTER}."
    if train:
        yield from _training_drafter_rules(c)
    if r.acceptance not in ("judged", "routed"):
        return
    if not r.drafter and (r.acceptance == "routed" or not r.sources):
        yield f"<rollout.acceptance> needs a draft model. {DRAFTER}."
    if r.uses_trained and not r.trained:
        what, kind = ("acceptance", "judge") if r.acceptance == "judged" else ("routed.by", "router")
        yield f"<rollout.{what}> needs rollout.trained, a directory from specrl.train_{kind}."


def _training_drafter_rules(c: Config) -> Iterator[str]:
    acceptance = c.rollout.acceptance
    if acceptance == "routed":
        yield (
            "<trainer.drafter.train> would change the draft model, and the router of <rollout.acceptance> was trained "
            "for it as it is. Try rollout.acceptance=exact."
        )
    elif acceptance not in ("exact", "judged"):
        yield "<trainer.drafter.train> has no effect with <rollout.acceptance>. Try rollout.acceptance=exact."


def _algorithm_rules(c: Config) -> Iterator[str]:
    """Refuses options that the algorithm would ignore."""
    shown = values(c)
    for key, option in options(Config).items():
        read = not option.only or (option.only == "ppo") == (c.trainer.algorithm == "ppo")
        if not read and shown[key] != option.default:
            yield f"<{key}> has no effect with <trainer.algorithm>. Leave it out."


def _logprob_rules(c: Config) -> Iterator[str]:
    """What the loss must know about the sampling distribution."""
    r = c.rollout
    t = c.trainer
    if r.lossy and t.old_logprobs == "trainer":
        yield (
            "<trainer.old_logprobs> with <rollout.acceptance> would hide that accepted tokens are off-policy. "
            "Try trainer.old_logprobs=engine."
        )
    if not r.lossy and r.engine == "transformers" and t.correction not in ("none", TrainerConfig.correction):
        yield "<trainer.correction> has no effect with <rollout.acceptance>, which is on-policy. Leave it out."
    if (t.old_logprobs == "engine" or r.lossy) and (r.top_p < 1 or r.top_k):
        other = "" if r.lossy else ", or trainer.old_logprobs=trainer"
        yield (
            "<rollout.top_p> with <rollout.top_k> needs the trainer's own log-probs: the engine's are relative to the "
            f"kept tokens, which biases the ratio (trl #6789). Try rollout.top_p=1 rollout.top_k=0{other}."
        )


def _size_rules(c: Config) -> Iterator[str]:
    gpus = c.cluster.gpus_per_worker
    shards = c.rollout.vllm.tensor_parallel
    cap = c.rollout.max_new_tokens
    if c.cluster.num_workers and c.rollout.engine == "vllm" and 0 < gpus < shards:
        near = f"Try cluster.gpus_per_worker={shards}"
        yield f"<rollout.vllm.tensor_parallel> needs as many GPUs per worker, not <cluster.gpus_per_worker>. {near}."
    if c.trainer.overlong_tokens(cap) >= cap:
        near = f"Try trainer.overlong_buffer={cap // 5}"
        yield f"<trainer.overlong_buffer> must be below <rollout.max_new_tokens>. {near}."
    if c.trainer.precision == "pure_bf16" and c.lora.rank:
        yield "<trainer.precision> has no effect with <lora.rank>: adapters are fp32. Try trainer.precision=bf16."


def _training_rules(c: Config) -> Iterator[str]:
    """What leaves nothing to learn from."""
    r = c.rollout
    if r.group_size == 1 and c.trainer.compares_groups:
        what = "trainer.advantage" if c.trainer.algorithm == "ppo" else "trainer.algorithm"
        yield f"<rollout.group_size> gives <{what}> no other response to compare with. Try rollout.group_size=8."
    if r.temperature == 0:
        yield "<rollout.temperature> gives all responses of a group the same text. Try rollout.temperature=1."


def _batch_rules(c: Config) -> Iterator[str]:
    parts = c.trainer.minibatches
    per_pass = c.trainer.rows_per_pass
    rows = c.trainer.prompts_per_step * c.rollout.group_size
    total = f"<trainer.prompts_per_step> with <rollout.group_size> gives {rows} rows"
    if rows == 1:
        yield "<trainer.prompts_per_step> with <rollout.group_size> gives 1 row; TRL needs 2. Try rollout.group_size=2."
    if rows % parts:
        near = max(n for n in range(1, parts) if rows % n == 0)
        yield f"{total}, not divisible by <trainer.minibatches>. Try trainer.minibatches={near}."
    elif per_pass and rows // parts % per_pass:
        per_minibatch = rows // parts
        below = max(n for n in range(1, min(per_minibatch, per_pass) + 1) if per_minibatch % n == 0)
        yield (
            f"{total}, {per_minibatch} per minibatch, not divisible by <trainer.rows_per_pass>. "
            f"Try trainer.rows_per_pass={below}."
        )


def _tracker_rules(c: Config) -> Iterator[str]:
    for name in c.report.trackers:
        if name not in TRACKERS:
            yield unknown_name("report.trackers", name, TRACKERS)
        elif find_spec(name) is None:
            yield f"report.trackers={plain(c.report.trackers)} needs {name}. Install it with: pip install {name}"


class Change(NamedTuple):
    """An option that differs between two configs."""

    key: str
    old: Any
    new: Any
    matters: bool
    """See `matters`."""

    def __str__(self) -> str:
        return f"{self.key}: {plain(self.old)} -> {plain(self.new)}"


MAY_CHANGE = {
    *("output_dir", "resume", "device", "cluster", "report", "rollout.cache"),
    *(f"rollout.{name}" for name in ("ahead", "fill", "measure_every", "rows_per_batch", "tokens_per_pass")),
    *("rollout.kv_cache_mb", "trainer.rows_per_pass", "trainer.gradient_checkpointing", "trainer.save_every"),
    *("trainer.keep_checkpoints", "trainer.eval_every", "trainer.eval_prompts", "trainer.log_completions_every"),
    *("reward.timeout_s", "reward.memory_mb", "reward.workers"),
}
"""Options and sections that a resume may change: they decide where and how fast a run goes on, and what it keeps."""
DRAFTS = {f"rollout.{name}" for name in ("sources", "drafter", "twin", "draft_tokens")}
"""Options that decide what is drafted."""
LENGTH = {"trainer.epochs", "trainer.max_steps"}


def matters(key: str, old: Config, new: Config) -> bool:
    """Whether runs that differ in this option would train differently, so that a resume must refuse the change."""
    if key == "rollout.acceptance":
        return not {old.rollout.acceptance, new.rollout.acceptance} <= {"exact", "off"}
    if key in DRAFTS:
        return new.rollout.acceptance in ("judged", "routed")  # which accept drafted text
    if key == "rollout.cache.max_mb":
        return new.rollout.accepts_old_text
    if key in LENGTH:
        return new.trainer.lr_schedule != "constant"
    return not {key, key.rpartition(".")[0]} & MAY_CHANGE


def differences(old: Config, new: Config) -> list[Change]:
    """Every option that differs between two configs, in the order of declaration."""
    before = values(old)
    after = values(new)
    return [Change(key, before[key], after[key], matters(key, old, new)) for key in before if before[key] != after[key]]


def same_settings(saved: Config, now: Config) -> None:
    """Raises ConfigError if a run would be resumed with options that train differently."""
    changed = [change for change in differences(saved, now) if change.matters]
    if not changed:
        return
    rule = ""
    if any(change.key in LENGTH for change in changed):
        rule = (
            f"trainer.lr_schedule={now.trainer.lr_schedule} spreads the learning rate over the length a run began "
            "with; only trainer.lr_schedule=constant can be made longer or shorter. Ctrl-C or SIGTERM ends a run "
            "early and saves it. "
        )
    raise ConfigError(
        f"resume=auto would go on with other settings than {Path(now.output_dir, now.name)} began with: "
        f"{'; '.join(map(str, changed))}. "
        f"{rule}Restore them, or start another name."
    )
