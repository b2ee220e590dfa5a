"""The draft tokens of a step are limited by free memory, which only rows with a draft share."""

import pytest

from specrl.rollout.config import RolloutConfig
from specrl.rollout.engines.vllm.logits import LogitsBudget, max_draft_tokens

VOCAB = 151_936
GB = 10**9
# An 80 GB card shared by vLLM, weights and KV included, and a trainer of 1.7B parameters in mixed precision that keeps
# master weights, gradients and AdamW's two moments in float32. `utilization` is that of configs/*_gsm8k.yaml, and the
# default.
TRAINER = 1.7e9 * 4 * 4
FREE = {utilization: int(80 * GB * (1 - utilization) - TRAINER) for utilization in (0.4, 0.45)}
BF16 = 2


def by_room(rows: int, drafting: int, free: int, logits_mb: int, tokens: int) -> int:
    return LogitsBudget(max_draft_tokens(VOCAB, logits_mb, free=free, width=BF16), step=tokens).share(
        drafting, rows, 32
    )


def over_all_rows(rows: int, drafting: int, free: int, logits_mb: int, tokens: int) -> int:
    """Planted fault: rows without a draft also get a share."""
    return by_room(rows, rows, free, logits_mb, tokens)


def by_logits_mb(rows: int, drafting: int, free: int, logits_mb: int, tokens: int) -> int:
    """Planted fault: a GPU has only logits_mb."""
    return LogitsBudget(max_draft_tokens(VOCAB, logits_mb), step=tokens).share(drafting, rows, 32)


def too_little(share) -> list[tuple]:
    """(rows, drafting rows, utilization, share) where rows get too small a share."""
    found = []
    for utilization, free in FREE.items():
        for logits_mb in (RolloutConfig().logits_mb, 2048):
            for rows in (64, 256, 512, 1024):
                given = share(rows, rows, free, logits_mb, 16_384)
                if given < 4:
                    found.append((rows, rows, utilization, given))
        few = share(1024, 64, free, RolloutConfig().logits_mb, 16_384)
        if few < 32:  # other rows do not need their shares
            found.append((1024, 64, utilization, few))
    return found


def test_every_row_of_a_large_batch_drafts():
    assert too_little(by_room) == []


@pytest.mark.parametrize("fault", [over_all_rows, by_logits_mb])
def test_control_planted_faults_are_found(fault):
    assert too_little(fault) != []


def test_the_logits_fit_what_is_free():
    """Two copies of a step's logits in the model's dtype, the previous step's logits, and the sampled chunk fit."""
    for free in (0, 300 * 2**20, 2 * GB, FREE[0.4]):
        room = max_draft_tokens(VOCAB, 256, free=free, width=BF16)
        assert 2 * room * VOCAB * 2 * BF16 + 256 * 2**20 <= max(free, 256 * 2**20)
    assert max_draft_tokens(VOCAB, 256, free=200 * 2**20, width=BF16) == 0
    assert max_draft_tokens(VOCAB, 256, free=4 * GB, width=4) == pytest.approx(
        max_draft_tokens(VOCAB, 256, free=4 * GB, width=BF16) / 2, abs=1
    )


def test_a_cpu_has_logits_mb():
    """With a vocabulary of 61, one MB holds the logits of 2148 draft tokens."""
    assert (max_draft_tokens(61, 1), max_draft_tokens(VOCAB, 256)) == (2148, 220)


def test_a_step_has_a_token_for_every_row():
    """Otherwise vLLM would fill it with the drafts of the first rows."""
    for rows in (1, 64, 256, 3000, 4096, 5000):
        share = LogitsBudget(1 << 20, step=4096).share(rows, rows, 32)
        assert share == min(32, max(0, 4096 - rows) // rows)
        assert rows > 4096 or rows * (1 + share) <= 4096
    assert LogitsBudget(1 << 20).share(0, 9, 32) == 32
