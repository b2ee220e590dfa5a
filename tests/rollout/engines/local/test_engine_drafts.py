"""Calls of the transformers engine to its drafters, and what they and the budget observe."""

import random
from dataclasses import dataclass

import pytest

from specrl.rollout.drafting.draft import Draft
from specrl.rollout.drafting.drafting import Drafting
from specrl.rollout.engines.response import Response
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


def test_a_drafter_is_judged_by_its_own_proposal_and_not_by_the_draft_models_draft():
    drafting, seen = Drafting(), []
    drafting.budget.observe_draft = lambda *observed: seen.append(observed)
    bucket = "start", "prefix"
    row = Response(Request([2], 0, 9), guess=Draft([5, 6], "prefix"), bucket=bucket)
    drafting.learn(row, Draft([7, 8], "model"), [7, 8, 9], drafted=2)
    assert seen == [(bucket, 2, 0)]
    assert row.state == "lost"


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


def test_rows_of_the_next_batch_neither_pay_for_drafts_nor_make_a_pass_longer_than_fill(golden):
    model, cases, want = golden("llama")
    engine, seen = engine_of(model, window=3, fill=24), []
    engine.drafting.budget.observe_pass = lambda tokens, s, rows, width, emitted, ahead, **_: seen.append(
        (emitted, tokens + ahead[1], ahead[0])
    )
    engine.begin(requests_of(cases, visit=1))
    done, stats = engine.generate(requests_of(cases, [Script(text) for text, _, _ in want])[:8])
    assert {c.finish for c in done} == {"stop", "length"}
    assert stats.ahead_tokens > 0
    assert sum(emitted for emitted, _, _ in seen) == sum(len(c.tokens) for c in done), "and no token after an EOS"
    assert max(tokens for _, tokens, others in seen if others) <= 24


class Vandal(Script):
    """Modifies its argument."""

    def propose(self, tokens, limit):
        if hasattr(tokens, "clear"):
            tokens.clear()
        return super().propose(tokens, limit)


def test_a_drafter_cannot_harm_the_text(golden):
    model, cases, want = golden("llama")
    done, stats = engine_of(model, window=4).generate(requests_of(cases, [Vandal(t) for t, _, _ in want]))
    assert differing(done, want) == []
    assert stats.accepted > 0
