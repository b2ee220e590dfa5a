"""PriorDrafter: where it looks for the next tokens. Guesses never change outputs, so these are tests of quality."""

import random

import pytest

from rollout.drafters.prior import PriorDrafter

OLD = list(range(100, 160))


def accepted(drafter, truth, limit: int = 8) -> tuple[int, int]:
    """Drives a drafter as an engine does: passes needed and draft tokens accepted for the response `truth`."""
    done, passes, stood = 0, 0, 0
    while done < len(truth):
        draft = list(drafter.propose(truth[:done], limit))
        assert len(draft) <= limit
        n = 0
        while n < len(draft) and done + n < len(truth) and draft[n] == truth[done + n]:
            n += 1
        passes, stood, done = passes + 1, stood + n, done + n + 1
    return passes, stood


def test_continues_at_the_same_positions():
    drafter = PriorDrafter([OLD])
    assert drafter.propose([], 5) == OLD[:5]
    assert drafter.propose(OLD[:5], 3) == OLD[5:8]
    assert drafter.propose(OLD[:59], 8) == OLD[59:]
    assert drafter.propose(OLD, 8) == [], "at the end there is nothing to guess"
    assert drafter.propose([*OLD, 7], 8) == []
    assert accepted(PriorDrafter([OLD]), OLD) == (7, 54)


@pytest.mark.parametrize("limit", [0, 1, 2, 59, 60, 1000])
def test_limits_are_kept(limit):
    assert PriorDrafter([OLD]).propose([], limit) == OLD[:limit]


def test_a_substitution_goes_on_at_the_same_positions_at_once():
    truth = [*OLD[:20], 7, *OLD[21:]]
    drafter = PriorDrafter([OLD])
    drafter.propose(truth[:16], 8)
    assert drafter.propose(truth[:21], 4) == OLD[21:25]
    assert accepted(PriorDrafter([OLD]), truth)[1] >= 50


@pytest.mark.parametrize(
    ("name", "truth", "at", "expected"),
    [
        ("insertion", [*OLD[:20], 7, 8, *OLD[20:]], 26, OLD[24:28]),
        ("deletion", [*OLD[:20], *OLD[23:]], 24, OLD[27:31]),
        ("late start", OLD[10:], 4, OLD[14:18]),
    ],
)
def test_shifted_text_is_picked_up_again(name, truth, at, expected):
    drafter = PriorDrafter([OLD], rematch=4)
    for n in range(at):
        drafter.propose(truth[:n], 4)
    assert drafter.propose(truth[:at], 4) == expected
    passes, stood = accepted(PriorDrafter([OLD], rematch=4), truth)
    assert stood > len(truth) * 0.7
    blind_passes, blind = accepted(PriorDrafter([OLD], rematch=0), truth)
    assert blind < stood  # control: without re-matching
    assert blind_passes > passes


def test_a_sibling_is_used_where_the_own_text_has_nothing():
    sibling = list(range(200, 240))
    truth = [*OLD[:10], *sibling[5:30]]
    drafter = PriorDrafter([OLD, sibling])
    for n in range(14):
        drafter.propose(truth[:n], 4)
    assert drafter.propose(truth[:14], 4) == sibling[9:13]
    assert accepted(PriorDrafter([OLD, sibling]), truth)[1] > accepted(PriorDrafter([OLD]), truth)[1]


def test_the_own_text_comes_before_siblings_and_the_nearest_occurrence_wins():
    phrase = [1, 2, 3, 4]
    own = [*range(50, 60), *phrase, 11, *range(60, 90), *phrase, 12, 13]
    sibling = [*phrase, 99, 98]
    early = [9, 9, 9, *phrase]
    assert PriorDrafter([own, sibling], 4).propose(early, 1) == [11]
    late = [*[9] * 40, *phrase]
    assert PriorDrafter([own, sibling], 4).propose(late, 1) == [12]
    longer = [8, 9, 10, 7, *phrase]  # twice as many tokens are tried first, in any source
    assert PriorDrafter([own, [0, *longer, 77]], 4).propose(longer, 1) == [77]


def test_a_match_at_the_very_end_of_a_text_is_no_use():
    phrase = [1, 2, 3, 4]
    own, sibling = [*range(50, 60), *phrase], [*range(70, 90), *phrase, 5]
    assert PriorDrafter([own, sibling], 4).propose([9, *phrase], 1) == [5]


def test_without_rematch_positions_are_never_left():
    drafter = PriorDrafter([OLD, list(range(200, 240))], rematch=0)
    for text in ([7], [7, 8, 9], [200, 201, 202, 203, 204, 205, 206, 207], OLD[10:30]):
        assert drafter.propose(text, 3) == OLD[len(text) : len(text) + 3]


def test_ids_are_compared_as_whole_tokens():
    """A byte-wise search must not match across token boundaries: 256 is the bytes 0 1 0 0."""
    own, needle = [0, 1, 0, 0, 0, 8, 5, 6], [256, 0, 0, 0]
    as_bytes = [b"".join(t.to_bytes(4, "little") for t in text) for text in (own, needle)]
    assert as_bytes[0].find(as_bytes[1]) == 3, "the bytes do occur, across tokens"
    assert PriorDrafter([own], 4).propose([7, 7, *needle], 4) == [5, 6], "no match: the same positions"
    big = [2**31 - 1, 70_000, 65_536, 151_935]
    assert PriorDrafter([[3, *big, 4]], 4).propose([9, 9, 9, *big], 1) == [4]


def test_random_edits_are_survived():
    rng = random.Random(0)
    for _ in range(200):
        old = [rng.randrange(20) for _ in range(rng.randrange(1, 60))]
        truth = list(old)
        for _ in range(rng.randrange(4)):
            at = rng.randrange(len(truth) + 1)
            truth[at : at + rng.randrange(3)] = [rng.randrange(20) for _ in range(rng.randrange(3))]
        drafter = PriorDrafter([old, [rng.randrange(20) for _ in range(30)]], rng.choice([0, 1, 4]))
        passes, stood = accepted(drafter, truth, rng.choice([1, 5, 100]))
        assert passes + stood >= len(truth)
        assert passes <= max(len(truth), 1)
