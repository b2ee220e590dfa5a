"""The rules options must keep. A broken one is a sentence: the value given, the reason, the nearest legal value."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from difflib import get_close_matches
from importlib.util import find_spec
from typing import TYPE_CHECKING

from reward.config import RewardConfig
from rollout.checks import UNLIMITED, limits, outside, rules
from rollout.config import RolloutConfig
from specrl.options import plain, values
from trainers.config import TrainerConfig

if TYPE_CHECKING:
    from specrl.config import Config

LIMITS = {
    **limits(RolloutConfig, "rollout."),
    "seed": (0, 2**32 - 1),
    "trainer.prompts_per_step": (1, math.inf),
    "trainer.updates_per_rollout": (1, math.inf),
    "trainer.minibatches": (1, math.inf),
    "trainer.gamma": (0, 1),
    "trainer.gae_lambda": (0, 1),
    "trainer.clip": (0, 1),
    "trainer.drafter.interval": (1, math.inf),
    "trainer.drafter.updates": (1, math.inf),
    "trainer.drafter.tokens_per_update": (1, math.inf),
    "trainer.drafter.versions": (1, math.inf),
    "trainer.correction_cap": (1, math.inf),
    "trainer.keep_checkpoints": (1, math.inf),
    "trainer.log_completions_every": (1, math.inf),
    "dataset.max_prompt_tokens": (1, math.inf),
    "reward.workers": (1, math.inf),
    "reward.start_timeout_s": (1, math.inf),
    "reward.max_failure_ratio": (0, 1),
    "cluster.tasks_per_worker": (1, math.inf),
    "cluster.cpus_per_worker": (0.01, math.inf),
    "cluster.start_timeout_s": (1, math.inf),
    "cluster.task_timeout_s": (1, math.inf),
    "cluster.max_failed_ratio": (0, 1),
    "cluster.object_store_mb": (80, math.inf),
}
"""Closed ranges of numbers; every number that is not listed must be 0 or more. Those of rollout stand at its fields."""

TRACKERS = ("tensorboard", "trackio", "wandb")
"""Names of trackers, which are also those of the packages they need."""


def problems(config: Config, training: bool = True) -> list[str]:
    """Every rule that the options break. With `training=False` (evaluation) greedy and single responses are legal."""
    numbers = {key: value for key, value in values(config).items() if isinstance(value, int | float)}
    wrong = [message for key, value in numbers.items() for message in outside(key, value, LIMITS.get(key, UNLIMITED))]
    if wrong:
        return wrong
    found = [*_run_rules(config), *_rollout_rules(config.rollout), *_cluster_rules(config)]
    found += [*_drafter_rules(config.rollout), *_cotraining_rules(config)]
    found += [*_lossy_rules(config.rollout, config.trainer), *_standing_rules(config, training)]
    found += [*_trainer_rules(config.trainer, config.rollout), *_algorithm_rules(config.trainer)]
    found += [*_reward_rules(config.reward), *_precision_rules(config)]
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
    if c.dataset.prompt_template and "{prompt}" not in c.dataset.prompt_template:
        yield f"dataset.prompt_template={c.dataset.prompt_template} has no {{prompt}}, the place of the question."


def _rollout_rules(r: RolloutConfig) -> Iterator[str]:
    yield from rules(r)
    if r.replay_gap and r.replay != "auto":
        yield (
            f"rollout.replay_gap={r.replay_gap} has no effect with rollout.replay={r.replay}. "
            "Try rollout.replay=auto, or leave it out."
        )
    if r.replay == "auto" and r.replay_gap and not r.measure_every:
        yield (
            "rollout.replay=auto chooses by what control steps measure, and rollout.measure_every=0 makes none. "
            f"Try rollout.measure_every={RolloutConfig.measure_every}."
        )
    if r.lenience != 1 and r.law != "lenient":
        yield (
            f"rollout.lenience={r.lenience} has no effect with rollout.law={r.law}. "
            "Try rollout.lenience=1, or rollout.law=lenient."
        )


def _drafter_rules(r: RolloutConfig) -> Iterator[str]:
    if r.drafter.startswith("layers") and not re.fullmatch("layers=[1-9][0-9]*", r.drafter):
        yield f"rollout.drafter={r.drafter} names no number of layers. Try rollout.drafter=layers=2."
    if r.drafter and r.law == "lenient":
        yield (
            f"rollout.drafter={r.drafter} cannot be combined with rollout.law=lenient, which drafts stored text "
            "only. Leave it out, or take rollout.law=exact."
        )
    if r.drafter and r.engine != "transformers":
        yield (
            f"rollout.drafter={r.drafter} works with rollout.engine=transformers only. "
            "Leave it out, or take rollout.engine=transformers."
        )
    if r.budget.branches > 1 and (r.engine != "transformers" or r.law == "lenient"):
        why = "rollout.law=lenient" if r.engine == "transformers" else f"rollout.engine={r.engine}"
        yield (
            f"rollout.budget.branches={r.budget.branches} has no effect with {why}, which verifies one path only. "
            "Try rollout.budget.branches=1, or rollout.engine=transformers rollout.law=exact."
        )


def _cotraining_rules(c: Config) -> Iterator[str]:
    if not c.trainer.drafter.train:
        return
    made = "rollout.drafter=DIR with a model that `python -m specrl.drafter out=DIR` makes"
    if not c.rollout.drafter:
        yield f"trainer.drafter.train=true has no draft model to train. Try {made}."
    if c.rollout.law != "exact":
        yield (
            "trainer.drafter.train=true learns from drafts that the exact rule verifies, not "
            f"rollout.law={c.rollout.law}. Try trainer.drafter.train=false, or rollout.law=exact."
        )
    if c.rollout.drafter.startswith("layers="):
        yield (
            f"trainer.drafter.train=true cannot train rollout.drafter={c.rollout.drafter}: these layers are the "
            f"policy's own, and follow it without training. Try trainer.drafter.train=false, or {made}."
        )
    if c.cluster.num_workers:
        yield (
            f"trainer.drafter.train=true cannot reach the draft models of cluster.num_workers={c.cluster.num_workers} "
            "workers. Try cluster.num_workers=0, or trainer.drafter.train=false."
        )


def _standing_rules(c: Config, training: bool) -> Iterator[str]:
    """Of the laws under which a judge or a router lets drafted text stand."""
    r = c.rollout
    if r.law not in ("judged", "routed"):
        return
    part = r.judged if r.law == "judged" else r.routed
    given = f"rollout.{r.law}.by={part.by}"
    if not r.drafter and (r.law == "routed" or part.by == "kl" or not r.sources):
        yield f"{given} needs a model that writes. Set rollout.drafter, such as layers=2 or a directory."
    if part.by in ("judge", "rsd", "arbitrage") and not part.path:
        yield f"{given} needs rollout.{r.law}.path, as specrl.train_router or specrl.train_judge writes it."
    if part.by in ("rsd", "arbitrage") and part.threshold > 1:
        yield f"rollout.routed.threshold={part.threshold} is no probability, as {given} needs. Try 0.5."
    if not all(r.routed.separators) or not r.routed.separators:
        yield r"rollout.routed.separators must name at least one text. Try rollout.routed.separators=[\n\n]."
    if r.engine != "transformers" or c.cluster.num_workers:
        yield (
            f"rollout.law={r.law} works in the trainer's process with rollout.engine=transformers only. "
            "Try rollout.engine=transformers cluster.num_workers=0."
        )
    if training and c.trainer.correction == "none" and not part.uncorrected:
        yield (
            f"rollout.law={r.law} with trainer.correction=none would train on drafted text as if the policy had "
            f"written it. Try trainer.correction=token_truncate, or say rollout.{r.law}.uncorrected=true."
        )


def _precision_rules(c: Config) -> Iterator[str]:
    if c.trainer.precision == "pure_bf16" and c.lora.rank:
        yield (
            f"trainer.precision=pure_bf16 has no meaning with lora.rank={c.lora.rank}: adapters are float32 in any "
            "case. Try trainer.precision=bf16."
        )


def _lossy_rules(r: RolloutConfig, t: TrainerConfig) -> Iterator[str]:
    if r.old_text_stands and r.replay:
        yield (
            f"rollout.replay={r.replay} cannot be combined with rollout.law={r.law}, which draws with "
            "fresh noise. Try rollout.replay=0, or rollout.law=exact."
        )
    if r.law == "lenient" and r.temperature == 0:
        yield (
            "rollout.law=lenient compares probabilities, and rollout.temperature=0 has none. "
            "Try rollout.temperature=1, or rollout.law=exact."
        )
    if r.lossy and t.old_logprobs == "trainer":
        yield (
            f"trainer.old_logprobs=trainer with rollout.law={r.law} would hide that accepted tokens are "
            "off-policy. Try trainer.old_logprobs=engine."
        )
    if not r.lossy and r.engine == "transformers" and t.correction not in ("none", TrainerConfig.correction):
        yield (
            f"trainer.correction={t.correction} has no effect with rollout.law={r.law}, whose tokens are "
            "on-policy. Leave it out, or take rollout.law=lenient or rollout.engine=vllm."
        )
    if (t.old_logprobs == "engine" or r.lossy) and (r.top_p < 1 or r.top_k):
        instead = "" if r.lossy else ", or trainer.old_logprobs=trainer"
        yield (
            f"rollout.top_p={r.top_p} with rollout.top_k={r.top_k} needs the trainer's own log-probs: the engine's are "
            "relative to the kept tokens, which biases the ratio by the kept mass (trl #6789). "
            f"Try rollout.top_p=1 rollout.top_k=0{instead}."
        )


def _cluster_rules(c: Config) -> Iterator[str]:
    v = c.rollout.vllm
    if c.cluster.address and not c.cluster.num_workers:
        yield f"cluster.address={c.cluster.address} with cluster.num_workers=0 has no use. Try cluster.num_workers=2."
    if c.cluster.dashboard and c.cluster.address:
        yield "cluster.dashboard=true has no effect on a cluster that runs already. Leave it out."
    if c.cluster.num_workers and c.rollout.engine == "vllm" and 0 < c.cluster.gpus_per_worker < v.tensor_parallel:
        yield (
            f"rollout.vllm.tensor_parallel={v.tensor_parallel} needs as many GPUs in each worker, not "
            f"cluster.gpus_per_worker={c.cluster.gpus_per_worker:g}. Try cluster.gpus_per_worker={v.tensor_parallel}."
        )
    if v.tensor_parallel > 1 and v.runner == "v1":
        yield (
            f"rollout.vllm.tensor_parallel={v.tensor_parallel} needs drafts that stay in the driver, so "
            "rollout.vllm.runner=v1 cannot serve it. Try rollout.vllm.runner=v2."
        )
    if c.rollout.engine == "vllm" and v.runner == "v2" and (c.rollout.top_p < 1 or c.rollout.top_k):
        yield (
            f"rollout.top_p={c.rollout.top_p} with rollout.top_k={c.rollout.top_k} cannot be verified exactly by "
            "rollout.vllm.runner=v2. Try rollout.top_p=1 rollout.top_k=0, or rollout.vllm.runner=v1."
        )


def _trainer_rules(t: TrainerConfig, r: RolloutConfig) -> Iterator[str]:
    if t.clip == 0:
        yield "trainer.clip=0 lets no ratio pass. Try trainer.clip=0.2."
    if 0 < t.clip_high < t.clip:
        yield f"trainer.clip_high={t.clip_high} is below trainer.clip={t.clip}. Try trainer.clip_high={t.clip}."
    if t.overlong_tokens(r.max_new_tokens) >= r.max_new_tokens:
        yield (
            f"trainer.overlong_buffer={t.overlong_buffer} must be below rollout.max_new_tokens={r.max_new_tokens}. "
            f"Try trainer.overlong_buffer={r.max_new_tokens // 5}."
        )
    for key in ("save_every", "max_steps"):
        if rest := getattr(t, key) % t.steps_per_rollout:
            steps = f"updates_per_rollout={t.updates_per_rollout}"
            steps += f" times minibatches={t.minibatches}" if t.minibatches > 1 else ""
            yield (
                f"trainer.{key}={getattr(t, key)} is no multiple of {steps}: the "
                "checkpoint would cut a rollout in two, and a resume could not repeat it. "
                f"Try trainer.{key}={getattr(t, key) - rest + t.steps_per_rollout}."
            )
    if not t.epochs and not t.max_steps:
        yield "trainer.epochs=0 and trainer.max_steps=0 train nothing. Try trainer.epochs=1."


PPO_ONLY = ("advantage", "minibatches", "kl_penalty", "kl_target", "entropy_bonus", "gamma", "gae_lambda", "critic")
GRPO_ONLY = ("loss", "scale_rewards", "ratio", "refills")


def _algorithm_rules(t: TrainerConfig) -> Iterator[str]:
    """Options that another algorithm would ignore are refused."""
    ppo = t.algorithm == "ppo"
    now, default = values(t), values(TrainerConfig())
    for key, value in now.items():
        if key.partition(".")[0] in (GRPO_ONLY if ppo else PPO_ONLY) and value != default[key]:
            yield f"trainer.{key}={plain(value)} has no effect with trainer.algorithm={t.algorithm}. Leave it out."
    if ppo and not t.beta and (t.kl_target or t.kl_penalty != "reward"):
        key = "kl_target" if t.kl_target else "kl_penalty"
        yield f"trainer.{key}={getattr(t, key)} needs a KL weight to begin with. Try trainer.beta=0.05."


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


def _reward_rules(w: RewardConfig) -> Iterator[str]:
    if not w.functions:
        yield "reward.functions=[] scores nothing. Try reward.functions=[math]."
    if w.weights and len(w.weights) != len(w.functions):
        near = (w.weights + [1.0] * len(w.functions))[: len(w.functions)]
        yield (
            f"reward.weights={plain(w.weights)} has {len(w.weights)} numbers for {len(w.functions)} functions "
            f"{plain(w.functions)}. Try reward.weights={plain(near)}."
        )
    if not all(map(math.isfinite, w.weights)):
        yield f"reward.weights={plain(w.weights)} must be finite numbers."
    if w.timeout_s == 0:
        yield "reward.timeout_s=0 leaves no time to score. Try reward.timeout_s=5."
