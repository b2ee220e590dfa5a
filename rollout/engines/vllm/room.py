"""How many draft tokens a step has room for, and how rows share it.

vLLM computes the logits of all positions of a step at once: those of rows that only decode are in the memory that it
measured at its start, those of draft tokens are not.
"""

from __future__ import annotations

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


def draft_share(room: int, drafting: int, most: int, *, rows: int = 0, tokens: int | None = None) -> int:
    """Most draft tokens of one row in the next step.

    Args:
        room: of `draft_room`.
        drafting: rows that have a draft; the others take nothing.
        most: `rollout.vllm.draft_tokens`.
        rows: rows of the step; each needs a token of its own.
        tokens: most tokens of a step. vLLM fills steps row by row, so longer drafts would leave the last rows out of
            it. None does not look at that.
    """
    if tokens is not None:
        room = min(room, max(0, tokens - rows))
    return min(most, room // max(1, drafting))
