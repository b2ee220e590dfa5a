"""From hidden states to sampled tokens: the output layer and keyed sampling, chunk by chunk, as one packed result.

Sampling is one operator, `specrl::keyed_sample`: rollout/noise.py on CPUs, sampler_kernel.py on CUDA. Nothing here
waits for a device, and shapes depend on the number of hidden states alone, so it can be part of a captured graph.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from specrl.rollout.engines.base import SamplingParams, free_bytes
from specrl.rollout.noise import keyed_sample

LOGITS_MB = 256
"""Memory for the logits and noise of a pass in MB of 2^20 bytes; larger passes are sampled chunk by chunk."""
CPU_BYTES, CUDA_BYTES = 16, 4
"""Memory per logit: logits, noise and scores of noise.py in float32; the kernel's logits."""
FREE_PART = 16
"""A chunk may take 1/16 of the memory that is free on a GPU; most of that is for KV."""


@torch.library.custom_op("specrl::keyed_sample", mutates_args=(), device_types="cpu")
def packed_sample(
    logits: Tensor,
    keys: Tensor,
    positions: Tensor,
    targets: Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    ids: Tensor | None = None,
) -> Tensor:
    """`keyed_sample` of logits [N, V] as int32 [4, N]: tokens, then the bits of log-prob, target's log-prob and gap."""
    tokens, *floats = keyed_sample(
        logits, keys, positions, targets, ids=ids, temperature=temperature, top_k=top_k, top_p=top_p
    )
    return torch.stack([tokens.int(), *(x.view(torch.int32) for x in floats)])


@packed_sample.register_kernel("cuda")
def _on_cuda(logits, keys, positions, targets, temperature, top_k, top_p, ids=None):
    from specrl.rollout.engines.local import sampler_kernel

    with torch.cuda.device(logits.device):  # Triton launches on the current one
        return sampler_kernel.keyed_sample(logits, keys, positions, targets, temperature, top_k, top_p, ids)


@packed_sample.register_fake
def _shape(logits, keys, positions, targets, temperature, top_k, top_p, ids=None):
    return logits.new_empty((4, logits.shape[0]), dtype=torch.int32)


def unpack(packed: Tensor) -> tuple[list[int], list[float], list[float], np.ndarray]:
    """Tokens, their log-probs, the targets' log-probs and gaps (float32) of a `Sampler`'s result on the CPU."""
    tokens, *columns = packed.numpy()
    logprobs, targets, gaps = (column.view(np.float32) for column in columns)
    return tokens.tolist(), logprobs.tolist(), targets.tolist(), gaps


def rows_per_chunk(vocab: int, free: int | None = None) -> int:
    """Rows of V logits in a chunk, at least one; `free` bytes of a GPU, or None on a CPU.

    On a CPU a chunk takes `LOGITS_MB`. On a GPU every chunk reads the output layer again, so there it takes 1/16 of
    the free memory if that is more.
    """
    if free is None:
        return max(1, LOGITS_MB * 2**20 // (vocab * CPU_BYTES))
    return max(1, max(LOGITS_MB * 2**20, free // FREE_PART) // (vocab * CUDA_BYTES))


class Sampler:
    """Samples the token after each of N hidden states; logits exist chunk by chunk only.

    Args:
        lm_head: the output layer, with a weight [V, hidden].
        sampling: the sampling params.

    Attributes:
        ids: int32 [V] of the output layer's rows, ascending; None where they are 0 to V - 1.
        rows: hidden states of a chunk; constant, as captured graphs need it.
        bytes: memory of a full chunk.
    """

    def __init__(self, lm_head: nn.Linear, sampling: SamplingParams):
        self.lm_head = lm_head
        self._params = sampling.terms
        self.ids: Tensor | None = None
        vocab, device = lm_head.weight.shape[0], lm_head.weight.device
        on_gpu = device.type == "cuda"
        self.rows = rows_per_chunk(vocab, free_bytes(device) if on_gpu else None)
        self.bytes = self.rows * vocab * (CUDA_BYTES if on_gpu else CPU_BYTES)

    def __call__(self, hidden: Tensor, keys: Tensor, positions: Tensor, targets: Tensor) -> Tensor:
        """Args: hidden [N, hidden]; keys, positions, targets int64 [N].

        Returns: int32 [4, N] on the same device: tokens, then the float32 bits of their log-probs, of the targets'
        log-probs and of the gaps, each as of `specrl.rollout.noise.keyed_sample`. `unpack` reads a copy on the CPU.
        """
        if len(hidden) <= self.rows:
            return packed_sample(self.logits(hidden), keys, positions, targets, *self._params, self.ids)
        columns = [x.split(self.rows) for x in (hidden, keys, positions, targets)]
        chunks = zip(*columns, strict=True)
        return torch.cat([packed_sample(self.logits(x), *noise, *self._params, self.ids) for x, *noise in chunks], 1)

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

        Rounding flips samples whose two best scores are close, one in a few hundred in bfloat16.
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


class TrimmedSampler(Sampler):
    """Samples among some ids only, whose rows of the output layer it copies, for drafts.

    VocabTrim (arXiv 2506.22694), with the noise that those ids have in the policy's own samples.

    Args:
        lm_head: the output layer, a plain Linear.
        size: ids; `take` chooses them. Their rows stay at one address, as captured graphs need it.
    """

    def __init__(self, lm_head: nn.Linear, sampling: SamplingParams, size: int):
        weight = lm_head.weight
        options = {"bias": lm_head.bias is not None, "device": weight.device, "dtype": weight.dtype}
        rows = torch.nn.utils.skip_init(nn.Linear, lm_head.in_features, size, **options).requires_grad_(False)
        super().__init__(rows, sampling)
        self._full_head = lm_head
        self.ids: Tensor = torch.empty(size, dtype=torch.int32, device=weight.device)
        self.take(np.arange(size))

    @torch.no_grad()
    def take(self, ids: np.ndarray) -> None:
        """Samples among these ids from now on, by the present output layer. Args: ids: [size], ascending."""
        self.ids.copy_(torch.from_numpy(ids))
        for rows, full in zip(self.lm_head.parameters(), self._full_head.parameters(), strict=True):
            torch.index_select(full, 0, self.ids, out=rows.data)

    def __call__(self, hidden: Tensor, keys: Tensor, positions: Tensor, targets: Tensor) -> Tensor:
        """See `Sampler`, without log-probs of the targets, which may be none of the ids."""
        return super().__call__(hidden, keys, positions, torch.zeros_like(targets))


def peculiar(lm_head: nn.Module) -> str:
    """Why the weight alone does not determine what an output layer computes; empty where it does."""
    hooked = lm_head._forward_hooks or lm_head._forward_pre_hooks or "forward" in vars(lm_head)
    if type(lm_head) is nn.Linear and not hooked:
        return ""
    return f"the output layer is no plain Linear but a {type(lm_head).__name__} with hooks or of another forward"
