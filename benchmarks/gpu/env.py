"""Phase 0: what the machine can do, what an operation costs, and which attention kernels it has for the engine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.run import Absent, Step, said
from benchmarks.gpu.timing import Context, busy, ms, synchronize, wall
from specrl.rollout.engines.local.varlen import aten_flash, unsplit

BACKENDS = {"default": None, "efficient": SDPBackend.EFFICIENT_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
TOKENS = (1, 2, 9)
"""New tokens of a row in one pass; the query heads that share a key head multiply them."""


def steps(context: Context) -> Iterator[Step]:
    yield Step("copy_gb_s", partial(copy_rate, context))
    yield Step("gemm_tflop_s", partial(gemm_rate, context))
    yield Step("us_per_op", partial(op_cost, context))
    yield Step("sdpa_choice", partial(choices, context))
    yield Step("cudnn_accepts", partial(cudnn_accepts, context))
    for i, name in enumerate(BACKENDS):  # at widths that no other has prepared
        yield Step(f"growing/{name}", partial(growing, context, partial(by_backend, BACKENDS[name]), i))
    for name in BACKENDS:
        yield Step(f"read/{name}", partial(read_rate, context, partial(by_backend, BACKENDS[name])))
    yield Step("growing/varlen", partial(growing, context, varlen, 0))  # last: it may break the process
    yield Step("read/varlen", partial(read_rate, context, varlen))
    yield Step("varlen_error", partial(varlen_error, context))


def copy_rate(context: Context) -> float:
    """GB/s of a copy within the device, bytes read and written."""
    source = torch.ones(context.sizes.copy_mb * 2**18, device=context.device)
    target = torch.empty_like(source)
    return round(2 * source.nbytes / busy(partial(target.copy_, source), context.device) / 1e9, 1)


def gemm_rate(context: Context) -> float:
    """TFLOP/s of a square product of random matrices in bfloat16."""
    n = context.sizes.gemm
    a, b = (torch.randn(n, n, device=context.device, dtype=torch.bfloat16) for _ in range(2))
    return round(2 * n**3 / busy(partial(torch.mm, a, b), context.device) / 1e12, 3)


@torch.inference_mode()
def op_cost(context: Context) -> dict[str, float]:
    """Microseconds of the host for one eager operation whose work is nothing."""
    x, weight = torch.zeros(16, 16, device=context.device), torch.zeros(16, 16, device=context.device)
    operations = {"add": partial(torch.add, x, 1.0), "linear": partial(torch.nn.functional.linear, x, weight)}
    result = {}
    for name, operation in operations.items():
        seconds = []
        for _ in range(4):
            synchronize(context.device)
            began = time.perf_counter()
            for _ in range(context.sizes.ops):
                operation()
            seconds.append(time.perf_counter() - began)
            synchronize(context.device)
        result[name] = round(1e6 * min(seconds) / context.sizes.ops, 3)
    return result


# Attention ------------------------------------------------------------------------------------------------------------


class Layer:
    """Queries, keys and values of one layer in a pass: `tokens` new ones of each row, `width` positions of a longer KV.

    Args: capacity: positions of the KV cache; 0 takes as many as `width` needs.
    """

    def __init__(self, context: Context, tokens: int, width: int, capacity: int = 0):
        shape, self.rows = context.sizes.policy, context.sizes.attention_rows
        self.tokens, self.width, self.device = tokens, width, context.device
        self.groups, self.kv_heads, self.dim = shape.heads // shape.kv_heads, shape.kv_heads, shape.head_dim
        self.capacity, make = capacity or width, partial(torch.randn, device=context.device, dtype=torch.bfloat16)
        self.query = make(self.rows, self.kv_heads, self.groups, tokens, self.dim)
        self.key, self.value = (make(self.rows, self.kv_heads, self.capacity, self.dim) for _ in range(2))

    def grouped(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As padded passes take them: query heads folded into the queries, and an additive mask."""
        at = self.width - self.tokens + torch.arange(self.tokens, device=self.device)
        later = torch.arange(self.width, device=self.device) > at.repeat(self.groups)[:, None]
        mask = torch.zeros(later.shape, device=self.device, dtype=self.query.dtype).masked_fill_(later, -torch.inf)
        mask = mask.expand(self.rows, 1, *mask.shape).contiguous()
        return self.query.flatten(2, 3), self.key[:, :, : self.width], self.value[:, :, : self.width], mask

    def packed(self) -> tuple[Tensor, Tensor, Tensor]:
        """As variable-length flash attention takes them: [tokens, heads, dim], one row after another."""
        query = self.query.permute(0, 3, 1, 2, 4).reshape(-1, self.kv_heads * self.groups, self.dim)
        return query.contiguous(), *(x.transpose(1, 2).reshape(-1, *x.shape[1::2]) for x in (self.key, self.value))


def by_backend(backend: SDPBackend | None, layer: Layer) -> Callable[[int], Tensor]:
    """Attention over the first `width` positions through scaled_dot_product_attention."""
    if backend is not None and layer.device.type != "cuda":
        raise Absent(f"{backend.name}: only on CUDA")
    q, k, v, mask = layer.grouped()

    def attend(width: int) -> Tensor:
        short = k[:, :, :width], v[:, :, :width], mask[..., :width].contiguous()
        with nullcontext() if backend is None else sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, *short)

    return attend


def varlen(layer: Layer) -> Callable[[int], Tensor]:
    """The same through the flash kernel for rows of unequal length: no mask, no padding, the KV as stored."""
    if layer.device.type != "cuda":
        raise Absent("variable-length flash attention: only on CUDA")
    q, k, v = layer.packed()
    more = unsplit(layer.device)
    numbers = partial(torch.arange, layer.rows + 1, device=layer.device, dtype=torch.int32)
    rows_q, rows_k = numbers() * layer.tokens, numbers() * layer.capacity

    def attend(width: int) -> Tensor:
        used = torch.full((layer.rows,), width, device=layer.device, dtype=torch.int32)
        lengths = (rows_q, rows_k, layer.tokens, layer.capacity, 0.0, True, False)
        return aten_flash(q, k, v, *lengths, scale=layer.dim**-0.5, seqused_k=used, **more)[0]

    return attend


def choices(context: Context) -> dict[str, str]:
    """The kernel that PyTorch takes by itself."""
    result = {}
    for tokens in TOKENS:
        for width in context.sizes.attention_widths:
            q, k, v, mask = Layer(context, tokens, width).grouped()
            chosen = torch._fused_sdp_choice(q, k, v, attn_mask=mask)
            result[f"{tokens} tokens x {width}"] = SDPBackend(chosen).name
    return result


def cudnn_accepts(context: Context) -> dict[str, bool | str]:
    """Whether cuDNN computes the shapes at all; else what PyTorch says."""
    context.needs_cuda("cuDNN")
    result: dict[str, bool | str] = {}
    for tokens in TOKENS:
        for width in context.sizes.attention_widths:
            try:
                by_backend(SDPBackend.CUDNN_ATTENTION, Layer(context, tokens, width))(width)
                result[f"{tokens} tokens x {width}"] = True
            except RuntimeError as error:
                result[f"{tokens} tokens x {width}"] = said(error)
    return result


def growing(context: Context, kernel: Callable[[Layer], Callable[[int], Tensor]], number: int) -> dict:
    """Milliseconds of the first call and of the next at widths that grow by one, as those of a rollout's passes do.

    Args: number: of this measurement, so that no two share a width.
    """
    count = context.sizes.growing
    first = context.sizes.attention_widths[0] + 3 + number * count
    attend = kernel(Layer(context, 1, first + count, capacity=first + count))
    attend(first - 1)
    times = [[wall(partial(attend, first + i), context.device) for _ in range(2)] for i in range(count)]
    calls = {"first_call_ms": [t[0] for t in times], "next_call_ms": [t[1] for t in times]}
    return {name: {"median": ms(statistics.median(t)), "most": ms(max(t))} for name, t in calls.items()}


def read_rate(context: Context, kernel: Callable[[Layer], Callable[[int], Tensor]]) -> dict:
    """How fast keys and values are read for one new token a row, and as a share of what a copy reads and writes."""
    result, width = {}, context.sizes.attention_widths[-1]
    for tokens in TOKENS[::2]:
        layer = Layer(context, tokens, width)
        attend = kernel(layer)
        seconds = busy(partial(attend, width), context.device, repeats=9)
        rate = (layer.key.nbytes + layer.value.nbytes) / seconds / 1e9
        share = round(rate / copy, 3) if isinstance(copy := context.figure("env", "copy_gb_s"), float) else None
        result[f"{tokens} tokens"] = {"ms": ms(seconds), "gb_s": round(rate, 1), "share_of_copy": share}
    return result


def varlen_error(context: Context) -> float:
    """Largest difference of variable-length attention over a longer KV from that by the default kernel."""
    width = context.sizes.attention_widths[-1]
    layer = Layer(context, TOKENS[-1], width, capacity=width + 40)
    got = varlen(layer)(width).view(layer.rows, layer.tokens, layer.kv_heads, layer.groups, layer.dim)
    want = by_backend(None, layer)(width).view(layer.rows, layer.kv_heads, layer.groups, layer.tokens, layer.dim)
    return (got.permute(0, 2, 3, 1, 4) - want).abs().max().item()
