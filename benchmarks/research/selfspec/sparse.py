"""The policy drafts on part of its own KV cache: SparseSpec; SpecPV and RAPID in their exact form.

A full pass verifies every `length` tokens, and records which keys are attended to most. Until the next full pass the
policy drafts on those, the first and the last ones (half of all kept keys), chosen anew for each layer and key-value
head. Controls keep the last ones alone, or random ones instead of the attended ones. One forward pass over a text
simulates all of it: its first row is the policy, and each other row drafts with a budget of its own, on the first row's
keys and values up to the last full pass and on those that it has computed since.

Texts are answers to a single problem, and to one after as many solved problems as the policy's 1,024 positions hold.
The policy is trained for the latter first, as it has seen only single problems. The seconds of a round on the simulated
GPU of `benchmarks.research.budget` are a formula: every pass reads the weights in `a` ms; keys and values are read at
the same bytes per ms, all of them by full passes and a part by drafting ones.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from torch import Tensor
from transformers import AttentionInterface

from benchmarks.research.budget import MACHINES
from benchmarks.research.selfspec.texts import Text, own_texts, taught
from specrl.results import tables

ATTENTION = "selfspec_sparse"
SINK = 4  # first keys, which are always kept
BUDGETS = (16, 32, 64, 128, 256)  # keys of a head
LENGTHS = (4, 8)
KINDS = ("attended", "last", "random")
CONTEXTS = {"one problem": 0, "behind solved ones": 1024}

WEIGHTS_BYTES, KV_BYTES = 15.2e9, 28 * 4 * 128 * 2 * 2  # of a 7B policy in bf16: all, and those of one position
ROWS, POSITIONS = (1, 64, 256), (1000, 8000, 32000)


@dataclass(frozen=True)
class Streams:
    """How the rows of the simulating pass attend: row 0 in full, row i + 1 as `kinds[i]` with `budgets[i]` keys.

    Args: first: where the first drafted token is fed; length: tokens between two full passes.
    """

    kinds: Sequence[str]
    budgets: Sequence[int]
    first: int
    length: int

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """query [rows, heads, T, dim], key and value [rows, kv, T, dim]; returns [rows, heads, T, dim]."""
        groups, at = query.shape[1] // key.shape[1], torch.arange(query.shape[2])
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        draft = (at - self.first).div(self.length, rounding_mode="floor").clamp(min=-1)  # -1 within the prompt
        causal = at <= at[:, None]
        own = causal & (draft == draft[:, None])
        weights = (query[0] @ key[0].mT * scaling).masked_fill(~causal, -torch.inf).softmax(-1)
        out, starts = [weights @ value[0]], torch.arange(self.first, len(at), self.length)[:, None]
        attended = self._attended(weights, starts, groups)
        for i, (kind, budget) in enumerate(zip(self.kinds, self.budgets, strict=True), start=1):
            kept = _kept(kind, budget, attended, starts)[:, draft] & (draft >= 0)[:, None]
            there = (query[i] @ key[0].mT * scaling).masked_fill(~kept, -torch.inf)
            here = (query[i] @ key[i].mT * scaling).masked_fill(~own, -torch.inf)
            weights = torch.cat([there, here], -1).softmax(-1)
            out.append(weights @ torch.cat([value[0], value[i]], -2))
        return torch.stack(out)

    def _attended(self, weights: Tensor, starts: Tensor, groups: int) -> Tensor:
        """What the full pass before each draft attended to [heads, drafts, T], summed over the heads of a group."""
        at = torch.arange(weights.shape[-1])
        before = ((at < starts) & (at >= starts - self.length)).float()
        return (before @ weights).unflatten(0, (-1, groups)).sum(1).repeat_interleave(groups, 0)


def _kept(kind: str, budget: int, attended: Tensor, starts: Tensor) -> Tensor:
    """Keys of the last full pass that each draft reads: bool [heads, drafts, T]. Args: starts: of the drafts [D, 1]."""
    at = torch.arange(attended.shape[-1])
    last = starts - at <= (budget - SINK if kind == "last" else (budget - SINK) // 2)
    score = torch.rand(attended.shape, generator=torch.Generator().manual_seed(0)) if kind == "random" else attended
    score = score.masked_fill(last | (at < SINK), torch.inf).masked_fill(at >= starts, -1.0)
    best = score.topk(min(budget, len(at)), -1).indices
    return torch.zeros_like(score, dtype=torch.bool).scatter_(-1, best, True) & (at < starts)


def _attention(module, query, key, value, attention_mask, scaling=None, streams: Streams | None = None, **_):
    return streams.attend(query, key, value, scaling).transpose(1, 2), None


AttentionInterface.register(ATTENTION, _attention)


def measure(policy, tokenizer, texts: int, console: Console) -> dict:
    """Agreement by budget, and what it is worth on the simulated GPU."""
    before, lines, described = policy.config._attn_implementation, [], {}
    for context, tokens in CONTEXTS.items():
        if tokens:
            policy = copy.deepcopy(policy)
            taught(policy, tokenizer)
        written = own_texts(policy, tokenizer, texts, tokens)
        policy.set_attn_implementation(ATTENTION)
        for length in LENGTHS:
            lines += [{"context": context, **line} for line in _lines(policy, written, length)]
        policy.set_attn_implementation(before)
        positions = sum(len(text.response) for text in written)
        longest = max(len(text.prompt) + len(text.response) for text in written)
        described[context] = {"positions": positions, "longest text": longest}
    worth = list(speeds([line for line in lines if line["kind"] == "attended"]))
    show(console, lines, worth)
    return {"texts": texts, "contexts": described, "lines": lines, "speed on the simulated GPU": worth}


def _lines(policy, texts: Sequence[Text], length: int) -> Iterator[dict]:
    ways = [(kind, budget) for kind in KINDS for budget in BUDGETS]
    found = [hits(policy, text, [kind for kind, _ in ways], [budget for _, budget in ways], length) for text in texts]
    for i, (kind, budget) in enumerate(ways):
        runs = [run for one in found for run in one[i]]
        held = sum(len(text.prompt) + len(text.response) / 2 for text in texts) / len(texts)
        yield {
            "kind": kind,
            "keys": budget,
            "share": min(1.0, budget / held),
            "length": length,
            "agreement": sum(map(sum, runs)) / sum(map(len, runs)),
            "tokens": 1 + sum(_accepted(run) for run in runs) / len(runs),
        }


@torch.no_grad()
def hits(policy, text: Text, kinds: Sequence[str], budgets: Sequence[int], length: int) -> list[list[list[bool]]]:
    """For each way of drafting, of the whole drafts between two full passes, which tokens are the policy's."""
    streams = Streams(kinds, budgets, len(text.prompt) - 1, length)
    ids = torch.tensor([[*text.prompt, *text.response[:-1]]]).expand(1 + len(kinds), -1)
    states = policy.model(input_ids=ids, use_cache=False, streams=streams).last_hidden_state
    logits = policy.get_output_embeddings()(states[:, len(text.prompt) - 1 :])
    if not text.hits(logits[0]).all():
        raise SystemExit("the full pass does not draw the policy's own text: this simulation is wrong")
    right = [text.hits(one).tolist() for one in logits[1:]]
    whole = range(0, len(text.response) - length + 1, length)
    return [[one[at : at + length] for at in whole] for one in right]


def _accepted(run: Sequence[bool]) -> int:
    return next((i for i, hit in enumerate(run) if not hit), len(run))


def speeds(lines: Sequence[dict]) -> Iterator[dict]:
    """Tokens per second of the best way over plain decoding, for a 7B policy; shares of its KV as measured here."""
    a, row, token, _ = MACHINES["gpu"]
    read = KV_BYTES / WEIGHTS_BYTES * a  # ms for one position of one row
    for rows in ROWS:
        for positions in POSITIONS:
            full = read * rows * positions
            plain = a + (row + token) * rows
            found = []
            for line in lines:
                drafting = line["length"] * (plain + line["share"] * full)
                verifying = plain + token * rows * line["length"] + full
                found.append((line["tokens"] * (plain + full) / (drafting + verifying), line))
            speed, line = max(found, key=lambda pair: pair[0])
            best = {key: line[key] for key in ("context", "keys", "share", "length", "agreement")}
            memory = (WEIGHTS_BYTES + KV_BYTES * rows * positions) / 1e9
            yield {"rows": rows, "positions": positions, "speedup": speed, "memory_gb": round(memory), **best}


def show(console: Console, lines: Sequence[dict], worth: Sequence[dict]) -> None:
    for context in CONTEXTS:
        cells = {(x["kind"], x["keys"], x["length"]): x for x in lines if x["context"] == context}
        rows = [
            (
                str(keys),
                f"{cells['attended', keys, LENGTHS[0]]['share']:.0%}",
                *(f"{cells[kind, keys, k]['agreement']:.1%}" for kind in KINDS for k in LENGTHS),
            )
            for keys in BUDGETS
        ]
        names = [f"{kind} {k}" for kind in KINDS for k in LENGTHS]
        tables.show(console, f"Agreement on part of the KV, {context}", ("keys", "share", *names), rows)
    title = "A 7B policy on the simulated GPU, its KV read in part: best speed over plain decoding"
    cells = {(x["rows"], x["positions"]): f"{x['speedup']:.2f}x ({x['memory_gb']} GB)" for x in worth}
    rows = [(str(n), *(cells[n, positions] for positions in POSITIONS)) for n in ROWS]
    tables.show(console, title, ("rows", *(f"{n:,} positions" for n in POSITIONS)), rows)
