"""Token judges: may a draft token stand although the policy would have drawn another?

Judge Decoding (arXiv 2501.19309) reads the answer off the policy's hidden state with a linear head; AutoJudge
(arXiv 2504.20039) learns that head from answers that did not change. The rule of arXiv 2601.04766 needs no training.
All are lossy.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specrl.rollout.lossy.pair import read_card, write_card
from specrl.rollout.types import RolloutError

WEIGHTS = "judge.safetensors"


class Judge(Protocol):
    """Decides about draft tokens; the first mismatch it does not let stand ends the accepted draft.

    It is asked about every draft token, as what stands follows the draft's law even where it is the policy's draw.
    """

    laws: bool
    """True when tokens must carry both models' log-probs."""

    def unimportant(self, hidden: Tensor, policy: Tensor | None, draft: Tensor | None) -> Sequence[bool]:
        """True where a draft token, whose law is known, may stand whatever the policy draws.

        Args:
            hidden: the policy's final hidden states [N, H] after it has read each draft token.
            policy: its log-probs [N, V] at the tokens' positions; for judges that ask for laws.
            draft: the draft model's; None where the draft is stored text.
        """


def judged(
    judge: Judge, hidden: Tensor, policy: Tensor | None = None, draft: Tensor | None = None
) -> tuple[list[bool], int]:
    """Verdicts, and how many of them failed: a judge that raises or returns no verdicts lets nothing stand."""
    try:
        verdicts = list(judge.unimportant(hidden, policy, draft))
        if len(verdicts) != len(hidden):
            raise ValueError(f"{len(verdicts)} verdicts for {len(hidden)} draft tokens")
    except Exception:  # whatever a learned or user-written judge does; the policy's own draw is always right
        return [False] * len(hidden), len(hidden)
    return [verdict is True for verdict in verdicts], sum(not isinstance(verdict, bool) for verdict in verdicts)


class JudgeHead:
    """Logistic regression on the policy's hidden state: the chance that a mismatch changes the answer.

    Args:
        weight: [H] float32.
        bias: scalar.
        threshold: mismatches with a chance below it may stand; 0 lets none stand, which is exact verification.
    """

    laws = False

    def __init__(self, weight: Tensor, bias: float, threshold: float):
        self.weight, self.bias, self.threshold = weight.float(), bias, threshold

    def importance(self, hidden: Tensor) -> Tensor:
        """Chances [N] from hidden states [N, H]."""
        return (hidden.float() @ self.weight.to(hidden.device) + self.bias).sigmoid()

    def unimportant(self, hidden: Tensor, policy: Tensor | None, draft: Tensor | None) -> Sequence[bool]:
        """Tokens whose chance of changing the answer is below the threshold; NaN is not."""
        return (self.importance(hidden) < self.threshold).tolist()

    def save(self, folder: str | Path, card: dict) -> None:
        """Writes head and card; `card` names the policy by its fingerprint."""
        write_card(folder, {"kind": "judge", "threshold": self.threshold, **card})
        save_file({"weight": self.weight, "bias": torch.tensor([self.bias])}, Path(folder) / WEIGHTS)

    @classmethod
    def load(cls, folder: str | Path, *, policy: str) -> JudgeHead:
        """The head that `specrl.train_judge` wrote to `folder`.

        Raises:
            RolloutError: it reads another policy's hidden states, or there is none.
        """
        card = read_card(folder, "judge", policy=policy)
        try:
            found = load_file(Path(folder) / WEIGHTS)
        except (OSError, ValueError) as error:
            raise RolloutError(f"the judge in {folder} cannot be loaded: {str(error).splitlines()[0]}") from error
        return cls(found["weight"], found["bias"].item(), card["threshold"])


class KLJudge:
    """Lets a draft token stand where both models mean nearly the same and the policy is not sure of itself.

    Args:
        most_kl: largest KL(policy, draft) in nats at which a mismatch may stand.
        confident: the policy's top probability above which nothing but its own draw stands.
    """

    laws = True

    def __init__(self, most_kl: float = 0.1, confident: float = 0.9):
        self._most_kl, self._confident = most_kl, confident

    def unimportant(self, hidden: Tensor, policy: Tensor, draft: Tensor | None) -> Sequence[bool]:
        """As the class says; stored text has one log-prob a token and no whole law, so it never stands."""
        if draft is None:
            return [False] * len(hidden)
        p = policy.exp()
        kl = torch.where(p > 0, p * (policy - draft), 0.0).sum(-1)
        return ((kl <= self._most_kl) & (p.amax(-1) <= self._confident)).tolist()
