"""Values of responses without a network: from earlier responses to the prompt, and from how likely the text is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

NUM_FEATURES = 4
PROMPT_WEIGHT = 2
"""The old value of a prompt counts as much as this many responses."""
FORGET = 0.9
"""Weight of the earlier rollouts in the regression, once for every later one."""
RIDGE = 4.0


class Prior:
    """Ridge regression of returns on features of the state, with forgetting; the critic learns the residual.

    The features of a token: 1, the prompt's value, and of the tokens before it the sum of their log-probs and the
    smallest probability, as a policy's slips are unlikely tokens. A response has the weight 1 whatever its length, and
    RIDGE pulls the coefficients towards the prompt's value alone.

    The value of a prompt is what responses to it earned at earlier visits. Single-stream Policy Optimization (Xu and
    Ding 2025, arXiv 2509.13232) replaces the critic by the same idea. As it depends on earlier visits only, it leaves
    the policy gradient unbiased as a baseline.
    """

    def __init__(self, accelerator: Accelerator):
        self._accelerator = accelerator
        self._prompt_values: dict[str, float] = {}
        self._gram = torch.zeros(NUM_FEATURES, NUM_FEATURES, dtype=torch.float64)
        self._moment = torch.zeros(NUM_FEATURES, dtype=torch.float64)

    def prompt_values(self, prompts: Iterable[str]) -> list[float]:
        """The value of each prompt; for unknown ones the mean over all prompts, 0 before there are any."""
        known = self._prompt_values
        mean = sum(known.values()) / len(known) if known else 0.0
        return [known.get(prompt, mean) for prompt in prompts]

    def features(self, prompts: Sequence[str], logp: Tensor, mask: Tensor) -> Tensor:
        """The features [B, T, NUM_FEATURES], float64, of responses to these prompts.

        Args: logp: of the sampled tokens under the policy [B, T]; mask: 1 for response tokens [B, T].
        """
        masked = (logp * mask).double()
        before = torch.nn.functional.pad(masked, (1, 0))[:, :-1]
        value = torch.tensor(self.prompt_values(prompts), dtype=torch.float64, device=logp.device)
        columns = (torch.ones_like(before), value[:, None].expand_as(before), before.cumsum(-1))
        return torch.stack([*columns, before.cummin(-1).values.exp()], dim=-1)

    def values(self, prompts: Sequence[str], logp: Tensor, mask: Tensor) -> Tensor:
        """The value before each token [B, T], float32. Args: as `features`."""
        prompt_value = torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
        ridge = RIDGE * torch.eye(NUM_FEATURES, dtype=torch.float64)
        coefficients = torch.linalg.solve(self._gram + ridge, self._moment + RIDGE * prompt_value)
        return (self.features(prompts, logp, mask) @ coefficients.to(logp.device)).float()

    def learn(self, prompts: Sequence[str], logp: Tensor, returns: Tensor, mask: Tensor) -> None:
        """Adds a rollout of all processes, with its Monte-Carlo returns [B, T]. Args: as `features`."""
        features = self.features(prompts, logp, mask)
        weight = mask.double() / mask.sum(-1, keepdim=True).clamp(min=1)
        gram = torch.einsum("bti,btj,bt->ij", features, features, weight)
        moment = torch.einsum("bti,bt,bt->i", features, returns.double(), weight)
        self._gram = FORGET * self._gram + self._accelerator.reduce(gram, "sum").cpu()
        self._moment = FORGET * self._moment + self._accelerator.reduce(moment, "sum").cpu()
        first = zip(prompts, returns[:, 0].tolist(), mask[:, 0], strict=True)
        self._learn_prompt_values(gather_object([(prompt, value) for prompt, value, scored in first if scored]))

    def _learn_prompt_values(self, returns: Iterable[tuple[str, float]]) -> None:
        """Adds a visit: (prompt, return) of each response. A prompt moves towards their mean by n / (n + 2)."""
        by_prompt = defaultdict(list)
        for prompt, value in returns:
            by_prompt[prompt].append(value)
        before = self.prompt_values(by_prompt)
        for (prompt, values), old in zip(by_prompt.items(), before, strict=True):
            self._prompt_values[prompt] = (PROMPT_WEIGHT * old + sum(values)) / (PROMPT_WEIGHT + len(values))

    def state(self) -> dict[str, Any]:
        """What `restore` takes, as JSON types."""
        return {"prompts": self._prompt_values, "gram": self._gram.tolist(), "moment": self._moment.tolist()}

    def restore(self, state: dict[str, Any]) -> None:
        self._prompt_values = dict(state["prompts"])
        self._gram = torch.tensor(state["gram"], dtype=torch.float64)
        self._moment = torch.tensor(state["moment"], dtype=torch.float64)
