"""What drafts would be worth: counted right, and simulated as it would happen."""

import pytest
import torch

from benchmarks.selfspec import layers, places, sparse
from benchmarks.selfspec.overlap import WAYS, Machine, best, plain
from benchmarks.selfspec.texts import own_texts, ranks, rounds, tokens_per_cost
from specrl.tiny import load_tiny

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tiny():
    return load_tiny()


@pytest.fixture(scope="module")
def texts(tiny):
    return own_texts(*tiny, 4)


# --- counts


def test_rounds_end_with_the_first_wrong_token():
    assert rounds([True, True, False, True], 2) == [(2, 2), (0, 0)]
    assert rounds([True, False, True, True], 2) == [(2, 1), (1, 1)]
    assert rounds([False, False], 2) == [(1, 0), (0, 0)], "the last token is a pass's own"


def test_tokens_per_cost_by_hand():
    hits = [[True, False, True, True]]
    assert tokens_per_cost(hits, 0.5, 2) == pytest.approx(4 / (2 + 0.5 * 3))
    assert tokens_per_cost(hits, 0.5, 0) == pytest.approx(4 / (2 + 0.5 * 2)), "an oracle drafts what stands"


def test_of_several_places_the_latest_or_the_most_frequent_goes_on():
    known = [[1, 2, 5, 5], [1, 2, 5, 6], [1, 2, 7, 8]]
    for counted, draft in ((False, [7, 8]), (True, [5, 6])):
        found = places.Places(known)
        assert found.draft([1], 2, counted) == [], "nothing as short is looked for"
        assert found.draft([1, 2], 2, counted) == draft
        assert found.draft([1, 2, 9, 1, 2], 3, counted) == ([9, 1, 2] if not counted else draft), "its own text too"
    assert places.walked([1, 2, 5, 6], known, 4, counted=True) == 3, "two tokens alone, then the rest in one pass"
    assert places.walked([1, 2, 5, 6], known, 4, counted=False) == 4


def test_the_policy_agrees_with_itself_and_other_noise_does_not(tiny, texts):
    assert {rank for text in ranks(tiny[0], texts) for rank in text} == {0}
    other = type(texts[0])(texts[0].prompt, texts[0].response, 100 * texts[0].noise.flip(0))
    assert max(ranks(tiny[0], [other])[0]) > 0


# --- layers


def test_every_subset_runs_its_own_steps():
    steps = [lambda x, n=n: x + 10**n for n in range(3)]
    found = {kept: int(out) for kept, out in layers.subsets(steps, torch.zeros(()))}
    assert found == {kept: sum(10**n for n in kept) for kept in found}
    assert len(found) == 8
    assert sorted(kept for kept, _ in layers.subsets(steps, torch.zeros(()), {0, 2})) == [(0, 1, 2), (0, 2)]


def test_first_layers_are_an_early_exit(tiny, texts):
    found = {one.parts: one.hits for one in layers.tried(tiny[0], texts, layers.whole_layers)}
    assert len(found) == 254
    for exit_at in (2, 7):
        right = [[rank == 0 for rank in text] for text in ranks(layers.early_exit(tiny[0], exit_at), texts)]
        assert found[tuple(range(exit_at))] == right


# --- part of the keys and values


def test_all_keys_are_the_policy_and_few_are_not(tiny, texts):
    policy, _ = tiny
    before = policy.config._attn_implementation
    policy.set_attn_implementation(sparse.ATTENTION)
    try:
        all_keys, few = sparse.hits(policy, texts[0], ["attended", "attended"], [2000, 8], 4)
    finally:
        policy.set_attn_implementation(before)
    assert all(map(all, all_keys)), "a draft on all keys is the policy"
    assert not all(map(all, few))
    assert {len(run) for run in all_keys} == {4}


def test_a_draft_reads_the_first_the_last_and_the_most_attended_keys():
    streams = sparse.Streams(["attended"], [10], 30, 10)
    query, key, value = torch.zeros(2, 1, 40, 8), torch.zeros(2, 1, 40, 8), torch.eye(40)[None, None].repeat(2, 1, 1, 1)
    query[0, :, :20, 2], key[0, :, [5, 6, 7], 2] = 1.0, 9.0  # passes before attended to these
    query[0, :, 20:30, 0], key[0, :, [10, 11, 19], 0] = 1.0, 9.0  # the full pass to these
    query[0, :, 30:, 1], key[0, :, [15, 16, 17], 1] = 1.0, 9.0  # the next one will to these
    read = streams.attend(query, key, value, 1.0)[1, 0, 30]
    assert read.nonzero().flatten().tolist() == [0, 1, 2, 3, 10, 11, 19, 27, 28, 29, 30]


# --- a draft model beside the policy


def test_plain_decoding_by_hand():
    machine = Machine((8.0, 1.0, 0.5, 0.0), 0.1)
    assert plain(machine, [[0] * 2, [0] * 3]) == pytest.approx(2 * (8 + 2 * 1.5) + (8 + 1.5))


def test_ways_by_hand():
    """Six tokens, all right: two passes with drafts of two, one of them drafted behind the other where both overlap."""
    machine, right = Machine((10.0, 0.0, 0.0, 0.0), 0.1), [[0] * 6]
    times = {name: run(machine, right, 2) for name, run in WAYS.items()}
    assert times["in turn"] == times["halves"] == pytest.approx(2 * (2 + 10))
    assert times["ahead"] == pytest.approx(2 + 10 + 10)
    assert times["free"] == pytest.approx(20)


def test_two_halves_hide_drafting_but_pay_for_two_passes():
    dear, right = Machine((0.0, 1.0, 0.0, 0.0), 0.5), [[0] * 6] * 2
    assert WAYS["in turn"](dear, right, 2) == pytest.approx(2 * (2 + 2))
    assert WAYS["halves"](dear, right, 2) == pytest.approx(1 + 4)
    fixed = Machine((1.0, 0.0, 0.0, 0.0), 0.0)
    assert WAYS["halves"](fixed, right, 2) == 2 * WAYS["in turn"](fixed, right, 2)


def test_a_second_guess_stands_where_the_first_is_wrong():
    machine, text = Machine((1.0, 0.0, 0.0, 0.0), 0.0), [[1, 0, 1, 0]]
    assert WAYS["in turn"](machine, text, 2) == 3
    assert WAYS["2 guesses"](machine, text, 2) == 2
    assert WAYS["2 guesses"](machine, [[2, 0, 2, 0]], 2) == 3, "the third best does not"


def test_the_best_length_is_none_where_drafting_loses():
    assert best(Machine((1.0, 0.0, 0.0, 0.0), 0.9), WAYS["in turn"], [[[1] * 20]]) == (1.0, 0)
    speed, length = best(Machine((1.0, 0.0, 0.0, 0.0), 0.01), WAYS["in turn"], [[[0] * 90]])
    assert (length, speed > 5) == (8, True)
