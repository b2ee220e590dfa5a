"""Draft trees of the transformers engine: which further branches ride beside a row's draft."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rollout.budget import Plan, State
from rollout.drafters.contexts import ContextTable
from rollout.engines.rows import Row, ids, known
from rollout.tree import children, merge
from rollout.types import EngineStats

_PRIOR = {False: (9.0, 1.0), True: (1.0, 3.0)}  # accepted and rejected tokens assumed before any were seen
_FORGET_ROLLOUT = 0.5


class Branching:
    """Adds further branches to drafts while the chance that the draws come to them is worth their tokens.

    A *fork* is where the branches of a draft part. How often a token stands once the draws have come to the one before
    it is counted by the row's state, the source of its draft, and whether it is the first of a fork or a further one.

    Args:
        width: most branches of a row, at least 2.
        vocab: ids below it exist.
        most: tokens of a tree, unless the draft alone has more.
        contexts: what follows the last tokens in the texts of all prompts makes branches too.
    """

    def __init__(self, width: int, vocab: int, most: int, contexts: ContextTable | None = None):
        self.width, self.vocab, self.most, self.contexts = width, vocab, most, contexts
        self._seen: dict[tuple[State, str, bool], list[float]] = {}

    def chance(self, row: Row, further: bool) -> float:
        """Estimated probability that the first token behind an accepted one is the draw, or a certain further one."""
        seen = self._seen.get((row.state, row.carried, further), (0.0, 0.0))
        accepted, rejected = (x + prior for x, prior in zip(seen, _PRIOR[further], strict=True))
        return accepted / (accepted + rejected)

    def grow(self, rows: Sequence[Row], plan: Plan) -> None:
        """Turns drafts into trees where further branches pay.

        A row that carries nothing gets none: its draft is likelier. Nor does one whose draft a model may replace.
        """
        for row in rows:
            row.parents, further = None, self.chance(row, True)
            if row.draft and further >= plan.needed and row.kind not in plan.handed:
                most = max(len(row.draft), self.most)
                paths = self._paths(row, plan.needed)
                tokens, parents = merge(paths, most, self.chance(row, False), further, plan.needed)
                if len(tokens) > len(row.draft):
                    row.draft, row.parents = tokens, parents

    def _paths(self, row: Row, price: float) -> list[tuple[int, ...]]:
        """The row's draft, and other continuations that its drafter or the contexts know."""
        drafter, limit, paths = row.request.drafter, len(row.draft), [row.draft, row.guess]
        if hasattr(drafter, "branches"):
            paths += [ids(drafter, path, limit) for path in drafter.branches(tuple(row.tokens), limit, self.width)]
        if self.contexts is not None:
            paths += self.contexts.branches((*row.request.prompt[-8:], *row.tokens[-8:]), limit, price)
        found = dict.fromkeys(tuple(known(path[:limit], self.vocab)) for path in paths)
        return [path for path in found if path][: self.width]

    def learn(self, row: Row, path: Sequence[int], emitted: int, logprobs: Sequence, stats: EngineStats) -> None:
        """Counts what became of the tokens that the draws came to, and the policy's mass on the branches of forks.

        Args: path: accepted places of the row's tree; emitted: tokens that came of it; logprobs: the policy's, of the
        children of every place of the tree.
        """
        after, accepted = children(row.parents), set(path)
        for place in (0, *(node + 1 for node in path))[:emitted]:
            for rank, node in enumerate(after[place]):
                self._seen.setdefault((row.state, row.carried, rank > 0), [0.0, 0.0])[node not in accepted] += 1
            if len(after[place]) > 1:
                stats.forks += 1
                stats.fork_mass += sum(map(math.exp, logprobs[place][: len(after[place])]))

    def next_rollout(self) -> None:
        """Weights have changed: trust the past half as much."""
        self._seen = {kind: [_FORGET_ROLLOUT * x for x in seen] for kind, seen in self._seen.items()}
