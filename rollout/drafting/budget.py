"""How many draft tokens each row carries in the next pass: as many as pay for themselves, none if drafting loses."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from specrl.rollout.drafting.chain import LONG, Chain, DraftModelRecord
from specrl.rollout.drafting.cost import FORGET, MOST, PRIOR, WEIGHT, CostModel, DraftingBackoff, emitted, prior
from specrl.rollout.drafting.suffix import MatchQuality

State = Literal["start", "agreeing", "diverged", "lost"]
"""What is known of a row's drafter: nothing yet; of its last draft all, some or no tokens stood."""
AcceptanceBucket = tuple[State | MatchQuality, str] | None
"""Drafts that are worth the same: what speaks for the text, or else the row's state, and where they come from. None is
a row without a draft."""

_MARGIN = 1.1  # the model must promise that much: rows that advance unevenly leave a longer tail than is estimated
_NEARLY = 0.95  # of the best rate is as good


@dataclass(frozen=True, slots=True)
class Plan:
    """What the rows of the next pass carry."""

    windows: Mapping[AcceptanceBucket, int]
    """Tokens that a row may carry from its own drafter."""
    handed: frozenset[AcceptanceBucket]
    """Kinds whose rows the draft model serves better than their own drafters."""
    goodput: float
    """Expected tokens per second of the rows that a draft model could help: what a second is worth."""
    token_s: float = 0.0
    """Seconds that a draft token costs in this pass."""
    needed: float = 0.0
    """Probability of acceptance from which on a row's first draft token pays."""


class Budget:
    """Goodput controller after SmartSpec (arXiv 2406.14066): draft lengths from measured costs and acceptances.

    A pass of n rows costs a seconds, r for each row and b for each token, the more the more positions it attends to;
    fitted to measured passes with forgetting. A draft of k tokens whose tokens are each accepted with probability p
    emits E(k) = 1 + p + ... + p^k tokens in expectation, p estimated per kind. SmartSpec maximises the tokens of a
    pass per second. Rows that draft well would then pay for long drafts by which only they get ahead, while the others
    set the time of a rollout; so every row's own rate counts here: sum_i (f + b k_i) / E_i(k_i) is minimised, with
    f = a / n + r + b its share of a pass. Where passes pad their rows, those that carry a draft all carry the same
    number of tokens, see `_levelled`. A token of the draft model also costs its share of the model's passes, and
    `chain` decides it token by token.

    Args:
        window: draft tokens per row and pass; 0 decides by what rows gain.
        padded: attention pads the rows of a pass to equal lengths.
    """

    def __init__(self, window: int = 0, padded: bool = True):
        self.window, self.padded = window, padded
        self.drafter = DraftModelRecord()
        self._passes, self._trial = CostModel(), DraftingBackoff()
        self._seen: defaultdict[AcceptanceBucket, list[float]] = defaultdict(
            lambda: [0.0, 0.0]
        )  # accepted tokens, rejected drafts
        self._all: tuple[float, float] | None = None  # the same of all kinds; None: to be summed
        self._needed = 0.0
        self._plain = 0.0, 0.0  # seconds of a plain pass and of each row in it, as last planned with

    # What was measured -------------------------------------------------------------------------------------------

    def acceptance(self, kind: AcceptanceBucket) -> float:
        """Estimated probability that one more draft token of a row of this kind is accepted."""
        if kind is None:
            return 0.0
        return self._estimate(kind, WEIGHT * self._expected())

    def _estimate(self, kind: AcceptanceBucket, expected: float) -> float:
        accepted, rejected = self._seen.get(kind, (0.0, 0.0))
        return (accepted + _promise(kind) * expected) / (accepted + rejected + WEIGHT)

    def _expected(self) -> float:
        """Acceptance of kinds that were not seen yet: what drafts did in general, but never more than the prior says.

        Else each kind would have to fail by itself before useless drafts are left.
        """
        if self._all is None:
            self._all = sum(seen[0] for seen in self._seen.values()), sum(seen[1] for seen in self._seen.values())
        accepted, rejected = self._all
        return min((accepted + WEIGHT * PRIOR) / (accepted + rejected + WEIGHT), PRIOR)

    def gain(self, kind: AcceptanceBucket, drafted: int, price: float) -> float:
        """Expected accepted tokens of a draft of this kind, less `price` for each that is carried."""
        return emitted(self.acceptance(kind), drafted) - 1 - price * drafted

    def cost(self, rows: int = 0, width: int = 0) -> tuple[float, float]:
        """Seconds of a pass over `rows` rows, and of each of its tokens, which attend to `width` positions."""
        fixed, row, token, place = self._passes.fit()
        return fixed + row * rows, token + place * width

    def observe_pass(
        self,
        tokens: int,
        seconds: float,
        rows: int = 0,
        width: int = 0,
        stood: int = 0,
        asking: float | None = None,
    ) -> None:
        """One pass of `tokens` tokens, of `rows` rows, that attend to `width` positions, took `seconds`.

        Args:
            rows: 0 for a pass that also read prompts, which says nothing about drafts.
            stood: tokens of all rows that the pass brought.
            asking: seconds that asking for the drafts of this pass took; None if nobody was asked.
        """
        self._passes.observe(tokens, seconds, rows, width)
        if rows:
            fixed, row = self._plain
            self._trial.observe(rows, seconds, (fixed + row * rows) * stood / rows, tokens > rows, asking)

    def calibrate(self, passes: Sequence[tuple[int, float]], rows: int = 0, width: int = 0) -> None:
        """Measured (tokens, seconds) of passes, see CostModel.calibrate."""
        self._passes.calibrate(passes, rows, width)

    def observe_draft(self, kind: AcceptanceBucket, drafted: int, accepted: int) -> None:
        """Of `drafted` tokens of a row's own drafter the first `accepted` stood, or would have stood."""
        seen, self._all = self._seen[kind], None
        seen[0] += accepted
        if accepted < drafted:
            seen[1] += 1

    def next_rollout(self) -> None:
        """Weights have changed: trust the past half as much, so that a bad spell does not last."""
        for seen in self._seen.values():
            seen[:] = [FORGET * x for x in seen]
        self._all = None
        self.drafter.next_rollout()
        self._trial.restart()

    # What to draft -----------------------------------------------------------------------------------------------

    def rest(self) -> Plan | None:
        """The plan of a pass that nobody is asked about, where asking did not pay of late, else None.

        A fixed window is always asked for.
        """
        if self.window or not self._trial.rests():
            return None
        return Plan({}, frozenset(), 0.0, needed=self._needed)

    def observe_asking(self, carried: bool) -> None:
        """The rows of the next pass were asked for drafts; whether it carries any."""
        self._trial.ask(carried)

    def longest(self, rows: int, width: int = 0) -> int:
        """Tokens that no draft of a pass over `rows` rows will exceed.

        The best kind there is, at the goodput of a pass without drafts: `plan` only raises that.
        """
        if self.window:
            return self.window
        expected = self._expected()
        best = max((self._estimate(kind, WEIGHT * expected) for kind in self._seen), default=0.0)
        a, b = self.cost(rows, width)
        return max(1, _length(max(best, expected), b * rows / (a + b * rows)))

    def plan(self, kinds: Sequence[AcceptanceBucket], model: bool = False, width: int = 0) -> Plan:
        """Draft lengths for the rows of the next pass, and the kinds that a draft model serves better."""
        count = Counter(kinds)
        if self.window:
            return Plan(dict.fromkeys(count, self.window), frozenset(), 0.0)
        rows = count.total()
        a, b = self.cost(rows, width)
        fixed, alone = a + b * rows, self.cost()[0]
        self._plain = alone, (fixed - alone) / max(1, rows)
        expected = WEIGHT * self._expected()
        chances = {kind: (n, self._estimate(kind, expected) if kind else 0.0) for kind, n in count.items()}
        k, goodput = (_levelled if self.padded else _each)(chances, fixed, b)
        self._needed, handed = min(1.0, b * goodput), frozenset()
        if model and count:
            handed, goodput = self._hand_over(count, k, fixed, b, goodput)
        return Plan(k, handed, goodput, b, self._needed)

    def _hand_over(
        self,
        count: Mapping[AcceptanceBucket, int],
        k: Mapping[AcceptanceBucket, int],
        fixed: float,
        b: float,
        goodput: float,
    ):
        """The kinds that the model drafts for, and the tokens per second of the rows that need it.

        These are the rows whose own drafters are right less often. They keep a rollout going after the others have
        left, so that a second is worth what it brings them: the long drafts of the others would only make it look dear.
        But all rows together must not be slower for it, as other rows need it in the next pass.
        """
        promise, total = self.drafter.promise(), count.total()
        chances = {s: self.acceptance(s) for s in count}
        needy = frozenset(s for s in count if chances[s] < promise)
        if not needy:
            return needy, goodput
        rows, others = sum(count[s] for s in needy), [s for s in count if s not in needy]
        theirs = fixed + b * sum(count[s] * k[s] for s in others)
        alone = sum(count[s] * emitted(chances[s], k[s]) for s in needy)
        alone /= theirs + b * sum(count[s] * k[s] for s in needy)
        draft, row, token, _ = self.drafter.fit()
        step = draft + (row + token) * rows
        helped, length = max(
            (rows * emitted(promise, n) / (theirs + (b * rows + step) * n), n) for n in range(LONG + 1)
        )
        share = (fixed + step * length) / total
        seconds = rows * (share + b * length) / emitted(promise, length)
        seconds += sum(count[s] * (share + b * k[s]) / emitted(chances[s], k[s]) for s in others)
        pays = helped > _MARGIN * alone and seconds < total / goodput
        return (needy, helped) if pays else (frozenset(), alone)

    def chain(self, behind: Sequence[int], plan: Plan) -> Chain:
        """The stop rule of a chain draft; it may let no row draft.

        Args: behind: tokens of each row that the model has not seen and must run first.
        """
        wanted = behind if plan.handed or self.window else []
        return Chain(self.drafter, plan.goodput, plan.token_s, wanted, self.window)


@cache
def _promise(kind: AcceptanceBucket) -> float:
    """Of a kind that was not seen yet, as a share of what drafts did in general."""
    return prior(kind[0][0], kind[1]) / PRIOR if type(kind[0]) is tuple else 1.0


def _levelled(
    groups: Mapping[AcceptanceBucket, tuple[int, float]], fixed: float, price: float
) -> tuple[dict[AcceptanceBucket, int], float]:
    """One draft length, a power of two, for all rows that it makes faster, and the rows' tokens per second.

    Attention pads the rows of a pass to equal lengths, block by block, so that lengths of their own cost more than they
    bring: at 64 rows on two cores equal drafts took 0.8x to 0.9x the time for about as many passes. Of lengths that are
    nearly as good the shortest is taken: what rows win that are ahead is worth less, as the last row sets the time.

    Args: groups: rows and acceptance of each kind; fixed: seconds of a pass without drafts; price: of a draft token.
    """
    total = sum(rows for rows, _ in groups.values())
    k, share = dict.fromkeys(groups, 0), fixed / max(total, 1)
    most = {s: n for s, (_, p) in groups.items() if (n := _length(p, price / share))}  # of others the first token loses
    drafting, found = {s: groups[s] for s in most}, []
    for level in (1 << i for i in range(max(most.values(), default=0).bit_length())):
        times = {s: (share + price * level) / emitted(p, level) for s, (_, p) in drafting.items()}
        seconds = sum(rows * min(share, times[s]) for s, (rows, _) in drafting.items())
        found.append((seconds, {s: level for s, time in times.items() if time < share}))
    best = min((seconds for seconds, _ in found), default=0.0)
    seconds, carried = next((line for line in found if _NEARLY * line[0] <= best), (0.0, {}))
    rest = sum(rows for s, (rows, _) in groups.items() if s not in drafting)
    return k | carried, total / (seconds + rest * share) if total else 0.0


def _each(
    groups: Mapping[AcceptanceBucket, tuple[int, float]], fixed: float, price: float
) -> tuple[dict[AcceptanceBucket, int], float]:
    """As `_levelled`, where passes pad nothing: each kind's own best length, 0 or a power of two."""
    total, seconds, best = sum(rows for rows, _ in groups.values()), 0.0, {}
    share = fixed / max(total, 1)
    for kind, (rows, p) in groups.items():
        length, time, longer = 0, share, 1
        while (other := (share + price * longer) / emitted(p, longer)) < time:  # it falls, then rises
            length, time, longer = longer, other, 2 * longer
        best[kind] = length
        seconds += rows * time
    return best, total / seconds if total else 0.0


def _length(p: float, worth: float) -> int:
    """Tokens k of a draft while p^k >= worth."""
    return int(math.log(worth) / math.log(min(p, MOST))) if 0 < worth < 1 and p > 0 else 0
