"""The policy of a run: model, tokenizer and the ids that end a response."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from specrl.options import ConfigError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rollout.engines import EngineSpec
    from specrl.config import Config


class PolicyError(ConfigError):
    """The model or tokenizer cannot be used. One line: what, why, the value given, the remedy."""


def trained_dtype(config: Config) -> str:
    """Type of the weights that a run trains.

    An optimiser moves float32 weights: in bfloat16 half the distance to the next number exceeds most of RL's steps.
    Weights that adapters leave alone need no such precision; the adapters themselves are float32.
    """
    pure = config.trainer.precision == "pure_bf16" or (config.trainer.precision == "bf16" and config.lora.rank)
    return "bfloat16" if pure else "float32"


def rollout_dtype(config: Config) -> str:
    """Type of the weights that responses are drawn with."""
    return "float32" if config.trainer.precision == "fp32" else "bfloat16"


def load_policy(config: Config, dtype: str = "") -> tuple[PreTrainedModel, PreTrainedTokenizerBase, frozenset[int]]:
    """Model on its device, tokenizer with a pad token, and the ids that end a response.

    Args: dtype: of the weights; by default that of rollouts, what commands need that train nothing.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from specrl.tiny import TINY_PATH

    logging.disable_progress_bar()
    source = str(TINY_PATH) if config.model == "tiny" else config.model
    options = {"trust_remote_code": config.trust_remote_code, "revision": config.revision or None}
    with _explained(
        "model", config.model, "Give `tiny`, a hub id that can be reached from here, or a local directory."
    ):
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=getattr(torch, dtype or rollout_dtype(config)), **options
        )
    with _explained("tokenizer", config.tokenizer or config.model, "Leave `tokenizer` empty to take the model's own."):
        tokenizer = AutoTokenizer.from_pretrained(config.tokenizer or source, padding_side="left", **options)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > vocabulary:
        raise PolicyError(
            f"tokenizer={config.tokenizer or config.model} has {len(tokenizer)} tokens but model={config.model} knows "
            f"{vocabulary}: they do not belong together. Leave `tokenizer` empty to take the model's own."
        )
    declared = model.generation_config.eos_token_id if model.generation_config else None
    ids = declared if isinstance(declared, list) else [declared]
    eos_ids = frozenset(i for i in (*ids, tokenizer.eos_token_id) if i is not None)
    if not eos_ids:
        raise PolicyError(f"model={config.model} names no EOS token, so no response could ever end.")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(min(eos_ids))
    return model.to(device(config)), tokenizer, eos_ids


@contextmanager
def _explained(key: str, given: str, remedy: str) -> Iterator[None]:
    """Turns the many ways in which a folder or a hub id can fail to load into one line."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        path = Path(given).expanduser()
        local = path.is_absolute() or given.startswith((".", "~")) or given.count("/") > 1
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        reason = "there is no such directory" if local and not path.is_dir() else reason
        raise PolicyError(f"{key}={given} cannot be loaded: {reason}. {remedy}") from error


def device(config: Config) -> torch.device:
    """The device of the policy; `auto` takes a GPU when there is one."""
    import torch

    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(config.device)
    except RuntimeError as error:
        raise PolicyError(f"device={config.device} is not known. Use auto, cpu, cuda or cuda:N.") from error
    if found.type == "cuda" and not torch.cuda.is_available():
        raise PolicyError(f"device={config.device}: PyTorch sees no GPU here. Use device=auto or device=cpu.")
    return found


def engine_spec(config: Config, eos_ids: frozenset[int]) -> EngineSpec:
    """What the run's rollout engine is built from, here or in a worker process."""
    from rollout.engines import EngineSpec
    from specrl.tiny import TINY_PATH

    workers = config.cluster.num_workers
    return EngineSpec(
        model=str(TINY_PATH) if config.model == "tiny" else config.model,
        eos_ids=eos_ids,
        rollout=config.rollout,
        dtype=rollout_dtype(config),
        device=("cuda" if config.cluster.gpus_per_worker else "cpu") if workers else str(device(config)),
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
        tokenizer=config.tokenizer,
    )


def fingerprint(config: Config, tokenizer: PreTrainedTokenizerBase) -> tuple[dict[str, str], dict[str, str]]:
    """What stored trajectories depend on: (identity, law), see rollout.cache.Fingerprint."""
    vocabulary = json.dumps([sorted(tokenizer.get_vocab().items()), tokenizer.chat_template])
    identity = {
        "tokenizer": hashlib.blake2b(vocabulary.encode(), digest_size=8).hexdigest(),
        "data": config.data,
        "prompt": json.dumps([config.dataset.system_prompt, config.dataset.prompt_template]),
    }
    law = {
        "model": f"{config.model} {config.revision}".strip(),
        "temperature": str(config.rollout.temperature),
        "top_p": str(config.rollout.top_p),
        "top_k": str(config.rollout.top_k),
    }
    return identity, law
