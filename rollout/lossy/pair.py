"""Whom a learned router or judge belongs to: one policy, one draft model, one rule for steps."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from specrl.rollout.types import RolloutError

CARD = "router.json"
SAMPLES = 256  # values of a tensor that enter its fingerprint; hashing billions of weights would take minutes


@torch.no_grad()
def fingerprint(model: torch.nn.Module) -> str:
    """Identity of a model's weights: a hash of names, shapes and evenly spaced values of all parameters.

    Training moves every tensor, so any update changes it; a change of single values may pass unseen.
    """
    found = hashlib.blake2b(digest_size=8)
    for name, weight in model.named_parameters():
        flat = weight.detach().reshape(-1)
        step = max(1, flat.numel() // SAMPLES)
        found.update(f"{name}{tuple(weight.shape)}{weight.dtype}".encode())
        found.update(flat[::step].float().cpu().numpy().tobytes())
    return found.hexdigest()


def write_card(folder: str | Path, card: dict[str, Any]) -> None:
    """Says in `folder`, which is made if need be, what the model in it is for."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / CARD).write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")


def read_card(folder: str | Path, kind: str, **expected: Any) -> dict[str, Any]:
    """The card in `folder`.

    Args: kind: what it must be, such as `arbitrage`; expected: entries that must be equal, such as draft="9f3c...".

    Raises:
        RolloutError: no card, another kind, or an entry that differs: a learned router knows one pair only.
    """
    path, what = Path(folder) / CARD, "judge" if kind == "judge" else "router"
    maker = f"`python -m specrl.train_{what}`"
    try:
        card = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RolloutError(f"{folder} holds no {what}: {path.name} cannot be read. {maker} writes one") from error
    found = card.get("kind") if isinstance(card, dict) else None
    if found != kind:
        raise RolloutError(f"{folder} holds a router of kind {found!r:.60}, not {kind!r}. {maker} writes one")
    for name, value in expected.items():
        if card.get(name) != value:
            raise RolloutError(
                f"the {what} in {folder} was trained for another {name}: {card.get(name)!r}, this run has {value!r}. "
                f"Its decisions would mean nothing; train one for this pair by {maker}"
            )
    return card
