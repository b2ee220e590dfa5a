"""Draft trees: several continuations of one text, common prefixes once, as flat lists of tokens and parents.

Node i carries `tokens[i]` behind node `parents[i] < i`; -1 is the last token of the text, the root. Nodes are in
depth-first order, so that the descendants of a node are those right behind it, and the first continuation comes first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def merge(
    paths: Sequence[Sequence[int]], most: int, stands: float = 1.0, branches: float = 1.0, price: float = 0.0
) -> tuple[list[int], list[int]]:
    """The tree of some continuations: the first one whole, of the others what is likely enough to be accepted.

    Args:
        paths: continuations as token ids, the likeliest first.
        most: nodes of the tree.
        stands: probability that a node's first child is the draw behind it.
        branches: the same of each further child.
        price: a node is left out when the chance that it is accepted, the product along its path, is below.

    Returns: tokens and parents.
    """
    root: dict[int, dict] = {}
    size = 0
    for rank, path in enumerate(paths):
        node, chance = root, 1.0
        for token in path:
            chance *= stands if next(iter(node), token) == token else branches
            if (rank and chance < price) or (token not in node and size == most):
                break
            size += token not in node
            node = node.setdefault(token, {})
    tokens: list[int] = []
    parents: list[int] = []
    waiting = [(-1, *child) for child in reversed(root.items())]
    while waiting:
        parent, token, children = waiting.pop()
        waiting += [(len(tokens), *child) for child in reversed(children.items())]
        tokens.append(token)
        parents.append(parent)
    return tokens, parents


def depths(parents: Sequence[int]) -> list[int]:
    """The depth of every place: of the root, which is 0, then of the nodes."""
    found = [0]
    for parent in parents:
        found.append(found[parent + 1] + 1)
    return found


def ends(parents: Sequence[int]) -> list[int]:
    """The first place behind each place's descendants, the root being place 0.

    Place j is place i or one of its ancestors exactly when j <= i < ends[j].
    """
    found = list(range(1, len(parents) + 2))
    for i in range(len(parents), 0, -1):
        above = parents[i - 1] + 1
        found[above] = max(found[above], found[i])
    return found


def followers(tokens: Sequence[int], parents: Sequence[int], fan: int) -> list[list[int]]:
    """The tokens of every place's children, padded to `fan` with 0."""
    return [[tokens[i] for i in after] + [0] * (fan - len(after)) for after in children(parents)]


def children(parents: Sequence[int]) -> list[list[int]]:
    """The child nodes of every place, the root's first."""
    found: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for i, parent in enumerate(parents):
        found[parent + 1].append(i)
    return found


def slots(starts: Sequence[int], width: int, trees: Mapping[int, Sequence[int]]) -> tuple[Tensor, Tensor]:
    """For every slot of every row [R, width]: the position of its token, and the first slot that does not see it.

    Args:
        starts: slot of each row's root; slots before it hold the text, at their own positions.
        width: slots of a row.
        trees: parents by row.
    """
    where, positions, hidden = [], [], []
    for row, parents in trees.items():
        start, first = starts[row], row * width + starts[row]
        where += range(first, first + len(parents) + 1)
        positions += [start + depth for depth in depths(parents)]
        hidden += [start + end for end in ends(parents)]
    tables = torch.arange(width).repeat(len(starts), 1), torch.full((len(starts), width), width)
    for table, values in zip(tables, (positions, hidden), strict=True):
        table.view(-1)[torch.tensor(where)] = torch.tensor(values)
    return tables
