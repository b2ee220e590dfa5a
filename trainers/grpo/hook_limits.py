"""Refuses options that TRL supports and ReuseRollouts does not, so that none is ignored silently."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from transformers import ProcessorMixin

from specrl.rollout.config import RolloutConfig
from specrl.rollout.types import RolloutError

if TYPE_CHECKING:
    from trl import GRPOConfig

OWN_MODEL = "responses come from the trainer's own model"
LAW = "responses are drawn by temperature, top_k and top_p alone"
OPTIONS = {
    "use_transformers_continuous_batching": ((False,), OWN_MODEL),
    "cache_implementation": ((None,), "no cache of transformers is used"),
    "min_p": ((None, 0), LAW),
    "repetition_penalty": ((1.0, None), LAW),
}
"""Option of GRPOConfig -> (its values that have no effect, why other values are not supported)."""
VLLM = {
    "colocate": "python -m specrl.train rollout.engine=vllm",
    "server": "python -m specrl.train rollout.engine=vllm cluster.num_workers=1",
}
"""TRL's vLLM mode -> the command that uses vLLM in the same way, with drafts."""

NEUTRAL: dict[str, tuple] = {
    "assistant_ensemble_weight": (None,),
    "bad_words_ids": (None, []),
    "begin_suppress_tokens": (None, []),
    "constraints": (None, []),
    "diversity_penalty": (0.0,),
    "dola_layers": (None,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "eos_token_id": (None,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "exponential_decay_length_penalty": (None,),
    "force_words_ids": (None, []),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "guidance_scale": (None, 1),
    "max_time": (None,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "min_p": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (None, 0),
    "remove_invalid_values": (False,),
    "repetition_penalty": (1.0,),
    "sequence_bias": (None, {}),
    "stop_strings": (None, []),
    "suppress_tokens": (None, []),
    "token_healing": (False,),
    "top_h": (None,),
    "typical_p": (1.0,),
    "watermarking_config": (None,),
}
"""Entry of a generation config that affects sampling -> its values that have no effect; None never has one."""
WITHOUT_EFFECT = frozenset(
    (
        *("cache_config", "cache_implementation", "compile_config", "continuous_batching_config", "disable_compile"),
        *("low_memory", "max_cache_len", "prefill_chunk_size", "use_cache"),  # affect time and memory only
        *("assistant_confidence_threshold", "assistant_early_exit", "assistant_lookbehind", "is_assistant"),
        *("max_matching_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule"),
        *("prompt_lookup_num_tokens", "speculation_type", "target_lookbehind", "use_mtp"),  # lossless drafting
        *("output_attentions", "output_hidden_states", "output_logits", "output_scores", "return_dict_in_generate"),
        *("early_stopping", "length_penalty", "renormalize_logits"),  # affect beam search only
        *("bos_token_id", "decoder_start_token_id", "pad_token_id"),  # affect no prompt or response of a decoder
        *("max_length", "transformers_version"),  # max_new_tokens has priority
    )
)
"""Entries of a generation config that do not affect what is sampled, whatever their value."""
OF_ARGS = {
    "max_new_tokens": "max_completion_length",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
}
"""Entry of a generation config -> the TRL option that sets it, which ReuseRollouts supports."""


def check_config(config: RolloutConfig) -> None:
    """Raises RolloutError for options of reuse that need `specrl.train`."""
    if config.engine != "transformers" or config.lossy or config.cache.start_from:
        raise RolloutError(
            "ReuseRollouts runs the trainer's own model under the exact rule; engine=vllm, acceptance=lenient, "
            "judged or routed, and cache.start_from need python -m specrl.train"
        )


def check_args(args: GRPOConfig) -> None:
    """Raises RolloutError for options of a GRPOConfig that TRL supports and ReuseRollouts does not."""
    if args.use_vllm:
        mode, near = args.vllm_mode, VLLM.get(args.vllm_mode, VLLM["colocate"])
        raise _refused(
            f"use_vllm=True (vllm_mode={mode!r})",
            f"{OWN_MODEL}, and TRL gives its vLLM no drafts. Use use_vllm=False, or rollouts by vLLM: {near}",
        )
    for name, (off, why) in OPTIONS.items():
        if (value := getattr(args, name)) not in off:
            raise _refused(f"{name}={value!r}", f"{why}. Use {name}={off[0]!r}")
    entries = args.generation_kwargs or {}
    assert not isinstance(entries, str), "GRPOConfig reads a JSON string into a dict"
    _check_entries("generation_kwargs", entries, _as_asked(args))
    if not isinstance(top_k := args.top_k, int) or top_k < 0:
        raise _refused(f"top_k={top_k!r}", "expected a number of tokens. Use top_k=0 to keep all")


def check_trainer(trainer: Any, model: Any) -> None:
    """Raises RolloutError for arguments of a GRPOTrainer that TRL supports and ReuseRollouts does not."""
    check_args(trainer.args)
    for name in ("_tokenize_prompts", "_log_metric", "eos_token_ids", "generation_config"):
        if not hasattr(trainer, name):
            raise RolloutError(f"trl {version('trl')} has no GRPOTrainer.{name}. Install trl==1.16.0")
    if trainer.environment_factories is not None:
        raise _refused("environment_factory", "responses take one turn. Leave it out, or leave rollout_func out")
    if trainer.tools:
        names = ", ".join(getattr(tool, "__name__", str(tool)) for tool in trainer.tools)
        raise _refused(f"tools=[{names}]", "responses take one turn. Leave them out, or leave rollout_func out")
    if isinstance(trainer.processing_class, ProcessorMixin):
        name = type(trainer.processing_class).__name__
        raise _refused(f"processing_class={name}", "prompts are text. Give the tokenizer of a text model")
    own, inherited = vars(trainer.generation_config), vars(model.generation_config)
    asked = _as_asked(trainer.args) | {"eos_token_id": (trainer.eos_token_ids,)}
    _check_entries("trainer.generation_config", own, asked)
    # where TRL leaves an entry unset, transformers' generate uses that of the model's config
    left_open = {name: value for name, value in inherited.items() if own.get(name) is None}
    _check_entries("model.generation_config", left_open, {})


def _as_asked(args: GRPOConfig) -> dict[str, tuple]:
    """The values that TRL's options set in a generation config."""
    return {"do_sample": (True,), **{name: (getattr(args, option),) for name, option in OF_ARGS.items()}}


def _check_entries(where: str, entries: Mapping[str, Any], asked: Mapping[str, tuple]) -> None:
    """Raises RolloutError for entries of a generation config that are not known to leave sampling unchanged.

    Args:
        where: name of the config in the message.
        asked: entries that are supported, with their values.
    """
    for name, value in entries.items():
        if value is None or name.startswith("_") or name in WITHOUT_EFFECT:
            continue
        neutral = asked.get(name) or NEUTRAL.get(name, (None,))
        if value not in neutral:
            why = LAW if name in NEUTRAL or name in asked else f"{LAW}, and what this entry does is not known here"
            raise _refused(f"{where}.{name}={value!r}", f"{why}. Set it to {neutral[0]!r}")


def _refused(what: str, why: str) -> RolloutError:
    return RolloutError(f"ReuseRollouts cannot do {what}: {why}")
