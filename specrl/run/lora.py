"""LoRA adapters of a run (`lora.*`)."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import TYPE_CHECKING

from specrl.config.options import ConfigError, plain

if TYPE_CHECKING:
    import peft
    import torch

    from specrl.config.schema import LoraConfig


def adapter(lora: LoraConfig, model: torch.nn.Module) -> peft.LoraConfig | None:
    """The adapter configuration for the trainers; None for full training. Raises ConfigError."""
    check_targets(lora.targets, model)
    if not lora.rank:
        return None
    import peft

    return peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # annotated as int, but peft only divides it by the rank
        target_modules=lora.targets or "all-linear",
    )


def check_targets(targets: Sequence[str], model: torch.nn.Module) -> None:
    """Raises ConfigError for a name in `lora.targets` that matches no layer of the model."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    linear = {name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, (nn.Linear, Conv1D))}
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name, _ in model.named_modules()):
            near = sorted(linear, key=lambda name: (-SequenceMatcher(None, target, name).ratio(), name))
            what = f"lora.targets={plain(targets)}: the model has no layer '{target}'"
            raise ConfigError(f"{what}. Its linear layers: {', '.join(near)}.")
