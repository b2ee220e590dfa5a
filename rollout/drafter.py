"""The draft model of `rollout.drafter`."""

from __future__ import annotations

from pathlib import Path

from torch.nn import Module
from transformers import PreTrainedModel

from specrl.rollout.durable import read_json
from specrl.rollout.engines.base import EngineSpec
from specrl.rollout.engines.local.head import ARCHITECTURE, Head
from specrl.rollout.engines.local.model import base_model
from specrl.rollout.types import RolloutError


def load_drafter(spec: EngineSpec, policy: PreTrainedModel) -> PreTrainedModel:
    """The draft model of `rollout.drafter`: a head on the policy, or a separate model."""
    policy = base_model(policy)
    if spec.rollout.drafter == "head":
        return Head.of(policy)
    if is_head(spec.rollout.drafter):
        return Head.load(spec.rollout.drafter, policy)
    try:
        return spec.load(spec.rollout.drafter)
    except (OSError, ValueError) as error:
        missing = "" if Path(spec.rollout.drafter).is_dir() else "there is no such directory, and "
        raise RolloutError(
            f"rollout.drafter={spec.rollout.drafter} cannot be loaded: {missing}{str(error).strip().splitlines()[0]} "
            "Give a model directory, such as `python -m specrl.drafter out=DIR` writes"
        ) from error


def is_head(directory: str) -> bool:
    """Whether the directory holds a head on hidden states, as its config.json says."""
    try:
        return ARCHITECTURE in read_json((Path(directory) / "config.json").read_text("utf-8"))["architectures"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def refuse_head(drafter: Module, acceptance: str) -> None:
    """Raises RolloutError for a head under an acceptance rule that accepts a draft model's own text."""
    if isinstance(drafter, Head):
        raise RolloutError(
            f"rollout.acceptance={acceptance} accepts text of rollout.drafter, but a head on the policy's states "
            "writes none by itself. Use a draft model, such as `python -m specrl.drafter kind=model out=DIR` makes"
        )
