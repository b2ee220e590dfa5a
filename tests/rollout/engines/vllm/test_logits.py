"""The draft tokens of a step are limited by free memory, which only rows with a draft share."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch

from specrl.rollout.engines.vllm.logits import LogitsBudget, max_draft_tokens

VOCAB, BF16 = 151_936, 2
GB = 10**9
# An 80 GB card shared by vLLM, weights and KV included, and a trainer of 1.7B parameters in mixed precision that keeps
# master weights, gradients and AdamW's two moments in float32. 0.45 is the `utilization` of configs/*_gsm8k.yaml.
FREE = int(80 * GB * (1 - 0.45) - 1.7e9 * 4 * 4)


def share(rows: int, drafting: int, free: int | None = FREE) -> int:
    """Draft tokens of each of the `drafting` rows, at most 32."""
    tokens = max_draft_tokens(VOCAB, free=free, width=BF16)
    return LogitsBudget(tokens, step=16_384).share(drafting, rows, 32)


def test_every_row_of_a_large_batch_drafts():
    assert all(share(rows, rows) >= 4 for rows in (64, 256, 512, 1024))
    assert share(1024, 64) == 32, "rows without a draft need no share"
    assert share(1024, 1024, free=None) < 4, "control: a CPU"


def test_the_logits_fit_what_is_free():
    """Two copies of a step's logits in the model's dtype, the previous step's logits, and the sampled chunk fit."""
    for free in (0, 300 * 2**20, 2 * GB, FREE):
        tokens = max_draft_tokens(VOCAB, free=free, width=BF16)
        assert 2 * tokens * VOCAB * 2 * BF16 + 256 * 2**20 <= max(free, 256 * 2**20)
    assert max_draft_tokens(VOCAB, free=200 * 2**20, width=BF16) == 0
    half = max_draft_tokens(VOCAB, free=4 * GB, width=BF16) / 2
    assert max_draft_tokens(VOCAB, free=4 * GB, width=4) == pytest.approx(half, abs=1)
    assert max_draft_tokens(61) == 256 * 2**20 // (61 * 8), "on a CPU"


def test_a_step_has_a_token_for_every_row():
    """Otherwise vLLM would fill it with the drafts of the first rows."""
    for rows in (1, 64, 256, 3000, 4096, 5000):
        for drafting in {rows, max(1, rows // 8)}:
            tokens = LogitsBudget(1 << 20, step=4096).share(drafting, rows, 32)
            assert tokens == min(32, max(0, 4096 - rows) // drafting)
    assert LogitsBudget(1 << 20).share(0, 9, 32) == 32


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: pip install 'specrl[vllm]'")
@pytest.mark.parametrize(("in_this_process", "held"), [(True, 0), (True, 40 * GB), (True, 44 * GB), (False, 40 * GB)])
def test_a_trainers_memory_is_not_free_for_a_colocated_engine(monkeypatch, in_this_process, held):
    """It is measured when a rollout begins, as an optimizer allocates after the engine's start."""
    from specrl.rollout.engines.vllm import served

    total = 80 * GB
    left = int(total * (1 - 0.45))
    platform = SimpleNamespace(is_cpu=lambda: False, get_device_total_memory=lambda: total)
    monkeypatch.setattr(served, "current_platform", platform)
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: in_this_process)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    free = [left]
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (free[0], total))
    for name in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda device: 0)
    config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.bfloat16, get_vocab_size=lambda: VOCAB),
        cache_config=SimpleNamespace(gpu_memory_utilization=0.45),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=16_384),
    )
    budget = served.logits_budget(config)
    assert budget.tokens == max_draft_tokens(VOCAB, free=left, width=BF16) > 0
    free[0] -= held
    budget.renew()
    known = left - held if in_this_process else left
    assert budget.tokens == max_draft_tokens(VOCAB, free=known, width=BF16)
    assert (budget.tokens == 0) == (in_this_process and held == 44 * GB)
