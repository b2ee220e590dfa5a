"""AutoJudge's labels (arXiv 2504.20039): which mismatches of a draft change the reward of the policy's own response."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from specrl.lossy.fit import Labels
from specrl.rollout.config import RolloutConfig
from specrl.rollout.drafting.suffix import PromptTexts, SuffixDrafter
from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.engines.local.engine import TransformersEngine
from specrl.rollout.engines.local.model import PackedModel
from specrl.rollout.engines.local.reader import Reader
from specrl.rollout.types import Request

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROWS_PER_READ = 32

Text = list[int]
Score = Callable[[Sequence[int], Sequence[Text]], list[float | None]]
"""Rewards of (rows, their responses), None for none."""
Propose = Callable[[dict[int, Text]], dict[int, Sequence[int | None]]]
"""The draft's token at each position of each row's text, given the text before it; None where it has none."""


class Mined(NamedTuple):
    """One mismatch of draft and policy that was tried out."""

    row: int
    """Index of the prompt."""
    prefix: Text
    """The response up to and including the draft token."""
    important: bool
    """Whether the reward changed when the draft token was kept."""


class Miner:
    """Tries out mismatches: the draft token replaces the policy's, and the policy finishes the response greedily.

    Args:
        model: the policy.
        sampling: of the run; only its EOS ids are used.
        cap: tokens of a response.
        tokens_per_pass: memory bound.
    """

    def __init__(self, model: PreTrainedModel, sampling: SamplingParams, cap: int, tokens_per_pass: int):
        greedy = replace(sampling, temperature=0.0, top_k=0, top_p=1.0)
        self._engine = TransformersEngine(model, greedy, limits=RolloutConfig(tokens_per_pass=tokens_per_pass))
        self._eos_ids = sampling.eos_ids
        self._cap = cap

    def __call__(
        self, prompts: Sequence[Sequence[int]], problems: Sequence[int], propose: Propose, score: Score, max_tries: int
    ) -> Labels:
        """Labels of the mismatches of `propose` with the policy's greedy responses to the prompts.

        Semi-greedy search: for every row, from left to right, the first position where the draft has another token gets
        that token, and the policy finishes the response. With the same reward the token is unimportant, and the new
        text replaces the row's. Otherwise it is important, and the text stays. Earlier important tokens are not tried
        again, hence semi-greedy. Responses with reward 0 or none are left out: a wrong answer that stays wrong says
        nothing about a token.

        Args: problems: number of each prompt's problem, which prompts may share; max_tries: mismatches per row.
        """
        distinct = list(dict.fromkeys(map(tuple, prompts)))
        done, _ = self._engine.generate([Request(prompt, 0, self._cap) for prompt in distinct])
        greedy = {prompt: c.tokens for prompt, c in zip(distinct, done, strict=True)}
        responses = [greedy[tuple(prompt)] for prompt in prompts]
        rewards = {i: reward for i, reward in enumerate(score(range(len(prompts)), responses)) if reward}
        current = {i: responses[i] for i in rewards}
        start = dict.fromkeys(rewards, 0)
        tries = dict.fromkeys(rewards, 0)
        mined: list[Mined] = []
        while current:
            drafts = propose(current)
            prefixes: dict[int, Text] = {}
            for i, text in list(current.items()):
                mismatch = self._first_mismatch(text, drafts[i], start[i])
                if mismatch is None or tries[i] >= max_tries:
                    del current[i]
                    continue
                position, token = mismatch
                prefixes[i] = [*text[:position], token]
                start[i] = position + 1
                tries[i] += 1
            texts = self._finish(prompts, responses, prefixes) if prefixes else {}
            for i, text in texts.items():
                (reward,) = score([i], [text])
                if reward is not None:
                    mined.append(Mined(i, prefixes[i], important=reward != rewards[i]))
                if reward == rewards[i]:
                    current[i] = text
        important = torch.tensor([m.important for m in mined], dtype=torch.bool)
        problem = torch.tensor([problems[m.row] for m in mined], dtype=torch.long)
        return Labels(self._states(prompts, mined), important, problem)

    def _first_mismatch(self, text: Text, draft: Sequence[int | None], start: int) -> tuple[int, int] | None:
        """(position, draft token) of the first mismatch from `start` on; None if there is none before the end."""
        for position in range(start, len(text)):
            if text[position] in self._eos_ids:
                return None
            token = draft[position]
            if token is not None and token != text[position]:
                return position, token
        return None

    def _finish(
        self, prompts: Sequence[Sequence[int]], responses: Sequence[Text], prefixes: dict[int, Text]
    ) -> dict[int, Text]:
        """Complete responses from prefixes, each drafting from the policy's response, to which most return."""
        unfinished = {i: p for i, p in prefixes.items() if len(p) < self._cap and p[-1] not in self._eos_ids}
        requests = [
            Request([*prompts[i], *p], 0, self._cap - len(p), SuffixDrafter(PromptTexts(), responses[i][len(p) :]))
            for i, p in unfinished.items()
        ]
        done, _ = self._engine.generate(requests)
        return prefixes | {i: [*p, *c.tokens] for (i, p), c in zip(unfinished.items(), done, strict=True)}

    def _states(self, prompts: Sequence[Sequence[int]], mined: Sequence[Mined]) -> Tensor:
        """The policy's states [N, H] after each draft token."""
        parts = []
        for start in range(0, len(mined), ROWS_PER_READ):
            batch = mined[start : start + ROWS_PER_READ]
            reads = read(self._engine.policy, [prompts[m.row] for m in batch], [m.prefix for m in batch])
            parts.append(torch.stack([state for _, state in reads]).cpu())
        return torch.cat(parts) if parts else torch.zeros(0, 0)


def until_first_mismatch(stored: Sequence[Sequence[int]]) -> Propose:
    """Stored texts as drafts, one per row, up to the first token that differs, as a judge is asked about them."""

    def draft(old: Sequence[int], text: Text) -> Sequence[int | None]:
        position = next((n for n, (a, b) in enumerate(zip(old, text, strict=False)) if a != b), len(text))
        return [*old[: position + 1], *[None] * len(text)][: len(text)]

    def propose(texts: dict[int, Text]) -> dict[int, Sequence[int | None]]:
        return {i: draft(stored[i], text) for i, text in texts.items()}

    return propose


def by_model(model: PackedModel, prompts: Sequence[Sequence[int]]) -> Propose:
    """The tokens of a draft model."""

    def propose(texts: dict[int, Text]) -> dict[int, Sequence[int | None]]:
        reads = read(model, [prompts[i] for i in texts], list(texts.values()))
        return {i: samples for i, (samples, _) in zip(texts, reads, strict=True)}

    return propose


def read(
    model: PackedModel, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
) -> list[tuple[list[int], Tensor]]:
    """For each text: the model's sample at every position, and the final hidden state [H] after its last token.

    Args: prompts: of the texts, in their order.
    """
    with model.inference():
        reader = Reader(model, [Request(prompt, 0, len(text)) for prompt, text in zip(prompts, texts, strict=True)])
        reader.admit(dict.fromkeys(range(len(texts)), ()))
        samples = reader.follow(dict(enumerate(texts)))
        return [(samples[n].tokens, samples[n].hidden[-1].float().clone()) for n in range(len(texts))]
