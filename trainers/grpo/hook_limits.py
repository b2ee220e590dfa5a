"""What ReuseRollouts cannot do as TRL would: refused in one line, never left out silently."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from transformers import ProcessorMixin

from rollout.config import RolloutConfig
from rollout.types import RolloutError

if TYPE_CHECKING:
    from trl import GRPOConfig

OWN_MODEL = "responses come from the trainer's own model"
LAW = "responses are drawn by temperature, top_k and top_p alone"
OPTIONS = {
    "use_transformers_continuous_batching": ((False,), OWN_MODEL),
    "cache_implementation": ((None,), "no cache of transformers is used"),
    "generation_kwargs": ((None, {}), LAW),
    "min_p": ((None, 0), LAW),
    "repetition_penalty": ((1.0, None), LAW),
}
"""GRPOConfig's option: its values that ask for nothing, and why another one cannot be had."""
VLLM = {
    "colocate": "python -m specrl.train rollout.engine=vllm",
    "server": "python -m specrl.train rollout.engine=vllm cluster.num_workers=1",
}
"""TRL's modes of vLLM, and what has vLLM in that place, with drafts."""

OF_THE_MODEL = (
    "bad_words_ids",
    "begin_suppress_tokens",
    "epsilon_cutoff",
    "eta_cutoff",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "min_length",
    "min_new_tokens",
    "no_repeat_ngram_size",
    "sequence_bias",
    "stop_strings",
    "suppress_tokens",
    "top_h",
)
"""Entries of a model's generation_config that TRL's generate obeys and that would change the law."""


def check_config(config: RolloutConfig) -> None:
    """Refuses options of reuse that need `specrl.train`. Raises RolloutError."""
    if config.engine != "transformers" or config.lossy or config.replay == "auto" or config.cache.start_from:
        raise RolloutError(
            "ReuseRollouts runs the trainer's own model under the exact rule; engine=vllm, law=lenient, "
            "judged or routed, replay=auto and cache.start_from need python -m specrl.train"
        )


def check_args(args: GRPOConfig) -> None:
    """Refuses options of a GRPOConfig that TRL would obey and ReuseRollouts cannot. Raises RolloutError."""
    if args.use_vllm:
        mode, near = args.vllm_mode, VLLM.get(args.vllm_mode, VLLM["colocate"])
        raise _refused(
            f"use_vllm=True (vllm_mode={mode!r})",
            f"{OWN_MODEL}, and TRL gives its vLLM no drafts. Use use_vllm=False, or rollouts by vLLM: {near}",
        )
    for name, (off, why) in OPTIONS.items():
        if (value := getattr(args, name)) not in off:
            raise _refused(f"{name}={value!r}", f"{why}. Use {name}={off[0]!r}")
    if not isinstance(top_k := args.top_k, int) or top_k < 0:
        raise _refused(f"top_k={top_k!r}", "expected a number of tokens. Use top_k=0 to keep all")


def check_trainer(trainer: Any, model: Any) -> None:
    """Refuses arguments of a GRPOTrainer that TRL would obey and ReuseRollouts cannot. Raises RolloutError."""
    for name in ("_tokenize_prompts", "_log_metric", "eos_token_ids"):
        if not hasattr(trainer, name):
            raise RolloutError(f"trl {version('trl')} has no GRPOTrainer.{name}. Install trl==1.16.0")
    check_args(trainer.args)
    if trainer.environment_factories is not None:
        raise _refused("environment_factory", "responses take one turn. Leave it out, or leave rollout_func out")
    if trainer.tools:
        names = ", ".join(getattr(tool, "__name__", str(tool)) for tool in trainer.tools)
        raise _refused(f"tools=[{names}]", "responses take one turn. Leave them out, or leave rollout_func out")
    if isinstance(trainer.processing_class, ProcessorMixin):
        name = type(trainer.processing_class).__name__
        raise _refused(f"processing_class={name}", "prompts are text. Give the tokenizer of a text model")
    for name in OF_THE_MODEL:
        if value := getattr(model.generation_config, name, None):
            raise _refused(f"model.generation_config.{name}={value!r}", f"{LAW}. Set it to None")


def _refused(what: str, why: str) -> RolloutError:
    return RolloutError(f"ReuseRollouts cannot do {what}: {why}")
