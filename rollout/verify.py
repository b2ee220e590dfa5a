"""Acceptance rules: pure functions from draws and drafts to the number of accepted tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor


def accept_exact(draws: Sequence[int], draft: Sequence[int]) -> int:
    """Accepted draft tokens under the exact rule: a draft token stands when it equals the sampler's own draw.

    `draws[i]` is the keyed draw given the prefix and draft[:i]; it may be longer than the draft. The output
    draws[:n + 1] is what plain decoding with the same key emits, whatever the draft (E0 of docs/guarantees.md).
    """
    n = 0
    for drawn, drafted in zip(draws, draft, strict=False):
        if drawn != drafted:
            break
        n += 1
    return n


def accept_tree(draws: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
    """Accepted nodes of a draft tree under the exact rule, from the root down: the child that is the draw, if any.

    `draws[0]` is the keyed draw behind the text and `draws[i + 1]` the one behind node i, given the text and the path
    to it; `tokens` and `parents` are as in rollout/tree.py. A draw depends on its own path only, so the draws along the
    accepted path and the one behind it are what plain decoding emits, whatever the other branches hold. A chain is the
    tree with parents -1, 0, 1, ..., of which this accepts the first `accept_exact(draws, tokens)` nodes.

    The chance to go on from a node is the policy's mass on its children: for candidates that are given rather than
    drawn this is the optimum of multi-draft verification (SpecTr, arXiv 2310.15141), so no rule accepts more.
    """
    path, at = [], -1
    for i, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if parent == at and token == draws[at + 1]:
            path.append(i)
            at = i
    return path


def accept_judged(draws: Sequence[int], draft: Sequence[int], unimportant: Collection[int]) -> int:
    """Accepted draft tokens when a mismatch also stands where a judge calls it unimportant.

    Judge Decoding (arXiv 2501.19309): standard acceptance OR the judge's. With no position in `unimportant` this is
    `accept_exact`; else the output follows no law that can be written down, and must be measured.

    Args: unimportant: positions of the draft whose token may stand although it is not the draw.
    """
    n = 0
    while n < min(len(draws), len(draft)) and (draws[n] == draft[n] or n in unimportant):
        n += 1
    return n


def judged_laws(own: Sequence[float], drafted: Sequence[float], unimportant: Collection[int]) -> list[float]:
    """Behaviour log-probs of accepted draft tokens.

    Where a judge lets the draft stand, it stands whatever is drawn, so its law is the draft's even if it is the draw as
    well; elsewhere only the policy's own draw stands. Exact for judges that do not read the token itself.

    Args: own: log-probs under the policy; drafted: under the law that drew the draft; unimportant: see `accept_judged`.
    """
    return [drafted[i] if i in unimportant else logprob for i, logprob in enumerate(own)]


def accept_lenient(logp_new: Tensor, logp_old: Tensor, u: Tensor, lenience: float) -> int:
    """Accepted prefix under SPEC-RL's published rule: token i stands with probability min(1, l * p_new / p_old).

    Algorithm 1 of SPEC-RL (arXiv 2509.23232). After the first rejection the caller samples from p_new, not from the
    residual, so the output is biased towards the old policy even at l = 1; see docs/guarantees.md.

    Args: logp_new, logp_old float [K], log-probs of the drafted tokens under the current policy and under the law that
    produced them, both after the same temperature, top-k and top-p; u uniforms [K], fresh on every visit.
    """
    accept = u.log() <= torch.tensor(lenience, dtype=torch.float64).log() + logp_new.double() - logp_old.double()
    return int(accept.long().cumprod(0).sum())


def cut(tokens: Sequence[int], eos_ids: Collection[int], room: int) -> tuple[int, str | None]:
    """How many of `tokens` may be emitted, and the finish reason when that ends the response.

    The first EOS ends it (kept, `stop`), else the cap of `room` tokens (`length`); an EOS that is exactly the last
    token allowed is a `stop`.
    """
    for i, token in enumerate(tokens[:room]):
        if token in eos_ids:
            return i + 1, "stop"
    return (room, "length") if len(tokens) >= room else (len(tokens), None)
