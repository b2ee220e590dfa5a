"""How many draft tokens each row carries in the next pass: as many as gain time, none if drafting loses time."""

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
"""What is known of a row's drafter: nothing yet; of its last draft all, some or no tokens were accepted."""
AcceptanceBucket = tuple[State | MatchQuality, str] | None
"""Drafts that share one acceptance estimate: how well the text matches, or else the row's state, and the source of the
draft. None is a row without a draft."""

_MARGIN = 1.1  # the model must promise so much more: rows that advance unevenly have a longer tail than is estimated
_NEARLY = 0.95  # of the best rate is good enough


@dataclass(frozen=True, slots=True)
class Plan:
    """Draft lengths of the next pass."""

    lengths: Mapping[AcceptanceBucket, int]
    """Most tokens of a draft from the row's own drafter."""
    by_model: frozenset[AcceptanceBucket]
    """Buckets whose rows the draft model serves better than their own drafters."""
    goodput: float
    """Expected tokens per second of the rows that a draft model could help."""
    token_s: float = 0.0
    """Seconds of a draft token in this pass."""
    needed: float = 0.0
    """Acceptance probability from which on a row's first draft token pays."""


class Budget:
    """Goodput controller after SmartSpec (arXiv 2406.14066): draft lengths from measured costs and acceptances.

    A pass of n rows costs a seconds, r for each row and b for each token (b grows with the positions it attends to),
    fitted to measured passes with forgetting. A draft of k tokens that are each accepted with probability p emits
    E(k) = 1 + p + ... + p^k tokens in expectation; p is estimated for each AcceptanceBucket. SmartSpec maximises the
    tokens of a pass per second. Then rows that draft well would get long drafts, while the slowest rows set the time of
    a rollout. So every row's own rate counts here: sum_i (f + b k_i) / E_i(k_i) is minimised, with f = a / n + r + b
    the row's share of a pass. Where passes pad their rows, all drafts have one length, see `_one_length`. A token of
    the draft model also costs its share of the model's passes, and `chain` decides it token by token.

    Args:
        window: draft tokens per row and pass; 0 decides by the estimated gain.
        padded: attention pads the rows of a pass to equal lengths.
    """

    def __init__(self, window: int = 0, padded: bool = True):
        self.window = window
        self.padded = padded
        self.drafter = DraftModelRecord()
        self._passes = CostModel()
        self._backoff = DraftingBackoff()
        # Accepted tokens and rejected drafts of each bucket, and their sums; None: to be computed.
        self._counts: defaultdict[AcceptanceBucket, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._total: tuple[float, float] | None = None
        self._needed = 0.0
        self._plain = 0.0, 0.0  # seconds of a plain pass and of each row in it, as of the last plan

    # Measurements -------------------------------------------------------------------------------------------

    def acceptance(self, bucket: AcceptanceBucket) -> float:
        """Estimated probability that one more draft token of a row in this bucket is accepted."""
        if bucket is None:
            return 0.0
        return self._estimate(bucket, WEIGHT * self._expected())

    def _estimate(self, bucket: AcceptanceBucket, expected: float) -> float:
        accepted, rejected = self._counts.get(bucket, (0.0, 0.0))
        return (accepted + _promise(bucket) * expected) / (accepted + rejected + WEIGHT)

    def _expected(self) -> float:
        """Acceptance of buckets without drafts so far: that of all drafts, but never more than the prior.

        Otherwise each bucket would have to fail by itself before useless drafting stops.
        """
        if self._total is None:
            counts = self._counts.values()
            self._total = sum(accepted for accepted, _ in counts), sum(rejected for _, rejected in counts)
        accepted, rejected = self._total
        return min((accepted + WEIGHT * PRIOR) / (accepted + rejected + WEIGHT), PRIOR)

    def gain(self, bucket: AcceptanceBucket, drafted: int, price: float) -> float:
        """Expected accepted tokens of a draft of this bucket, less `price` for each draft token."""
        return emitted(self.acceptance(bucket), drafted) - 1 - price * drafted

    def cost(self, rows: int = 0, width: int = 0) -> tuple[float, float]:
        """Seconds of a pass over `rows` rows, and of each of its tokens, which attend to `width` positions."""
        fixed, row, token, position = self._passes.fit()
        return fixed + row * rows, token + position * width

    def observe_pass(
        self,
        tokens: int,
        seconds: float,
        rows: int = 0,
        width: int = 0,
        emitted: int = 0,
        asking: float | None = None,
    ) -> None:
        """One pass of `tokens` tokens, of `rows` rows, that attend to `width` positions, took `seconds`.

        Args:
            rows: 0 for a pass that also read prompts, which says nothing about drafts.
            emitted: tokens that all rows emitted.
            asking: seconds that asking for the drafts of this pass took; None if no drafter was asked.
        """
        self._passes.observe(tokens, seconds, rows, width)
        if rows:
            fixed, row = self._plain
            worth = (fixed + row * rows) * emitted / rows
            self._backoff.observe(rows, seconds, worth, tokens > rows, asking)

    def calibrate(self, passes: Sequence[tuple[int, float]], rows: int = 0, width: int = 0) -> None:
        """Measured (tokens, seconds) of passes, see CostModel.calibrate."""
        self._passes.calibrate(passes, rows, width)

    def observe_draft(self, bucket: AcceptanceBucket, drafted: int, accepted: int) -> None:
        """Of `drafted` tokens of a row's own drafter the first `accepted` were accepted, or would have been."""
        counts = self._counts[bucket]
        counts[0] += accepted
        if accepted < drafted:
            counts[1] += 1
        self._total = None

    def next_rollout(self) -> None:
        """Weights have changed: past counts weigh half, so that drafts that failed are tried again."""
        for counts in self._counts.values():
            counts[:] = [FORGET * x for x in counts]
        self._total = None
        self.drafter.next_rollout()
        self._backoff.restart()

    # Plans ------------------------------------------------------------------------------------------------------

    def skipping_plan(self) -> Plan | None:
        """The plan of a pass without drafting, if asking for drafts has not paid lately, else None.

        With a fixed window drafters are always asked.
        """
        if self.window or not self._backoff.should_skip():
            return None
        return Plan({}, frozenset(), 0.0, needed=self._needed)

    def observe_asking(self, drafted: bool) -> None:
        """Drafters were asked for the next pass. Args: drafted: it carries a draft."""
        self._backoff.observe_asking(drafted)

    def longest(self, rows: int, width: int = 0) -> int:
        """An upper bound on the draft lengths of a pass over `rows` rows.

        That of the best bucket at the goodput of a pass without drafts, which a plan only raises.
        """
        if self.window:
            return self.window
        expected = self._expected()
        best = max((self._estimate(bucket, WEIGHT * expected) for bucket in self._counts), default=0.0)
        a, b = self.cost(rows, width)
        return max(1, _length(max(best, expected), b * rows / (a + b * rows)))

    def plan(self, buckets: Sequence[AcceptanceBucket], model: bool = False, width: int = 0) -> Plan:
        """Draft lengths for the rows of the next pass, and the buckets that a draft model serves better."""
        count = Counter(buckets)
        if self.window:
            return Plan(dict.fromkeys(count, self.window), frozenset(), 0.0)
        rows = count.total()
        a, b = self.cost(rows, width)
        fixed = a + b * rows
        empty = self.cost()[0]
        self._plain = empty, (fixed - empty) / max(1, rows)
        expected = WEIGHT * self._expected()
        chances = {bucket: (n, self._estimate(bucket, expected) if bucket else 0.0) for bucket, n in count.items()}
        k, goodput = (_one_length if self.padded else _own_lengths)(chances, fixed, b)
        self._needed = min(1.0, b * goodput)
        by_model: frozenset[AcceptanceBucket] = frozenset()
        if model and count:
            by_model, goodput = self._for_model(count, k, fixed, b, goodput)
        return Plan(k, by_model, goodput, b, self._needed)

    def _for_model(
        self,
        count: Counter[AcceptanceBucket],
        k: Mapping[AcceptanceBucket, int],
        fixed: float,
        b: float,
        goodput: float,
    ) -> tuple[frozenset[AcceptanceBucket], float]:
        """The buckets that the model drafts for, and the tokens per second of their rows.

        These are the rows whose own drafters are accepted less often. They run longest, so the value of a second is
        what it gains for them; with the long drafts of the other rows a second would seem too expensive. But all rows
        together must not become slower, as other rows need the model in the next pass.
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

    def chain(self, missing: Sequence[int], plan: Plan) -> Chain:
        """The stop rule of a chain draft; it may let no row draft.

        Args: missing: tokens of each row that the model must read first.
        """
        missing = missing if plan.by_model or self.window else []
        return Chain(self.drafter, plan.goodput, plan.token_s, missing, self.window)


@cache
def _promise(bucket: AcceptanceBucket) -> float:
    """Expected acceptance of a bucket without drafts so far, relative to that of all drafts."""
    if bucket is None or isinstance(bucket[0], str):
        return 1.0
    return prior(bucket[0][0], bucket[1]) / PRIOR


def _one_length(
    groups: Mapping[AcceptanceBucket, tuple[int, float]], fixed: float, price: float
) -> tuple[dict[AcceptanceBucket, int], float]:
    """One draft length, a power of two, for all rows that it makes faster, and the rows' tokens per second.

    Attention pads the rows of a pass to equal lengths, block by block, so different lengths cost more than they gain:
    at 64 rows on two cores equal drafts took 0.8x to 0.9x the time for about as many passes. Of lengths that are nearly
    as good the shortest is taken, as a gain of rows that are ahead is worth less: the last row sets the time.

    Args: groups: rows and acceptance of each bucket; fixed: seconds of a pass without drafts; price: of a draft token.
    """
    total = sum(rows for rows, _ in groups.values())
    share = fixed / max(total, 1)
    most = {s: n for s, (_, p) in groups.items() if (n := _length(p, price / share))}  # of others the first token loses
    drafting = {s: groups[s] for s in most}
    candidates = []
    for length in (1 << i for i in range(max(most.values(), default=0).bit_length())):
        times = {s: (share + price * length) / emitted(p, length) for s, (_, p) in drafting.items()}
        seconds = sum(rows * min(share, times[s]) for s, (rows, _) in drafting.items())
        candidates.append((seconds, {s: length for s, time in times.items() if time < share}))
    best = min((seconds for seconds, _ in candidates), default=0.0)
    seconds, lengths = next((c for c in candidates if _NEARLY * c[0] <= best), (0.0, {}))
    undrafted = sum(rows for s, (rows, _) in groups.items() if s not in drafting)
    return dict.fromkeys(groups, 0) | lengths, total / (seconds + undrafted * share) if total else 0.0


def _own_lengths(
    groups: Mapping[AcceptanceBucket, tuple[int, float]], fixed: float, price: float
) -> tuple[dict[AcceptanceBucket, int], float]:
    """As `_one_length`, where passes pad nothing: each bucket's own best length, 0 or a power of two."""
    total = sum(rows for rows, _ in groups.values())
    share = fixed / max(total, 1)
    seconds = 0.0
    best = {}
    for bucket, (rows, p) in groups.items():
        length, longer = 0, 1
        time = share
        while (other := (share + price * longer) / emitted(p, longer)) < time:  # it falls, then rises
            time = other
            length, longer = longer, 2 * longer
        best[bucket] = length
        seconds += rows * time
    return best, total / seconds if total else 0.0


def _length(p: float, worth: float) -> int:
    """Tokens k of a draft while p^k >= worth."""
    return int(math.log(worth) / math.log(min(p, MOST))) if 0 < worth < 1 and p > 0 else 0
