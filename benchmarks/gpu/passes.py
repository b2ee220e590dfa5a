"""Phase 2: the cost of a pass by rows, tokens and width, where it goes, and what a compiled model would take."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from unittest.mock import patch

import numpy as np
import torch
from torch import nn
from transformers import StaticCache

import specrl.rollout.engines.local.engine as local
from benchmarks.gpu.model import SAMPLING, build
from benchmarks.gpu.run import Absent, Step
from benchmarks.gpu.timing import Context, busy, ms
from benchmarks.gpu.watch import Pass, Watched, Wrong, free_bytes, profiled
from specrl.rollout.config import RolloutConfig
from specrl.rollout.types import Request

MORE, BESIDE = 1.2, 4e9
"""Memory of a pass: so many times what its KV holds, and bytes for the rest."""
SKIP, PROFILED = 2, 4


def steps(context: Context) -> Iterator[Step]:
    sizes = context.sizes
    model = build(sizes.policy, context.device, torch.bfloat16)
    bench = PassBench(context, model)
    yield from bench.profiles("profile")
    yield from graphs_off(context, model)
    cells = list(itertools.product(sizes.pass_rows, sizes.pass_tokens, sizes.pass_widths))
    random.Random(0).shuffle(cells)  # so that what is there at the deadline covers all
    for rows, tokens, width in cells:
        yield Step(f"ms/{rows} rows/{tokens} tokens/{width}", partial(bench.cell, rows, tokens, width))
        if len(bench.measured) % 8 == 0:
            yield Step("fit", bench.fit)
    yield Step("fit", bench.fit)
    rows, width = sizes.pass_rows[0], sizes.pass_widths[0]
    for tokens in sizes.pass_tokens[:2]:
        bound = partial(compiled, context, model, rows, tokens, width)
        yield Step(f"compiled/{rows} rows/{tokens} tokens/{width}", bound, needs=sizes.compile_s)


def graphs_off(context: Context, model: nn.Module) -> Iterator[Step]:
    """The same passes without CUDA graphs."""
    bench = PassBench(context, model)
    bench.engine.policy.record = None
    yield from bench.profiles("profile_graphs_off")
    rows, width = context.sizes.pass_rows[0], context.sizes.pass_widths[0]
    for tokens in context.sizes.pass_tokens[:2]:
        yield Step(f"ms_graphs_off/{rows} rows/{tokens} tokens/{width}", partial(bench.cell, rows, tokens, width))


class PassBench:
    """An engine whose passes are of a chosen size."""

    def __init__(self, context: Context, model: nn.Module):
        self.context, self.model, sizes = context, model, context.sizes
        most = max(sizes.pass_rows)
        self.watched, self.measured = Watched(), []
        limits = RolloutConfig(rows_per_batch=most, tokens_per_pass=most * max(sizes.pass_tokens))
        self.engine = local.TransformersEngine(model, SAMPLING, drafting=self.watched, limits=limits)

    def requests(self, rows: int, tokens: int, width: int, new: int) -> list[Request]:
        """Rows of one prompt whose passes carry `tokens` each for the first `new` of them; no draft is ever right."""
        self.watched.budget.window = tokens - 1
        rng = random.Random(width)
        prompt = [rng.randrange(self.engine.vocab) for _ in range(width)]
        wrong = [Wrong(self.engine.vocab, seed) if tokens > 1 else None for seed in range(rows)]
        return [Request(prompt, i + 1, new + tokens - 1, drafter, plain=not drafter) for i, drafter in enumerate(wrong)]

    def cell(self, rows: int, tokens: int, width: int) -> float:
        """Milliseconds of a pass of `rows` rows with `tokens` tokens each over `width` positions; the best of a few."""
        needed = MORE * self.context.sizes.policy.kv_bytes(rows * (width + 128)) + BESIDE
        if needed > (free := free_bytes(self.context)):
            raise Absent(f"may take {needed / 1e9:.0f} GB, {free / 1e9:.0f} are free")
        self.watched.passes.clear()
        with patch.object(local, "OVERLAP", rows + 1):  # all rows in one pass
            self.engine.generate(self.requests(rows, tokens, width, self.context.sizes.pass_repeats + 1))
        complete = [p for p in self.watched.passes if (p.rows, p.tokens) == (rows, rows * tokens)]
        if not complete:
            raise Absent(f"the engine cut the rows: its passes were of {[p[:2] for p in self.watched.passes[:4]]}")
        best = min(complete, key=lambda p: p.seconds)
        self.measured.append(best)
        return ms(best.seconds)

    def fit(self) -> dict:
        return fit(self.measured)

    def profiles(self, name: str) -> Iterator[Step]:
        """Passes of few and of many rows, plain and with drafts, under the profiler."""
        sizes = self.context.sizes
        for rows, tokens in itertools.product(sizes.pass_rows[:2], sizes.pass_tokens[:2]):
            yield Step(f"{name}/{rows} rows/{tokens} tokens", partial(self._profile, rows, tokens))

    def _profile(self, rows: int, tokens: int) -> dict:
        requests = self.requests(rows, tokens, self.context.sizes.pass_widths[0], SKIP + PROFILED)
        with patch.object(local, "OVERLAP", rows + 1):
            return profiled(self.context, self.engine, requests, SKIP, PROFILED)


@torch.no_grad()
def compiled(context: Context, model: nn.Module, rows: int, tokens: int, width: int) -> dict:
    """The decoder alone over a static cache, eager and compiled with CUDA graphs: a bound that can be reached."""
    torch.compiler.reset()
    calls = 16  # more than are made: a static cache advances by itself
    cache = StaticCache(config=model.config, max_cache_len=width + calls * tokens)
    ids = torch.zeros(rows, tokens, dtype=torch.long, device=context.device)
    at = torch.arange(width - tokens, width, device=context.device).expand(rows, -1)
    inputs = {"input_ids": ids, "position_ids": at, "past_key_values": cache, "use_cache": True}
    fast = {"mode": "reduce-overhead"} if context.cuda else {"backend": "eager"}  # a CPU may have no compiler
    eager = busy(partial(model.base_model, **inputs), context.device)
    quick = busy(partial(torch.compile(model.base_model, **fast), **inputs), context.device)
    return {"eager_ms": ms(eager), "compiled_ms": ms(quick)}


def fit(passes: Sequence[Pass]) -> dict:
    """a + r R + (b + c W) N in milliseconds, R rows, N tokens, W width; none negative; least relative squares."""
    if len(passes) < 4:
        raise Absent(f"four terms need more than {len(passes)} passes")
    seconds = np.array([p.seconds for p in passes]) * 1e3
    terms = np.array([(1, p.rows, p.tokens, p.tokens * p.width) for p in passes], dtype=float)
    kept, result = [0, 1, 2, 3], np.zeros(4)
    while kept:  # without the most negative term until none is
        solved = np.linalg.lstsq(terms[:, kept] / seconds[:, None], np.ones(len(passes)), rcond=None)[0]
        if solved.min() >= 0:
            result[kept] = solved
            break
        kept.pop(int(solved.argmin()))
    errors = np.abs(terms @ result / seconds - 1)
    names = dict(zip(("a_ms", "row_ms", "token_ms", "token_place_ms"), result.tolist(), strict=True))
    return {
        **names,
        "passes": len(passes),
        "error_median": statistics.median(errors),
        "error_most": float(errors.max()),
    }
