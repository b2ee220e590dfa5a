"""A model at work on rows whose texts it, a drafter or another model writes."""

from __future__ import annotations

import time
from bisect import bisect
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain, pairwise

import numpy as np
import torch

from specrl.rollout.engines.local.kv import KV, States
from specrl.rollout.engines.local.memory import row_tokens
from specrl.rollout.engines.local.model import InFlightPass, Layout, PackedModel, chunks
from specrl.rollout.engines.local.sampler import unpack
from specrl.rollout.types import Request, RolloutError
from specrl.rollout.verify import TargetSamples, accept_exact


class Reader:
    """A model with its KV over rows: reads new tokens of a row and samples a token after each of them.

    Rows are numbered by their requests. A row at work has a slab of KV memory that no other row writes; when it leaves,
    the next row in line gets the slab. At first it holds its prompt without the last token, then what it was fed. A
    rollback only shortens the row: later tokens overwrite the positions beyond.

    Samples whose two best scores are closer than `tie_margin` could differ between passes of different shapes, whose
    logits differ in the last bits. They are computed again in a pass over the row's prefix alone, whose shape depends
    on nothing but the prefix, so every route samples the same token. About 1 token in 20 000 needs it.

    Args:
        model: runs the passes, within its `inference`.
        requests: whose prompts and keys the rows have; at least one.
        max_rows: rows at a time; all by default.
        states: True keeps the model's final hidden states. Another reader of the same rows lends those that it keeps,
            and its slabs, as states are found by them; its rows are admitted and leave before those of this one.
        session: keeps the KV of rows that leave, and has that of earlier ones; it decides about the slabs.
    """

    def __init__(
        self,
        model: PackedModel,
        requests: Sequence[Request],
        max_rows: int | None = None,
        tie_margin: float = 0.0,
        states: bool | Reader = False,
        session: Session | None = None,
    ):
        self.model = model
        self.max_rows = session.slabs if session else max_rows or len(requests)
        self._tie_margin = tie_margin
        self._prompts = [r.prompt for r in requests]
        self._keys = np.array([r.key for r in requests])
        self._firsts = np.array([r.position for r in requests])
        self._prompt_lengths = np.array([len(r.prompt) - 1 for r in requests])
        self._lender = states if isinstance(states, Reader) else None
        owner: Session | Reader | None = session or self._lender
        self.capacity: int = owner.capacity if owner else row_tokens(requests)
        """Positions of a slab."""
        self._held: list[list[int]] = [[] for _ in requests]  # what was fed, from the prompt's last token on
        self._matched = [0] * len(self._held)  # of that, the tokens known to be the row's text; see `missing`
        self._slab: dict[int, int] = {}
        self._empty: list[int] = []  # rows with a slab in which nothing is written yet
        self._span = self.max_rows  # slabs up to the last one in use, about
        self._kv: KV | None = session.kv if session else None
        self._session = session
        self._begun: dict[int, Sequence[int]] = {}  # what the slabs of new rows hold
        self._states = states
        self.passes = self.forward_tokens = self.ties = 0
        self.width = 0
        """Positions that the last pass covered."""

    # Rows come and go ------------------------------------------------------------------------------------------------

    @property
    def states(self) -> States | None:
        """Final hidden states of the rows' tokens, if they are kept."""
        return self._kv.states if self._kv else None

    def slab(self, row: int) -> int:
        """Of a row at work."""
        return self._slab[row]

    @property
    def free(self) -> int:
        """Slabs that no row has."""
        return self.max_rows - len(self._slab)

    def admit(self, rows: Mapping[int, Sequence[int]]) -> None:
        """Gives each row a slab. Args: rows: row -> what it has emitted already."""
        used = set(self._slab.values())
        vacant = iter(sorted({*range(self.max_rows)} - used))
        if self._session and rows:
            slabs, texts = zip(*self._session.claim(self._keys[[*rows]].tolist(), used), strict=True)
            vacant, self._begun = iter(slabs), self._begun | dict(zip(rows, texts, strict=True))
        for row, text in rows.items():
            self._slab[row] = self._lender.slab(row) if self._lender else next(vacant)
            self._held[row] = [self._prompts[row][-1], *text[:-1]] if text else []
            self._matched[row] = 0
        self._empty += rows

    def leave(self, rows: Sequence[int], compact: bool = False) -> None:
        """Frees the slabs of rows; the KV memory goes with the last row, unless a session keeps it.

        Args: compact: no row will take the slabs, so the others may be moved together.
        """
        for row in rows:
            slab = self._slab.pop(row)
            if self._session:
                self._session.keep(int(self._keys[row]), slab, [*self._prompts[row][:-1], *self._held[row]])
                compact = False
        self._empty = [row for row in self._empty if row in self._slab]
        if compact and not self._slab:
            self._kv = None
        elif self._lender:
            self._move({row: self._lender.slab(row) for row in self._slab})
        elif compact and self.model.layout.heads_first and len(self._slab) <= 3 * self._span // 4:
            # Attention covers the slabs in between. Rows move a few times in a rollout, so this is cheap.
            self._span = len(self._slab)
            self._move({row: i for i, row in enumerate(sorted(self._slab, key=self._slab.__getitem__))})

    def _move(self, slabs: dict[int, int]) -> None:
        """Gives all rows these slabs, with what they hold."""
        before = self._slab
        self._slab = slabs
        moves = [(before[row], slab) for row, slab in slabs.items() if before[row] != slab]
        if self._kv is not None and moves:
            self._copy(moves, max(map(self._next_position, self._slab)))

    def prefill(self) -> None:
        """Computes the KV that new rows need: of their prompts without the last token, and of what they had emitted.

        Equal beginnings are computed once, those of rows at work included. A longer text than a pass may have takes
        several.
        """
        if not self._empty:
            return
        if self._kv is None:
            self._kv = self.model.kv(self.max_rows, self.capacity)
            if self._session:
                self._session.kv = self._kv
            if self._lender:
                self._kv.policy_states = self._lender.states
            elif self._states:
                self._kv.states = States(self.max_rows, self.capacity)
        rows = sorted(self._empty, key=self._slab.__getitem__)
        self._empty = []
        sources: dict[tuple[int, ...], int] = {}
        for row in self._slab.keys() - rows:
            sources[tuple(self._prompts[row][:-1])] = row
        missing = []
        copies = []
        most = self.model.limits.tokens_per_pass
        for row in rows:
            text = (*self._prompts[row][:-1], *self._held[row])
            start = accept_exact(self._begun.pop(row, ()), text)
            source = row if start else sources.setdefault(text, row)
            if source != row:
                copies.append((self._slab[source], self._slab[row], len(text)))
            elif len(text) > start:
                missing += [(self._slab[row], cut, text[cut : cut + most]) for cut in range(start, len(text), most)]
        for first, last in chunks([len(text) for *_, text in missing], most):
            slabs, starts, texts = zip(*missing[first:last], strict=True)
            layout = self._layout(slabs, starts, [*map(len, texts)])
            self.forward_tokens += len(self.model.forward([*chain.from_iterable(texts)], layout))
        if copies:
            self._copy([(source, slab) for source, slab, _ in copies], max(length for *_, length in copies))

    def _copy(self, pairs: Sequence[tuple[int, int]], length: int) -> None:
        assert self._kv is not None
        sources, targets = torch.tensor(pairs, device=self.model.device).unbind(1)
        self._kv.copy(sources, targets, length)

    def _layout(self, slabs: Sequence[int], starts, lengths) -> Layout:
        assert self._kv is not None
        layout = self.model.layout(self._kv, slabs, starts, lengths, self.model.device)
        if layout.width > self.capacity:  # it would write into the next slab
            raise RolloutError(f"a row of {layout.width} tokens does not fit its slab of {self.capacity}")
        return layout

    # What rows hold --------------------------------------------------------------------------------------------------

    def follow(self, texts: Mapping[int, Sequence[int]]) -> dict[int, TargetSamples]:
        """Feeds the tokens of each row's text that the row does not hold; the last sample continues the text.

        Args: texts: row -> its whole response so far.
        """
        feed = {row: self.missing(row, text, final=False) for row, text in texts.items()}
        return dict(pair for part in self.parts(feed) for pair in self.collect(self.launch(part)))

    def missing(self, row: int, text: Sequence[int], final: bool = True) -> list[int]:
        """The tokens of a response that the row does not hold, at least the last. Other tokens that it holds are lost.

        Args: final: `text` only grows from now on, so its tokens need not be compared again.
        """
        held = self._held[row]
        matched = self._matched[row]
        rest = [*text[matched - 1 :]] if matched else [self._prompts[row][-1], *text]
        most = min(len(rest) - 1, len(held) - matched)
        same = most if held[matched : matched + most] == rest[:most] else accept_exact(held[matched:], rest[:most])
        if final:
            self._matched[row] = matched + same
        del held[matched + same :]
        return rest[same:]

    def missing_count(self, row: int, length: int) -> int:
        """About how many tokens of a response of `length` tokens the row does not hold."""
        return max(1, length + 1 - len(self._held[row]))

    def rollback(self, row: int, length: int) -> None:
        """Forgets what the row holds beyond the first `length` tokens of its response."""
        del self._held[row][length + 1 :]
        if self._matched[row] > length + 1:
            self._matched[row] = length + 1

    def _next_position(self, row: int) -> int:
        """Where the row is written next."""
        return len(self._prompts[row]) - 1 + len(self._held[row])

    # Passes ----------------------------------------------------------------------------------------------------------

    def parts(self, feed: Mapping[int, Sequence[int]]) -> Iterator[dict[int, Sequence[int]]]:
        """Splits the new tokens of many rows into passes; at least one row each."""
        rows = sorted(feed, key=self._slab.__getitem__)
        for first, last in chunks([len(feed[row]) for row in rows], self.model.limits.tokens_per_pass):
            yield {row: feed[row] for row in rows[first:last]}

    def read(self, feed: Mapping[int, Sequence[int]], ends: bool = False) -> dict[int, TargetSamples]:
        """One pass, see `launch`, and the samples of each row."""
        return dict(self.collect(self.launch(feed, ends)))

    def launch(self, feed: Mapping[int, Sequence[int]], ends: bool = False) -> InFlightPass:
        """Begins a pass that writes new tokens of rows and samples; none of its rows may be in another pass.

        Args:
            feed: row -> its new tokens, at least one; rows in the order of their slabs, as `parts` gives them.
            ends: sample after the last token of each row only.
        """
        began = time.perf_counter()
        self.prefill()
        rows = [*feed]
        length = np.array([*map(len, feed.values())])
        before = np.array([len(self._held[row]) for row in rows])
        layout = self._layout([self._slab[row] for row in rows], before + self._prompt_lengths[rows], length)
        layout.samples = True
        tokens = np.fromiter(chain.from_iterable(feed.values()), np.int64)
        end = length.cumsum()
        keys = self._keys[rows].repeat(length)
        positions = np.arange(len(tokens)) + (before - end + length + self._firsts[rows]).repeat(length)
        targets = np.empty_like(tokens)
        targets[:-1] = tokens[1:]
        targets[end - 1] = 0
        in_flight = self.model.launch(tokens, layout, (keys, positions, targets), end - 1 if ends else None)
        self.passes += 1
        self.forward_tokens += len(tokens)
        if ends:
            before = before + length - 1
            end = np.arange(1, len(rows) + 1)
        in_flight.feed = feed
        in_flight.positions = (before + self._firsts[rows]).tolist()
        in_flight.spans = [0, *end.tolist()]
        in_flight.width = layout.width
        in_flight.began = began
        in_flight.launch_s = time.perf_counter() - began
        return in_flight

    def collect(self, in_flight: InFlightPass) -> Iterator[tuple[int, TargetSamples]]:
        """Waits for a pass, whose tokens the rows then hold. The samples of each row are unpacked lazily."""
        tokens, logprobs, draft_logprobs, gaps = unpack(in_flight.wait())
        rows = [*in_flight.feed]
        positions = in_flight.positions
        spans = in_flight.spans
        self.width = in_flight.width
        for row, new in in_flight.feed.items():
            self._held[row] += new
        unusable = set()
        for i in (~(gaps >= self._tie_margin)).nonzero()[0].tolist():
            k = bisect(spans, i) - 1
            if np.isnan(gaps[i]):
                unusable.add(rows[k])
            else:
                tokens[i], logprobs[i] = self._canonical(rows[k], positions[k] + i - spans[k])
        hidden = in_flight.hidden
        firsts = in_flight.picked[spans[:-1]].tolist()
        return (
            (
                row,
                TargetSamples(
                    position, tokens[i:j], logprobs[i:j], draft_logprobs[i:j], row not in unusable, (hidden, first)
                ),
            )
            for row, position, (i, j), first in zip(rows, positions, pairwise(spans), firsts, strict=True)
        )

    def _canonical(self, row: int, position: int) -> tuple[int, float]:
        """The sample at a response position by a pass over the row's prefix alone, and its log-prob."""
        prefix = [*self._prompts[row][:-1], *self._held[row][: position - self._firsts[row] + 1]]
        hidden = self.model.forward(prefix, self.model.single_row(len(prefix)))[-1:]
        noise = (torch.tensor([x], device=hidden.device) for x in (self._keys[row], position, 0))
        (token,), (logprob,), _, _ = unpack(self.model.sampler(hidden, *noise).cpu())
        self.ties += 1
        return token, logprob


class Session:
    """KV that outlives a call of the engine, for the next call of the same rollout: what slabs hold of rows that have
    left, by noise key. A later request that continues a row's text needs only the rest.

    Args:
        slabs: rows at a time.
        capacity: most positions of a row.
    """

    def __init__(self, slabs: int, capacity: int):
        self.slabs = slabs
        self.capacity = capacity
        self.kv: KV | None = None
        self._rows: dict[int, tuple[int, Sequence[int]]] = {}

    def keep(self, key: int, slab: int, text: Sequence[int]) -> None:
        """A row leaves its slab, which holds these tokens."""
        self._rows[key] = slab, text

    def claim(self, keys: Sequence[int], taken: Collection[int]) -> list[tuple[int, Sequence[int]]]:
        """A slab for each new row and the tokens in it: the row's own if it has one, else one that others need least.

        Args: taken: slabs of rows at work.
        """
        own = [self._rows.pop(key, None) for key in keys]
        used = {*taken, *(found[0] for found in own if found)}
        held = {slab: key for key, (slab, _) in self._rows.items()}
        vacant = iter(sorted({*range(self.slabs)} - used, key=lambda slab: (slab in held, slab)))
        claimed = [found or (next(vacant), ()) for found in own]
        for slab, _ in claimed:
            if slab in held:
                del self._rows[held[slab]]
        return claimed
