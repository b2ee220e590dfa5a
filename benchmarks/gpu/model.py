"""A policy whose text is about as certain as a trained one's though nothing trained it, an older one, and requests."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.gpu.sizes import Shape, Sizes
from specrl.rollout.drafting.suffix import PromptTexts, SuffixDrafter
from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.engines.local.engine import TransformersEngine
from specrl.rollout.keys import derive_key
from specrl.rollout.types import Request

UNCHANGED, ACCEPTED = 0.93, 0.9
"""Probability that fresh noise draws a token of the policy's own text again, and one of the older policy's."""
SYNONYM, BRANCH = 1.0, 0.95
"""Weight of the second token that may come next, and of the third, at most; that of the first is 1."""
SAMPLING = SamplingParams(frozenset())
_ROWS, _TOKENS = 16, 48  # of the text that scales are result on


def build(shape: Shape, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """A Qwen3 of that shape, made on the device."""
    config = Qwen3Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=32_768,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model.eval()


@torch.no_grad()
def teach(model: nn.Module) -> None:
    """Gives embeddings and output layer a language; all between them stays random.

    Tokens are pairs of synonyms with nearly one embedding. What follows a pair is mostly another, either of its tokens;
    sometimes the first token of a third. The probabilities depend on the pair, so that the policy is certain of most
    tokens and not of others, as a trained one is. Texts do not run in circles, and two texts that differ in a synonym
    continue alike. Layers add to an embedding about as much as it holds, so a token depends on all tokens before it.
    Random weights alone would need logits of 100 and more to be so certain, which bfloat16 rounds to integers.
    """
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    pairs, device = len(embedding) // 2, embedding.device
    dice = torch.Generator(device).manual_seed(2)
    meaning = torch.randn(pairs, embedding.shape[1], generator=dice, device=device)
    first, second = (torch.randperm(pairs, generator=dice, device=device) for _ in range(2))
    synonym, branch = (torch.rand(pairs, 1, generator=dice, device=device) for _ in range(2))
    head[0::2] = meaning[first] + BRANCH * branch * meaning[second]
    head[1::2] = SYNONYM * synonym * meaning[first]
    embedding[0::2], embedding[1::2] = meaning, meaning + 0.3 * torch.randn_like(meaning)
    seen: list[Tensor] = []
    hook = model.base_model.norm.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    ids = torch.randint(len(embedding), (4, 64), generator=dice, device=device)
    model.base_model(input_ids=ids, use_cache=False)
    hook.remove()
    added = (seen[0] - model.get_input_embeddings()(ids)).float().square().mean().sqrt()
    embedding.mul_(added)
    head.div_(embedding.shape[1])


def prompts(sizes: Sizes) -> list[list[int]]:
    """Random tokens, for each row of all groups; the rows of a group have one prompt."""
    rng = random.Random(0)
    distinct = [[rng.randrange(sizes.policy.vocab) for _ in range(sizes.prompt_tokens)] for _ in range(sizes.prompts)]
    return [prompt for prompt in distinct for _ in range(sizes.group)]


def caps(rows: int, longest: int) -> list[int]:
    """Lengths of responses, lognormal with a median of half the longest: few rows go on to the end."""
    rng = random.Random(1)
    return [max(1, min(longest, round(longest / 2 * rng.lognormvariate(0, 0.5)))) for _ in range(rows)]


def plain(texts: Sequence[Sequence[int]], lengths: Sequence[int], visit: int) -> list[Request]:
    """Requests for plain decoding with the noise of that visit."""
    keys = [derive_key(0, str(i), 0, visit) for i in range(len(lengths))]
    return [Request(prompt, key, length, plain=True) for prompt, key, length in zip(texts, keys, lengths, strict=False)]


def drafted(requests: Sequence[Request], old: Sequence[Sequence[int]]) -> list[Request]:
    """The same requests with drafts of the samples' old text and the group's, as rollout/speculative.py makes them."""
    groups: dict[tuple[int, ...], list[Sequence[int]]] = {}
    for request, text in zip(requests, old, strict=True):
        groups.setdefault(tuple(request.prompt), []).append(text)
    shared = {prompt: PromptTexts(texts) for prompt, texts in groups.items()}
    return [
        Request(r.prompt, r.key, r.max_new_tokens, SuffixDrafter(shared[tuple(r.prompt)], text))
        for r, text in zip(requests, old, strict=True)
    ]


@dataclass
class Policies:
    """A policy and an older one, which is the same with noise on its matrices."""

    model: nn.Module
    engine: TransformersEngine
    entropy: float
    """Mean entropy in nats over its text."""
    accepted_unchanged: float
    """Mean probability of the tokens of its text, an upper bound for any drift."""
    drift: float = 0.0
    """Spread of the noise, in units of each matrix's spread."""
    accepted: float = 0.0
    """Probability that the policy's token is drawn again by the older one."""

    @contextmanager
    def older(self, drift: float | None = None) -> Iterator[None]:
        """The model is the older policy for a while."""
        drift = self.drift if drift is None else drift
        kept = {name: p.detach().clone() for name, p in self.model.named_parameters() if p.dim() > 1}
        parameters = dict(self.model.named_parameters())
        noise = torch.Generator(self.engine.device).manual_seed(1)
        with torch.no_grad():
            for name in kept:
                p = parameters[name]
                p.add_(torch.empty_like(p).normal_(generator=noise), alpha=drift * p.std().item())
        try:
            yield
        finally:
            with torch.no_grad():
                for name, weight in kept.items():
                    parameters[name].copy_(weight)


def policies(model: nn.Module, engine: TransformersEngine, sizes: Sizes) -> Policies:
    """Teaches the policy, scales its last norm until its text is as certain as UNCHANGED says, finds the drift.

    The drift is that by which fresh noise draws the older policy's tokens again with probability ACCEPTED.
    """
    rows = prompts(sizes)[:: sizes.group][:_ROWS]
    rows = (rows * _ROWS)[:_ROWS]
    teach(model)
    norm, entropy = model.base_model.norm, math.nan
    for _ in range(3):  # the text changes with the scale
        texts = _written(engine, rows)
        logits = _logits(model, rows, texts)
        scale = _bisect(lambda scale, z=logits: -_again(z * scale), -UNCHANGED, 0.01, 1000.0)
        with torch.no_grad():
            norm.weight.mul_(scale)
        entropy = _entropy(logits * scale)
    texts = _written(engine, rows)
    result = Policies(model, engine, entropy, _accepted(engine, rows, texts))

    def accepted(drift: float) -> float:
        with result.older(drift):
            return _accepted(engine, rows, texts)

    result.drift = _bisect(accepted, ACCEPTED, 1e-3, 10.0)
    result.accepted = accepted(result.drift)
    return result


def _written(engine: TransformersEngine, rows: Sequence[Sequence[int]]) -> list[list[int]]:
    done, _ = engine.generate(plain(rows, [_TOKENS] * len(rows), visit=0))
    return [completion.tokens for completion in done]


@torch.inference_mode()
def _logits(model: nn.Module, rows: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]) -> Tensor:
    """Logits before each token of the texts [texts * tokens, V], float32."""
    ids = torch.tensor([[*row, *text] for row, text in zip(rows, texts, strict=True)], device=model.device)
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, -_TOKENS - 1 : -1]
    return model.get_output_embeddings()(hidden.flatten(0, 1)[:: 1 + len(texts) // 8]).float()


def _entropy(logits: Tensor) -> float:
    logp = logits.log_softmax(-1)
    return -(logp.exp() * logp).sum(-1).mean().item()


def _again(logits: Tensor) -> float:
    """Probability that two draws are the same token."""
    return logits.softmax(-1).square().sum(-1).mean().item()


def _accepted(engine: TransformersEngine, rows: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]) -> float:
    """Mean probability of the texts' tokens."""
    scores = [engine.score([*row, *text])[-len(text) :] for row, text in zip(rows, texts, strict=True)]
    return fmean(math.exp(logp) for of_row in scores for logp in of_row)


def _bisect(falling: Callable[[float], float], wanted: float, low: float, high: float) -> float:
    """Where a falling function has the wanted value, between two positive numbers."""
    for _ in range(12):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if falling(middle) > wanted else (low, middle)
    return math.sqrt(low * high)
