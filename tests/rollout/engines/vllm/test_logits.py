"""The draft tokens of a step are limited by free memory, which only rows with a draft share."""

import pytest

from specrl.rollout.config import RolloutConfig
from specrl.rollout.engines.vllm.logits import LogitsBudget, max_draft_tokens

VOCAB, BF16 = 151_936, 2
GB = 10**9
# An 80 GB card shared by vLLM, weights and KV included, and a trainer of 1.7B parameters in mixed precision that keeps
# master weights, gradients and AdamW's two moments in float32. 0.45 is the `utilization` of configs/*_gsm8k.yaml.
FREE = int(80 * GB * (1 - 0.45) - 1.7e9 * 4 * 4)


def share(rows: int, drafting: int, free: int | None = FREE) -> int:
    """Draft tokens of each of the `drafting` rows, at most 32."""
    tokens = max_draft_tokens(VOCAB, RolloutConfig().logits_mb, free=free, width=BF16)
    return LogitsBudget(tokens, step=16_384).share(drafting, rows, 32)


def test_every_row_of_a_large_batch_drafts():
    assert all(share(rows, rows) >= 4 for rows in (64, 256, 512, 1024))
    assert share(1024, 64) == 32, "rows without a draft need no share"
    assert share(1024, 1024, free=None) < 4, "control: a GPU with logits_mb only"


def test_the_logits_fit_what_is_free():
    """Two copies of a step's logits in the model's dtype, the previous step's logits, and the sampled chunk fit."""
    for free in (0, 300 * 2**20, 2 * GB, FREE):
        tokens = max_draft_tokens(VOCAB, 256, free=free, width=BF16)
        assert 2 * tokens * VOCAB * 2 * BF16 + 256 * 2**20 <= max(free, 256 * 2**20)
    assert max_draft_tokens(VOCAB, 256, free=200 * 2**20, width=BF16) == 0
    half = max_draft_tokens(VOCAB, 256, free=4 * GB, width=BF16) / 2
    assert max_draft_tokens(VOCAB, 256, free=4 * GB, width=4) == pytest.approx(half, abs=1)
    assert max_draft_tokens(61, 1) == 2148, "a CPU has logits_mb"


def test_a_step_has_a_token_for_every_row():
    """Otherwise vLLM would fill it with the drafts of the first rows."""
    for rows in (1, 64, 256, 3000, 4096, 5000):
        tokens = LogitsBudget(1 << 20, step=4096).share(rows, rows, 32)
        assert tokens == min(32, max(0, 4096 - rows) // rows)
    assert LogitsBudget(1 << 20).share(0, 9, 32) == 32
