"""How many draft tokens a step has room for, and how rows share it.

vLLM computes the logits of all positions of a step at once: those of rows that only decode are in the memory that it
measured at its start, those of draft tokens are not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from specrl.rollout.engines.local.memory import free_bytes

log = logging.getLogger(__name__)

MB = 2**20
PART = 2
"""One in so many of a GPU's free bytes is planned with: torch may keep the last step's logits beside this one's."""


def draft_room(vocab: int, logits_mb: int, *, free: int | None = None, width: int = 4) -> int:
    """Draft tokens of all rows together whose logits fit.

    On a CPU they take `logits_mb`, 8 bytes a logit: vLLM's float32 and a copy. On a GPU they take half of what is free
    after the `logits_mb` in which draws are made chunk by chunk, and the model's logits exist at most twice, as some
    models scale or cap them.

    Args:
        vocab: logits of a position.
        logits_mb: `rollout.logits_mb`, in MB of 2^20 bytes.
        free: bytes of the GPU that nobody holds, vLLM's share taken; None on a CPU.
        width: bytes of a logit of the model.
    """
    if free is None:
        return logits_mb * MB // (vocab * 8)
    return max(0, free - logits_mb * MB) // PART // (vocab * 2 * width)


class Remedies(NamedTuple):
    """What whoever runs an engine can change where no draft rides; empty: nothing."""

    rows: str = "a lower rollout.rows_per_batch"
    memory: str = "a lower rollout.vllm.memory_utilization"
    step: str = "a higher rollout.tokens_per_pass"


ON_CPU = Remedies(memory="a higher rollout.logits_mb")
OF_SERVER = Remedies("a lower max_num_seqs", "a lower gpu_memory_utilization", "a higher max_num_batched_tokens")
OF_CPU_SERVER = OF_SERVER._replace(memory="")


@dataclass
class LogitsBudget:
    """What a rollout's steps have room for. That it is nothing is told once.

    Args:
        tokens: of `draft_room`.
        measure: gives `tokens` anew when a rollout begins, as others may hold more memory than before; None: it stays.
        step: most tokens of a step. vLLM fills steps row by row, so longer drafts would leave the last rows out of it.
        remedies: what is told then.
    """

    tokens: int
    measure: Callable[[], int] | None = None
    step: int = 1 << 31
    remedies: Remedies = ON_CPU
    _told: bool = False

    def renew(self) -> None:
        """A rollout begins."""
        if self.measure:
            self.tokens = self.measure()

    def share(self, drafting: int, rows: int, most: int) -> int:
        """Draft tokens, at most `most`, of each of the `drafting` rows that have a draft, of `rows` in all.

        Each row needs a token of the step for itself; those without a draft need no more.
        """
        share = min(most, min(self.tokens, max(0, self.step - rows)) // max(1, drafting))
        if drafting and not share and not self._told:
            self._told = True
            if self.tokens < drafting:
                why, remedy = f"there is memory for the logits of {self.tokens}", self.remedies.memory
            else:
                why, remedy = f"a step has {self.step} tokens", self.remedies.step
            remedy = ", or ".join(filter(None, (self.remedies.rows, remedy)))
            log.warning("no draft rides: %d of %d rows have one, and %s. Try %s", drafting, rows, why, remedy)
        return share


def room_of(vocab: int, logits_mb: int, dtype: torch.dtype, step: int, served: bool = False) -> LogitsBudget:
    """The room of an engine in this process.

    Args: dtype: of the model's logits; step: most tokens of a step; served: it is somebody else's server.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu() or not torch.cuda.is_available():
        return LogitsBudget(draft_room(vocab, logits_mb), step=step, remedies=OF_CPU_SERVER if served else ON_CPU)
    device = torch.device("cuda", torch.cuda.current_device())

    def measure() -> int:
        return draft_room(vocab, logits_mb, free=free_bytes(device), width=dtype.itemsize)

    return LogitsBudget(measure(), measure, step, OF_SERVER if served else Remedies())
