"""Texts of the policy, and what drafts that agree with them are worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR

from benchmarks.research.responses import response_logits
from benchmarks.tiny_policy import IGNORE
from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.engines.local.engine import TransformersEngine
from specrl.rollout.keys import derive_key
from specrl.rollout.noise import gumbel, row_words
from specrl.rollout.types import Request
from specrl.run.tasks import arithmetic
from specrl.trainers.cotraining import texts as states

CAP, LEVEL = 220, "medium"
TAUGHT = {"steps": 100, "rows": 2, "tokens": 1024}
"""How the policy is taught to answer after other problems; one thread takes about a minute."""


@dataclass(frozen=True)
class Text:
    prompt: tuple[int, ...]
    response: tuple[int, ...]
    noise: Tensor
    """Gumbel noise [T, V] that the policy drew the response with."""

    def ranks(self, logits: Tensor) -> Tensor:
        """How many tokens score higher than the policy's, by logits [T, V] and its noise: int64 [T]; 0 is a hit."""
        scores = logits.float() + self.noise
        own = scores.gather(-1, torch.tensor(self.response)[:, None])
        return (scores > own).sum(-1)

    def hits(self, logits: Tensor) -> Tensor:
        """Where the keyed draw of logits [T, V] is the policy's token: bool [T]."""
        return self.ranks(logits) == 0


def own_texts(policy, tokenizer, count: int, context: int = 0) -> list[Text]:
    """What the policy answers to `count` held-out problems.

    Args: context: solved problems go before each, as many as fit with the answer into that many tokens.
    """
    problems = arithmetic("test", count, 0, LEVEL)
    prompts = [tokenizer(p.prompt)["input_ids"] for p in problems]
    if context:
        solved = arithmetic("train", 16 * count, 0, LEVEL)
        shots = [[*tokenizer(p.prompt + p.solution)["input_ids"], tokenizer.eos_token_id] for p in solved]
        prompts = [_after(shots[16 * i : 16 * i + 16], prompt, context - CAP) for i, prompt in enumerate(prompts)]
    requests = [Request(prompt, derive_key(0, "selfspec", i, 0), CAP) for i, prompt in enumerate(prompts)]
    engine = TransformersEngine(policy, SamplingParams(frozenset([tokenizer.eos_token_id])))
    done, _ = engine.generate(requests)
    return [
        _text(request, completion.tokens, policy.config.vocab_size)
        for request, completion in zip(requests, done, strict=True)
    ]


def own_groups(policy, tokenizer, count: int, size: int) -> list[list[list[int]]]:
    """`size` responses of the policy to each of `count` held-out problems."""
    prompts = [tokenizer(p.prompt)["input_ids"] for p in arithmetic("test", count, 0, LEVEL)]
    keys = ((prompt, derive_key(0, "selfspec", i, visit)) for i, prompt in enumerate(prompts) for visit in range(size))
    engine = TransformersEngine(policy, SamplingParams(frozenset([tokenizer.eos_token_id])))
    done, _ = engine.generate([Request(prompt, key, CAP) for prompt, key in keys])
    return [[c.tokens for c in done[i * size : (i + 1) * size]] for i in range(count)]


def taught(policy, tokenizer) -> None:
    """Trains the policy in place on solved problems one after the other, as many as its positions hold."""
    rows, size, steps = TAUGHT["rows"], TAUGHT["tokens"], TAUGHT["steps"]
    ids: list[int] = []
    labels: list[int] = []
    for problem in arithmetic("train", rows * steps * size // 100, 1, LEVEL):
        asked = tokenizer(problem.prompt)["input_ids"]
        tokens = [*tokenizer(problem.solution)["input_ids"], tokenizer.eos_token_id]
        ids += asked + tokens
        labels += [IGNORE] * len(asked) + tokens
    optimizer = torch.optim.AdamW(policy.parameters(), 1e-3, weight_decay=0.01)
    schedule = OneCycleLR(optimizer, 1e-3, total_steps=steps, pct_start=0.1)
    for at in range(0, rows * steps * size, rows * size):
        fed, wanted = (torch.tensor(x[at : at + rows * size]).view(rows, size) for x in (ids, labels))
        logits = policy(input_ids=fed, use_cache=False).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), wanted[:, 1:].flatten(), ignore_index=IGNORE)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def _after(shots: Sequence[Sequence[int]], prompt: Sequence[int], most: int) -> list[int]:
    """The prompt after as many shots as `most` tokens hold."""
    tokens: list[int] = []
    for shot in shots:
        if len(tokens) + len(shot) + len(prompt) <= most:
            tokens += shot
    return [*tokens, *prompt]


def _text(request: Request, tokens: Sequence[int], vocab: int) -> Text:
    at = torch.arange(len(tokens))
    return Text(tuple(request.prompt), tuple(tokens), gumbel(*row_words(torch.full_like(at, request.key), at), vocab))


@torch.no_grad()
def ranks(model, texts: Sequence[Text]) -> list[list[int]]:
    """`Text.ranks` of a draft model, along each text."""
    logits = (response_logits(model, [states.Text(text.prompt, text.response)]) for text in texts)
    return [text.ranks(one).tolist() for text, one in zip(texts, logits, strict=True)]


def rounds(hits: Sequence[bool], length: int) -> list[tuple[int, int]]:
    """(tokens drafted, accepted tokens) of every pass over one text, with drafts of `length` tokens."""
    found, at = [], 0
    while at < len(hits):
        drafted = min(length, len(hits) - at - 1)  # a pass draws one token of its own
        accepted = next((i for i in range(drafted) if not hits[at + i]), drafted)
        found.append((drafted, accepted))
        at += accepted + 1
    return found


def tokens_per_cost(hits: Sequence[Sequence[bool]], price: float, length: int) -> float:
    """Tokens of all texts by what they cost: 1 for a pass, `price` for a draft token; verifying one is free.

    Args: length: of every draft; 0 lets an oracle end each one before its first wrong token.
    """
    passes = [one for text in hits for one in rounds(text, length or len(text))]
    drafted = sum(accepted if length == 0 else made for made, accepted in passes)
    return sum(map(len, hits)) / (len(passes) + price * drafted)
