"""Token judges: whether a draft token is accepted although the policy would have sampled another. All are lossy.

Judge Decoding (arXiv 2501.19309) predicts this from the policy's hidden state with a linear head; AutoJudge
(arXiv 2504.20039) trains that head on answers that did not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from specrl.rollout.lossy.pair import read_card, write_card
from specrl.rollout.types import RolloutError

WEIGHTS = "judge.safetensors"


class Judge(Protocol):
    """Decides about draft tokens; the first mismatch that it calls important ends the accepted draft.

    It is asked about every draft token, not only mismatches: tokens that it accepts follow the draft's distribution.
    """

    usual_share: float | None
    """The share of the mismatches that it accepted when it was trained; None unless it was."""

    def unimportant(self, hidden: Tensor) -> Sequence[bool]:
        """True where a draft token may be accepted whatever the policy samples.

        Args: hidden: the policy's final hidden states [N, H] after it has read each draft token.
        """


class JudgeHead:
    """Logistic regression on the policy's hidden state: the probability that a mismatch changes the answer.

    Args:
        weight: [H] float32.
        bias: scalar.
        threshold: mismatches with a lower probability are accepted; 0 accepts none, which is exact verification.
        usual_share: see Judge.
    """

    def __init__(self, weight: Tensor, bias: float, threshold: float, usual_share: float | None = None):
        self.weight = weight.float()
        self.bias = bias
        self.threshold = threshold
        self.usual_share = usual_share

    def importance(self, hidden: Tensor) -> Tensor:
        """Probabilities [N] from hidden states [N, H]."""
        return (hidden.float() @ self.weight.to(hidden.device) + self.bias).sigmoid()

    def unimportant(self, hidden: Tensor) -> Sequence[bool]:
        """Tokens whose probability of changing the answer is below the threshold; NaN is not."""
        return (self.importance(hidden) < self.threshold).tolist()

    def save(self, folder: str | Path, card: dict) -> None:
        """Writes head and card; `card` names the policy by its fingerprint."""
        write_card(folder, {"kind": "judge", "threshold": self.threshold, "usual_share": self.usual_share, **card})
        save_file({"weight": self.weight, "bias": torch.tensor([self.bias])}, Path(folder) / WEIGHTS)

    @classmethod
    def load(cls, folder: str | Path, *, policy: str) -> JudgeHead:
        """The head that `specrl.train_judge` wrote to `folder`.

        Raises:
            RolloutError: it was trained for another policy, or there is none.
        """
        card = read_card(folder, "judge", policy=policy)
        try:
            tensors = load_file(Path(folder) / WEIGHTS)
            weight = tensors["weight"]
            bias = tensors["bias"].item()
        except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
            raise RolloutError(f"the judge in {folder} cannot be loaded: {str(error).splitlines()[0]}") from error
        if lacking := {"threshold", "usual_share"} - card.keys():
            raise RolloutError(f"the judge in {folder} has no {min(lacking)}; train it again")
        return cls(weight, bias, card["threshold"], card["usual_share"])
