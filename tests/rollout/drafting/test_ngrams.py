"""The index of n-grams compared with a plain dictionary: the same positions, except for a few collisions."""

import random
from collections import Counter

import pytest

from specrl.rollout.drafting.ngrams import GROUPS, LENGTHS, NOT_FOUND, NGrams, token_ids


def add(index: NGrams, pieces) -> None:
    index.add([(group, text, token_ids(tokens), known) for group, text, tokens, known in pieces])


class Dictionary:
    """Maps every n-gram to its last occurrence."""

    def __init__(self):
        self.seen = {}

    def add(self, pieces):
        for group, text, tokens, known in pieces:
            for at in range(max(known, min(LENGTHS)), len(tokens)):
                for length in LENGTHS:
                    if at >= length:
                        self.seen[group, *tokens[at - length : at]] = text, at, length

    def find(self, group, suffix, longest=LENGTHS[0]):
        known = [n for n in LENGTHS if n <= min(longest, len(suffix)) and (group, *suffix[-n:]) in self.seen]
        return self.seen[group, *suffix[-known[0] :]] if known else NOT_FOUND


class Writing:
    """Texts of some groups that grow by pieces of random sizes."""

    def __init__(self, rng: random.Random, vocab: int, groups: int, texts: int):
        self.rng, self.vocab = rng, vocab
        self.texts = {(group, text): [] for group in range(groups) for text in range(texts)}

    def pieces(self, most: int):
        grown = self.rng.sample(sorted(self.texts), self.rng.randrange(1, len(self.texts) + 1))
        for group, text in grown:
            tokens = self.texts[group, text]
            known = len(tokens)
            tokens += [self.rng.randrange(self.vocab) for _ in range(self.rng.randrange(1, most))]
            yield group, text, tokens, known

    def suffix(self, group: int):
        """The tokens before the end of a text or before a random position in it, sometimes few."""
        text = self.texts[group, self.rng.choice([t for g, t in self.texts if g == group])]
        end = self.rng.choice([len(text), self.rng.randrange(len(text) + 1)])
        return text[max(0, end - self.rng.choice([1, 2, 3, 7, 8, 8, 8])) : end]


def compared(index: NGrams, known: Dictionary, asked) -> Counter:
    """Counts searches that agree and those that a collision made shorter. Any other difference is an error."""
    found = index.find([group for group, _ in asked], [suffix for _, suffix in asked])
    counts = Counter()
    for (group, suffix), place in zip(asked, found, strict=True):
        if place == known.find(group, suffix):
            counts["same"] += 1
            continue
        assert place == known.find(group, suffix, place[2]), "a collision shortens the suffix, and changes nothing else"
        counts["shorter"] += 1
    return counts


@pytest.mark.parametrize("vocab", [2, 4, 30])
def test_the_index_finds_what_a_dictionary_finds(vocab):
    """Texts grow piece by piece and are searched in between."""
    counts = Counter()
    for seed in range(12):
        writing, index, known = Writing(random.Random(seed), vocab, groups=3, texts=4), NGrams(), Dictionary()
        groups = [index.group() for _ in range(3)]
        for _ in range(15):
            pieces = list(writing.pieces(most=20))
            add(index, pieces)
            known.add(pieces)
            counts += compared(index, known, [(g, writing.suffix(g)) for g in groups for _ in range(8)])
    assert counts["same"] > 4000
    assert counts["shorter"] < 0.01 * counts["same"]


@pytest.mark.parametrize("expected", [60_000, 0])
def test_collisions_are_few(expected):
    """No n-gram occurs twice, so there are as many entries as possible. Tables of the expected size are filled to a
    quarter, grown ones more.
    """
    rng, index, known = random.Random(0), NGrams(expected), Dictionary()
    group, texts = index.group(), [[rng.randrange(10**6) for _ in range(3000)] for _ in range(20)]
    for first in range(0, 3000, 100):
        pieces = [(group, i, text[: first + 100], first) for i, text in enumerate(texts)]
        add(index, pieces)
        known.add(pieces)
    asked = [(group, text[at - 8 : at]) for text in texts for at in range(8, 3000, 7)]
    counts = compared(index, known, asked)
    assert 0 < counts["shorter"] < (0.15 if expected else 0.3) * len(asked)
    nowhere = index.find([group] * len(asked), [suffix for _, suffix in asked]).count(NOT_FOUND)
    assert nowhere < (0.02 if expected else 0.08) * len(asked), "a shorter suffix leads to the same place"


@pytest.mark.parametrize("odd", [-1, 2**20, 2**31, 2**32, 2**70, 0.5, None])
def test_what_is_no_token_id_is_never_found(odd):
    index = NGrams()
    group = index.group()
    add(index, [(group, 0, (1, 2, odd, 3, 4, 5), 0)])
    assert index.find([group], [[3, 4]]) == [(0, 5, 2)]
    assert index.find([group], [[1, 2]]) == [(0, 2, 2)]
    assert index.find([group], [[2, 9]]) == [NOT_FOUND]


@pytest.mark.slow
def test_an_index_is_full_at_some_size():
    index = NGrams()
    assert index.takes(1)
    group = index.group()
    add(index, [(group, 0, range(2**22 + 2), 0)])
    assert not index.takes(1)
    many = NGrams()
    assert [many.group() for _ in range(GROUPS - 3)] == list(range(GROUPS - 3))
    assert many.takes(3)
    assert not many.takes(4)
    last = [many.group() for _ in range(3)]
    assert not many.takes(1)
    add(many, [(0, 7, [5, 6, 1], 0), (last[2], 8, [5, 6, 2], 0)])
    assert many.find([0, *last], [[5, 6]] * 4) == [(7, 2, 2), NOT_FOUND, NOT_FOUND, (8, 2, 2)]


def test_groups_know_nothing_of_each_other():
    index, text = NGrams(), [5, 6, 7, 8, 9]
    first, second, third = index.group(), index.group(), index.group()
    add(index, [(first, 0, text, 0), (second, 3, [1, *text], 0)])
    assert index.find([first, second, third], [[5, 6, 7, 8]] * 3) == [(0, 4, 4), (3, 5, 4), NOT_FOUND]
