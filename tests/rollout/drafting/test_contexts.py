"""Drafts from the context table: predictions, their probabilities, and forgetting."""

from __future__ import annotations

import random

import pytest

from specrl.rollout.drafting.contexts import ContextTable

PROMPT = (90, 91, 92, 93, 94, 95)


def template(rng: random.Random) -> list[int]:
    """Ten fixed tokens around five random ones, four times, like the text of a task with numbers in it."""
    return [t for _ in range(4) for t in (*range(10), *(rng.randrange(20, 40) for _ in range(5)))]


def learnt(rollouts: int, rng: random.Random, table: ContextTable | None = None) -> ContextTable:
    table = ContextTable() if table is None else table
    for i in range(rollouts):
        table.learn([((*PROMPT, 100 + i), template(rng))])
    return table


def test_template_and_numbers_are_told_apart():
    table = learnt(40, random.Random(0))
    token, sure = table.next((3, 4, 5, 6, 7, 8))
    assert token == 9
    assert sure > 0.95
    assert table.next((4, 5, 6, 7, 8, 9))[1] < 0.2  # a random token follows


def said_and_was(table: ContextTable, rng: random.Random) -> list[tuple[float, float]]:
    """Predicted probability and observed frequency of hits on new texts."""
    right: dict[float, list[bool]] = {}
    for _ in range(60):
        text = template(rng)
        for at in range(6, len(text)):
            if guess := table.next(tuple(text[at - 6 : at])):
                right.setdefault(guess[1], []).append(guess[0] == text[at])
    return [(said, sum(was) / len(was)) for said, was in right.items() if len(was) > 50]


def test_the_probability_is_how_often_new_texts_follow():
    rng = random.Random(1)
    found = said_and_was(learnt(60, rng), rng)
    assert len(found) >= 3
    assert all(abs(said - was) < 0.2 for said, was in found)


def test_control_a_table_that_learns_before_it_guesses_promises_too_much():
    class Peeking(ContextTable):
        def learn(self, texts):
            for prompt, tokens in texts:
                text = (*prompt[-6:], *tokens)
                self._add(text, len(tokens))
                self._check(text, len(tokens))

    rng = random.Random(1)
    assert any(said - was > 0.3 for said, was in said_and_was(learnt(60, rng, Peeking()), rng))


def test_a_draft_ends_where_it_no_longer_pays():
    table = learnt(60, random.Random(2))
    tokens, gain = table.draft([*PROMPT, 0, 1, 2, 3], 100, 0.5)
    assert tokens == [4, 5, 6, 7, 8, 9]
    assert 2.5 < gain < 3.0  # six almost certain tokens, at half a token each
    assert table.draft([*PROMPT, 0, 1, 2, 3], 2, 0.5)[0] == [4, 5]
    assert table.draft([*PROMPT, 4, 5, 6, 7, 8, 9], 100, 0.5) == ([], 0.0)
    assert (
        len(table.draft([*PROMPT, 4, 5, 6, 7, 8, 9], 100, 0.01)[0]) >= 1
    )  # if tokens cost nothing, unlikely ones are drafted
    assert table.draft([*PROMPT, 0, 1, 2, 3], 100, 1.01) == ([], 0.0)
    assert ContextTable().draft(PROMPT, 100, 0.1) == ([], 0.0)


@pytest.mark.parametrize("capacity", [200, 1000])
def test_memory_is_bounded_and_what_is_in_use_stays(capacity):
    rng, table = random.Random(3), ContextTable(capacity)
    for _ in range(200):
        table.learn([(PROMPT, [1, 2, 3, 4, 5, 6]), ((*PROMPT, 96), [rng.randrange(1000) for _ in range(30)])])
        assert len(table) <= 2 * (capacity + 120)
    assert table.next((1, 2, 3, 4, 5))[0] == 6
