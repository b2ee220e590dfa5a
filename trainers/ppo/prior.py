"""What a response is worth as far as no network is needed: earlier responses to its prompt, how likely its text is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


class PromptValues:
    """What responses to each prompt were worth at its last visits: the value of a prompt before its first token.

    The same idea takes a critic's place in Single-stream Policy Optimization (Xu and Ding 2025, arXiv 2509.13232). A
    prompt's value is of its earlier visits only, so as a baseline it leaves the policy gradient unbiased.
    """

    CERTAINTY = 2
    """Responses that what was believed before weighs as much as."""

    def __init__(self, values: dict[str, float] | None = None):
        self._values = dict(values or {})

    def of(self, prompts: Sequence[str]) -> list[float]:
        """The value of each prompt; of unknown ones the mean of all, 0 before there are any."""
        usual = self._usual()
        return [self._values.get(prompt, usual) for prompt in prompts]

    def learn(self, returns: Iterable[tuple[str, float]]) -> None:
        """Takes in a visit: (prompt, return) of each response. A prompt moves towards its mean by n / (n + 2)."""
        usual, found = self._usual(), defaultdict(list)
        for prompt, value in returns:
            found[prompt].append(value)
        for prompt, values in found.items():
            n, before = len(values), self._values.get(prompt, usual)
            self._values[prompt] = (self.CERTAINTY * before + sum(values)) / (self.CERTAINTY + n)

    def _usual(self) -> float:
        return sum(self._values.values()) / len(self._values) if self._values else 0.0

    def state(self) -> dict[str, float]:
        """What `PromptValues` takes to go on, as JSON types."""
        return dict(self._values)


class Prior:
    """Least squares of returns on facts about the state, with forgetting; a critic learns what is left to be said.

    The facts of a token: 1, the prompt's value, and of the tokens before it the sum of their log-probs and the least
    probability: a policy's slips are unlikely tokens. Earlier rollouts fade by FORGET with every later one. A response
    counts once however long it is, and a weight of RIDGE responses holds the coefficients at the prompt's value alone.
    """

    FORGET, RIDGE = 0.9, 4.0
    FACTS = 4

    def __init__(self):
        self.prompts = PromptValues()
        self._gram = torch.zeros(self.FACTS, self.FACTS, dtype=torch.float64)
        self._moment = torch.zeros(self.FACTS, dtype=torch.float64)

    def facts(self, prompts: Sequence[str], logp: Tensor, mask: Tensor) -> Tensor:
        """The facts [B, T, FACTS], float64, of responses to these prompts.

        Args: logp: of the drawn tokens under the policy [B, T]; mask: 1 for response tokens [B, T].
        """
        drawn = (logp * mask).double()
        before = torch.nn.functional.pad(drawn, (1, 0))[:, :-1]
        value = torch.tensor(self.prompts.of(prompts), dtype=torch.float64, device=logp.device)
        columns = (torch.ones_like(before), value[:, None].expand_as(before), before.cumsum(-1))
        return torch.stack([*columns, before.cummin(-1).values.exp()], dim=-1)

    def values(self, facts: Tensor) -> Tensor:
        """The value before each token [B, T], float32."""
        return (facts @ self._coefficients().to(facts.device)).float()

    def learn(self, facts: Tensor, returns: Tensor, mask: Tensor, total: Callable[[Tensor], Tensor]) -> None:
        """Takes in a rollout. Args: returns, mask [B, T]; total: turns this process's sums into those of all."""
        weight = mask.double() / mask.sum(-1, keepdim=True).clamp(min=1)
        gram = torch.einsum("bti,btj,bt->ij", facts, facts, weight)
        moment = torch.einsum("bti,bt,bt->i", facts, returns.double(), weight)
        self._gram = self.FORGET * self._gram + total(gram).cpu()
        self._moment = self.FORGET * self._moment + total(moment).cpu()

    def _coefficients(self) -> Tensor:
        held = torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
        ridge = self.RIDGE * torch.eye(self.FACTS, dtype=torch.float64)
        return torch.linalg.solve(self._gram + ridge, self._moment + self.RIDGE * held)

    def state(self) -> dict[str, Any]:
        """What `restore` takes, as JSON types."""
        return {"prompts": self.prompts.state(), "gram": self._gram.tolist(), "moment": self._moment.tolist()}

    def restore(self, state: dict[str, Any]) -> None:
        self.prompts = PromptValues(state["prompts"])
        self._gram = torch.tensor(state["gram"], dtype=torch.float64)
        self._moment = torch.tensor(state["moment"], dtype=torch.float64)
