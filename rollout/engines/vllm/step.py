"""What happens in a step of vLLM: drafts ride along, and what was drawn at their positions decides what stands.

Each row feeds its last token and its draft. How the drafts come into the step and the draws out of it is the model
runner's matter: v1.py, native.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from specrl.rollout.drafting.draft import EMPTY, Draft
from specrl.rollout.engines.response import refuse_unusable
from specrl.rollout.engines.vllm.room import LogitsBudget
from specrl.rollout.engines.vllm.rows import BUG, LogprobBuffer, Rules, VLLMRow
from specrl.rollout.types import RolloutError
from specrl.rollout.verify import Accepted, TargetSamples, exact


@dataclass
class Step:
    """What the last engine step did, for the accounting."""

    tokens: int = 0
    rows: int = 0
    """That are drawn."""
    drafted: int = 0
    stood: int = 0
    """Tokens that its rows emitted."""
    decoding: bool = False
    draft_s: float = 0.0
    asking: float | None = None
    """Seconds that asking for its drafts took; None if nobody was asked."""
    asking_next: float | None = None
    """The same of the step that follows."""

    def next(self) -> Step:
        """The step that follows begins."""
        return Step(asking=self.asking_next)


class StepBatch:
    """The rows of a step, and what stays the same of them for as long as they stay together.

    Args: rows: None for requests that are not drawn in this step.
    """

    def __init__(self, rows: Sequence[VLLMRow | None]):
        self.rows, self.ours = rows, [row for row in rows if row]
        self.missing = [i for i, row in enumerate(rows) if row is None]
        laws = [row.sampling for row in self.ours]
        self.laws = laws if len({*laws}) > 1 else laws[:1]
        """Of each row; a single one is that of all."""
        self.eos_ids = np.array([*{end for law in laws for end in law.eos_ids}], np.int32).reshape(-1, 1)
        self.at = np.array([len(row.tokens) for row in self.ours], np.int64)
        """Tokens of each of `ours`."""
        self.columns = np.zeros((4, len(self.ours)), np.int64)
        """What `Fed.columns` repeats."""
        self.columns[:2] = [row.place for row in self.ours], [row.request.key for row in self.ours]


class VerifyInputs:
    """The positions of a step that logits are computed at: each row's last token, then its draft.

    Args:
        counts: int64 [R], draft tokens of each row; vLLM pads some.
        tokens: int32, these tokens; -1 is padding.
    """

    def __init__(self, lineup: StepBatch, counts: np.ndarray, tokens: np.ndarray):
        self.lineup, self.sizes = lineup, counts + 1
        """Int64 [R], positions without padding; 0 where there is no row."""
        ends = self.sizes.cumsum()
        self.firsts = starts = ends - self.sizes
        """Int64 [R], each row's first position."""
        self.behind, last = np.empty(ends[-1], np.int32), np.zeros(ends[-1], bool)
        """Int32 [N], the draft token that was fed behind each position; -1 where there is none."""
        last[ends - 1] = True
        self.behind[last], self.behind[~last] = -1, tokens
        self.drafted, sizes = len(tokens), self.sizes
        self.whole = not lineup.missing and tokens.min(initial=0) == 0
        self.drawn: slice | np.ndarray = slice(None)
        """Index of the positions that are a row's, M of N; of all where the step is `whole`."""
        if not self.whole:
            self.drafted -= int((tokens < 0).sum())
            self.sizes -= np.bincount(np.arange(len(counts)).repeat(counts)[tokens < 0], minlength=len(counts))
            self.sizes[lineup.missing] = 0
            self.drawn, sizes = ranges(self.firsts, sizes), sizes[sizes > 0]
            starts = sizes.cumsum() - sizes
        lineup.columns[2] = lineup.at - starts
        self.columns = lineup.columns.repeat(sizes, 1)
        """Int64 [4, M]: the row's place and key, response position, token whose log-prob is asked for."""
        self.columns[2] += np.arange(self.columns.shape[1])


@dataclass(kw_only=True)
class StepRules(Rules):
    """Drafts of the rows of a step, and what stands of them.

    The last position of a row has no draft token behind it. The lenient rule, which decides about its draft's tokens
    and not about draws, uses it for the token that comes next; so it also decides about the first token.

    Args:
        draft_tokens: most draft tokens of a row in one step.
        room: draft tokens of all rows in one step; those that have drafts share it.
        tie_margin: gaps below it are counted. On a CPU one thread computes a position's logits bit for bit the same in
            every step, so near ties need no arbiter; elsewhere their number says how often rounding could have decided.
    """

    draft_tokens: int
    room: LogitsBudget
    tie_margin: float = 0.0
    hidden: Tensor | None = None
    """Final hidden states of a step's logits, in their order, if the rule reads them."""
    rows: dict[str, VLLMRow | None] = field(default_factory=dict)
    """By vLLM's own request id; None, as without an entry, is scored or drawn by vLLM."""
    told: LogprobBuffer | None = None
    """None where nobody reads more of a response than its tokens."""
    lineup: StepBatch = field(default_factory=lambda: StepBatch([]))
    """Of the last step."""
    _step: Step = field(default_factory=Step)

    def ask(self, rows: Sequence[VLLMRow | None]) -> list[list[int]]:
        """The draft tokens that each row carries next; none for None."""
        waiting = [row for row in rows if row]
        if not self._step.decoding:
            self.room.renew()
        if self.drafting.whole:
            drafts = [self._of_text(row, min(self.draft_tokens, row.room - 1)) for row in waiting]
        else:
            drafts = self.drafting.propose(waiting, self.stats)
            self._step.asking_next = self.drafting.asking
        lengths = [len(draft.tokens) for draft in drafts]
        share = self.room.share(len(lengths) - lengths.count(0), len(waiting), self.draft_tokens)
        if max(lengths, default=0) > share:
            drafts = [draft.first(share) for draft in drafts]
        for row, draft in zip(waiting, drafts, strict=True):
            row.draft = draft
        return [[*row.draft.tokens] if row else [] for row in rows]

    def _of_text(self, row: VLLMRow, most: int) -> Draft:
        places, text = slice(len(row.tokens), len(row.tokens) + most), row.text if row.drafting else EMPTY
        return Draft(text.tokens[places], text.source, (text.logprobs or ())[places])

    def fed(self, rows: list[VLLMRow | None], counts: np.ndarray, tokens: np.ndarray) -> VerifyInputs:
        """What the rows of this step fed, see Fed."""
        if rows != self.lineup.rows:
            self.lineup = StepBatch(rows)
        fed = VerifyInputs(self.lineup, counts, tokens)
        self._step.rows += len(fed.lineup.ours)
        self._step.drafted += fed.drafted
        self._step.decoding |= fed.drafted > 0 or any(row.tokens for row in fed.lineup.ours)
        return fed

    def tested(self, fed: VerifyInputs) -> list[Draft]:
        """What is decided about: the draft that rode, and under the lenient rule the next token of its text.

        Raises:
            RolloutError: vLLM fed other tokens than were proposed. The exact rule goes by what was fed.
        """
        rows, sizes = fed.lineup.rows, fed.sizes.tolist()
        if self.drafting.whole:
            return [self._of_text(row, n) if row else EMPTY for row, n in zip(rows, sizes, strict=True)]
        drafts = [row.draft if row else EMPTY for row in rows]
        if [len(draft.tokens) + 1 for draft in drafts] != sizes:
            drafts = [draft.first(max(0, n - 1)) for draft, n in zip(drafts, sizes, strict=True)]
        if self.rule is not exact:
            given = fed.behind[fed.drawn]
            if given[given >= 0].tolist() != (proposed := [token for draft in drafts for token in draft.tokens]):
                raise RolloutError(f"vLLM fed the drafts {given.tolist()} where {proposed} was proposed; {BUG}")
        return drafts

    def targets(self, fed: VerifyInputs, drafts: Sequence[Draft]) -> np.ndarray:
        """The token whose log-prob each position tells, int64 [N]: that of its draft. The exact rule needs none."""
        targets = np.zeros(len(fed.behind), np.int64)
        for draft, first in zip(drafts, fed.firsts.tolist(), strict=True):
            targets[first : first + len(draft.tokens)] = draft.tokens
        return targets

    def decide(
        self, fed: VerifyInputs, drafts: Sequence[Draft], packed: np.ndarray, began: int = 0
    ) -> tuple[np.ndarray, ...]:
        """What each row emits: int32 [N], from each row's first position on, and how many tokens that are, [R].

        Without a row it is one token 0: vLLM drops it, or ends a scored request with it.

        Args:
            drafts: of `tested`.
            packed: int32 [4, N], what was drawn, see rollout/engines/local/draw.py; overwritten.
            began: logits of the step before these.

        Raises:
            RolloutError: logits of a row are NaN or infinite.
        """
        gaps = packed[3].view(np.float32)
        if unclear := not gaps.min() >= self.tie_margin:  # or one is NaN
            refuse_unusable((~np.isnan(gaps[fed.drawn])).tolist(), self.weight_version)
        counts = self._exact(fed, drafts, packed) if self.rule is exact else self._other(fed, drafts, packed, began)
        if missing := fed.lineup.missing:
            packed[0, fed.firsts[missing]], counts[missing] = 0, 1
        if unclear:
            self.stats.ties += int((gaps[ranges(fed.firsts, np.minimum(fed.sizes, counts))] < self.tie_margin).sum())
        fed.lineup.at += np.delete(counts, missing) if missing else counts
        self._step.stood += int(counts.sum()) - len(missing)
        return packed[0], counts

    def observe(self, seconds: float) -> None:
        """The step took `seconds`, without asking for the next one's drafts. What it read of prompts takes time that
        no draft is to blame for, so its rows are named only where it read none."""
        step = self._step
        rows = step.rows if step.tokens == step.rows + step.drafted else 0
        self.drafting.observe_pass(step.tokens, seconds, rows, stood=step.stood, asking=step.asking)

    def _exact(self, fed: VerifyInputs, drafts: Sequence[Draft], packed: np.ndarray) -> np.ndarray:
        """Each row's draws stand up to the first that was not fed."""
        same, draws, told = packed[0] == fed.behind, memoryview(packed[0]), self.told
        apart = (~same).nonzero()[0]  # each row's last position among them
        counts = apart[apart.searchsorted(fed.firsts)] - fed.firsts + 1
        if told:
            index = fed.columns[0] + fed.columns[2]
            told.logprobs[index], told.reused[index] = packed[1].view(np.float32)[fed.drawn], same[fed.drawn]
        learn, redraws, of_sources = self.drafting.learn, self.drafting.redraws, defaultdict(lambda: [0, 0])
        ended = (packed[0] == fed.lineup.eos_ids).any()  # a row, maybe
        places = fed.firsts.tolist(), fed.sizes.tolist(), counts.tolist()
        for i, row, draft, first, size, n in zip(range(len(drafts)), fed.lineup.rows, drafts, *places, strict=True):
            if row is None:
                continue
            end, drafted = first + n, n - 1
            new = draws[first:end].tolist()
            learn(row, draft, new, drafted, draws[end : first + size].tolist() if redraws else ())
            cut = len(row.tokens) + n >= row.request.max_new_tokens
            if cut or (ended and not row.sampling.eos_ids.isdisjoint(new)):
                counts[i] = n = row.emit(Accepted(new, (), (), drafted), row.sampling.eos_ids)
                drafted = min(drafted, n)
                if told:
                    told.complete(row)
            else:
                row.tokens += new
                row.passes += 1
            count = of_sources[draft.source]
            count[0] += size - 1
            count[1] += drafted
        for source, count in of_sources.items():
            self.stats.count(source, *count)
        return counts

    def _other(self, fed: VerifyInputs, drafts: Sequence[Draft], packed: np.ndarray, began: int) -> np.ndarray:
        """What a rule lets stand, be it drawn or not."""
        columns, counts = [packed[0].tolist(), *packed[1:3].view(np.float32).tolist()], np.ones(len(drafts), np.int64)
        places = fed.lineup.rows, drafts, fed.firsts.tolist(), fed.sizes.tolist()
        for i, (row, draft, first, size) in enumerate(zip(*places, strict=True)):
            if row is None:
                continue
            told, states = [column[first : first + size] for column in columns], (self.hidden, began + first)
            stood = self.rule(row.request.key, draft, TargetSamples(len(row.tokens), *told, states=states))
            packed[0, first : first + len(stood.tokens)] = stood.tokens
            counts[i] = row.emit(stood, row.sampling.eos_ids)
            self.drafting.learn(row, draft, stood.tokens, stood.drafted, stood.behind)
            self.stats.count(draft.source, len(draft.tokens), min(stood.drafted, int(counts[i])))
        return counts


def keep_hidden(runner, flow: StepRules) -> None:
    """Lets the rule see what vLLM computes the logits of a step from."""
    compute = runner.model.compute_logits

    def compute_logits(hidden_states: Tensor, *more, **others) -> Tensor | None:
        flow.hidden = hidden_states
        return compute(hidden_states, *more, **others)

    if flow.drafting.reads_states:
        runner.model.compute_logits = compute_logits


def ranges(firsts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """firsts[0], firsts[0] + 1, ..., sizes[0] numbers, then those from firsts[1] on, and so on."""
    ends = sizes.cumsum()
    return np.repeat(firsts - ends + sizes, sizes) + np.arange(ends[-1])


def padded(tokens: np.ndarray, firsts: np.ndarray, sizes: np.ndarray, width: int) -> np.ndarray:
    """[R, width] with `sizes[i]` of the tokens [N > 0], from firsts[i] on, in row i, and -1 behind them."""
    place = np.arange(width)
    found = tokens.take(firsts[:, None] + place, mode="clip")
    found[place >= sizes[:, None]] = -1
    return found
