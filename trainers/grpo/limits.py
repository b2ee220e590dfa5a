"""Refuses what would change what TRL samples and `reusing` cannot obey, so that nothing is ignored silently."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig

from specrl.rollout.config import RolloutConfig
from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.engines.local.engine import TransformersEngine
from specrl.rollout.types import RolloutError
from specrl.trainers.weights import check_shared

if TYPE_CHECKING:
    from trl import GRPOConfig

logger = logging.getLogger(__name__)
INSTALL = "Install trl==1.16.0"
SAMPLED_BY = "responses are sampled by temperature, top_k and top_p alone"
MASKS = "min_p", "repetition_penalty", "vllm_structured_outputs_regex"
"""Options of GRPOConfig that change what is sampled and that no keyed sampler has."""
OF_ARGS = {
    "max_new_tokens": "max_completion_length",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
}
"""Entry of a generation config -> the TRL option that sets it, which is supported."""
ACCEPTED = frozenset(
    (
        *("cache_implementation", "disable_compile", "use_cache"),  # affect time and memory only
        *("bos_token_id", "decoder_start_token_id", "pad_token_id"),  # affect no prompt or response of a decoder
        *("early_stopping", "length_penalty"),  # affect beam search only
        *("max_length", "transformers_version"),  # max_new_tokens has priority
        *("output_attentions", "output_hidden_states"),  # affect what transformers' generate returns
        *("stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens"),  # vLLM obeys them
        *("seed", "detokenize", "skip_special_tokens", "spaces_between_special_tokens"),  # affect no keyed request
    )
)
"""Entries of generation configs and of `generation_kwargs` that may have any value."""
TURNS = "tools", "environment_factory"
"""Arguments of a trainer by which a conversation may have several turns."""


def check_trl() -> None:
    """Raises RolloutError for an untested TRL: specrl overrides and calls private methods of its trainers.

    TRL is an optional package, so an environment may have any version of it.
    """
    if not version("trl").startswith("1.16."):
        raise RolloutError(f"specrl relies on methods of trl 1.16, and this is trl {version('trl')}. {INSTALL}")


def check_class(trainer_class: type) -> None:
    """Raises RolloutError unless `reusing` can override how this class generates."""
    check_trl()
    single_turn = trainer_class._generate_single_turn  # type: ignore[attr-defined]  # of TRL's trainers
    if not single_turn.__module__.startswith("trl."):
        raise RolloutError(
            f"{trainer_class.__name__} overrides _generate_single_turn, and so does reusing(): one of the two would be "
            "ignored. Apply reusing() to a class without that method"
        )


def check_config(config: RolloutConfig) -> None:
    """Raises RolloutError for options of reuse that need `specrl.train`."""
    if config.engine != "transformers" or config.lossy or config.cache.start_from:
        raise RolloutError(
            "reusing() accepts drafts by the exact rule, on the engine that TRL's arguments name (use_vllm). "
            "rollout.engine=vllm, acceptance=lenient, judged or routed, and cache.start_from need "
            "python -m specrl.train"
        )


def check_args(args: GRPOConfig, given: Mapping[str, Any], config: RolloutConfig) -> None:
    """Raises RolloutError for arguments of a trainer that TRL supports and `reusing` does not.

    Args:
        args: the trainer's configuration.
        given: all arguments of its constructor, by name.
        config: the rollout options.
    """
    _check_entries("GRPOConfig", {name: getattr(args, name, None) for name in MASKS}, {})
    entries: Any = args.generation_kwargs or {}  # GRPOConfig reads a JSON text into a dict
    _check_entries("generation_kwargs", entries, _supported(args))
    if args.temperature <= 0:
        raise _refused(f"temperature={args.temperature!r}", "the loss divides logits by it. Use temperature=1.0")
    if given.get("rollout_func") is not None:
        raise _refused("rollout_func", "it would generate instead of specrl. Leave one of the two out")
    if not args.use_vllm:
        return
    if config.fill not in ("auto", 0) and args.vllm_mode == "server":
        raise _refused(
            f"RolloutConfig(fill={config.fill}) with vllm_mode='server'",
            "a server begins rows of the next batch between its calls, and no row joins a pass of another batch. Leave "
            "it out, or use vllm_mode='colocate'",
        )
    if config.drafter:
        raise _refused(
            f"RolloutConfig(drafter={config.drafter!r}) with use_vllm=True",
            "the vLLM that TRL starts has no draft model. Leave the drafter out, use_vllm=False, or take "
            "python -m specrl.train",
        )
    if args.vllm_mode == "colocate" and args.vllm_tensor_parallel_size > 1:
        raise _refused(
            f"vllm_tensor_parallel_size={args.vllm_tensor_parallel_size} with vllm_mode='colocate'",
            "it has not been tried. Use vllm_tensor_parallel_size=1, or vllm_mode='server'",
        )
    turns = [name for name in TURNS if given.get(name)]
    if args.vllm_mode == "server" and turns and args.world_size > 1:
        raise _refused(
            f"{turns[0]} with vllm_mode='server' and {args.world_size} processes",
            "TRL gathers the rows of all processes in every turn, and one process may have more turns than another. "
            "Use vllm_mode='colocate', or one process",
        )


def check_trainer(trainer: Any) -> None:
    """Raises RolloutError for what a trainer has only after its construction.

    Warns once where TRL alone samples with dropout. Refuses a model with attention or logits of a kind that the
    transformers engine does not know.
    """
    check_args(trainer.args, {"rollout_func": getattr(trainer, "rollout_func", None)}, trainer.specrl_config)
    if trainer.use_vllm:
        return  # it samples without dropout under TRL too
    check_shared(False, trainer.accelerator)
    entries = vars(trainer.generation_config)
    _check_entries(
        "trainer.generation_config", entries, _supported(trainer.args) | {"eos_token_id": trainer.eos_token_ids}
    )
    # where TRL leaves an entry unset, transformers' generate uses that of the model's config
    model = trainer.accelerator.unwrap_model(trainer.model)
    inherited = {name: value for name, value in vars(model.generation_config).items() if entries.get(name) is None}
    _check_entries("model.generation_config", inherited, {})
    layers = any(isinstance(module, torch.nn.Dropout) and module.p for module in model.modules())
    if layers or getattr(model.config, "attention_dropout", None):
        logger.warning(
            "The model has dropout. TRL alone samples responses with it; reusing() samples without, as in evaluation."
        )
    try:
        TransformersEngine(model, SamplingParams(frozenset(trainer.eos_token_ids)))
    except RolloutError as error:
        raise RolloutError(f"reusing() cannot sample from this model: {error}. Train it with TRL alone") from error


def _supported(args: GRPOConfig) -> dict[str, Any]:
    """The values that TRL's options set in a generation config."""
    return {"do_sample": True} | {name: getattr(args, option) for name, option in OF_ARGS.items()}


def _check_entries(where: str, entries: Mapping[str, Any], supported: Mapping[str, Any]) -> None:
    """Raises RolloutError for settings of sampling that are neither supported nor transformers' default.

    Args:
        where: what has the settings, for the message.
        supported: settings that are supported, with their values.
    """
    neutral = GenerationConfig._get_default_generation_params() | dict(supported)
    for name, value in entries.items():
        if value is None or value == neutral.get(name) or name.startswith("_") or name in ACCEPTED:
            continue
        remedy = f"{SAMPLED_BY}. Leave it out, or set it to {neutral.get(name)!r}"
        if name == "eos_token_id":
            remedy = f"TRL ends responses by the model's. Set model.generation_config.eos_token_id={value!r}"
        elif name in OF_ARGS and value > 0:
            remedy = f"GRPOConfig sets it. Use {OF_ARGS[name]}={value!r} there"
        raise _refused(f"{where}.{name}={value!r}", remedy)


def _refused(option: str, why: str) -> RolloutError:
    return RolloutError(f"reusing() does not support {option}: {why}")
