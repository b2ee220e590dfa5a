"""Phase 1: the cost of a draw over the vocabulary and of the output layer, and whether every device draws the same."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.model import build
from benchmarks.gpu.run import Step
from benchmarks.gpu.sizes import Shape
from benchmarks.gpu.timing import Context, busy, ms, peak_mb, wall
from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.engines.local.model import PackedModel
from specrl.rollout.engines.local.probe import packed_model
from specrl.rollout.engines.local.sampler import TrimmedSampler, unpack
from specrl.rollout.noise import hash_tokens, keyed_sample, row_words

NUCLEUS = 0.95
TRIMMED = 5
"""A drafter's draw is timed on one in so many ids."""


def steps(context: Context) -> Iterator[Step]:
    yield Step("integers_equal", partial(integers, context))
    for hidden in context.sizes.draw_hidden:
        model = build(_shape(context, hidden), context.device, torch.bfloat16)
        plain = packed_model(model, SamplingParams(frozenset()))
        nucleus = packed_model(model, SamplingParams(frozenset(), top_p=NUCLEUS))
        for rows in context.sizes.draw_rows:
            case = Case(context, plain, rows)
            for name, measure in case.measures(nucleus).items():
                yield Step(f"hidden {hidden}/{rows} rows/{name}", measure)
        del model, plain, nucleus, case
        if context.cuda:
            torch.cuda.empty_cache()


def _shape(context: Context, hidden: int) -> Shape:
    """One layer, as only the output layer counts."""
    dim = min(128, hidden // 4)
    return Shape(hidden, hidden, 1, hidden // dim, hidden // dim // 2, dim, context.sizes.draw_vocab)


def integers(context: Context) -> dict:
    """Whether the noise's integers are those of a CPU, eager and compiled."""
    rows, vocab = context.sizes.draw_rows[0], context.sizes.draw_vocab
    generator = torch.Generator().manual_seed(0)
    keys = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    words = row_words(keys, torch.arange(rows))
    want, there = hash_tokens(*words, vocab), [word.to(context.device) for word in words]
    here = row_words(keys.to(context.device), torch.arange(rows, device=context.device))
    result: dict = {"words": all(map(torch.equal, here, there))}
    result["eager"] = torch.equal(hash_tokens(*there, vocab).cpu(), want)
    if context.cuda:
        result["compiled"] = torch.equal(torch.compile(hash_tokens, dynamic=True)(*there, vocab).cpu(), want)
    return (
        result if all(result.values()) else result | {"error": "other integers than on a CPU: other tokens are drawn"}
    )


class Case:
    """Hidden states of `rows` draws by one model."""

    def __init__(self, context: Context, model: PackedModel, rows: int):
        self.context, self.model, self.rows, self.head = context, model, rows, model.lm_head
        self.device, shape = context.device, (rows, model.lm_head.weight.shape[1])
        self.hidden = torch.randn(shape, device=self.device, dtype=torch.bfloat16)
        self.columns = [torch.tensor(column, device=self.device) for column in (range(1, rows + 1), [7] * rows)]
        self.targets = torch.zeros(rows, dtype=torch.int64, device=self.device)

    def measures(self, nucleus: PackedModel) -> dict:
        return {
            "head_ms": self.of_head,
            "head_float32_ms": self.of_float32_head,
            "eager_ms": self.of_eager,
            "engine": partial(self.of_engine, self.model),
            f"engine_top_p_{NUCLEUS}": partial(self.of_engine, nucleus),
            "trimmed": self.of_trimmed,
            "same_draws_as_cpu": self.same_draws,
        }

    @torch.inference_mode()
    def of_head(self) -> float:
        return ms(busy(partial(self.head, self.hidden), self.device))

    @torch.inference_mode()
    def of_float32_head(self) -> float:
        """The output layer with float32 logits of bfloat16 products."""
        self.context.needs_cuda("mm(out_dtype=float32)")
        weight = self.head.weight.T
        return ms(busy(lambda: torch.mm(self.hidden, weight, out_dtype=torch.float32), self.device))

    @torch.inference_mode()
    def of_eager(self) -> float:
        """The draw alone, operation by operation."""
        logits = self.head(self.hidden)
        return ms(busy(partial(keyed_sample, logits, *self.columns), self.device, repeats=3))

    def of_engine(self, model: PackedModel) -> dict:
        """The output layer and the draw as the engine has them, brought to the host.

        A float32 buffer of the vocabulary was stored where more memory is taken than one of bfloat16 logits needs;
        only for rows that are drawn in one piece is their number in `vocabulary_buffers`.
        """
        draw = lambda: model.sampler(self.hidden, *self.columns, self.targets).cpu()  # noqa: E731
        with model.inference():
            first, again = wall(draw, self.device), min(wall(draw, self.device) for _ in range(4))
            peak = peak_mb(draw, self.device)
        logits_mb = self.rows * model.vocab * 2 / 2**20
        buffers = None if peak is None else round((peak - logits_mb) / (2 * logits_mb), 2)
        result = {"ms": ms(again), "first_call_ms": ms(first), "peak_mb": peak, "logits_mb": round(logits_mb, 1)}
        return result | {"vocabulary_buffers": buffers}

    def of_trimmed(self) -> dict:
        """A drafter's draw from few ids, and how many of them a CPU draws otherwise."""
        ids = np.arange(0, self.model.vocab, TRIMMED)
        trimmed = TrimmedSampler(self.head, SamplingParams(frozenset()), len(ids))
        taking = partial(trimmed.take, ids)
        taking()
        draw = lambda: trimmed(self.hidden, *self.columns, self.targets).cpu()  # noqa: E731
        with self.model.inference():
            here, *_ = unpack(draw())
            logits, columns = trimmed.logits(self.hidden).cpu(), [column.cpu() for column in self.columns]
            there = keyed_sample(logits, *columns, ids=trimmed.ids.cpu())[0].tolist()
            result = {"ids": len(ids), "ms": ms(min(wall(draw, self.device) for _ in range(4)))}
        result["take_ms"] = ms(min(wall(taking, self.device) for _ in range(2)))
        return result | {"differ": sum(a != b for a, b in zip(here, there, strict=True))}

    def same_draws(self) -> dict:
        """Draws of the device's logits, there and on a CPU: the noise's logarithms differ in their last bits."""
        few = slice(0, min(self.rows, 64))
        with self.model.inference():
            here, *_ = unpack(self.model.sampler(*(x[few] for x in (self.hidden, *self.columns, self.targets))).cpu())
            logits: Tensor = self.head(self.hidden[few])
        there = keyed_sample(logits.cpu(), *(column[few].cpu() for column in self.columns))[0].tolist()
        return {"draws": len(here), "differ": sum(a != b for a, b in zip(here, there, strict=True))}
