"""Draft trees by hand and against their definition: merging, shape, and the walk that accepts."""

import random

import pytest

from rollout.tree import children, depths, ends, followers, merge
from rollout.verify import accept_exact, accept_tree

PATHS = [[5, 6, 7], [5, 8], [5, 6, 9, 9], [4]]
TOKENS, PARENTS = [5, 6, 7, 9, 9, 8, 4], [-1, 0, 1, 1, 3, 0, -1]


def random_paths(rng, count=6, length=6, vocab=3):
    return [[rng.randrange(vocab) for _ in range(rng.randint(1, length))] for _ in range(count)]


def texts(tokens, parents):
    """The text of every node, from the root."""
    found = []
    for token, parent in zip(tokens, parents, strict=True):
        found.append([*(found[parent] if parent >= 0 else []), token])
    return found


def test_common_prefixes_are_stored_once_in_depth_first_order():
    assert merge(PATHS, 99) == (TOKENS, PARENTS)
    assert merge([[5, 6, 7]], 99) == ([5, 6, 7], [-1, 0, 1])
    assert merge([[5], [5], [5, 6]], 99) == ([5, 6], [-1, 0])
    assert merge([[]], 99) == ([], [])


def test_a_tree_holds_every_prefix_of_every_path_and_nothing_else():
    rng = random.Random(0)
    for _ in range(200):
        paths = random_paths(rng)
        tokens, parents = merge(paths, 999)
        want = {tuple(path[:n]) for path in paths for n in range(1, len(path) + 1)}
        found = [tuple(text) for text in texts(tokens, parents)]
        assert len(found) == len(set(found)) == len(want)
        assert set(found) == want
        assert tokens[: len(paths[0])] == paths[0], "the first path comes first"
        assert parents[: len(paths[0])] == list(range(-1, len(paths[0]) - 1))


def test_a_node_is_kept_while_its_chance_reaches_the_price():
    law = {"stands": 0.8, "branches": 0.3}  # 8: 0.8 * 0.3; 9 behind 6: 0.64 * 0.3 * 0.8; 4: 0.3
    assert merge(PATHS, 99, **law, price=0.19)[0] == [5, 6, 7, 9, 8, 4]
    assert merge(PATHS, 99, **law, price=0.20)[0] == [5, 6, 7, 8, 4]
    assert merge(PATHS, 99, **law, price=0.25)[0] == [5, 6, 7, 4]
    assert merge(PATHS, 99, **law, price=0.31)[0] == [5, 6, 7], "the first path is the window's to cut"
    assert merge(PATHS, 5)[0] == [5, 6, 7, 9, 8], "the bound cuts the last ones"


def test_shape():
    assert depths(PARENTS) == [0, 1, 2, 3, 3, 4, 2, 1]
    assert ends(PARENTS) == [8, 7, 6, 4, 6, 6, 7, 8]
    assert children(PARENTS) == [[0, 6], [1, 5], [2, 3], [], [4], [], [], []]
    assert followers(TOKENS, PARENTS, 2) == [[5, 4], [6, 8], [7, 9], [0, 0], [9, 0], [0, 0], [0, 0], [0, 0]]
    assert depths([]) == [0]
    assert ends([]) == [1]


def test_ends_tell_ancestors_from_others():
    rng = random.Random(1)
    for _ in range(100):
        _, parents = merge(random_paths(rng), 999)
        above = [{0}]
        for i, parent in enumerate(parents, 1):
            above.append(above[parent + 1] | {i})
        last = ends(parents)
        for i, ancestors in enumerate(above):
            assert {j for j in range(len(above)) if j <= i < last[j]} == ancestors


@pytest.mark.parametrize(
    ("draws", "path"),
    [
        ([3, 0, 0, 0, 0, 0, 0, 0], []),
        ([5, 6, 7, 1, 0, 0, 0, 0], [0, 1, 2]),
        ([5, 6, 9, 0, 9, 1, 0, 0], [0, 1, 3, 4]),
        ([5, 6, 9, 0, 8, 1, 0, 0], [0, 1, 3]),
        ([5, 8, 0, 0, 0, 0, 1, 0], [0, 5]),
        ([4, 6, 7, 0, 0, 0, 0, 1], [6]),
        ([5, 4, 0, 0, 0, 0, 0, 4], [0]),  # 4 stands behind the root only
    ],
)
def test_accept_tree(draws, path):
    assert accept_tree(draws, TOKENS, PARENTS) == path


def wrong_parents(draws, tokens, parents):
    """Planted: accepts a node whatever it hangs on."""
    path, at = [], -1
    for i, token in enumerate(tokens):
        if token == draws[at + 1]:
            path.append(i)
            at = i
    return path


def walks_differ(accept) -> int:
    """Trees on which `accept` does not find the longest path of draws."""
    rng, wrong = random.Random(2), 0
    for _ in range(300):
        tokens, parents = merge(random_paths(rng), 999)
        draws = [rng.randrange(3) for _ in range(len(tokens) + 1)]
        drawn = {}
        for i, text in enumerate([[], *texts(tokens, parents)]):
            drawn[tuple(text)] = draws[i]
        want = []
        while (token := drawn.get(tuple(want))) is not None and (*want, token) in drawn:
            want.append(token)
        wrong += [tokens[i] for i in accept(draws, tokens, parents)] != want
    return wrong


def test_the_walk_follows_the_draws_and_a_wrong_one_is_rejected():
    assert walks_differ(accept_tree) == 0
    assert walks_differ(wrong_parents) > 30


def test_of_a_chain_as_much_is_accepted_as_by_accept_exact():
    rng = random.Random(3)
    for _ in range(300):
        draft = [rng.randrange(2) for _ in range(rng.randrange(6))]
        draws = [rng.randrange(2) for _ in range(len(draft) + 1)]
        assert accept_tree(draws, draft, range(-1, len(draft) - 1)) == list(range(accept_exact(draws, draft)))
