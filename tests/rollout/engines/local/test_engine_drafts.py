"""Calls of the transformers engine to its drafters, and what they and the budget observe."""

import random
from dataclasses import dataclass

import pytest
import torch

from specrl.rollout.drafting.budget import Budget
from specrl.rollout.keys import derive_key
from specrl.rollout.types import EngineStats, Request
from tests.rollout.golden import (
    VOCAB,
    Named,
    Script,
    all_wrong,
    corrupt,
    differing,
    engine_of,
    requests_of,
)


def test_the_budget_learns_what_became_of_the_last_draft(golden):
    model, cases, want = golden("llama")
    (prompt, _), (text, _, _) = max(zip(cases, want, strict=True), key=lambda pair: len(pair[1][0]))
    place = next(i for i, (t, _, _) in enumerate(want) if t == text)
    wrong = [t if at not in (5, 9, 10) else (t + 1) % VOCAB for at, t in enumerate(text)]
    engine, seen = engine_of(model, window=3), []
    engine.drafting.budget.observe_draft = lambda *observed: seen.append(observed)
    request = Request(prompt, derive_key(3, "engine", place, 0), len(text), Script(wrong))
    assert engine.generate([request])[0][0].tokens == text
    states = [("start", 3, 3), ("agreeing", 3, 1), ("diverged", 3, 3), ("agreeing", 3, 0), ("lost", 3, 3)]
    assert seen[:5] == [((state, "custom"), drafted, stood) for state, drafted, stood in states]


def test_the_budget_is_told_what_every_pass_brought(golden):
    """These measurements decide whether to draft: a pass that appears to emit nothing would never pay."""
    model, cases, want = golden("llama")
    engine, seen = engine_of(model, window=4), []
    engine.drafting.budget.observe_pass = lambda *of, **more: seen.append(of[4])
    done, _ = engine.generate(requests_of(cases, [Script(text) for text, _, _ in want]))
    emitted = sum(len(c.tokens) for c in done)
    assert emitted <= sum(seen) <= emitted + 4 * len(done), "draws behind an end are in it"


def test_drafts_are_counted_by_their_source(golden):
    model, cases, want = golden("llama")
    texts = [text for text, _, _ in want]
    drafters = [
        (Named(t, source="right"), Named(all_wrong(t), source="wrong"), None)[i % 3] for i, t in enumerate(texts)
    ]
    done, stats = engine_of(model, window=4).generate(requests_of(cases, drafters))
    assert differing(done, want) == []
    assert set(stats.sources) == {"right", "wrong"}
    assert stats.sources["wrong"][1] == 0
    assert tuple(map(sum, zip(*stats.sources.values(), strict=True))) == (stats.drafted, stats.accepted)
    assert stats.sources["right"][1] == sum(sum(c.reused) for c in done[::3])
    total = EngineStats(drafted=2, sources={"right": (2, 1)}) + stats
    assert total.sources["right"] == (stats.sources["right"][0] + 2, stats.sources["right"][1] + 1)
    assert total.sources["wrong"] == stats.sources["wrong"]
    assert total.drafted == stats.drafted + 2


@dataclass
class Fails(Script):
    """Proposes `odd` after correct proposals, or raises it."""

    odd: object = None

    def propose(self, tokens, limit):
        if len(tokens) < 3:
            return super().propose(tokens, limit)
        if isinstance(self.odd, Exception):
            raise self.odd
        return self.odd


@pytest.mark.parametrize("odd", [OSError("a file is gone"), [3.0], None, 5], ids=repr)
def test_what_a_drafter_raises_ends_the_rollout(golden, odd):
    model, cases, want = golden("llama")
    engine, texts = engine_of(model, window=4), [text for text, _, _ in want]
    with pytest.raises(type(odd) if isinstance(odd, Exception) else TypeError):
        engine.generate(requests_of(cases, [Fails(t, odd=odd) if i % 2 else Script(t) for i, t in enumerate(texts)]))
    done, stats = engine.generate(requests_of(cases, [Script(text) for text in texts]))
    assert differing(done, want) == []
    assert stats.accepted > 0


@pytest.mark.parametrize("wrap", [tuple, iter, torch.tensor, lambda t: [torch.tensor(x) for x in t]], ids=range(4))
def test_token_ids_of_any_kind_are_taken(golden, wrap):
    model, cases, want = golden("llama")

    class Wrapped(Script):
        def propose(self, tokens, limit):
            return wrap(list(super().propose(tokens, limit)))

    done, stats = engine_of(model, window=4).generate(requests_of(cases, [Wrapped(t) for t, _, _ in want]))
    assert differing(done, want) == []
    assert stats.accepted > 0


def test_a_finished_row_shows_its_end_to_those_that_draft_from_it(golden):
    model, cases, want = golden("llama")

    class Sees(Script):
        def propose(self, tokens, limit):
            self.shown, self.limit = list(tokens), limit
            return super().propose(tokens, limit)

    drafters = [Sees(corrupt(t, random.Random(i), 0.3)) for i, (t, _, _) in enumerate(want)]
    engine_of(model, window=3).generate(requests_of(cases, drafters))
    assert [d.shown for d in drafters] == [t for t, _, _ in want]
    assert {d.limit for d in drafters} == {0}


def test_drafts_that_would_lose_time_are_counted_as_paused(golden):
    model, cases, want = golden("llama")
    engine = engine_of(model)
    budget = engine.drafting.budget = Budget()  # independent of measured costs
    budget.observe_pass = lambda *_, **__: None
    budget.calibrate([(1, 1.001), (1000, 1001.0)])  # a token costs as much as a pass
    for _ in range(2000):
        budget.observe_draft(("start", "custom"), 1, 0)
    drafters = [Script(all_wrong(text)) if i % 2 else None for i, (text, _, _) in enumerate(want)]
    done, stats = engine.generate(requests_of(cases, drafters))
    assert differing(done, want) == []
    rows = [c for i, c in enumerate(done) if i % 2]
    probed = sum(any(c.reused) for c in rows)
    assert stats.paused > 0.7 * sum(c.passes for c in rows) - probed
    assert stats.paused_acceptance / stats.paused < 0.1 < stats.paused_needed / stats.paused
    plain = engine.generate(requests_of(cases))[1]
    assert plain.paused == 0  # control: nothing to draft


@dataclass
class Vandal(Script):
    """Modifies its argument."""

    harm: str = "clear"

    def propose(self, tokens, limit):
        if self.harm == "append" and hasattr(tokens, "append"):
            tokens.append(9)
        if self.harm == "clear" and hasattr(tokens, "clear"):
            tokens.clear()
        return super().propose(tokens, limit)


@pytest.mark.parametrize("harm", ["append", "clear"])
def test_a_drafter_cannot_harm_the_text(golden, harm):
    model, cases, want = golden("llama")
    drafters = [Vandal(t, harm=harm) for t, _, _ in want]
    done, stats = engine_of(model, window=4).generate(requests_of(cases, drafters))
    assert differing(done, want) == []
    assert stats.accepted > 0
