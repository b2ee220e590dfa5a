"""Subsets of the policy's own layers as its draft model: Kangaroo, SWIFT and DEL without training or search.

Tries every subset of layers, and every subset of half layers (attention or MLP) that keeps the first and the last layer
complete, as SWIFT does. A subset computes its own keys and values. The best of a size is chosen on one half of the
texts and reported on the other. A pass costs 1 and a draft token its share of the weights of all layers; the output
layer and the verification of a token are free, which favours drafting. A distilled draft model is listed for
comparison, at its share of the policy's layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from benchmarks.research.selfspec.texts import Text, own_texts, ranks, tokens_per_cost
from specrl.results import tables

LENGTHS = (1, 2, 3, 4, 6, 8)
Step = Callable[[Tensor], Tensor]


def early_exit(model: nn.Module, layers: int) -> nn.Module:
    """The model's own first `layers` layers under its last norm and head, all weights shared."""
    decoder = model.base_model
    short = copy.copy(decoder)
    short._modules = {**decoder._modules, "layers": decoder.layers[:layers]}
    shallow = copy.copy(model)
    shallow._modules = {**model._modules, model.base_model_prefix: short}
    return shallow


@dataclass(frozen=True)
class Tried:
    """One subset: its parts by number, its share of the layers' weights, and where its draws were right."""

    parts: tuple[int, ...]
    price: float
    hits: list[list[bool]]

    def agreement(self) -> float:
        return sum(map(sum, self.hits)) / sum(map(len, self.hits))


def measure(policy, tokenizer, draft_model, texts: int, console: Console) -> dict:
    """Agreement and tokens per cost of the best subsets of each size, and of the draft model if there is one."""
    written = own_texts(policy, tokenizer, texts)
    depth = policy.config.num_hidden_layers
    whole = list(tried(policy, written, whole_layers))
    halves = list(tried(policy, written[: texts // 4], half_layers, always={0, 1, 2 * depth - 2, 2 * depth - 1}))
    exits = sorted((one for one in whole if _runs(one.parts, 0)), key=lambda one: len(one.parts))
    lines = [{"what": "best layers", **line} for line in best_by_size(whole)]
    lines += [{"what": "first layers", **_line(one)} for one in exits]
    lines += [{"what": "last layers", **_line(one)} for one in whole if _runs(one.parts, depth - len(one.parts))]
    lines += [{"what": "best half layers", **line} for line in best_by_size(halves)]
    if draft_model is not None:
        price = _size(draft_model.model.layers) / _size(policy.model.layers)
        hits = [[rank == 0 for rank in text] for text in ranks(draft_model, written)]
        lines.append({"what": "draft model", **_line(Tried((), price, hits))})
    show(console, lines, len(whole), len(halves))
    positions = [sum(len(t.response) for t in part) for part in (written, written[: texts // 4])]
    found = {"layers": depth, "subsets": len(whole), "subsets of half layers": len(halves), "positions": positions}
    return {**found, "best exit for every token, by an oracle": any_exit(exits), "lines": lines}


@torch.no_grad()
def tried(policy, texts: Sequence[Text], parts: Callable, always: Collection[int] = ()) -> Iterator[Tried]:
    """All proper subsets of the policy's `parts` that hold `always`."""
    ids = pad_sequence([torch.tensor([*t.prompt, *t.response[:-1]]) for t in texts], batch_first=True)
    decoder, head = policy.model, policy.get_output_embeddings()
    hidden = decoder.embed_tokens(ids)
    where = decoder.rotary_emb(hidden, torch.arange(ids.shape[1])[None])
    steps, weights = parts(decoder.layers, where)
    for kept, out in subsets(steps, hidden, always):
        if 0 < len(kept) < len(steps):
            rows = [row[len(t.prompt) - 1 :][: len(t.response)] for row, t in zip(out, texts, strict=True)]
            logits = head(decoder.norm(torch.cat(rows))).split([len(row) for row in rows])
            hits = [text.hits(part).tolist() for text, part in zip(texts, logits, strict=True)]
            yield Tried(kept, sum(weights[i] for i in kept) / sum(weights), hits)


def subsets(
    steps: Sequence[Step], hidden: Tensor, always: Collection[int] = (), kept: tuple = ()
) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Every subset of the steps that holds `always` and begins with `kept`, and what it makes of `hidden`."""
    at = kept[-1] + 1 if kept else 0
    for i in range(at, len(steps)):
        if not any(at <= j < i for j in always):
            yield from subsets(steps, steps[i](hidden), always, (*kept, i))
    if not any(j >= at for j in always):
        yield kept, hidden


def whole_layers(layers: nn.ModuleList, where) -> tuple[list[Step], list[int]]:
    """Whole layers; padding lies on the right, where causal attention never looks."""
    return [lambda x, f=layer: f(x, position_embeddings=where) for layer in layers], [_size(layer) for layer in layers]


def half_layers(layers: nn.ModuleList, where) -> tuple[list[Step], list[int]]:
    """Attention and MLP of each layer, each with its norm and its residual."""
    steps: list[Step] = []
    for layer in layers:
        steps.append(lambda x, f=layer: x + f.self_attn(f.input_layernorm(x), where, None)[0])
        steps.append(lambda x, f=layer: x + f.mlp(f.post_attention_layernorm(x)))
    return steps, [_size(part) for layer in layers for part in (layer.self_attn, layer.mlp)]


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _runs(parts: Sequence[int], first: int) -> bool:
    """Whether these are neighbours, beginning with `first`."""
    return [*parts] == [*range(first, first + len(parts))]


def best_by_size(found: Sequence[Tried]) -> Iterator[dict]:
    """Of each size the subset that agrees most on the even texts, as it does on the odd ones."""
    for size in sorted({len(one.parts) for one in found}):
        same = [one for one in found if len(one.parts) == size]
        yield _line(max(same, key=lambda one: Tried(one.parts, one.price, one.hits[::2]).agreement()))


def _line(one: Tried) -> dict:
    odd = Tried(one.parts, one.price, one.hits[1::2])
    length = max(LENGTHS, key=lambda k: tokens_per_cost(one.hits[::2], one.price, k))
    return {
        "parts": list(one.parts),
        "price": one.price,
        "agreement": odd.agreement(),
        "length": length,
        "tokens per cost": tokens_per_cost(odd.hits, one.price, length),
        "oracle": tokens_per_cost(odd.hits, one.price, 0),
    }


def any_exit(exits: Sequence[Tried]) -> float:
    """Tokens per cost where each draft token leaves by the cheapest right exit, and none is drafted without one."""
    tokens = cost = 0.0
    for text in range(1, len(exits[0].hits), 2):
        prices = [
            min((e.price for e in exits if e.hits[text][at]), default=None) for at in range(len(exits[0].hits[text]))
        ]
        at = 0
        while at < len(prices):
            while at < len(prices) - 1 and prices[at] is not None:
                cost += prices[at]
                at += 1
            cost, at = cost + 1, at + 1
        tokens += len(prices)
    return tokens / cost


def show(console: Console, lines: Sequence[dict], whole: int, halves: int) -> None:
    rows = [
        (
            f"{line['what']} {' '.join(map(str, line['parts']))}",
            f"{line['price']:.2f}",
            f"{line['agreement']:.1%}",
            f"{line['tokens per cost']:.2f} ({line['length']})",
            f"{line['oracle']:.2f}",
        )
        for line in lines
    ]
    title = f"The policy's own layers as a draft model: {whole} subsets of layers, {halves} of half layers"
    tables.show(console, title, ("drafts by", "price", "agreement", "tokens per cost (length)", "oracle"), rows)
