"""Refuses options that TRL supports and ReuseRollouts does not, so that none is ignored silently."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from transformers import GenerationConfig, ProcessorMixin

from specrl.rollout.config import RolloutConfig
from specrl.rollout.types import RolloutError

if TYPE_CHECKING:
    from trl import GRPOConfig

OWN_MODEL = "responses come from the trainer's own model"
SAMPLED_BY = "responses are sampled by temperature, top_k and top_p alone"
OPTIONS = {
    "use_transformers_continuous_batching": ((False,), OWN_MODEL),
    "cache_implementation": ((None,), "no cache of transformers is used"),
    "min_p": ((None, 0), SAMPLED_BY),
    "repetition_penalty": ((1.0, None), SAMPLED_BY),
}
"""Option of GRPOConfig -> (its values that have no effect, why other values are not supported)."""
VLLM = {
    "colocate": "python -m specrl.train rollout.engine=vllm",
    "server": "python -m specrl.train rollout.engine=vllm cluster.num_workers=1",
}
"""TRL's vLLM mode -> the command that uses vLLM in the same way, with drafts."""

WITHOUT_EFFECT = frozenset(
    (
        *("cache_implementation", "disable_compile", "use_cache"),  # affect time and memory only
        *("bos_token_id", "decoder_start_token_id", "pad_token_id"),  # affect no prompt or response of a decoder
        *("early_stopping", "length_penalty"),  # affect beam search only
        *("max_length", "transformers_version"),  # max_new_tokens has priority
    )
)
"""Entries of a generation config that models or TRL set, and that do not affect what is sampled."""
OF_ARGS = {
    "max_new_tokens": "max_completion_length",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
}
"""Entry of a generation config -> the TRL option that sets it, which ReuseRollouts supports."""


def check_trl(trainer: Any, names: Iterable[str]) -> None:
    """Raises RolloutError if a GRPOTrainer, or its class, lacks a name that specrl relies on.

    TRL is an optional package, so an environment may have any version of it.
    """
    if missing := [name for name in names if not hasattr(trainer, name)]:
        raise RolloutError(
            f"trl {version('trl')} has no GRPOTrainer.{missing[0]}, which specrl relies on. Install trl==1.16.0"
        )


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
        command = VLLM.get(args.vllm_mode, VLLM["colocate"])
        raise _refused(
            f"use_vllm=True (vllm_mode={args.vllm_mode!r})",
            f"{OWN_MODEL}, and TRL gives its vLLM no drafts. Use use_vllm=False, or rollouts by vLLM: {command}",
        )
    for name, (off, why) in OPTIONS.items():
        if (value := getattr(args, name)) not in off:
            raise _refused(f"{name}={value!r}", f"{why}. Use {name}={off[0]!r}")
    entries = args.generation_kwargs or {}
    if isinstance(entries, str):  # GRPOConfig reads a JSON text into a dict, so this was set later
        raise _refused(f"generation_kwargs={entries!r}", "it is text. Use a dict")
    _check_entries("generation_kwargs", entries, _supported(args))
    if not isinstance(top_k := args.top_k, int) or top_k < 0:
        raise _refused(f"top_k={top_k!r}", "expected a number of tokens. Use top_k=0 to keep all")


def check_trainer(trainer: Any, model: Any) -> None:
    """Raises RolloutError for arguments of a GRPOTrainer that TRL supports and ReuseRollouts does not."""
    check_trl(trainer, ("_tokenize_prompts", "_log_metric", "eos_token_ids", "generation_config"))
    check_args(trainer.args)
    if trainer.environment_factories is not None:
        raise _refused("environment_factory", "responses take one turn. Leave it out, or leave rollout_func out")
    if trainer.tools:
        names = ", ".join(getattr(tool, "__name__", str(tool)) for tool in trainer.tools)
        raise _refused(f"tools=[{names}]", "responses take one turn. Leave them out, or leave rollout_func out")
    if isinstance(trainer.processing_class, ProcessorMixin):
        name = type(trainer.processing_class).__name__
        raise _refused(f"processing_class={name}", "prompts are text. Give the tokenizer of a text model")
    entries = vars(trainer.generation_config)
    supported = _supported(trainer.args) | {"eos_token_id": trainer.eos_token_ids}
    _check_entries("trainer.generation_config", entries, supported)
    # where TRL leaves an entry unset, transformers' generate uses that of the model's config
    inherited = {name: value for name, value in vars(model.generation_config).items() if entries.get(name) is None}
    _check_entries("model.generation_config", inherited, {})


def _supported(args: GRPOConfig) -> dict[str, Any]:
    """The values that TRL's options set in a generation config."""
    return {"do_sample": True} | {name: getattr(args, option) for name, option in OF_ARGS.items()}


def _check_entries(where: str, entries: Mapping[str, Any], supported: Mapping[str, Any]) -> None:
    """Raises RolloutError for entries of a generation config that are neither supported nor transformers' default.

    Args:
        where: name of the config in the message.
        supported: entries that are supported, with their values.
    """
    neutral = GenerationConfig._get_default_generation_params() | dict(supported)
    for name, value in entries.items():
        if value is None or name.startswith("_") or name in WITHOUT_EFFECT:
            continue
        if value != neutral.get(name):
            raise _refused(f"{where}.{name}={value!r}", f"{SAMPLED_BY}. Set it to {neutral.get(name)!r}")


def _refused(option: str, why: str) -> RolloutError:
    return RolloutError(f"ReuseRollouts does not support {option}: {why}")
