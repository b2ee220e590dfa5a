"""AutoJudge's labels (arXiv 2504.20039): which mismatches of a draft change the reward of the policy's own response."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from specrl.rollout.drafting.suffix import PromptTexts, SuffixDrafter
from specrl.rollout.engines.base import Limits, SamplingParams
from specrl.rollout.engines.local.engine import TransformersEngine
from specrl.rollout.engines.local.ragged import RaggedModel
from specrl.rollout.engines.local.reader import Reader
from specrl.rollout.types import Request
from specrl.trainers.lossy.judge import Labels

ROWS_PER_READ = 32

Text = list[int]
Score = Callable[[Sequence[int], Sequence[Text]], list[float | None]]
"""Rewards of (rows, their responses); None where there is none."""
Propose = Callable[[dict[int, Text]], dict[int, Sequence[int | None]]]
"""The token a draft would write at each position of a row's text, given the text before it; None where it has none."""


@dataclass(frozen=True, slots=True)
class Mined:
    """One mismatch of draft and policy, tried out."""

    row: int
    """Which prompt."""
    prefix: tuple[int, ...]
    """The response up to and including the draft token."""
    important: bool
    """The answer changed when the draft token stood."""


class Miner:
    """Tries out mismatches under one policy: the token is put in and the policy finishes the response greedily.

    Args:
        model: the policy.
        sampling: of the run; its end-of-response ids are used, its temperature is not.
        cap: tokens of a response.
        tokens_per_pass: memory bound.
    """

    def __init__(self, model: torch.nn.Module, sampling: SamplingParams, cap: int, tokens_per_pass: int):
        greedy = replace(sampling, temperature=0.0, top_k=0, top_p=1.0)
        self._engine = TransformersEngine(model, greedy, limits=Limits(tokens_per_pass=tokens_per_pass))
        self._eos_ids, self._cap = sampling.eos_ids, cap

    def __call__(
        self, prompts: Sequence[Sequence[int]], problems: Sequence[int], propose: Propose, score: Score, most: int
    ) -> Labels:
        """Labels of the mismatches of `propose` with the policy's greedy responses to the prompts.

        Responses without a reward are left out: a wrong answer that stays wrong says nothing about a token.

        Args: problems: number of each prompt's problem, which prompts may share; most: mismatches tried per row.
        """
        distinct = list(dict.fromkeys(map(tuple, prompts)))
        done, _ = self._engine.generate([Request(prompt, 0, self._cap) for prompt in distinct])
        greedy = {prompt: c.tokens for prompt, c in zip(distinct, done, strict=True)}
        own = [greedy[tuple(prompt)] for prompt in prompts]
        right = [bool(value) for value in score(range(len(prompts)), own)]

        def answer(i: int, text: Text) -> float | None:
            return score([i], [text])[0] if right[i] else None

        mined = mine(own, propose, partial(self._finish, prompts, own), answer, self._eos_ids, most)
        important = torch.tensor([m.important for m in mined], dtype=torch.bool)
        problem = torch.tensor([problems[m.row] for m in mined], dtype=torch.long)
        return Labels(self._states(prompts, mined), important, problem)

    def _finish(
        self, prompts: Sequence[Sequence[int]], own: Sequence[Text], prefixes: dict[int, Text]
    ) -> dict[int, Text]:
        """Whole responses from prefixes; each drafts from the policy's own text, to which it mostly returns."""
        going = {i: p for i, p in prefixes.items() if len(p) < self._cap and p[-1] not in self._eos_ids}
        requests = [
            Request([*prompts[i], *p], 0, self._cap - len(p), SuffixDrafter(PromptTexts(), own[i][len(p) :]))
            for i, p in going.items()
        ]
        done, _ = self._engine.generate(requests)
        return prefixes | {i: [*p, *c.tokens] for (i, p), c in zip(going.items(), done, strict=True)}

    def _states(self, prompts: Sequence[Sequence[int]], mined: Sequence[Mined]) -> Tensor:
        """The policy's states [N, H] after each draft token."""
        states, model = [torch.zeros(0, self._engine.model.config.hidden_size)], self._engine.policy
        for at in range(0, len(mined), ROWS_PER_READ):
            some = mined[at : at + ROWS_PER_READ]
            found = read(model, [prompts[m.row] for m in some], [m.prefix for m in some])
            states.append(torch.stack([state for _, state in found]).cpu())
        return torch.cat(states)


def mine(
    texts: Sequence[Text],
    propose: Propose,
    finish: Callable[[dict[int, Text]], dict[int, Text]],
    answer: Callable[[int, Text], object],
    eos_ids: frozenset[int],
    most: int = 64,
) -> list[Mined]:
    """Semi-greedy search: try each mismatch in turn, and go on from the text in which the unimportant ones stand.

    For every row, from left to right: the first position where the draft would write another token gets that token and
    the policy finishes the response. Same answer: unimportant, and the new text is the row's from now on. Else:
    important, and the text stays. Earlier important tokens are not tried again, hence semi-greedy.

    Args:
        texts: the policy's own greedy responses; their answers are what must not change.
        finish: whole responses from prefixes, by the policy, greedily.
        answer: what counts as the answer of a row's response; None when it has none, which labels nothing.
        eos_ids: a mismatch at or behind the end of the text is not tried.
        most: mismatches tried per row.
    """
    wanted = {i: found for i, text in enumerate(texts) if (found := answer(i, text)) is not None}
    current, left, tried = {i: list(texts[i]) for i in wanted}, dict.fromkeys(wanted, 0), dict.fromkeys(wanted, 0)
    mined: list[Mined] = []
    while current:
        drafts = propose(current)
        prefixes: dict[int, Text] = {}
        for i in list(current):
            at = _first(current[i], drafts[i], left[i], eos_ids)
            if at is None or tried[i] >= most:
                del current[i]
                continue
            prefixes[i] = [*current[i][:at], drafts[i][at]]
            left[i], tried[i] = at + 1, tried[i] + 1
        for i, text in (finish(prefixes) if prefixes else {}).items():
            found = answer(i, text)
            if found is None:
                continue
            mined.append(Mined(i, tuple(prefixes[i]), found != wanted[i]))
            if found == wanted[i]:
                current[i] = text
    return mined


def _first(text: Text, draft: Sequence[int | None], left: int, eos_ids: frozenset[int]) -> int | None:
    """The first mismatch from `left` on; None at the end of the text."""
    for at in range(left, len(text)):
        if text[at] in eos_ids:
            return None
        if draft[at] is not None and draft[at] != text[at]:
            return at
    return None


def while_followed(stored: Sequence[Sequence[int]]) -> Propose:
    """Stored texts as drafts, one per row: the token with which each leaves the row's text, as a judge is asked."""

    def draft(own: Sequence[int], text: Text) -> Sequence[int | None]:
        at = next((n for n, (a, b) in enumerate(zip(own, text, strict=False)) if a != b), len(text))
        return [*own[: at + 1], *[None] * len(text)][: len(text)]

    def propose(texts: dict[int, Text]) -> dict[int, Sequence[int | None]]:
        return {i: draft(stored[i], text) for i, text in texts.items()}

    return propose


def by_model(model: RaggedModel, prompts: Sequence[Sequence[int]]) -> Propose:
    """What a draft model writes at each position, given the text before it."""

    def propose(texts: dict[int, Text]) -> dict[int, Sequence[int | None]]:
        found = read(model, [prompts[i] for i in texts], list(texts.values()))
        return {i: draws for i, (draws, _) in zip(texts, found, strict=True)}

    return propose


def read(
    model: RaggedModel, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
) -> list[tuple[list[int], Tensor]]:
    """For each text: the model's draw at every position of it, and the final hidden state [H] after its last token.

    Args: prompts: of the texts, in their order.
    """
    with model.inference():
        reader = Reader(model, [Request(prompt, 0, len(text)) for prompt, text in zip(prompts, texts, strict=True)])
        reader.admit(dict.fromkeys(range(len(texts)), ()))
        fed = reader.follow(dict(enumerate(texts)))
        return [(fed[n].draws, fed[n].hidden[-1].float().clone()) for n in range(len(texts))]
