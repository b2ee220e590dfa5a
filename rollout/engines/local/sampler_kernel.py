"""The keyed sampling of rollout/noise.py as Triton kernels, which read the logits once and write little.

Each program samples from one block of BLOCK tokens of a row, and a second small kernel reduces the blocks of each row.
The split depends only on the vocabulary, so a row's result depends neither on the number of rows nor on its index.
With top-k or top-p one program per row first computes the smallest logit to keep. It bisects on the integers that order
floats, and reads the row once for every two of their bits.

Hashes, uniforms, scaled logits, masses and therefore the tokens kept by top-k and top-p equal those of noise.py bit for
bit. Noise and log-probs may differ in their last bits, as logarithm, exponential and the order of float sums differ.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from specrl.rollout import noise

BLOCK = 4096
"""Tokens per program. A row of 152k tokens has 38 programs, so a few rows occupy a GPU."""
LEAST = tl.constexpr(-float("inf"))
MIX_A, MIX_B, MIX_C = (tl.constexpr(x & 0xFFFFFFFF) for x in (noise.MIX_A, noise.MIX_B, noise.MIX_C))
GOLDEN = tl.constexpr(noise.GOLDEN & 0xFFFFFFFF)
STEP = tl.constexpr(noise.STEP & 0xFFFFFFFFFFFFFFFF)
ROUND_A, ROUND_B = (tl.constexpr(x & 0xFFFFFFFFFFFFFFFF) for x in noise.ROUNDS)
FRACTION = tl.constexpr(noise.FRACTION)
BELOW_POINT = tl.constexpr((1 << noise.FRACTION) - 1)
SCALE, CEILING = tl.constexpr(noise.LOG2_E * 2.0**noise.FRACTION), tl.constexpr(62 * 2.0**noise.FRACTION)
P0, P1, P2, P3, P4, P5 = (tl.constexpr(c) for c in noise.POWER)


def keyed_sample(
    logits: Tensor,
    keys: Tensor,
    positions: Tensor,
    targets: Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    ids: Tensor | None = None,
) -> Tensor:
    """`noise.keyed_sample` of logits [N, V].

    Launches at most three kernels and does not synchronise.

    Returns:
        int32 [4, N]: the sampled tokens, then the bits of the float32 log-probs of samples and targets, and of the gap.
    """
    rows, vocab = logits.shape
    top_k = top_k if 0 < top_k < vocab else 0
    cut, scaled, device = top_k > 0 or top_p < 1.0, temperature not in (0.0, 1.0), logits.device
    blocks = triton.cdiv(vocab, BLOCK)
    logits, keys, positions, targets = (x.contiguous() for x in (logits, keys, positions, targets))
    packed = torch.empty(4, rows, dtype=torch.int32, device=device)
    floors = torch.empty(rows, dtype=torch.float32, device=device)
    floats = torch.empty(4, rows, blocks, dtype=torch.float32, device=device)
    tokens = torch.empty(rows, blocks, dtype=torch.int32, device=device)
    if not rows:
        return packed
    by = float(temperature) if scaled else 1.0
    names = tokens if ids is None else ids.contiguous()  # without ids the kernels do not read this argument
    constants = {"SCALED": scaled, "enable_fp_fusion": False}  # a fused multiply-add rounds once, noise.py twice
    if cut:
        search[(rows,)](
            logits, floors, vocab, by, TOP_K=top_k, TOP_P=float(top_p), BLOCK=BLOCK, num_warps=16, **constants
        )
    constants |= {"CUT": cut, "NAMED": ids is not None}
    inputs = (logits, keys, positions, names, floors, floats, tokens, vocab, by)
    part[(rows, blocks)](*inputs, NOISE=temperature != 0.0, BLOCK=BLOCK, num_warps=8, **constants)
    results = (logits, targets, names, floors, floats, tokens, packed, vocab, blocks, by)
    combine[(rows,)](*results, WIDTH=triton.next_power_of_2(blocks), num_warps=1, **constants)
    return packed


@triton.jit
def scale(z, by, SCALED: tl.constexpr):
    z = z.to(tl.float32)
    return tl.math.div_rn(z, by) if SCALED else z


@triton.jit
def order(z):
    """uint32 in the order of the float32 values; both zeros have the same value."""
    bits = tl.where(z == 0.0, 0.0, z).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def weigh(z, most):
    """`noise.masses`."""
    exponent = tl.minimum((most - z) * SCALE, CEILING).to(tl.int64)
    fraction = exponent & BELOW_POINT
    power = ((fraction * P5) >> FRACTION) + P4
    power = ((power * fraction) >> FRACTION) + P3
    power = ((power * fraction) >> FRACTION) + P2
    power = ((power * fraction) >> FRACTION) + P1
    power = ((power * fraction) >> FRACTION) + P0
    return power >> (exponent >> FRACTION)


@triton.jit
def token_hash(key, position, token):
    """`noise.hash_tokens` as uint32. Key and position are int64."""
    x = key.to(tl.uint64, bitcast=True) ^ (position.to(tl.uint64, bitcast=True) * STEP + 1)
    x = (x ^ (x >> 33)) * ROUND_A
    x = (x ^ (x >> 33)) * ROUND_B
    x = x ^ (x >> 33)
    low, high = x.to(tl.uint32), (x >> 32).to(tl.uint32)
    h = token.to(tl.uint32) * GOLDEN + low
    h = (h ^ (h >> 16)) * MIX_A
    h = (h ^ (h >> 15)) + high
    h = (h ^ (h >> 16)) * MIX_B
    h = (h ^ (h >> 13)) * MIX_C
    return h ^ (h >> 16)


@triton.jit
def gumbel(key, position, token):
    h = token_hash(key, position, token) & 0x7FFFFFFF
    unit = tl.minimum((h.to(tl.int32).to(tl.float32) + 0.5) * 2.0**-31, 1 - 2.0**-24)
    return -libdevice.log(-libdevice.log1p(-unit))


@triton.jit
def bisect(row, vocab, by, most, least, limit, MASS: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr):
    """The smallest rank above which the tokens' total weight is less than `limit` (int64).

    Tokens of a rank below `least` have no weight. Each pass over the row compares three pivots and yields two bits: it
    counts the pivots with at least `limit` above them, which are too low.
    """
    found = tl.full((), 0, tl.uint32)
    unit = tl.full((), 1 << 30, tl.uint32)
    for _ in range(16):
        one = found + (unit - 1)
        above_one = tl.zeros((BLOCK,), tl.int64)
        above_two = tl.zeros((BLOCK,), tl.int64)
        above_three = tl.zeros((BLOCK,), tl.int64)
        for first in range(0, vocab, BLOCK):
            token = first + tl.arange(0, BLOCK)
            z = scale(tl.load(row + token, mask=token < vocab, other=LEAST), by, SCALED)
            rank = order(z)
            weight = weigh(z, most) if MASS else tl.full((BLOCK,), 1, tl.int64)
            weight = tl.where((token < vocab) & (rank >= least), weight, 0)
            above_one += tl.where(rank > one, weight, 0)
            above_two += tl.where(rank > one + unit, weight, 0)
            above_three += tl.where(rank > one + unit + unit, weight, 0)
        low = (tl.sum(above_one) >= limit).to(tl.uint32)
        low += (tl.sum(above_two) >= limit).to(tl.uint32)
        low += (tl.sum(above_three) >= limit).to(tl.uint32)
        found += unit * low
        unit = unit >> 2
    return found


@triton.jit
def search(
    logits, floors, vocab, by,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes floors [N], the smallest scaled logit that each row keeps. There is one program per row."""
    n = tl.program_id(0).to(tl.int64)
    row = logits + n * vocab
    least = tl.full((), 0, tl.uint32)
    if TOP_K > 0:
        least = bisect(row, vocab, by, 0.0, least, TOP_K, MASS=False, SCALED=SCALED, BLOCK=BLOCK)
    if TOP_P < 1.0:
        peaks = tl.full((BLOCK,), LEAST, tl.float32)
        for first in range(0, vocab, BLOCK):
            token = first + tl.arange(0, BLOCK)
            peaks = tl.maximum(peaks, scale(tl.load(row + token, mask=token < vocab, other=LEAST), by, SCALED))
        most = tl.max(peaks)
        mass = tl.zeros((BLOCK,), tl.int64)
        for first in range(0, vocab, BLOCK):
            token = first + tl.arange(0, BLOCK)
            z = scale(tl.load(row + token, mask=token < vocab, other=LEAST), by, SCALED)
            mass += tl.where((token < vocab) & (order(z) >= least), weigh(z, most), 0)
        limit = tl.ceil(tl.sum(mass).to(tl.float64) * TOP_P).to(tl.int64)
        least = bisect(row, vocab, by, most, least, limit, MASS=True, SCALED=SCALED, BLOCK=BLOCK)
    bits = tl.where(least >> 31 == 1, least ^ 0x80000000, least ^ 0xFFFFFFFF)
    tl.store(floors + n, bits.to(tl.float32, bitcast=True))


@triton.jit
def part(
    logits, keys, positions, names, floors, floats, tokens, vocab, by,
    NOISE: tl.constexpr, SCALED: tl.constexpr, CUT: tl.constexpr, NAMED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Samples from one block of a row.

    Writes the column of the best score to tokens [N, blocks]; and the best and second best score, the largest logit and
    the sum of exponentials to floats [4, N, blocks].
    """
    n, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    z = scale(tl.load(logits + n * vocab + token, mask=token < vocab, other=LEAST), by, SCALED)
    if CUT:
        z = tl.where(z < tl.load(floors + n), LEAST, z)
    name = tl.load(names + token, mask=token < vocab, other=0) if NAMED else token
    score = z + gumbel(tl.load(keys + n), tl.load(positions + n), name) if NOISE else z
    score = tl.where(score == score, score, float("inf"))  # NaN wins, as in torch.argmax
    best, index = tl.max(score, 0, return_indices=True)
    sampled = block * BLOCK + index
    second = tl.max(tl.where(token == sampled, LEAST, score))
    most = tl.max(z)
    total = tl.sum(libdevice.exp(z - tl.where(most == LEAST, 0.0, most)))
    blocks, size = tl.num_programs(1), tl.num_programs(0).to(tl.int64) * tl.num_programs(1)
    out = floats + n * blocks + block
    tl.store(out, best)
    tl.store(out + size, second)
    tl.store(out + 2 * size, most)
    tl.store(out + 3 * size, total)
    tl.store(tokens + n * blocks + block, sampled)


@triton.jit
def combine(
    logits, targets, names, floors, floats, tokens, packed, vocab, blocks, by,
    SCALED: tl.constexpr, CUT: tl.constexpr, NAMED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Reduces the blocks of a row to its column of packed, int32 [4, N]."""
    n, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    block = tl.arange(0, WIDTH)
    found, size, inside = floats + n * blocks + block, rows * blocks, block < blocks
    scores = tl.load(found, mask=inside, other=LEAST)
    seconds = tl.load(found + size, mask=inside, other=LEAST)
    peaks = tl.load(found + 2 * size, mask=inside, other=LEAST)
    sums = tl.load(found + 3 * size, mask=inside, other=0.0)
    best, winner = tl.max(scores, 0, return_indices=True)  # of equal scores the lowest token
    second = tl.max(tl.where(block == winner, seconds, scores))
    peak = tl.max(peaks)
    shift = tl.where(peak == LEAST, 0.0, peak)
    total = shift + libdevice.log(tl.sum(sums * libdevice.exp(peaks - shift)))
    sampled = tl.load(tokens + n * blocks + winner)
    row = logits + n * vocab
    log_p = scale(tl.load(row + sampled), by, SCALED) - total
    target = scale(tl.load(row + tl.load(targets + n)), by, SCALED)
    if CUT:
        target = tl.where(target < tl.load(floors + n), LEAST, target)
    gap = tl.where(tl.abs(total) < float("inf"), best - second, float("nan"))
    tl.store(packed + n, tl.load(names + sampled) if NAMED else sampled)
    tl.store(packed + rows + n, log_p.to(tl.int32, bitcast=True))
    tl.store(packed + 2 * rows + n, (target - total).to(tl.int32, bitcast=True))
    tl.store(packed + 3 * rows + n, gap.to(tl.int32, bitcast=True))
