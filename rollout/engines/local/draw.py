"""From hidden states to drawn tokens: the output layer and the keyed draw, chunk by chunk, as one packed result.

The draw is one operator, `specrl::keyed_draw`: rollout/noise.py on CPUs, draw_kernel.py on CUDA. Nothing here waits for
a device, and shapes depend on the number of hidden states alone, so that it can be part of a captured graph.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.engines.local.memory import free_bytes
from specrl.rollout.noise import keyed_draw

CPU_BYTES, CUDA_BYTES = 16, 4
"""Memory per logit: logits, noise and scores of noise.py in float32; the kernel's logits."""
FREE_PART = 16
"""A chunk may take one part in so many of the memory that is free on a GPU; the most of it is for KV."""


@torch.library.custom_op("specrl::keyed_draw", mutates_args=(), device_types="cpu")
def packed_draw(
    logits: Tensor,
    keys: Tensor,
    positions: Tensor,
    targets: Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    ids: Tensor | None = None,
) -> Tensor:
    """`keyed_draw` of logits [N, V] as int32 [4, N]: draws, then the bits of log-prob, target's log-prob and gap."""
    law = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    draws, *floats = keyed_draw(logits, keys, positions, targets, ids=ids, **law)
    return torch.stack([draws.int(), *(x.view(torch.int32) for x in floats)])


@packed_draw.register_kernel("cuda")
def _on_cuda(logits, keys, positions, targets, temperature, top_k, top_p, ids=None):
    from specrl.rollout.engines.local import draw_kernel

    with torch.cuda.device(logits.device):  # Triton launches on the current one
        return draw_kernel.keyed_draw(logits, keys, positions, targets, temperature, top_k, top_p, ids)


@packed_draw.register_fake
def _shape(logits, keys, positions, targets, temperature, top_k, top_p, ids=None):
    return logits.new_empty((4, logits.shape[0]), dtype=torch.int32)


def unpack(packed: Tensor) -> tuple[list[int], list[float], list[float], np.ndarray]:
    """Draws, their log-probs, the targets' log-probs and gaps (float32) from what `Draw` gave, copied to the CPU."""
    draws, logprobs, text, gaps = packed.numpy()
    logprobs, text, gaps = (column.view(np.float32) for column in (logprobs, text, gaps))
    return draws.tolist(), logprobs.tolist(), text.tolist(), gaps


def rows_per_chunk(vocab: int, logits_mb: int, free: int | None = None) -> int:
    """Rows of V logits in a chunk, at least one; `free` bytes of a GPU, or None on a CPU.

    On a CPU they take `logits_mb`. On a GPU every chunk reads the output layer again, so there they take a sixteenth of
    what is free where that is more.
    """
    if free is None:
        return max(1, logits_mb * 2**20 // (vocab * CPU_BYTES))
    return max(1, max(logits_mb * 2**20, free // FREE_PART) // (vocab * CUDA_BYTES))


class Draw:
    """Draws the token after each of N hidden states; logits exist chunk by chunk only.

    Args:
        lm_head: the output layer, with a weight [V, hidden].
        sampling: the law that tokens are drawn from.
        logits_mb: most memory for logits, noise and scores in MB; on a GPU see `rows_per_chunk`.

    Attributes:
        ids: int32 [V] of the output layer's rows, ascending; None where they are 0 to V - 1.
        rows: hidden states of a chunk; it stays as it is, as captured graphs need it.
        bytes: what a full chunk takes; whoever plans memory leaves that much.
    """

    def __init__(self, lm_head: nn.Module, sampling: SamplingParams, logits_mb: int):
        self.lm_head = lm_head
        self._law = sampling.terms
        self.ids: Tensor | None = None
        vocab, device = lm_head.weight.shape[0], lm_head.weight.device
        on_gpu = device.type == "cuda"
        self.rows = rows_per_chunk(vocab, logits_mb, free_bytes(device) if on_gpu else None)
        self.bytes = self.rows * vocab * (CUDA_BYTES if on_gpu else CPU_BYTES)

    def __call__(self, hidden: Tensor, keys: Tensor, positions: Tensor, targets: Tensor) -> Tensor:
        """Args: hidden [N, hidden]; keys, positions, targets int64 [N].

        Returns: int32 [4, N] on the same device: draws, then the float32 bits of their log-probs, of the targets'
        log-probs and of the gaps, each as of `specrl.rollout.noise.keyed_draw`. `unpack` reads a copy on the CPU.
        """
        if len(hidden) <= self.rows:
            return packed_draw(self.logits(hidden), keys, positions, targets, *self._law, self.ids)
        columns = [x.split(self.rows) for x in (hidden, keys, positions, targets)]
        parts = [packed_draw(self.logits(x), *of, *self._law, self.ids) for x, *of in zip(*columns, strict=True)]
        return torch.cat(parts, 1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, V] of hidden states [N, hidden]: float32, or as the output layer gives them where it `rounds`."""
        kind = self._computed_in()
        if kind.itemsize > 2 or self.rounds:
            return self.lm_head(hidden)
        logits = torch.mm(hidden.to(kind), self.lm_head.weight.to(kind).T, out_dtype=torch.float32)
        return logits if self.lm_head.bias is None else logits.add_(self.lm_head.bias)

    @property
    def rounds(self) -> str:
        """Why logits are rounded to the 16 bits that the output layer computes in; empty where they are not.

        Rounding flips draws whose two best scores are close, one in a few hundred in bfloat16.
        """
        head, kind = self.lm_head, self._computed_in()
        if kind not in (torch.float16, torch.bfloat16):
            return ""
        if head.weight.device.type != "cuda":
            return f"torch multiplies {kind} into float32 on CUDA only, not on {head.weight.device.type}"
        if not hasattr(torch.ops.aten.mm, "dtype"):
            return f"torch {torch.__version__} has no torch.mm(out_dtype=...); torch 2.8 has"
        return peculiar(head)

    def _computed_in(self) -> torch.dtype:
        """The output layer's type, or that of the autocast around it."""
        kind = self.lm_head.weight.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.lm_head.weight.dtype


class TrimmedDraw(Draw):
    """Draws among some ids only, whose rows of the output layer it holds: never wrong for a draft, only blind.

    VocabTrim (arXiv 2506.22694), with the noise that those ids have in the policy's own draws.

    Args:
        lm_head: the output layer, a plain Linear.
        size: ids; which they are is told by `take`, and their rows stay where they are, as captured graphs need it.
    """

    def __init__(self, lm_head: nn.Linear, sampling: SamplingParams, logits_mb: int, size: int):
        of = {"bias": lm_head.bias is not None, "device": lm_head.weight.device, "dtype": lm_head.weight.dtype}
        rows = torch.nn.utils.skip_init(nn.Linear, lm_head.in_features, size, **of).requires_grad_(False)
        super().__init__(rows, sampling, logits_mb)
        self._whole, self.ids = lm_head, torch.empty(size, dtype=torch.int32, device=lm_head.weight.device)
        self.take(np.arange(size))

    @torch.no_grad()
    def take(self, ids: np.ndarray) -> None:
        """Draws are among these from now on, by the output layer as it is now. Args: ids: [size], ascending."""
        self.ids.copy_(torch.from_numpy(ids))
        for mine, theirs in zip(self.lm_head.parameters(), self._whole.parameters(), strict=True):
            torch.index_select(theirs, 0, self.ids, out=mine.data)

    def __call__(self, hidden: Tensor, keys: Tensor, positions: Tensor, targets: Tensor) -> Tensor:
        """See `Draw`, without log-probs of the targets, which may be none of the ids."""
        return super().__call__(hidden, keys, positions, torch.zeros_like(targets))


def peculiar(lm_head: nn.Module) -> str:
    """Why its weight alone does not tell what an output layer computes; empty where it does."""
    hooked = lm_head._forward_hooks or lm_head._forward_pre_hooks or "forward" in vars(lm_head)
    if type(lm_head) is nn.Linear and not hooked:
        return ""
    return f"the output layer is no plain Linear but a {type(lm_head).__name__} with hooks or of another forward"
