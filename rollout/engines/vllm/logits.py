"""How many draft tokens fit a step, and how rows share them.

vLLM computes the logits of all positions of a step at once. It has reserved memory for those of rows that only decode,
measured at its start, but none for the logits of draft tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from specrl.rollout.engines.base import free_bytes
from specrl.rollout.engines.local.sampler import LOGITS_MB

log = logging.getLogger(__name__)

MB = 2**20
PART = 2
"""One in so many of a GPU's free bytes is used: torch may keep the last step's logits while this one's are computed."""


def max_draft_tokens(vocab: int, *, free: int | None = None, width: int = 4) -> int:
    """Draft tokens of all rows together whose logits fit.

    On a CPU they take `LOGITS_MB`, 8 bytes a logit: vLLM's float32 and a copy. On a GPU they take half of what is free
    after the `LOGITS_MB` in which tokens are sampled chunk by chunk, and the model's logits exist at most twice, as
    some models scale or cap them.

    Args:
        vocab: logits of a position.
        free: free bytes of the GPU, vLLM's share subtracted; None on a CPU.
        width: bytes of a logit of the model.
    """
    if free is None:
        return LOGITS_MB * MB // (vocab * 8)
    return max(0, free - LOGITS_MB * MB) // PART // (vocab * 2 * width)


class Remedies(NamedTuple):
    """What the user of an engine can change where no draft fits; empty: nothing."""

    rows: str = "a lower rollout.rows_per_batch"
    memory: str = "a lower rollout.vllm.memory_utilization"
    step: str = "a higher rollout.tokens_per_pass"


ON_CPU = Remedies(memory="")
OF_SERVER = Remedies("a lower max_num_seqs", "a lower gpu_memory_utilization", "a higher max_num_batched_tokens")
OF_CPU_SERVER = OF_SERVER._replace(memory="")


@dataclass
class LogitsBudget:
    """Draft tokens that fit a rollout's steps. If no draft fits, this is logged once.

    Args:
        tokens: of `max_draft_tokens`.
        measure: computes `tokens` again when a rollout begins, as others may hold more memory than before; None: it is
            constant.
        step: most tokens of a step. vLLM fills steps row by row, so longer drafts would leave the last rows out of it.
        remedies: what the log suggests.
    """

    tokens: int
    measure: Callable[[], int] | None = None
    step: int = 1 << 31
    remedies: Remedies = ON_CPU
    _logged: bool = False

    def renew(self) -> None:
        """A rollout begins."""
        if self.measure:
            self.tokens = self.measure()

    def share(self, drafting: int, rows: int, most: int) -> int:
        """Draft tokens, at most `most`, of each of the `drafting` rows that have a draft, of `rows` in all.

        Each row needs a token of the step for itself; those without a draft need no more.
        """
        share = min(most, min(self.tokens, max(0, self.step - rows)) // max(1, drafting))
        if drafting and not share and not self._logged:
            self._logged = True
            if self.tokens < drafting:
                why = f"there is memory for the logits of {self.tokens}"
                remedy = self.remedies.memory
            else:
                why = f"a step has {self.step} tokens"
                remedy = self.remedies.step
            remedy = ", or ".join(filter(None, (self.remedies.rows, remedy)))
            log.warning("no draft is verified: %d of %d rows have one, and %s. Try %s", drafting, rows, why, remedy)
        return share


def logits_budget(vocab: int, dtype: torch.dtype, step: int) -> LogitsBudget:
    """The budget of an engine in this process.

    Args: dtype: of the model's logits; step: most tokens of a step.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu() or not torch.cuda.is_available():
        return LogitsBudget(max_draft_tokens(vocab), step=step, remedies=ON_CPU)
    device = torch.device("cuda", torch.cuda.current_device())

    def measure() -> int:
        return max_draft_tokens(vocab, free=free_bytes(device), width=dtype.itemsize)

    return LogitsBudget(measure(), measure, step, Remedies())
