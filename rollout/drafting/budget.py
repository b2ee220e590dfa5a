"""Decides how many draft tokens each row has in the next pass: as many as save time, none if drafting costs time."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from specrl.rollout.drafting.chain import LONG, Chain, DraftModelRecord
from specrl.rollout.drafting.cost import FORGET, MOST, PRIOR, WEIGHT, Account, CostModel, emitted, prior
from specrl.rollout.drafting.suffix import MatchQuality

State = Literal["start", "agreeing", "diverged", "lost"]
"""State of a row's drafter: no draft yet; or all, some or none of the tokens of its last draft were accepted."""
AcceptanceBucket = tuple[State | MatchQuality, str] | None
"""Drafts that share one acceptance estimate: their match quality, or the row's state if there is none, and the source.
None is a row without a draft."""

_MARGIN = 1.1  # required gain of the draft model: rows that advance unevenly have a longer tail than estimated
_NEARLY = 0.95  # of the best rate is sufficient
_WORTH = 0.9  # of a pass without drafts is the most that rows which pad each other may take for its tokens


@dataclass(frozen=True, slots=True)
class Plan:
    """Draft lengths of the next pass."""

    lengths: Mapping[AcceptanceBucket, int]
    """Maximum draft tokens from a row's drafter, by bucket."""
    by_model: frozenset[AcceptanceBucket]
    """Buckets whose rows get more accepted tokens from the draft model than from their drafters."""
    goodput: float
    """Expected tokens per second of the rows that the draft model may serve."""
    token_s: float = 0.0
    """Seconds that one draft token adds to this pass."""
    needed: float = 0.0
    """Acceptance probability above which a draft token of each row saves enough time."""


class Budget:
    """Goodput controller after SmartSpec (arXiv 2406.14066): draft lengths from measured costs and acceptances.

    A pass of n rows costs a seconds, r for each row and b for each token, where b grows with the attended positions.
    The costs are fitted to measured passes with forgetting. A draft of k tokens that are each accepted with probability
    p emits E(k) = 1 + p + ... + p^k tokens in expectation; p is estimated for each AcceptanceBucket. SmartSpec
    maximises the tokens per second of a pass, which gives long drafts to rows with high acceptance although the slowest
    rows determine the time of a rollout. This class therefore minimises the rows' seconds per token,
    sum_i (f + b k_i) / E_i(k_i), where f = a / n + r + b is the row's share of a pass. If passes pad their rows, all
    drafts have the same length, see `_one_length`. A token of the draft model also costs its share of the model's
    passes, so `chain` decides token by token.

    What drafts have saved is measured against passes without drafts, whose costs are fitted to them alone. On a CPU a
    token may cost half as much again in a longer pass, and by the costs of all passes drafts would be credited with
    seconds that plain decoding does not take.

    Args:
        window: draft tokens per row and pass; with 0 the estimated gain decides.
        padded: attention pads the rows of a pass to equal lengths.
    """

    def __init__(self, window: int = 0, padded: bool = True):
        self.window = window
        self.padded = padded
        self.drafter = DraftModelRecord()
        self._passes = CostModel()
        self._plain_passes = CostModel()  # those without drafts
        self.account = Account()
        # Accepted tokens and rejected drafts of each bucket, and their sums.
        self._counts: defaultdict[AcceptanceBucket, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._totals: dict[str, tuple[float, float]] = {}  # by source, and of all; empty until computed
        self._needed = 0.0
        self._lead = 0  # passes that the slowest row of this rollout has saved
        self._even = 0.0  # the same if all its rows advanced alike
        self._share = 1.0  # of `_lead` in `_even`, over past rollouts
        self._refills = False  # other rows wait for the places of those that end
        self._plain = 0.0, 0.0  # seconds of a pass without drafts, and of each of its rows, at the last plan

    # Measurements -------------------------------------------------------------------------------------------

    def acceptance(self, bucket: AcceptanceBucket) -> float:
        """Estimated probability that one more draft token of a row in this bucket is accepted."""
        if bucket is None:
            return 0.0
        accepted, rejected = self._counts.get(bucket, (0.0, 0.0))
        expected = min(self._expected(bucket[1]), PRIOR)
        return (accepted + WEIGHT * _promise(bucket) * expected) / (accepted + rejected + WEIGHT)

    def _expected(self, source: str = "") -> float:
        """Expected acceptance in a bucket without observed drafts: that of its source, and of all drafts before it.

        With a fixed prior, drafts that fail would be tried in every bucket before drafting stops.
        """
        accepted, rejected = self._sums().get(source, (0.0, 0.0))
        expected = self._expected() if source else PRIOR
        return (accepted + WEIGHT * expected) / (accepted + rejected + WEIGHT)

    def _sums(self) -> dict[str, tuple[float, float]]:
        """Accepted tokens and rejected drafts by source, and of all drafts under the empty name."""
        if not self._totals:
            for bucket, (accepted, rejected) in self._counts.items():
                for name in ("", bucket[1]) if bucket else ():
                    before = self._totals.get(name, (0.0, 0.0))
                    self._totals[name] = before[0] + accepted, before[1] + rejected
        return self._totals

    def gain(self, bucket: AcceptanceBucket, drafted: int, price: float) -> float:
        """Expected accepted tokens of a draft in this bucket, minus `price` for each draft token."""
        return emitted(self.acceptance(bucket), drafted) - 1 - price * drafted

    def cost(self, rows: int = 0, width: int = 0) -> tuple[float, float]:
        """Seconds of a pass over `rows` rows, and of each of its tokens that attend to `width` positions."""
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
        ahead: tuple[int, int] = (0, 0),
    ) -> None:
        """Records that a pass of `rows` rows and `tokens` tokens, which attend to `width` positions, took `seconds`.

        Args:
            rows: 0 for a pass that also reads prompts, which is not used to evaluate drafting.
            emitted: tokens emitted by all rows.
            asking: seconds taken to get the drafts of this pass; None if no drafter was called, or for another pass of
                the same batch. Such a pass is not used to evaluate drafting.
            ahead: rows of the next batch in the pass, and their tokens, whose seconds are not those of drafts.
        """
        others, their_tokens = ahead
        self._passes.observe(tokens + their_tokens, seconds, rows + others, width)
        if tokens + their_tokens == rows + others:
            self._plain_passes.observe(rows + others, seconds, rows + others, width)
        if others:
            _, row_s, token_s, position_s = self._passes.fit()
            seconds -= row_s * others + (token_s + position_s * width) * their_tokens
        saved_s = 0.0
        if rows and asking is not None:
            fixed, row = self._plain
            saved_s = -asking
            if tokens > rows:
                even = emitted / rows - 1
                self._even += even
                saved_s += fixed * (1 + even * self._refills) + row * emitted - seconds
        self.account.observe(seconds, saved_s)

    def observe_lead(self, lead: int | None) -> None:
        """Records by how many passes the row that needs most of them is ahead of plain decoding, before a pass.

        The time that a pass takes whatever its rows is saved only where this row needs fewer passes.

        Args:
            lead: None while other rows wait for the places of these: then every row that ends early saves some.
        """
        self._refills = lead is None
        if lead is not None and lead > self._lead:
            self.account.observe(0.0, self._plain[0] * (lead - self._lead))
            self._lead = lead

    def calibrate(self, passes: Sequence[tuple[int, float]], rows: int = 0, width: int = 0) -> None:
        """Records measured (tokens, seconds) of passes of so many rows, 0 if unknown, see CostModel.calibrate."""
        self._passes.calibrate(passes, rows, width)
        self._plain_passes.calibrate([one for one in passes if rows in (0, one[0])], rows)
        self.account.pass_s = self.account.pass_s or passes[0][1]

    def observe_draft(self, bucket: AcceptanceBucket, drafted: int, accepted: int) -> None:
        """Records that the first `accepted` of a drafter's `drafted` tokens were, or would have been, accepted."""
        counts = self._counts[bucket]
        counts[0] += accepted
        if accepted < drafted:
            counts[1] += 1
        self._totals = {}

    def next_rollout(self) -> None:
        """Halves all counts, because the weights have changed and drafts that failed should be tried again.

        The share that the slowest row saves is learnt here too: plain rollouts may have followed, which have no drafts.
        """
        for counts in self._counts.values():
            counts[:] = [FORGET * x for x in counts]
        self._totals = {}
        self.drafter.next_rollout()
        self.account.open()
        if self._even > 1 and not self._refills:
            self._share += FORGET * (min(1.0, self._lead / self._even) - self._share)
        self._lead = 0
        self._even = 0.0

    # Plans ------------------------------------------------------------------------------------------------------

    def skipping_plan(self) -> Plan | None:
        """A plan without drafts if the account is empty, else None. With a fixed window drafters are always called."""
        if self.window or self.account.balance_s > 0:
            return None
        return Plan({}, frozenset(), 0.0, needed=self._needed)

    def affordable(self, buckets: Sequence[AcceptanceBucket], plan: Plan) -> Plan:
        """The plan with no more draft tokens than their sources have had right, or than the account covers.

        Tokens of proposals that were not drafted count as right where the row sampled them.
        """
        if self.window:
            return plan
        lengths = plan.lengths
        sums = self._sums()
        right = sum(sums[name][0] for name in {bucket[1] for bucket in buckets if bucket} & sums.keys())
        most = max(right, self.account.balance_s / plan.token_s)
        while 0 < sum(lengths[bucket] for bucket in buckets) > most:
            lengths = {bucket: length // 2 for bucket, length in lengths.items()}
        return replace(plan, lengths=lengths)

    def longest(self, rows: int, width: int = 0) -> int:
        """An upper bound on the draft lengths of a pass over `rows` rows.

        It is the length for the best bucket at the goodput of a pass without drafts, which a plan can only increase.
        """
        if self.window:
            return self.window
        best = max((self.acceptance(bucket) for bucket in self._counts), default=0.0)
        a, b = self.cost(rows, width)
        return max(1, _length(max(best, self._expected()), b * rows / (a + b * rows)))

    def plan(self, buckets: Sequence[AcceptanceBucket], model: bool = False, width: int = 0) -> Plan:
        """Draft lengths for the rows of the next pass, and the buckets that the draft model serves."""
        count = Counter(buckets)
        if self.window:
            return Plan(dict.fromkeys(count, self.window), frozenset(), 0.0)
        rows = count.total()
        a, b = self.cost(rows, width)
        fixed = a + b * rows
        plain, row, token, position = (self._plain_passes if self._plain_passes.observed else self._passes).fit()
        self._plain = plain, row + token + position * width
        chances = {bucket: (n, self.acceptance(bucket)) for bucket, n in count.items()}
        paid = fixed if self._refills else fixed - (1 - self._share) * self.cost()[0]
        k, goodput = (_one_length if self.padded else _own_lengths)(chances, paid, b)
        self._needed = min(1.0, (1 + b * goodput) / (_WORTH if self.padded else 1.0) - 1)
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
        """The buckets that the draft model serves, and the tokens per second of their rows.

        These are the buckets whose drafters have a lower acceptance than the model. Their rows run longest, so the
        value of a second is computed from these rows: with the long drafts of the other rows it would be too high for
        the model's passes to pay. The model is still not used if it makes all rows together slower.
        """
        promise = self.drafter.promise()
        acceptance = {s: self.acceptance(s) for s in count}
        needy = frozenset(s for s in count if acceptance[s] < promise)
        if not needy:
            return needy, goodput
        others = [s for s in count if s not in needy]
        needy_rows = sum(count[s] for s in needy)
        rows = count.total()
        # The pass without drafts of needy rows, and the needy rows' tokens per second with their drafters' drafts.
        others_s = fixed + b * sum(count[s] * k[s] for s in others)
        alone_rate = sum(count[s] * emitted(acceptance[s], k[s]) for s in needy)
        alone_rate /= others_s + b * sum(count[s] * k[s] for s in needy)
        # The same with n tokens of the model, each of which takes a pass of it over the needy rows.
        draft, row, token, _ = self.drafter.fit()
        model_pass_s = draft + (row + token) * needy_rows
        model_rate, length = max(
            (needy_rows * emitted(promise, n) / (others_s + (b * needy_rows + model_pass_s) * n), n)
            for n in range(LONG + 1)
        )
        # Each row's seconds a token with the model: a share of what all rows wait for, and its own draft tokens.
        waited_s = (fixed + model_pass_s * length) / rows
        token_s = needy_rows * (waited_s + b * length) / emitted(promise, length)
        token_s += sum(count[s] * (waited_s + b * k[s]) / emitted(acceptance[s], k[s]) for s in others)
        pays = model_rate > _MARGIN * alone_rate and token_s < rows / goodput
        return (needy, model_rate) if pays else (frozenset(), alone_rate)

    def chain(self, missing: Sequence[int], plan: Plan) -> Chain:
        """The stopping rule of the model's drafts, which may let no row draft.

        Args: missing: tokens of each row that the draft model must read first.
        """
        missing = missing if plan.by_model or self.window else []
        return Chain(self.drafter, plan.goodput, plan.token_s, missing, self.window)


@cache
def _promise(bucket: AcceptanceBucket) -> float:
    """Expected acceptance in a bucket without observed drafts, relative to that of all drafts."""
    if bucket is None or isinstance(bucket[0], str):
        return 1.0
    return prior(bucket[0][0], bucket[1]) / PRIOR


def _one_length(
    groups: Mapping[AcceptanceBucket, tuple[int, float]], fixed: float, price: float
) -> tuple[dict[AcceptanceBucket, int], float]:
    """One draft length, 0 or a power of two, for all rows that it makes faster, and the rows' tokens per second.

    Attention pads the rows of a pass to equal lengths, so different lengths cost more than they gain: at 64 rows on two
    cores, drafts of equal length took 0.8x to 0.9x the time in about as many passes. The shortest length that is nearly
    optimal is chosen, because the last row determines the time of a rollout, and faster rows gain little for it. Drafts
    that save little time are not worth it: the rows that they bring ahead pad the others until they end.

    Args:
        groups: rows and acceptance of each bucket.
        fixed: seconds of a pass without drafts.
        price: seconds of a draft token.
    """
    total = sum(rows for rows, _ in groups.values())
    share = fixed / max(total, 1)
    longest = max((_length(p, price / share) for _, p in groups.values()), default=0)  # no token beyond it pays
    candidates = []
    for length in (1 << i for i in range(longest.bit_length())):
        times = {s: (share + price * length) / emitted(p, length) for s, (_, p) in groups.items()}
        seconds = sum(rows * min(share, times[s]) for s, (rows, _) in groups.items())
        candidates.append((seconds, {s: length for s, time in times.items() if time < share}))
    best = min((seconds for seconds, _ in candidates), default=fixed)
    if best >= _WORTH * fixed:
        return dict.fromkeys(groups, 0), total / fixed
    seconds, lengths = next(c for c in candidates if _NEARLY * c[0] <= best)
    return dict.fromkeys(groups, 0) | lengths, total / seconds


def _own_lengths(
    groups: Mapping[AcceptanceBucket, tuple[int, float]], fixed: float, price: float
) -> tuple[dict[AcceptanceBucket, int], float]:
    """Like `_one_length` for passes without padding: the best length of each bucket, 0 or a power of two."""
    total = sum(rows for rows, _ in groups.values())
    share = fixed / max(total, 1)
    seconds = 0.0
    best = {}
    for bucket, (rows, p) in groups.items():
        length, longer = 0, 1
        time = share
        while (other := (share + price * longer) / emitted(p, longer)) < time:  # the time decreases, then increases
            time = other
            length, longer = longer, 2 * longer
        best[bucket] = length
        seconds += rows * time
    return best, total / seconds if total else 0.0


def _length(p: float, worth: float) -> int:
    """The largest k with p^k >= worth."""
    return int(math.log(worth) / math.log(min(p, MOST))) if 0 < worth < 1 and p > 0 else 0
