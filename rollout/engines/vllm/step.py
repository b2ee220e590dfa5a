"""What happens in a step of vLLM: drafts ride along, and what was drawn at their positions decides what stands.

Each row feeds its last token and its draft. How the drafts come into the step and the draws out of it is the model
runner's matter: v1.py, native.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from rollout.drafting.draft import EMPTY, Draft
from rollout.engines.response import refuse_unusable
from rollout.engines.vllm.room import Room
from rollout.engines.vllm.rows import BUG, Rules, VLLMRow
from rollout.types import RolloutError
from rollout.verify import Drawn, exact


@dataclass
class Step:
    """What the last engine step did, for the accounting."""

    tokens: int = 0
    drafted: int = 0
    decoding: bool = False
    draft_s: float = 0.0


class Fed:
    """The positions of a step that logits are computed at: each row's last token, then its draft.

    Args:
        rows: None for requests that are not drawn in this step.
        counts: int64 [R], draft tokens of each; vLLM pads some.
        tokens: int64, these tokens; -1 is padding.
    """

    def __init__(self, rows: Sequence[VLLMRow | None], counts: np.ndarray, tokens: np.ndarray):
        self.sizes = counts + 1
        """Int64 [R], positions without padding; 0 where there is no row."""
        ends = self.sizes.cumsum()
        self.firsts = ends - self.sizes
        """Int64 [R], each row's first position."""
        self.behind = np.full(ends[-1], -1)
        """Int64 [N], the draft token that was fed behind each position; -1 where there is none."""
        drafted = np.ones(ends[-1], bool)
        drafted[ends - 1] = False
        self.behind[drafted] = tokens
        if (padding := tokens < 0).any():
            self.sizes -= np.bincount(np.arange(len(rows)).repeat(counts)[padding], minlength=len(rows))
        self.drafted = int(self.sizes.sum()) - len(rows)
        if not all(rows):
            self.sizes[[row is None for row in rows]] = 0

    def agreed(self, draws: np.ndarray) -> list[int]:
        """How many of each row's draft tokens are what was drawn, up to the first that is not. Args: draws: int [N]."""
        apart = np.flatnonzero(draws != self.behind)  # each row's last position among them
        return (apart[np.searchsorted(apart, self.firsts)] - self.firsts).tolist()


@dataclass(kw_only=True)
class StepRules(Rules):
    """Drafts of the rows of a step, and what stands of them.

    The last position of a row has no draft token behind it. The lenient rule, which decides about its draft's tokens
    and not about draws, uses it for the token that comes next; so it also decides about the first token.

    Args:
        draft_tokens: most draft tokens of a row in one step.
        room: draft tokens of all rows in one step; those that have drafts share it.
        tie_margin: gaps below it are counted.
    """

    draft_tokens: int
    room: Room
    tie_margin: float = 0.0
    hidden: Tensor | None = None
    """Final hidden states of a step's logits, in their order, if the rule reads them."""
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
        share = self.room.share(sum(bool(draft.tokens) for draft in drafts), len(waiting), self.draft_tokens)
        for row, draft in zip(waiting, drafts, strict=True):
            row.draft = draft if len(draft.tokens) <= share else draft.first(share)
        return [[*row.draft.tokens] if row else [] for row in rows]

    def _of_text(self, row: VLLMRow, most: int) -> Draft:
        places, text = slice(len(row.tokens), len(row.tokens) + most), row.text if row.drafting else EMPTY
        return Draft(text.tokens[places], text.source, (text.logprobs or ())[places])

    def tested(self, rows: Sequence[VLLMRow | None], fed: Fed) -> list[Draft]:
        """What is decided about: the draft that rode, and under the lenient rule the next token of its text.

        Raises:
            RolloutError: vLLM fed other tokens than were proposed. The exact rule goes by what was fed.
        """
        self._step.drafted += fed.drafted
        self._step.decoding |= any(row.tokens for row in rows if row)
        drafts, sizes = [row.draft if row else EMPTY for row in rows], fed.sizes.tolist()
        if self.drafting.whole:
            return [self._of_text(row, n) if row else EMPTY for row, n in zip(rows, sizes, strict=True)]
        drafts = [d if len(d.tokens) == n - 1 else d.first(n - 1) for d, n in zip(drafts, sizes, strict=True)]
        if self.rule is not exact:
            given = fed.behind[ranges(fed.firsts, fed.sizes)]
            if given[given >= 0].tolist() != (proposed := [token for draft in drafts for token in draft.tokens]):
                raise RolloutError(f"vLLM fed the drafts {given.tolist()} where {proposed} was proposed; {BUG}")
        return drafts

    def targets(self, fed: Fed, drafts: Sequence[Draft]) -> np.ndarray:
        """The token whose log-prob each position tells, int64 [N]."""
        targets = np.maximum(fed.behind, 0)
        if self.drafting.whole:
            for draft, first in zip(drafts, fed.firsts.tolist(), strict=True):
                targets[first : first + len(draft.tokens)] = draft.tokens
        return targets

    def decide(
        self, rows: Sequence[VLLMRow | None], fed: Fed, drafts: Sequence[Draft], packed: np.ndarray, began: int = 0
    ) -> tuple[np.ndarray, np.ndarray]:
        """What each row emits: int32 [N], from each row's first position on, and how many tokens that are, [R].

        Without a row it is one token 0: vLLM drops it, or ends a scored request with it.

        Args:
            drafts: of `tested`.
            packed: int32 [4, N], what was drawn, see rollout/engines/local/draw.py.
            began: logits of the step before these.

        Raises:
            RolloutError: logits of a row are NaN or infinite.
        """
        tokens, (logprobs, texts, gaps) = packed[0].copy(), packed[1:].view(np.float32)
        if unclear := not gaps.min() >= self.tie_margin:  # or one is NaN
            refuse_unusable((~np.isnan(gaps[ranges(fed.firsts, fed.sizes)])).tolist(), self.weight_version)
        exactly, learn, emitted, of_sources = self.rule is exact, self.drafting.learn, [], {}
        draws, firsts, sizes = tokens.tolist(), fed.firsts.tolist(), fed.sizes.tolist()
        if not exactly:
            logprobs, texts = logprobs.tolist(), texts.tolist()
        for row, draft, first, size, n in zip(rows, drafts, firsts, sizes, fed.agreed(tokens), strict=True):
            if row is None:
                tokens[first] = 0
                emitted.append(1)
                continue
            if exactly:
                end = first + n + 1
                new, drafted, behind = draws[first:end], n, draws[end : first + size]
                stays = row.take(new, logprobs[first:end], row.sampling.eos_ids)
            else:
                part = slice(first, first + size)
                told, states = (draws[part], logprobs[part], texts[part]), (self.hidden, began + first)
                stood = self.rule(row.request.key, draft, Drawn(len(row.tokens), *told, states=states))
                new, drafted, behind = stood.tokens, stood.drafted, stood.behind
                tokens[first : first + len(new)] = new
                stays = row.emit(stood, row.sampling.eos_ids)
            learn(row, draft, new, drafted, behind)
            emitted.append(stays)
            count = of_sources.setdefault(draft.source, [0, 0])
            count[0] += len(draft.tokens)
            count[1] += drafted if drafted < stays else stays
        counts = np.array(emitted)
        for source, count in of_sources.items():
            self.stats.count(source, *count)
        if unclear:
            self._count_ties(gaps[ranges(fed.firsts, np.minimum(fed.sizes, counts))])
        return tokens, counts

    def _count_ties(self, gaps: np.ndarray) -> None:
        """On a CPU one thread computes a position's logits bit for bit the same in every step, so near ties need no
        arbiter; elsewhere their number says how often rounding could have decided."""
        self.stats.ties += int((gaps < self.tie_margin).sum())


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
