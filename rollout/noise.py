"""Counter-based Gumbel noise and keyed sampling.

The token at response position t of a rollout with key k is `argmax_v(z_t(v) + G(k, t, v))`, where z_t are the processed
logits and G is standard Gumbel noise computed by a hash of (k, t, v). For a fresh key that is an exact sample from
softmax(z_t) (the Gumbel-max trick). Noise depends on nothing else: not on the batch, nor on the pass that computes it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _signed32(x: int) -> int:
    return x - (1 << 32) if x >> 31 else x


GOLDEN = _signed32(0x9E3779B1)
MIX_A = _signed32(0x7FEB352D)  # lowbias32, C. Wellons, "Prospecting for Hash Functions" (public domain)
MIX_B = _signed32(0x846CA68B)
MIX_C = _signed32(0xC2B2AE35)  # MurmurHash3 finaliser, A. Appleby (public domain)
STEP = -7046029254386353131
ROUNDS = (-49064778989728563, -4265267296055464877)  # MurmurHash3's 64-bit finaliser, as signed integers

LOG2_E = 1.4426950408889634
FRACTION = 22
"""Bits after the point of a base-2 exponent."""
MASS_BITS = 40
"""The likeliest token weighs 2**MASS_BITS; the sum over 2**22 tokens fits int64."""
POWER = (2**40, -762120090033, 264085108502, -60811128193, 10133099349, -1042803513)
"""2**-f * 2**MASS_BITS as a polynomial of f in [0, 1]: least squares, reweighted; 1 and 1/2 at the ends, error 7e-8."""


def _fold(x: Tensor, n: int) -> Tensor:
    """x ^ (x >> n) of int32, by a logical shift (torch's is arithmetic)."""
    return (x >> n).bitwise_and_((1 << (32 - n)) - 1).bitwise_xor_(x)


def _fold64(x: Tensor) -> Tensor:
    """x ^ (x >> 33) of int64, by a logical shift."""
    return (x >> 33).bitwise_and_((1 << 31) - 1).bitwise_xor_(x)


def row_words(keys: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Two int32 words [N] that identify (key, position); keys, positions int64 [N]. Murmur3's 64-bit finaliser."""
    x = (positions * STEP).add_(1).bitwise_xor_(keys)
    for mult in ROUNDS:
        x = _fold64(x).mul_(mult)
    x = _fold64(x)
    return x.to(torch.int32), (x >> 32).to(torch.int32)  # the low bits are kept


def hash_tokens(low: Tensor, high: Tensor, vocab: int, ids: Tensor | None = None) -> Tensor:
    """int32 hash [N, V] of (key, position, token id): the same integers on every device.

    Args: low, high int32 [N]; ids int32 [V], where they are not 0 to V - 1.
    """
    ids = torch.arange(vocab, dtype=torch.int32, device=low.device) if ids is None else ids
    x = ids * GOLDEN + low[:, None]
    x = _fold(x, 16).mul_(MIX_A)
    x = _fold(x, 15).add_(high[:, None])
    x = _fold(x, 16).mul_(MIX_B)
    x = _fold(x, 13).mul_(MIX_C)
    return _fold(x, 16)


def gumbel(low: Tensor, high: Tensor, vocab: int, ids: Tensor | None = None) -> Tensor:
    """Standard Gumbel noise [N, V] float32 from the words of `row_words`; ids as of `hash_tokens`.

    G = -log(E), E = -log(1 - u), u in (0, 1) from 31 hash bits. Small u give the large G that decide samples; there
    both the conversion to float32 and log1p are precise. G lies in [-2.9, 22.2]: the cut tails weigh 6e-8 and 2.4e-10.
    """
    return _to_unit(hash_tokens(low, high, vocab, ids)).neg_().log1p_().neg_().log_().neg_()


def _to_unit(word: Tensor) -> Tensor:
    """Uniform float32 in (0, 1) from the low 31 bits of int32 words, with full relative precision near 0."""
    return (word & 0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)


def uniform(keys: Tensor, positions: Tensor) -> Tensor:
    """Uniforms in (0, 1) [N] float32 of (key, position); independent of `gumbel` for keys of another domain."""
    return _to_unit(hash_tokens(*row_words(keys, positions), 1)[:, 0])


def process_logits(logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Sampling logits [N, V] float32: divided by temperature, then cut to top-k, then to the top-p nucleus.

    Removed tokens get -inf. `temperature=0` keeps the logits (sampling is then a plain argmax). The nucleus is every
    token whose likelier tokens have a total probability below `top_p`. Tokens tied with the last one that is kept are
    kept too, in either cut, so the result does not depend on the order of a sort.
    """
    z = logits.float()
    if temperature not in (0.0, 1.0):
        z = z / temperature
    if 0 < top_k < z.shape[-1]:
        z = z.masked_fill(z < z.topk(top_k, dim=-1).values[..., -1:], -torch.inf)
    if top_p < 1.0:
        ordered = z.sort(dim=-1, descending=True).values
        upto = masses(ordered, ordered[..., :1]).cumsum(-1)
        limit = upto[..., -1:].double().mul_(top_p).ceil_().long()
        last = (upto < limit).sum(-1, keepdim=True).clamp_(max=z.shape[-1] - 1)  # a NaN could count them all
        z = z.masked_fill(z < ordered.gather(-1, last), -torch.inf)
    return z


def masses(z: Tensor, most: Tensor) -> Tensor:
    """exp(z - most) * 2**MASS_BITS, rounded down to int64 [..., V]; most [..., 1] is the row's largest z.

    Accurate to a relative 1e-6. A sum of integers does not depend on its order, and only one float32 product is rounded
    here, so every device cuts the same nucleus.
    """
    exponent = (most - z).mul_(LOG2_E * 2.0**FRACTION).clamp_(max=62 * 2.0**FRACTION).long()
    fraction = exponent & ((1 << FRACTION) - 1)
    power = fraction * POWER[-1]
    for term in POWER[-2:0:-1]:
        power = power.bitwise_right_shift_(FRACTION).add_(term).mul_(fraction)
    power = power.bitwise_right_shift_(FRACTION).add_(POWER[0])
    return power.bitwise_right_shift_(exponent.bitwise_right_shift_(FRACTION))


def keyed_sample(
    logits: Tensor,
    keys: Tensor,
    positions: Tensor,
    targets: Tensor | None = None,
    ids: Tensor | None = None,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Samples one token for each of N (key, position) pairs.

    Args: logits [N, V] of any float type; keys, positions int64 [N]; targets int64 [N], by default the samples; ids
    int32 [V] ascending, the tokens of the columns if these are not 0 to V - 1: samples are ids, targets are columns.
    Returns: tokens int64 [N]; their log-prob float32 [N] and that of the targets, under the processed distribution;
    gap float32 [N] between the two best scores, NaN where the logits are not usable.
    """
    z = process_logits(logits, temperature, top_k, top_p)
    scores = z if temperature == 0.0 else gumbel(*row_words(keys, positions), z.shape[-1], ids).add_(z)
    best, sampled = scores.max(-1)
    without = scores.scatter if scores is z else scores.scatter_
    second = without(-1, sampled[:, None], -torch.inf).amax(-1)
    total = z.logsumexp(-1)
    wanted = torch.stack([sampled, sampled if targets is None else targets], -1)
    log_p, log_p_targets = (z.gather(-1, wanted) - total[:, None]).unbind(-1)
    gap = (best - second).add_(total - total)  # NaN where the total is not finite
    return sampled if ids is None else ids[sampled].long(), log_p, log_p_targets, gap
