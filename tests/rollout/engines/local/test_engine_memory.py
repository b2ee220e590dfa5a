"""The transformers engine within its memory: bounds change no token, and what does not fit runs in parts."""

import random

import pytest
import torch

from rollout.engines.local import ragged
from rollout.engines.local.reader import Reader
from rollout.noise import keyed_draw
from rollout.types import RolloutError
from tests.rollout.golden import (
    Named,
    corrupt,
    differing,
    drafts_of_every_quality,
    engine_of,
    requests_of,
)


@pytest.mark.parametrize(
    "settings",
    [
        {"tokens_per_pass": 1},
        {"tokens_per_pass": 7},
        {"tokens_per_pass": 40},
        {"rows_per_batch": 1},
        {"rows_per_batch": 5},
        {"logits_mb": 0},  # one position at a time
        {"rows_per_batch": 9, "tokens_per_pass": 11, "logits_mb": 0},
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
    if "logits_mb" not in settings or len(settings) > 1:
        assert stats.passes > free.passes, "the bound was at work"


def scarce(monkeypatch, limit: int, error: Exception) -> None:
    """Passes of more than `limit` rows fail once some tokens are out."""
    read = Reader.read

    def failing(reader, feed, *more):
        if len(feed) > limit and reader.passes > 1:
            raise error
        return read(reader, feed, *more)

    monkeypatch.setattr(Reader, "read", failing)


@pytest.mark.parametrize("drafting", [False, True])
@pytest.mark.parametrize("limit", [13, 5])
def test_rows_that_do_not_fit_the_memory_run_in_parts(golden, monkeypatch, limit, drafting):
    model, cases, want = golden("llama")
    scarce(monkeypatch, limit, torch.OutOfMemoryError("CUDA out of memory"))
    drafters = drafts_of_every_quality([t for t, _, _ in want]) if drafting else None
    done, _ = engine_of(model, window=3).generate(requests_of(cases, drafters))
    assert differing(done, want) == []
    assert sum(c.passes for c in done) > sum(len(t) for t, _, _ in want) or drafting, "what was lost was paid for"


def test_what_an_out_of_memory_cut_throws_away_is_counted_no_more(golden, monkeypatch):
    """Shares of reused tokens by source add up to the share of all, whatever was tried in between."""
    model, cases, want = golden("llama")
    texts = [t for t, _, _ in want]
    drafters = [
        Named(t if i % 2 else corrupt(t, random.Random(i), 0.2), source=f"s{i % 3}") for i, t in enumerate(texts)
    ]
    whole, free = engine_of(model, window=3).generate(requests_of(cases, drafters))
    scarce(monkeypatch, 5, torch.OutOfMemoryError("CUDA out of memory"))
    done, stats = engine_of(model, window=3).generate(requests_of(cases, drafters))
    assert differing(done, whole) == []
    assert stats.accepted == sum(sum(c.reused) for c in done) == sum(accepted for _, accepted in stats.sources.values())
    assert stats.drafted == sum(drafted for drafted, _ in stats.sources.values())
    assert stats.passes > free.passes, "the cut happened"
    assert stats.forward_tokens > free.forward_tokens, "and was paid for"


def test_memory_that_never_suffices_is_one_readable_error(golden, monkeypatch):
    model, cases, _ = golden("llama")
    scarce(monkeypatch, 2, RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 4 bytes"))
    with pytest.raises(RolloutError, match=r"out of memory with \d rows, cut 3 times: .*rows_per_batch \(now"):
        engine_of(model).generate(requests_of(cases))


def test_other_errors_are_not_taken_for_a_lack_of_memory(golden, monkeypatch):
    model, cases, _ = golden("llama")
    scarce(monkeypatch, 2, RuntimeError("an illegal memory access"))
    with pytest.raises(RuntimeError, match=r"^an illegal memory access$"):
        engine_of(model).generate(requests_of(cases))


def test_logits_exist_in_chunks_only(golden, monkeypatch):
    model, cases, want = golden("llama")
    sizes = []
    monkeypatch.setattr(ragged, "keyed_draw", lambda z, *a, **k: sizes.append(len(z)) or keyed_draw(z, *a, **k))
    for logits_mb, largest in ((0, 1), (256, 26)):
        sizes.clear()
        engine = engine_of(model, logits_mb=logits_mb)
        sizes.clear()
        done, _ = engine.generate(requests_of(cases))
        assert differing(done, want) == []
        assert max(sizes) == largest
