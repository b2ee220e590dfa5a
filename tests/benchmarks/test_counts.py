"""The replay of drafts on recorded texts, and the parts of the counts that decide a verdict."""

import numpy as np
import pytest

from benchmarks.research.counts import beside_texts, law, longest, recycling, trees
from benchmarks.research.drafter_walks import Plan, grid_of, planned, walk
from specrl.rollout.drafting.suffix import PromptTexts
from specrl.trainers.cotraining.texts import Text

RIGHT = [True, True, False, True, True, True]
SURE = np.log([0.9, 0.9, 0.9, 0.2, 0.9, 0.9])


def passes(plan, lengths):
    return int(walk(plan, np.array(lengths))["alive"].sum())


def test_a_walk_takes_the_passes_that_its_drafts_leave():
    grid = grid_of([(np.array(RIGHT), SURE)])
    assert passes(planned(grid, 0, 0.0), [6]) == 6
    assert passes(planned(grid, 8, 0.0), [6]) == 2, "two right tokens and the third, then three right ones"
    assert passes(planned(grid, 8, 0.5), [6]) == 3, "the unsure one is not drafted"
    assert walk(planned(grid, 8, 0.5), np.array([6]))["carried"].sum() == 3 + 0 + 2


def test_a_drafter_that_was_not_asked_reads_later_what_it_missed():
    free = np.array([[1, 0, 0, 0]])
    plan = Plan(1 - free, np.zeros_like(free), np.zeros_like(free))
    assert walk(plan, np.array([3]))["unread"].tolist() == [[0], [2], [1]]


def test_a_tree_of_one_guess_is_the_chain():
    ranks, estimates = [np.array([0, 0, 2, 0, 0, 0])], [np.exp(SURE)[:, None]]
    chain = planned(grid_of([(np.array(RIGHT), SURE)]), 16, 0.5)
    tree = trees.grown(ranks, estimates, width=1, doubt=0.5)
    for name in ("tried", "carried", "taken"):
        assert getattr(tree, name)[0, :6].tolist() == getattr(chain, name)[0, :6].tolist(), name


def test_a_tree_of_two_guesses_accepts_the_second():
    ranks, estimates = [np.array([1, 0, 0])], [np.array([[0.6, 0.3]] * 3)]
    tree = trees.grown(ranks, estimates, width=2, doubt=0.15)
    assert tree.taken[0, 0] == 2, "0.3 x 0.6 is reached, 0.3 x 0.6 x 0.6 is not"
    assert tree.carried[0, 0] == 2 + 3 + 1


def test_a_second_guess_brings_one_token_and_costs_as_many_as_the_draft():
    ranks = np.array([0, 1, 2, 0])
    plans = [({"most": 4}, planned(grid_of([(ranks == 0, np.zeros(4))]), 4, 0.0))]
    ((_, plan),) = recycling.with_second(plans, [ranks])
    assert (plan.taken[0, 0], plan.taken[0, 2], plan.carried[0, 0]) == (2, 0, 8)


@pytest.mark.parametrize(("search", "place"), [(longest.latest, 8), (longest.longest, 4)])
def test_a_longer_match_comes_before_a_later_one(search, place):
    texts = PromptTexts([[9, 2, 3, 4, 5, 8, 3, 4, 7]], ("earlier",))
    assert [(number, at) for number, at, _ in search(texts, [2, 3, 4])] == [(0, place)]


def test_a_power_law_is_found_and_another_dependence_is_not():
    cells = [{"layers": n, "tokens": d} for n in (1, 2, 4) for d in (100, 200, 400)]
    exact = [c | {"agreement": 1 - 0.8 * c["layers"] ** -0.5 * c["tokens"] ** -0.2} for c in cells]
    found = law.law(exact)
    assert found["law"] == {"C": 0.8, "alpha": 0.5, "beta": 0.2}
    assert found["largest cell"]["by the law"] == pytest.approx(found["largest cell"]["agreement"], abs=1e-4)
    random = [c | {"agreement": a} for c, a in zip(cells, (0.5, 0.9, 0.6, 0.4, 0.8, 0.3, 0.7, 0.5, 0.9), strict=True)]
    assert law.law(random)["R2"] < 0.3


def test_a_drafter_agrees_at_its_share_of_the_positions_the_easiest_ones():
    ease = [np.array([0.0, 0.5, 0.25, 0.75])]
    grid = beside_texts.agreeing([0.5, 0.3], ease, np.array([4]))
    assert grid.accepted[0, :3].tolist() == [[True, False], [False, True], [True, False]]
    assert planned(grid, 2, 0.0).taken[0].tolist()[:3] == [1, 0, 1]


def test_matches_go_on_with_what_follows_in_the_texts():
    text = Text((1, 2, 3), (7, 8, 7, 8, 9))
    found = [(matched, list(draft)[:2]) for matched, draft in beside_texts.matches(text, [(5, 7, 8, 9)])]
    assert found[2] == (2, [9]), "in the stored text"
    assert found[0] == (0, [])
