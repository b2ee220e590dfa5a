"""Which models a learned router or judge was trained for: fingerprints of weights, and the card that records them."""

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
    """A hash of names, shapes and evenly spaced values of all parameters.

    Training changes every tensor, so any update changes it; a change of single values may be missed.
    """
    digest = hashlib.blake2b(digest_size=8)
    for name, weight in model.named_parameters():
        values = weight.detach().reshape(-1)
        step = max(1, values.numel() // SAMPLES)
        digest.update(f"{name}{tuple(weight.shape)}{weight.dtype}".encode())
        digest.update(values[::step].float().cpu().numpy().tobytes())
    return digest.hexdigest()


def write_card(folder: str | Path, card: dict[str, Any]) -> None:
    """Records in `folder`, which is created if necessary, what the model in it is for."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / CARD).write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")


def read_card(folder: str | Path, kind: str, **expected: Any) -> dict[str, Any]:
    """The card in `folder`.

    Args: kind: what it must be, such as `arbitrage`; expected: entries that must be equal, such as draft="9f3c...".

    Raises:
        RolloutError: no card, another kind, or an entry that differs: a learned router works for one pair only.
    """
    path = Path(folder) / CARD
    noun = "judge" if kind == "judge" else "router"
    command = f"`python -m specrl.train_{noun}`"
    try:
        card = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RolloutError(f"{folder} holds no {noun}: {path.name} cannot be read. {command} writes one") from error
    actual = card.get("kind") if isinstance(card, dict) else None
    if actual != kind:
        raise RolloutError(f"{folder} holds a router of kind {actual!r:.60}, not {kind!r}. {command} writes one")
    for name, value in expected.items():
        if card.get(name) != value:
            raise RolloutError(
                f"the {noun} in {folder} was trained for another {name}: {card.get(name)!r}, this run has {value!r}. "
                f"Its decisions would mean nothing; train one for this pair with {command}"
            )
    return card
