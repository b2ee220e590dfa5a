"""Shared by tests of engines: requests, right and wrong drafts, and a decoding loop without a cache as the oracle.

The oracle decodes one row at a time by full forward passes. Positive tests and planted faults both compare with
`differing`.
"""

import copy
import random
from dataclasses import dataclass

import torch

from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.engines.local.engine import TransformersEngine
from specrl.rollout.keys import derive_key
from specrl.rollout.noise import gumbel, keyed_sample, row_words
from specrl.rollout.types import Request
from tests.engines import local

FAMILIES = ["qwen3", "qwen2", "llama", "gpt2", "mistral"]
VOCAB, EOS_IDS = 61, frozenset({1, 7})
SAMPLING = SamplingParams(EOS_IDS)


@dataclass
class Script:
    """Proposes `text` at the same positions, whatever was emitted. `limit` is ignored if `rude`."""

    text: list[int]
    rude: bool = False
    calls: int = 0

    def propose(self, tokens, limit):
        self.calls += limit > 0
        return self.text[len(tokens) :] if self.rude else self.text[len(tokens) : len(tokens) + limit]


@dataclass
class Named(Script):
    source: str = ""


def prompts_and_caps(n: int, seed: int = 0) -> list[tuple[list[int], int]]:
    """Ragged prompts, some shared, some of one token, and caps from 1."""
    rng = random.Random(seed)
    pool = [[rng.randrange(2, VOCAB) for _ in range(length)] for length in (1, 1, 2, 5, 9, 14)]
    return [(pool[i // 2 % len(pool)], rng.choice([1, 2, 9, 20, 30])) for i in range(n)]


def requests_of(cases, drafters=None, visit: int = 0) -> list[Request]:
    drafters = drafters or [None] * len(cases)
    return [
        Request(prompt, derive_key(3, "engine", i, visit), cap, drafter)
        for i, ((prompt, cap), drafter) in enumerate(zip(cases, drafters, strict=True))
    ]


def engine_of(model, sampling=SAMPLING, **settings) -> TransformersEngine:
    return local(model, sampling, **settings)


def reference(model, requests, sampling=SAMPLING) -> list[tuple[list[int], list[float], str]]:
    """Decodes each row alone, with a full forward pass of the model for every token."""
    law = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    model = copy.deepcopy(model).eval()
    rows = []
    for r in requests:
        tokens, logprobs, finish = [], [], "length"
        while len(tokens) < r.max_new_tokens and finish == "length":
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([[*r.prompt, *tokens]]), use_cache=False).logits[0, -1:]
            draw, logp, _, gap = keyed_sample(logits, torch.tensor([r.key]), torch.tensor([len(tokens)]), **law)
            assert gap.item() > 1e-5, "a near tie would make the comparison depend on rounding; choose another seed"
            tokens.append(draw.item())
            logprobs.append(logp.item())
            finish = "stop" if tokens[-1] in sampling.eos_ids else "length"
        rows.append((tokens, logprobs, finish))
    return rows


def differing(done, want, tolerance: float = 1e-5) -> list[int]:
    """Rows whose tokens, finish reason or log-probs differ."""
    assert len(done) == len(want)
    rows = [(c.tokens, c.logprobs, c.finish) if hasattr(c, "tokens") else c for c in want]
    return [
        i
        for i, (c, (tokens, logprobs, finish)) in enumerate(zip(done, rows, strict=True))
        if c.tokens != tokens
        or c.finish != finish
        or max(abs(a - b) for a, b in zip(c.logprobs, logprobs, strict=True)) > tolerance
    ]


def corrupt(text, rng, rate):
    return [rng.randrange(VOCAB) if rng.random() < rate else t for t in text]


def all_wrong(text):
    return [(t + 1) % VOCAB for t in text]


def drafts_of_every_quality(texts, seed=0) -> list[Script]:
    """One drafter per row, cycling through all kinds of right and wrong drafts."""
    rng = random.Random(seed)
    kinds = [
        lambda t: Script(t),
        lambda t: Script(corrupt(t, rng, 0.2)),
        lambda t: Script([rng.randrange(VOCAB) for _ in range(40)]),
        lambda t: Script(t[: len(t) // 2]),
        lambda t: Script(t + [5] * 100, rude=True),  # longer than the cap and the requested limit
        lambda t: Script([*t[:3], VOCAB, *t[4:]]),  # invalid ids
        lambda t: Script([*t[:2], -1, 10**9, *t[4:]], rude=True),
        lambda t: Script([*t[:2], 1, *t[3:]]),  # an EOS where the policy has none
        lambda t: Script([1] * 40),
        lambda t: Script([]),
        lambda t: None,
        lambda t: Script([9, *t]),  # shifted
        lambda t: Script(all_wrong(t)),
    ]
    return [kinds[i % len(kinds)](list(text)) for i, text in enumerate(texts)]


class NoisyHead(torch.nn.Linear):
    """An output layer whose rounding depends on the shape of the pass, far more than a real one's."""

    size = 3e-5

    def forward(self, hidden):
        generator = torch.Generator().manual_seed(hidden[..., 0].numel())
        out = super().forward(hidden)
        return out + self.size * torch.randn(out.shape, generator=generator)


def noisy(model):
    """A copy of the model whose logits are rounded depending on the pass."""
    rounded, head = copy.deepcopy(model), model.get_output_embeddings()
    rounded.lm_head = NoisyHead(head.in_features, head.out_features, bias=False)
    rounded.lm_head.weight = head.weight
    return rounded


def nearly_tied_keys(model, prompt, closer_than: float) -> list[int]:
    """Keys whose first sample has its two best scores closer than that."""
    with torch.no_grad():
        logits = copy.deepcopy(model).eval()(input_ids=torch.tensor([prompt])).logits[0, -1]
    found = []
    for start in range(0, 300_000, 50_000):
        keys = torch.arange(start, start + 50_000) * 0x9E3779B97F4A7C1 + 12345
        best = (logits + gumbel(*row_words(keys, torch.zeros_like(keys)), VOCAB)).topk(2).values
        found += keys[best[:, 0] - best[:, 1] < closer_than].tolist()
    return found
