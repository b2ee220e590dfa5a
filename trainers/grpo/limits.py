"""Refuses what TRL supports and `reusing` does not, so that nothing is ignored silently."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, ProcessorMixin

from specrl.rollout.config import RolloutConfig
from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.engines.local.engine import TransformersEngine
from specrl.rollout.engines.local.probe import check_kind
from specrl.rollout.types import RolloutError
from specrl.trainers.weights import check_shared

if TYPE_CHECKING:
    from trl import GRPOConfig

logger = logging.getLogger(__name__)
INSTALL = "Install trl==1.16.0"
SAMPLED_BY = "responses are sampled by temperature, top_k and top_p alone"
OPTIONS = {
    "use_transformers_continuous_batching": ((False,), "specrl batches rows itself"),
    "cache_implementation": ((None,), "no cache of transformers is used"),
    "min_p": ((None, 0), SAMPLED_BY),
    "repetition_penalty": ((1.0, None), SAMPLED_BY),
    "vllm_structured_outputs_regex": ((None,), SAMPLED_BY),
}
"""Option of GRPOConfig -> (its values that have no effect, why other values are not supported)."""
TURNS = "tools", "environment_factory"
"""Arguments of a trainer by which a conversation may have several turns."""
SEAM = {
    "_generate": ("self", "prompts"),
    "_generate_single_turn": ("self", "prompt_ids", "images", "multimodal_fields"),
    "_log_metric": ("self", "name", "value"),
}
"""Methods of TRL's trainers that `reusing` overrides or calls -> their first arguments."""

WITHOUT_EFFECT = frozenset(
    (
        *("cache_implementation", "disable_compile", "use_cache"),  # affect time and memory only
        *("bos_token_id", "decoder_start_token_id", "pad_token_id"),  # affect no prompt or response of a decoder
        *("early_stopping", "length_penalty"),  # affect beam search only
        *("max_length", "transformers_version"),  # max_new_tokens has priority
        *("output_attentions", "output_hidden_states"),  # affect what transformers' generate returns
    )
)
"""Entries of a generation config that models or TRL set, and that do not affect what is sampled."""
OF_VLLM = frozenset(
    (
        *("stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens"),
        *("seed", "detokenize", "skip_special_tokens", "spaces_between_special_tokens"),
    )
)
"""Entries of `generation_kwargs` that vLLM obeys for keyed requests, or that do not affect what is sampled."""
OF_ARGS = {
    "max_new_tokens": "max_completion_length",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
}
"""Entry of a generation config -> the TRL option that sets it, which is supported."""


def check_trl(trainer: Any, names: Iterable[str]) -> None:
    """Raises RolloutError if a TRL trainer, or its class, lacks a name that specrl relies on.

    TRL is an optional package, so an environment may have any version of it.
    """
    if missing := [name for name in names if not hasattr(trainer, name)]:
        raise RolloutError(f"trl {version('trl')} has no GRPOTrainer.{missing[0]}, which specrl relies on. {INSTALL}")


def check_seam(trainer_class: type) -> None:
    """Raises RolloutError unless `reusing` can override how this class generates."""
    check_trl(trainer_class, SEAM)
    for name, wanted in SEAM.items():
        method = getattr(trainer_class, name)
        arguments = tuple(inspect.signature(method).parameters)
        if arguments[: len(wanted)] != wanted:
            raise RolloutError(
                f"trl {version('trl')} has {trainer_class.__name__}.{name}({', '.join(arguments)}), where specrl "
                f"relies on ({', '.join(wanted)}). {INSTALL}"
            )
    single_turn = trainer_class._generate_single_turn  # type: ignore[attr-defined]  # see SEAM
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


def check_args(args: GRPOConfig, given: Mapping[str, Any]) -> None:
    """Raises RolloutError for arguments of a trainer that TRL supports and `reusing` does not.

    Args:
        args: the trainer's configuration.
        given: all arguments of its constructor, by name.
    """
    for name, (off, why) in OPTIONS.items():
        if (value := getattr(args, name, off[0])) not in off:
            raise _refused(f"{name}={value!r}", f"{why}. Use {name}={off[0]!r}")
    if given.get("rollout_func") is not None:
        raise _refused("rollout_func", "it would generate instead of specrl. Leave one of the two out")
    if isinstance(processor := given.get("processing_class"), ProcessorMixin):
        name = type(processor).__name__
        raise _refused(f"processing_class={name}", "prompts are text. Give the tokenizer of a text model")
    entries = args.generation_kwargs or {}
    if isinstance(entries, str):  # GRPOConfig reads a JSON text into a dict, so this was set later
        raise _refused(f"generation_kwargs={entries!r}", "it is text. Use a dict")
    if args.use_vllm:
        _check_vllm(args, entries, [name for name in TURNS if given.get(name)])
    else:
        _check_entries("generation_kwargs", entries, _supported(args))
        if getattr(given.get("peft_config"), "is_prompt_learning", False):
            raise _refused(f"peft_config={type(given['peft_config']).__name__}", "it learns a prompt. Use LoRA")
    if args.max_completion_length is None:
        raise _refused("max_completion_length=None", "drafts are cut to it. Use max_completion_length=256, or more")
    if args.temperature <= 0:
        raise _refused(f"temperature={args.temperature!r}", "the loss divides logits by it. Use temperature=1.0")
    if not isinstance(top_k := args.top_k, int) or top_k < 0:
        raise _refused(f"top_k={top_k!r}", "expected a number of tokens. Use top_k=0 to keep all")
    if not args.use_vllm and isinstance(model := given.get("model"), str):
        _check_name(model, args.model_init_kwargs or {})


def check_drafter(config: RolloutConfig, args: GRPOConfig) -> None:
    """Raises RolloutError for a draft model that nothing would ask."""
    if config.drafter and args.use_vllm:
        raise _refused(
            f"RolloutConfig(drafter={config.drafter!r}) with use_vllm=True",
            "the vLLM that TRL starts has no draft model. Leave the drafter out, use_vllm=False, or take "
            "python -m specrl.train",
        )


def _check_name(model: str, options: Any) -> None:
    """Raises RolloutError if a model's configuration says that the transformers engine cannot run it."""
    used = {name: options[name] for name in ("revision", "trust_remote_code") if name in options}
    config = AutoConfig.from_pretrained(model, **used)
    with torch.device("meta"):
        outline = AutoModelForCausalLM.from_config(config, trust_remote_code=used.get("trust_remote_code", False))
    try:
        check_kind(outline)
    except RolloutError as error:
        raise _no_model(error) from error


def _check_vllm(args: GRPOConfig, entries: Mapping[str, Any], turns: list[str]) -> None:
    for name, value in entries.items():
        if name not in OF_VLLM:
            raise _refused(f"generation_kwargs.{name}={value!r}", _remedy("generation_kwargs", name, value, None))
    if args.vllm_mode == "colocate" and args.vllm_tensor_parallel_size > 1:
        raise _refused(
            f"vllm_tensor_parallel_size={args.vllm_tensor_parallel_size} with vllm_mode='colocate'",
            "it has not been tried. Use vllm_tensor_parallel_size=1, or vllm_mode='server'",
        )
    if args.vllm_mode == "server" and turns and args.world_size > 1:
        raise _refused(
            f"{turns[0]} with vllm_mode='server' and {args.world_size} processes",
            "TRL gathers the rows of all processes in every turn, and one process may have more turns than another. "
            "Use vllm_mode='colocate', or one process",
        )


def check_trainer(trainer: Any) -> None:
    """Raises RolloutError for what a trainer has only after its construction."""
    names = {name: getattr(trainer, name, None) for name in ("rollout_func", "processing_class")}
    check_args(trainer.args, names)
    if trainer.use_vllm:
        return
    check_shared(False, trainer.accelerator)
    entries = vars(trainer.generation_config)
    supported = _supported(trainer.args) | {"eos_token_id": trainer.eos_token_ids}
    _check_entries("trainer.generation_config", entries, supported)
    # where TRL leaves an entry unset, transformers' generate uses that of the model's config
    model = trainer.accelerator.unwrap_model(trainer.model)
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
            raise _refused(f"{where}.{name}={value!r}", _remedy(where, name, value, neutral.get(name)))


def _remedy(where: str, name: str, value: Any, neutral: Any) -> str:
    """Why an entry of a generation config is refused, and what works instead, in TRL's words."""
    if name == "eos_token_id":
        return f"TRL ends responses by the model's. Set model.generation_config.eos_token_id={value!r}"
    if name in OF_ARGS and value > 0:
        return f"GRPOConfig sets it. Use {OF_ARGS[name]}={value!r} there"
    if where == "generation_kwargs":
        return f"{SAMPLED_BY}. Leave {name} out"
    return f"{SAMPLED_BY}. Set it to {neutral!r}"


def check_model(trainer: Any) -> None:
    """Warns once where TRL alone samples with dropout; refuses a model whose passes specrl does not compute.

    Raises:
        RolloutError: the model has attention or logits of a kind that the transformers engine does not know.
    """
    if trainer.use_vllm:
        return  # it samples without dropout under TRL too
    model = trainer.accelerator.unwrap_model(trainer.model)
    layers = any(isinstance(module, torch.nn.Dropout) and module.p for module in model.modules())
    if layers or getattr(model.config, "attention_dropout", None):
        logger.warning(
            "The model has dropout. TRL alone samples responses with it; reusing() samples without, as in evaluation."
        )
    try:
        TransformersEngine(model, SamplingParams(frozenset(trainer.eos_token_ids)))
    except RolloutError as error:
        raise _no_model(error) from error


def _no_model(error: RolloutError) -> RolloutError:
    return RolloutError(f"reusing() cannot sample from this model: {error}. Train it with TRL alone")


def _refused(option: str, why: str) -> RolloutError:
    return RolloutError(f"reusing() does not support {option}: {why}")
