"""Memory limits of the transformers engine: they change no token, and a batch that does not fit is split."""

import copy
import math
import random
from dataclasses import replace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.engines.local import memory as memory_plan
from specrl.rollout.engines.local import probe, sampler
from specrl.rollout.engines.local.reader import Reader
from specrl.rollout.keys import derive_key
from specrl.rollout.types import Request, RolloutError
from tests.engines import local
from tests.rollout.golden import (
    differing,
    drafts_of_every_quality,
    engine_of,
    requests_of,
)

NO_EOS = SamplingParams(frozenset())
MB = 2**20


@pytest.mark.parametrize(
    "settings",
    [
        {"tokens_per_pass": 7},
        {"rows_per_batch": 1},
        {"rows_per_batch": 9, "tokens_per_pass": 11},
    ],
)
def test_memory_bounds_change_nothing(golden, settings):
    model, cases, want = golden("qwen3")
    drafters = drafts_of_every_quality([t for t, _, _ in want])
    engine = engine_of(model, window=6, **settings)
    for batch in (requests_of(cases), requests_of(cases, drafters)):
        done, stats = engine.generate(batch)
        assert differing(done, want) == []
    _, free = engine_of(model, window=6).generate(requests_of(cases, drafters))
    assert stats.passes > free.passes, "the bound was at work"


def test_a_prompt_longer_than_a_pass_takes_several(build_model):
    model = build_model("qwen3")
    asked = requests_of([([2 + i % 50 for i in range(length)], 6) for length in (150, 10, 33, 150, 17)])
    want, _ = engine_of(model).generate(asked)
    sizes = []
    engine = engine_of(model, tokens_per_pass=16)
    hook = model.model.embed_tokens.register_forward_hook(lambda module, given, out: sizes.append(given[0].numel()))
    done, _ = engine.generate(asked)
    hook.remove()
    assert differing(done, want) == []
    assert max(sizes) <= 16


def scarce(monkeypatch, limit: int, error: Exception) -> None:
    """Passes of more than `limit` rows fail once some tokens have been sampled."""
    launch = Reader.launch

    def failing(reader, feed, *more):
        if len(feed) > limit and reader.passes > 1:
            raise error
        return launch(reader, feed, *more)

    monkeypatch.setattr(Reader, "launch", failing)


@pytest.mark.parametrize("drafting", [False, True])
@pytest.mark.parametrize("limit", [13, 5])
def test_rows_that_do_not_fit_the_memory_run_fewer_at_a_time(golden, monkeypatch, caplog, limit, drafting):
    """No row starts again, and the size that fitted is remembered."""
    model, cases, want = golden("llama")
    scarce(monkeypatch, limit, torch.OutOfMemoryError("CUDA out of memory"))
    drafters = drafts_of_every_quality([t for t, _, _ in want]) if drafting else None
    engine = engine_of(model, window=3)
    done, stats = engine.generate(requests_of(cases, drafters))
    assert differing(done, want) == []
    if not drafting:
        assert [c.passes for c in done] == [len(t) for t, _, _ in want], "a token a pass: none was thrown away"
    assert stats.accepted == sum(sum(c.reused) for c in done) == sum(accepted for _, accepted in stats.sources.values())
    assert stats.drafted == sum(drafted for drafted, _ in stats.sources.values())
    assert "out of memory with 26 rows at a time" in caplog.text, "it is not silent"
    caplog.clear()
    done, _ = engine.generate(requests_of(cases, drafters))
    assert differing(done, want) == []
    assert not caplog.text, "the second rollout has begun with what fits"


def test_rows_of_the_next_batch_go_first(golden, monkeypatch, caplog):
    """They end where memory ends, and the batch keeps its size."""
    model, cases, want = golden("llama")
    engine = engine_of(model, fill=64)
    scarce(monkeypatch, len(cases), torch.OutOfMemoryError("CUDA out of memory"))
    engine.begin([replace(request, key=request.key + 1) for request in requests_of(cases)])
    done, stats = engine.generate(requests_of(cases))
    assert differing(done, want) == []
    assert stats.ahead_tokens > 0, "they had joined"
    assert "no rows of the next batch join" in caplog.text
    assert "rows at a time" not in caplog.text
    assert "rollout.fill is 0" in engine.not_ahead
    _, alone = engine_of(model).generate(requests_of(cases))
    assert stats.passes <= alone.passes + 3


def test_memory_that_never_suffices_is_one_readable_error(golden, monkeypatch):
    model, cases, _ = golden("llama")
    scarce(monkeypatch, 0, RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 4 bytes"))
    with pytest.raises(RolloutError, match=r"out of memory with one row at a time: .*tokens_per_pass \(now"):
        engine_of(model).generate(requests_of(cases))


class Scarce(TorchDispatchMode):
    """An allocator with a limit of `most` bytes."""

    def __init__(self, most: int):
        super().__init__()
        self.most, self.peak, self._held = most, 0, {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._held[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.held())
        if self.peak > self.most:
            raise torch.OutOfMemoryError(f"CUDA out of memory: {self.peak} of {self.most} bytes")
        return out

    def held(self) -> int:
        self._held = {place: x for place, x in self._held.items() if not x[0].expired()}
        return sum(size for _, size in self._held.values())


def lognormal(n: int, most: int) -> list[Request]:
    """Requests of one prompt whose responses end at their caps. The lengths are lognormal, so a few are long."""
    rng = random.Random(5)
    caps = [min(most, 1 + int(rng.lognormvariate(math.log(most / 8), 0.8))) for _ in range(n)]
    return [Request([5, 9, 30, 12], derive_key(3, "engine", i, 0), cap) for i, cap in enumerate(caps)]


@pytest.mark.slow
def test_kv_is_planned_and_allocated_once(golden, monkeypatch, caplog):
    """Three rollouts within a byte limit: as many rows as fit run, memory is as planned, nothing is allocated twice."""
    model, _, _ = golden("qwen3")
    monkeypatch.setattr(probe, "on_gpu", lambda model: True)
    monkeypatch.setattr(sampler, "LOGITS_MB", 1)
    engine = local(model, NO_EOS, tokens_per_pass=64)
    requests, policy = lognormal(40, 240), engine.policy
    with Scarce(3 * MB) as memory:
        monkeypatch.setattr(memory_plan, "free_bytes", lambda device: memory.most - memory.held())
        rows = memory_plan.max_concurrent_rows(requests, [policy], 256)
        tokens = memory_plan.row_tokens(requests)
        plan = rows * tokens * policy.kv_bytes + memory_plan.pass_bytes(policy)
        for _ in range(3):
            done, _ = engine.generate(requests)
            assert [len(c.tokens) for c in done] == [r.max_new_tokens for r in requests]
            assert [c.passes for c in done] == [r.max_new_tokens for r in requests], "no row started again"
    assert 8 <= rows < 40
    assert memory.peak <= 1.05 * plan <= 1.05 * memory.most
    assert not caplog.text


def test_the_kv_of_a_draft_model_is_planned_too(golden):
    policy = engine_of(golden("qwen3")[0], kv_cache_mb=1).policy
    requests = [Request([5, 9, 30, 12], i, 100) for i in range(200)]
    alone, both = (memory_plan.max_concurrent_rows(requests, models, 256) for models in ([policy], [policy, policy]))
    assert both == alone // 2 > 0


def test_kv_that_fits_no_row_is_one_readable_error(golden):
    model, _, _ = golden("qwen3")
    model = copy.deepcopy(model)
    engine = local(model, NO_EOS, kv_cache_mb=1)
    with pytest.raises(RolloutError, match=r"one row of 5004 tokens takes 1 MB, and there are 1 MB .*kv_cache_mb \(1;"):
        memory_plan.max_concurrent_rows([Request([5, 9, 30, 12], 1, 5000)], [engine.policy], 8)


def test_other_errors_are_not_taken_for_a_lack_of_memory(golden, monkeypatch):
    model, cases, _ = golden("llama")
    scarce(monkeypatch, 2, RuntimeError("an illegal memory access"))
    with pytest.raises(RuntimeError, match=r"^an illegal memory access$"):
        engine_of(model).generate(requests_of(cases))
