"""Redraws: the tokens that a pass sampled after a mismatch are drafted if their acceptance is higher."""

import pytest

from specrl.rollout.drafting.budget import Budget
from specrl.rollout.drafting.draft import Draft
from specrl.rollout.drafting.drafting import Drafting
from specrl.rollout.engines.response import Response
from specrl.rollout.types import EngineStats, Request
from specrl.rollout.verify import Accepted, TargetSamples, exact


class Fixed:
    """A drafter with a constant proposal."""

    def propose(self, tokens, limit):
        return [5, 6, 7, 8][:limit]


def drafting(redraws=True) -> Drafting:
    made = Drafting(Budget(window=4), redraws=redraws)
    made.vocab = 20
    return made


def row_of(drafter=None) -> Response:
    return Response(Request([1], 0, 30, drafter))


def settle(made: Drafting, row: Response, draft: Draft, draws: list[int]) -> Accepted:
    """Updates the rows as an engine does after a pass."""
    stood = exact(0, draft, TargetSamples(len(row.tokens), draws, [0.0] * len(draws), [0.0] * len(draws)))
    row.emit(stood, frozenset())
    made.learn(row, draft, stood.tokens, stood.drafted, stood.rejected_tail)
    return stood


def test_the_exact_rule_tells_what_was_drawn_behind_a_mismatch():
    drawn = TargetSamples(0, [5, 9, 7, 8, 3], [0.0] * 5, [0.0] * 5)
    stood = exact(0, Draft([5, 6, 7, 8]), drawn)
    assert (stood.tokens, stood.drafted, stood.rejected_tail) == ([5, 9], 1, [7, 8, 3])
    assert not exact(0, Draft([5, 9, 7, 8]), drawn).rejected_tail, "all stood"


def test_they_are_the_next_guess_where_nothing_else_is():
    made, row = drafting(), row_of()
    settle(made, row, Draft([5, 6, 7], "custom"), [5, 9, 4, 3])
    (draft,) = made.propose([row], EngineStats())
    assert (draft.tokens, draft.source) == ([4, 3], "redraw")
    settle(made, row, draft, [4, 3, 2])
    assert row.state == "agreeing"
    assert made.propose([row], EngineStats())[0].tokens in ((), []), "they are for one pass"


class Old:
    """A drafter that follows a text at its positions."""

    def __init__(self, text):
        self.text = text

    def propose(self, tokens, limit):
        return self.text[len(tokens) : len(tokens) + limit]


@pytest.mark.parametrize(
    ("drafter", "custom_accepted", "want"),
    [
        (Old([5, 6, 7, 3, 11, 12]), 0, ([4, 3, 11, 12], "redraw")),  # continued by the text, which has their last token
        (Old([5, 6, 4, 8, 11, 12]), 0, ([4, 3], "redraw")),
        (Fixed(), 0, ([4, 3], "redraw")),
        (Fixed(), 4, ([5, 6, 7, 8], "custom")),
    ],
)
def test_the_guess_of_higher_acceptance_is_drafted(drafter, custom_accepted, want):
    """Redraws are as long as the rejected part of the last draft. A text may continue after them."""
    made, row = drafting(), row_of(drafter)
    for state in ("lost", "diverged", "agreeing"):
        for _ in range(60):
            made.budget.observe_draft((state, "custom"), 4, custom_accepted)
            made.budget.observe_draft((state, "redraw"), 2, 1)
    made.propose([row], EngineStats())
    settle(made, row, Draft([5, 6, 7], "custom"), [5, 9, 4, 3])
    (draft,) = made.propose([row], EngineStats())
    assert (draft.tokens, draft.source) == want
