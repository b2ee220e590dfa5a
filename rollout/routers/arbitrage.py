"""The learned router of Arbitrage (arXiv 2512.05033): would the policy's step be worth more than the draft's?

A small transformer classifier reads the problem, the steps so far, each tagged with the model that wrote it, and the
candidate; its second class is "the policy does better". One pass per step, and no policy token is spent on asking.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from rollout.routers.pair import read_card
from rollout.steps import Candidate
from rollout.types import RolloutError

ROWS_PER_PASS = 32
Tags = Mapping[str, Sequence[int]]
"""Token ids that go before a step, by its source."""


class ArbitrageRouter:
    """Escalates where the classifier's probability of a positive advantage is above the threshold.

    Args:
        model: a causal LM of transformers with a sequence-classification head of two classes, over the policy's ids.
        tags: what goes before a step of each source.
        threshold: 0 to 1; higher keeps more draft steps.
    """

    low, high = 0.0, 1.0
    needs: frozenset[str] = frozenset()

    def __init__(self, model: torch.nn.Module, tags: Tags, threshold: float = 0.5):
        self.model, self.tags, self.threshold = model.eval(), tags, threshold

    def score(self, candidates: Sequence[Candidate]) -> Sequence[float]:
        """Probability that the policy's step is worth more."""
        return classify(self.model, [encode(candidate, self.tags) for candidate in candidates])

    @classmethod
    def load(
        cls, folder: str | Path, *, draft: str, policy: str, separators: Sequence[str], threshold: float = 0.5
    ) -> ArbitrageRouter:
        """The router that `specrl.train_router` wrote to `folder`.

        Args: draft, policy: fingerprints of the pair at work; separators: where its steps end.

        Raises:
            RolloutError: it belongs to another pair or other steps, or it is none.
        """
        from transformers import AutoModelForSequenceClassification

        card = read_card(folder, "arbitrage", draft=draft, policy=policy, separators=list(separators))
        try:
            model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
        except (OSError, ValueError) as error:
            raise RolloutError(f"the router in {folder} cannot be loaded: {str(error).splitlines()[0]}") from error
        return cls(model, card["tags"], threshold)


def encode(candidate: Candidate, tags: Tags) -> list[int]:
    """Problem, tagged history and tagged candidate as one sequence of token ids."""
    steps = [*candidate.history, candidate.step]
    return [*candidate.prompt, *(token for step in steps for token in (*tags[step.source], *step.tokens))]


@torch.inference_mode()
def classify(model: torch.nn.Module, inputs: Sequence[Sequence[int]]) -> list[float]:
    """Probability of the second class for each sequence of token ids."""
    found: list[float] = []
    for i in range(0, len(inputs), ROWS_PER_PASS):
        found += class_logits(model, inputs[i : i + ROWS_PER_PASS]).softmax(-1)[:, 1].tolist()
    return found


def class_logits(model: torch.nn.Module, inputs: Sequence[Sequence[int]]) -> torch.Tensor:
    """Logits [N, 2] float32 at the last token of each sequence; padding is on the right, where causal models miss it.

    transformers' own head looks for the last token that is not padding, which fails where padding and EOS are the same.
    """
    device = next(model.parameters()).device
    lengths = torch.tensor([len(ids) for ids in inputs], device=device)
    padded = [[*ids, *[0] * (int(lengths.max()) - len(ids))] for ids in inputs]
    mask = torch.arange(int(lengths.max()), device=device) < lengths[:, None]
    hidden = model.base_model(input_ids=torch.tensor(padded, device=device), attention_mask=mask.long())[0]
    return model.score(hidden[torch.arange(len(inputs), device=device), lengths - 1]).float()
