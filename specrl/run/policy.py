"""Loads the policy of a run: model, tokenizer and EOS ids."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from specrl.config.options import ConfigError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from specrl.config.schema import Config
    from specrl.rollout.engines.base import EngineSpec


TINY_PATH = Path(__file__).parents[1] / "assets" / "tiny"
TOOLS_PATH = Path(__file__).parents[1] / "assets" / "tiny_tools"
EMBEDDED = {"tiny": TINY_PATH, "tiny_tools": TOOLS_PATH}
"""Policies that come with the package, by the names that `model` takes."""
SMOLLM2 = "smollm2"
"""The name of the real language model that comes from a package, see specrl.run.smollm2."""
NAMED = (*EMBEDDED, SMOLLM2)
TOKENIZER_FILES = re.compile(r"tokenizer|^vocab|^spiece|\.tiktoken$")


def trained_dtype(config: Config) -> str:
    """Data type of the weights that a run trains.

    The optimiser updates float32 weights, because most RL updates are smaller than half the distance between
    neighbouring bfloat16 numbers and would be rounded away. With adapters the base weights are frozen and can be
    bfloat16; the adapters themselves are float32.
    """
    pure = config.trainer.precision == "pure_bf16" or (config.trainer.precision == "bf16" and config.lora.rank)
    return "bfloat16" if pure else "float32"


def rollout_dtype(config: Config) -> str:
    """Data type of the weights that responses are sampled with."""
    return "float32" if config.trainer.precision == "fp32" else "bfloat16"


def load_policy(config: Config, dtype: str = "") -> tuple[PreTrainedModel, PreTrainedTokenizerBase, frozenset[int]]:
    """Loads the model onto its device, the tokenizer with a pad token, and the EOS ids.

    Args: dtype: of the weights; the default is the rollout's, for commands that do not train.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    # Otherwise only the first process would load the weights, and the others would sample from empty ones.
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    target = device(config)
    find_model(config)
    source, options = _source(config)
    with _explained(config):
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=getattr(torch, dtype or rollout_dtype(config)), **options
        )
    tokenizer = load_tokenizer(config)
    eos_ids = ends(config, model, tokenizer)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(min(eos_ids))
    model.to(target)  # type: ignore[arg-type]  # the stub of `to` lacks self
    return model, tokenizer, eos_ids


def outline(config: Config) -> PreTrainedModel:
    """The policy on the meta device: its modules and shapes without weights, so it takes no memory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    source, options = _source(config)
    with _explained(config):
        shape = AutoConfig.from_pretrained(source, **options)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(shape, trust_remote_code=config.trust_remote_code)
    with suppress(OSError):  # without such a file the model's configuration applies
        model.generation_config = GenerationConfig.from_pretrained(source, revision=options["revision"])
    return model


def ends(config: Config, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The EOS ids. Raises ConfigError if there are none, or if the tokenizer does not match the model."""
    vocabulary = model.get_input_embeddings().get_parameter("weight").shape[0]
    if len(tokenizer) > vocabulary:
        raise ConfigError(
            f"tokenizer={config.tokenizer or config.model} has {len(tokenizer)} tokens but model={config.model} knows "
            f"{vocabulary}: they do not belong together. Leave `tokenizer` empty to use the model's own."
        )
    declared = model.generation_config.eos_token_id if model.generation_config else None
    ids = declared if isinstance(declared, list) else [declared]
    eos_ids = frozenset(i for i in (*ids, tokenizer.eos_token_id) if i is not None)
    if not eos_ids:
        raise ConfigError(
            f"model={config.model} names no EOS token, nor does its tokenizer: every response would go on to "
            f"rollout.max_new_tokens={config.rollout.max_new_tokens}. Set eos_token_id in its generation_config.json, "
            "or give tokenizer=DIR with one."
        )
    return eos_ids


def prompt_limit(config: Config, model: PreTrainedModel) -> int | None:
    """Most prompt tokens that fit the model's context together with a response; None if the context is unknown.

    Raises:
        ConfigError: the response alone does not fit.
    """
    context = getattr(model.config, "max_position_embeddings", None)
    if context is None:
        return None
    cap = config.rollout.max_new_tokens
    if cap >= context:
        near = context - config.dataset.max_prompt_tokens
        raise ConfigError(
            f"rollout.max_new_tokens={cap} leaves no token for a prompt: model={config.model} has a context of "
            f"{context} tokens. Try rollout.max_new_tokens={near if near > 0 else context // 2}."
        )
    return context - cap


def load_tokenizer(config: Config) -> PreTrainedTokenizerBase:
    """Loads the tokenizer, with the templates of conversations if there are tools; it may have no pad token."""
    from transformers import AutoTokenizer

    find_tokenizer(config)
    source, options = _source(config)
    with _explained(config, tokenizer=True):
        tokenizer = AutoTokenizer.from_pretrained(config.tokenizer or source, padding_side="left", **options)
    if config.dataset.tools:  # before prompts are rendered and data digests made
        from specrl.run.toolbox import adapt

        adapt(tokenizer)
    return tokenizer


def find_model(config: Config) -> None:
    """Raises ConfigError for a directory without a model."""
    if config.model in NAMED or not is_path(config.model):
        return
    if reason := flaw(Path(config.model).expanduser()):
        raise unloadable(config, reason)


def find_tokenizer(config: Config) -> None:
    """Raises ConfigError for a directory without a tokenizer, for which transformers may create an empty one."""
    source = config.tokenizer or config.model
    path = Path(source).expanduser()
    if source in NAMED or not is_path(source):
        return
    if not path.is_dir():
        raise unloadable(config, "there is no such directory", tokenizer=True)
    if not any(TOKENIZER_FILES.search(file.name) for file in path.iterdir()):
        raise unloadable(config, "none of its files is one", tokenizer=True)


def unloadable(config: Config, reason: str, tokenizer: bool = False) -> ConfigError:
    """The error for a model or tokenizer that cannot be loaded."""
    if not tokenizer:
        return ConfigError(
            f"model={config.model} cannot be loaded: {reason}. Give `tiny`, `smollm2`, a hub id that can be reached "
            "from here, or a local directory."
        )
    if config.tokenizer:
        return ConfigError(
            f"tokenizer={config.tokenizer} cannot be loaded: {reason}. Leave `tokenizer` empty to use the model's own."
        )
    return ConfigError(
        f"model={config.model} has no tokenizer that can be loaded: {reason}. Give tokenizer=DIR_OR_HUB_ID."
    )


def _source(config: Config) -> tuple[str, dict]:
    source = config.model
    if source == SMOLLM2:
        from specrl.run.smollm2 import directory

        source = str(directory())
    source = str(EMBEDDED.get(source, source))
    return source, {"trust_remote_code": config.trust_remote_code, "revision": config.revision or None}


@contextmanager
def _explained(config: Config, tokenizer: bool = False) -> Iterator[None]:
    """Turns any failure to load the model or the tokenizer from a directory or the hub into a ConfigError."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise unloadable(config, reason, tokenizer) from error


def on_hub(name: str) -> bool:
    """Whether this is a model's id on the hub."""
    return name not in ("", *NAMED) and not is_path(name)


def is_path(name: str) -> bool:
    """Whether this must be a directory, not a hub id. OWNER/NAME is one if OWNER is a directory here."""
    path = Path(name).expanduser()
    exists = path.is_dir() or ("/" in name and path.parent.is_dir())
    return exists or path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1


def flaw(path: Path) -> str:
    """Why this cannot be a model's directory; empty if it can."""
    if not path.is_dir():
        return "there is no such directory"
    known = any((path / name).is_file() for name in ("config.json", "adapter_config.json"))
    return "" if known else "the directory has no config.json"


def device(config: Config) -> torch.device:
    """The device of the policy in this process; `auto` uses a GPU if there is one.

    With several processes on a machine, each uses the GPU of its local rank, as in accelerate.
    """
    import torch

    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device={config.device} is not known. Use auto, cpu, cuda or cuda:N.") from error
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise ConfigError(f"device={config.device}: PyTorch sees no GPU here. Use device=auto or device=cpu.")
    if device.index is None:
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]) % count) if "LOCAL_RANK" in os.environ else device
    if device.index >= count:
        raise ConfigError(f"device={config.device}: PyTorch sees {count} GPUs here, from cuda:0 on. Use device=cuda.")
    if int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > 1:
        raise ConfigError(f"device={config.device} puts all processes of this machine on one GPU. Use device=cuda.")
    return device


def engine_spec(config: Config, eos_ids: frozenset[int]) -> EngineSpec:
    """The specification that the rollout engine is built from, in this process or in a worker."""
    from specrl.rollout.engines.base import EngineSpec

    workers = config.cluster.num_workers
    return EngineSpec(
        model=_source(config)[0],
        eos_ids=eos_ids,
        rollout=config.rollout,
        dtype=rollout_dtype(config),
        device=("cuda" if config.cluster.gpus_per_worker else "cpu") if workers else str(device(config)),
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
        tokenizer=config.tokenizer,
    )


def fingerprint(config: Config, tokenizer: PreTrainedTokenizerBase) -> tuple[dict[str, str], dict[str, str]]:
    """The settings that stored trajectories depend on: (identity, sampling), see rollout.cache.memory.Fingerprint."""
    from specrl.run.prompts import chat_template

    vocabulary = json.dumps([sorted(tokenizer.get_vocab().items()), tokenizer.chat_template])
    options = config.dataset
    chat = [options.chat_template_kwargs] if chat_template(tokenizer, options) else []
    identity = {
        "tokenizer": hashlib.blake2b(vocabulary.encode(), digest_size=8).hexdigest(),
        "data": config.data,
        "prompt": json.dumps([options.system_prompt, options.prompt_template, *chat], sort_keys=True),
    }
    sampling = {
        "model": f"{config.model} {config.revision}".strip(),
        "temperature": str(config.rollout.temperature),
        "top_p": str(config.rollout.top_p),
        "top_k": str(config.rollout.top_k),
    }
    return identity, sampling
