"""Counter-based Gumbel noise and the keyed draw.

The token at response position t of a rollout with key k is `argmax_v(z_t(v) + G(k, t, v))`, where z_t are the processed
logits and G is standard Gumbel noise computed by a hash of (k, t, v). For a fresh key that is an exact sample from
softmax(z_t) (the Gumbel-max trick). Noise depends on nothing else: not on the batch, nor on the pass that computes it.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF


def _signed32(x: int) -> int:
    x &= _WORD
    return x - (1 << 32) if x >> 31 else x


_GOLDEN = _signed32(0x9E3779B1)
_MIX_A = _signed32(0x7FEB352D)  # lowbias32, C. Wellons, "Prospecting for Hash Functions" (public domain)
_MIX_B = _signed32(0x846CA68B)
_MIX_C = _signed32(0xC2B2AE35)  # MurmurHash3 finaliser, A. Appleby (public domain)


def _shift(x: Tensor, n: int) -> Tensor:
    """Logical right shift of int32 (torch's is arithmetic)."""
    return (x >> n) & ((1 << (32 - n)) - 1)


def row_words(keys: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Two int32 words [N] that identify (key, position); keys, positions int64 [N]. Murmur3's 64-bit finaliser."""
    x = keys ^ (positions * -7046029254386353131 + 1)
    for mult, n in ((-49064778989728563, 33), (-4265267296055464877, 33)):
        x = (x ^ ((x >> n) & ((1 << (64 - n)) - 1))) * mult
    x = x ^ ((x >> 33) & ((1 << 31) - 1))
    low = ((x & _WORD) ^ 0x80000000) - 0x80000000
    return low.to(torch.int32), (x >> 32).to(torch.int32)


def hash_tokens(low: Tensor, high: Tensor, vocab: int) -> Tensor:
    """int32 hash [N, V] of (key, position, token id): the same integers on every device. low, high int32 [N]."""
    x = torch.arange(vocab, dtype=torch.int32, device=low.device) * _GOLDEN + low[:, None]
    x = (x ^ _shift(x, 16)) * _MIX_A
    x = (x ^ _shift(x, 15)) + high[:, None]
    x = (x ^ _shift(x, 16)) * _MIX_B
    x = (x ^ _shift(x, 13)) * _MIX_C
    return x ^ _shift(x, 16)


def gumbel(low: Tensor, high: Tensor, vocab: int) -> Tensor:
    """Standard Gumbel noise [N, V] float32 from the words of `row_words`.

    G = -log(E), E = -log(1 - u), u in (0, 1) from 31 hash bits. Small u make the large G that decide draws; there both
    the conversion to float32 and log1p are precise. G lies in [-2.9, 22.2]: the cut tails weigh 6e-8 and 2.4e-10.
    """
    return -torch.log(-torch.log1p(-_to_unit(hash_tokens(low, high, vocab))))


def _to_unit(word: Tensor) -> Tensor:
    """Uniform float32 in (0, 1) from the low 31 bits of int32 words, with full relative precision near 0."""
    return (((word & 0x7FFFFFFF).float() + 0.5) * 2.0**-31).clamp(max=1 - 2.0**-24)


def uniform(keys: Tensor, positions: Tensor) -> Tensor:
    """Uniforms in (0, 1) [N] float32 of (key, position); independent of `gumbel` for keys of another domain."""
    return _to_unit(hash_tokens(*row_words(keys, positions), 1)[:, 0])


def process_logits(logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Sampling logits [N, V] float32: divided by temperature, then cut to top-k, then to the top-p nucleus.

    Removed tokens get -inf. `temperature=0` keeps the logits (the draw is then a plain argmax). A token tied with the
    k-th stays, so that the result does not depend on the order of a sort.
    """
    z = logits.float()
    if temperature not in (0.0, 1.0):
        z = z / temperature
    if 0 < top_k < z.shape[-1]:
        z = z.masked_fill(z < z.topk(top_k, dim=-1).values[..., -1:], -torch.inf)
    if top_p < 1.0:
        ordered, index = z.sort(dim=-1, descending=True, stable=True)
        p = ordered.softmax(-1)
        outside = p.cumsum(-1) - p >= top_p  # mass of the more likely tokens; the first token always stays
        z = z.masked_fill(torch.zeros_like(outside).scatter(-1, index, outside), -torch.inf)
    return z


def keyed_draw(
    logits: Tensor,
    keys: Tensor,
    positions: Tensor,
    targets: Tensor | None = None,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draws one token for each of N (key, position) pairs.

    Args: logits [N, V] of any float type; keys, positions int64 [N]; targets int64 [N] or [N, C], the draws when None.
    Returns: draws int64 [N]; their log-prob float32 [N] and that of the targets, under the processed distribution;
    gap float32 [N] between the two best scores, NaN where the logits are not usable.
    """
    z = process_logits(logits, temperature, top_k, top_p)
    scores = z if temperature == 0.0 else z + gumbel(*row_words(keys, positions), z.shape[-1])
    best, draws = scores.max(-1)
    second = scores.scatter(-1, draws[:, None], -torch.inf).amax(-1)
    total = z.logsumexp(-1)
    log_p = z.gather(-1, draws[:, None])[:, 0] - total
    wanted = draws if targets is None else targets
    log_p_targets = (z.gather(-1, wanted.view(len(z), -1)) - total[:, None]).view(wanted.shape)
    gap = torch.where(total.isfinite(), best - second, torch.nan)
    return draws, log_p, log_p_targets, gap
