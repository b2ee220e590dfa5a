"""A model at work on rows whose texts it, a drafter or another model writes."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
import torch

from specrl.rollout.engines.local.attention import Layout
from specrl.rollout.engines.local.draw import unpack
from specrl.rollout.engines.local.kv import KV, States
from specrl.rollout.engines.local.memory import row_tokens
from specrl.rollout.engines.local.ragged import Drawing, RaggedModel, chunks
from specrl.rollout.types import Request, RolloutError
from specrl.rollout.verify import TargetSamples, accept_exact


@dataclass(frozen=True, slots=True)
class Flight:
    """A pass that was launched."""

    feed: Mapping[int, Sequence[int]]
    drawing: Drawing
    at: list[int]
    """Response position of each row's first draw."""
    spans: list[int]
    """Where each row's draws begin, and where the last one's end."""
    width: int
    """Positions that the longest row covers."""


class Reader:
    """A model with its KV over rows: reads tokens behind what a row holds and draws behind every one of them.

    Rows are numbered by their requests. One that is at work has a place, whose slab of KV no other row writes; it
    leaves for the next in line. It holds its prompt but the last token at first, and then what it was fed. Rolling back
    is forgetting how far it was written; positions beyond are written over.

    Draws whose two best scores are closer than `tie_margin` could differ between passes of different shapes, whose
    logits differ in the last bits. They are taken from a pass over the row's prefix alone, whose shape depends on
    nothing but the prefix, so that every route draws the same token. About 1 token in 20 000 needs it.

    Args:
        model: runs the passes, within its `inference`.
        requests: whose prompts and keys the rows have; at least one.
        places: rows at a time; all by default.
        states: True keeps the model's last hidden states; a reader of the same rows lends those that it keeps, and its
            rows' places, as states are found by them. It is told of rows that come and go before this one.
    """

    def __init__(
        self,
        model: RaggedModel,
        requests: Sequence[Request],
        places: int | None = None,
        tie_margin: float = 0.0,
        states: bool | Reader = False,
    ):
        self.model, self.places, self._tie_margin = model, places or len(requests), tie_margin
        self._prompts, self._keys = [r.prompt for r in requests], np.array([r.key for r in requests])
        self._heads = np.array([len(r.prompt) - 1 for r in requests])
        self._capacity = row_tokens(requests)
        self._held: list[list[int]] = [[] for _ in requests]  # what was fed, from the prompt's last token on
        self._agreed = [0] * len(self._held)  # of that, the tokens known to be the row's text; see `lacking`
        self._place: dict[int, int] = {}
        self._empty: list[int] = []  # rows with a place in which nothing is written yet
        self._span = self.places  # places up to the last that is taken, about
        self._kv: KV | None = None
        self._states = states
        self._lender = states if isinstance(states, Reader) else None
        self.passes = self.forward_tokens = self.ties = self.width = 0
        """Of all passes; of the last one, the positions it covers."""

    # Rows come and go ------------------------------------------------------------------------------------------------

    @property
    def states(self) -> States | None:
        """Last hidden states of the rows' tokens, where they are kept."""
        return self._kv and self._kv.states

    def place(self, row: int) -> int:
        """Of a row at work."""
        return self._place[row]

    @property
    def free(self) -> int:
        """Places that no row has."""
        return self.places - len(self._place)

    def admit(self, rows: Mapping[int, Sequence[int]]) -> None:
        """Gives rows a place each. Args: rows: row -> what it has emitted already."""
        taken = set(self._place.values())
        vacant = (place for place in range(self.places) if place not in taken)
        for row, text in rows.items():
            self._place[row] = self._lender.place(row) if self._lender else next(vacant)
            self._held[row] = [self._prompts[row][-1], *text[:-1]] if text else []
            self._agreed[row] = 0
        self._empty += rows

    def leave(self, rows: Sequence[int], close_up: bool = False) -> None:
        """Frees the places of rows. Args: close_up: nobody will take them, so the others may move together.

        The KV goes with the last one.
        """
        for row in rows:
            del self._place[row]
        self._empty = [row for row in self._empty if row in self._place]
        if close_up and not self._place:
            self._kv = None
        elif self._lender:
            self._move({row: self._lender.place(row) for row in self._place})
        elif close_up and self.model.layout.heads_first and len(self._place) <= 3 * self._span // 4:
            self._close_up()

    def _close_up(self) -> None:
        """Moves all rows to the first places: attention covers what lies between. Amortised: each moves a few times."""
        self._span = len(self._place)
        self._move({row: i for i, row in enumerate(sorted(self._place, key=self._place.__getitem__))})

    def _move(self, places: dict[int, int]) -> None:
        """Gives all rows these places, with what they hold."""
        before, self._place = self._place, places
        moves = [(before[row], place) for row, place in places.items() if before[row] != place]
        if self._kv is not None and moves:
            self._copy(moves, max(map(self._first, self._place)))

    def prefill(self) -> None:
        """Computes the KV that rows come with: of their prompts but the last token, and of what they had emitted.

        Equal beginnings are computed once, those of rows at work included.
        """
        if not self._empty:
            return
        if self._kv is None:
            self._kv = self.model.kv(self.places, self._capacity)
            if self._lender:
                self._kv.given = self._lender.states
            elif self._states:
                self._kv.states = States(self.places, self._capacity)
        rows, self._empty = sorted(self._empty, key=self._place.__getitem__), []
        sources: dict[tuple[int, ...], int] = {}
        for row in self._place.keys() - rows:
            sources[tuple(self._prompts[row][:-1])] = row
        missing, copies = [], []
        for row in rows:
            text = (*self._prompts[row][:-1], *self._held[row])
            source = sources.setdefault(text, row)
            if source != row:
                copies.append((self._place[source], self._place[row], len(text)))
            elif text:
                missing.append((self._place[row], text))
        for first, last in chunks([len(text) for _, text in missing], self.model.limits.tokens_per_pass):
            part = missing[first:last]
            lengths = [len(text) for _, text in part]
            layout = self._layout([place for place, _ in part], [0] * len(part), lengths)
            self.model.forward([*chain.from_iterable(text for _, text in part)], layout)
            self.forward_tokens += sum(lengths)
        if copies:
            self._copy([(source, place) for source, place, _ in copies], max(length for *_, length in copies))

    def _copy(self, pairs: Sequence[tuple[int, int]], length: int) -> None:
        self._kv.copy(*torch.tensor(pairs, device=self.model.device).unbind(1), length)

    def _layout(self, places: Sequence[int], starts: Sequence[int], lengths: Sequence[int]) -> Layout:
        layout = self.model.layout(self._kv, places, starts, lengths, self.model.device)
        if layout.width > self._capacity:  # it would write into its neighbour's slab
            raise RolloutError(f"a row of {layout.width} tokens does not fit its slab of {self._capacity}")
        return layout

    # What rows hold --------------------------------------------------------------------------------------------------

    def follow(self, texts: Mapping[int, Sequence[int]], last: bool = True) -> dict[int, TargetSamples]:
        """Feeds what each row lacks of its text; the last draw continues it.

        Args:
            texts: row -> its whole response so far.
            last: also feed the last token of each text; without, it is only scored, and the row still lacks it.
        """
        feed, after = {}, {}
        for row, text in texts.items():
            feed[row] = self.lacking(row, text, final=False)
            if not last:
                after[row] = feed[row].pop()
        return {row: drawn for part in self.parts(feed) for row, drawn in self.read(part, after).items()}

    def lacking(self, row: int, text: Sequence[int], final: bool = True) -> list[int]:
        """The tokens of a response that the row does not hold, at least the last; what else it holds is given up.

        Args: final: what is emitted stays, so that it need not be compared again.
        """
        held, agreed = self._held[row], self._agreed[row]
        rest = [*text[agreed - 1 :]] if agreed else [self._prompts[row][-1], *text]
        most = min(len(rest) - 1, len(held) - agreed)
        same = most if held[agreed : agreed + most] == rest[:most] else accept_exact(held[agreed:], rest[:most])
        if final:
            self._agreed[row] = agreed + same
        del held[agreed + same :]
        return rest[same:]

    def behind(self, row: int, length: int) -> int:
        """About how many tokens of a response of `length` tokens the row lacks."""
        return max(1, length + 1 - len(self._held[row]))

    def rollback(self, row: int, length: int) -> None:
        """Forgets what the row holds beyond the first `length` tokens of its response."""
        del self._held[row][length + 1 :]
        if self._agreed[row] > length + 1:
            self._agreed[row] = length + 1

    def _first(self, row: int) -> int:
        """Where the row is written next."""
        return len(self._prompts[row]) - 1 + len(self._held[row])

    # Passes ----------------------------------------------------------------------------------------------------------

    def parts(self, feed: Mapping[int, Sequence[int]]) -> Iterator[dict[int, Sequence[int]]]:
        """Cuts what many rows are fed into what fits one pass each; at least one row."""
        rows = sorted(feed, key=self._place.__getitem__)
        for first, last in chunks([len(feed[row]) for row in rows], self.model.limits.tokens_per_pass):
            yield {row: feed[row] for row in rows[first:last]}

    def read(
        self, feed: Mapping[int, Sequence[int]], after: Mapping[int, int] | None = None, ends: bool = False
    ) -> dict[int, TargetSamples]:
        """One pass, see `launch`, and what it says of each row."""
        return dict(self.collect(self.launch(feed, after, ends)))

    def launch(
        self, feed: Mapping[int, Sequence[int]], after: Mapping[int, int] | None = None, ends: bool = False
    ) -> Flight:
        """Begins a pass that writes new tokens behind each row and draws; none of its rows may be in another.

        Args:
            feed: row -> its new tokens, at least one; rows in the order of their places, as `parts` gives them.
            after: row -> the token that follows them in its text, where that is known.
            ends: draw behind the last token of each row only.
        """
        self.prefill()
        rows, length = [*feed], np.array([*map(len, feed.values())])
        before = np.array([len(self._held[row]) for row in rows])
        layout = self._layout([self._place[row] for row in rows], before + self._heads[rows], length)
        layout.draws = True
        tokens = np.fromiter(chain.from_iterable(feed.values()), np.int64)
        end = length.cumsum()
        keys = self._keys[rows].repeat(length)
        at = np.arange(len(tokens)) + (before - end + length).repeat(length)
        targets = np.empty_like(tokens)
        targets[:-1] = tokens[1:]
        targets[end - 1] = [after.get(row, 0) for row in rows] if after else 0
        drawing = self.model.launch(tokens, layout, (keys, at, targets), end - 1 if ends else None)
        self.passes, self.forward_tokens = self.passes + 1, self.forward_tokens + len(tokens)
        if ends:
            before, end = before + length - 1, np.arange(1, len(rows) + 1)
        return Flight(feed, drawing, before.tolist(), [0, *end.tolist()], layout.width)

    def collect(self, flight: Flight) -> Iterator[tuple[int, TargetSamples]]:
        """Waits for a pass; the rows hold what they were fed. What it says of each row is made when it is asked for."""
        packed, hidden, where = flight.drawing.wait()
        draws, logprobs, text, gaps = unpack(packed)
        rows, firsts, unusable, self.width = [*flight.feed], flight.spans[:-1], set(), flight.width
        for row, tokens in flight.feed.items():
            self._held[row] += tokens
        for i in (~(gaps >= self._tie_margin)).nonzero()[0].tolist():
            of = bisect(firsts, i) - 1
            if np.isnan(gaps[i]):
                unusable.add(rows[of])
            else:
                draws[i], logprobs[i] = self._canonical(rows[of], flight.at[of] + i - firsts[of])
        columns = zip(rows, flight.at, pairwise(flight.spans), where[firsts].tolist(), strict=True)
        return (
            (row, TargetSamples(at, draws[i:j], logprobs[i:j], text[i:j], row not in unusable, (hidden, place)))
            for row, at, (i, j), place in columns
        )

    def _canonical(self, row: int, at: int) -> tuple[int, float]:
        """The draw at a response position by a pass over the row's prefix alone, and its log-prob."""
        prefix = [*self._prompts[row][:-1], *self._held[row][: at + 1]]
        hidden = self.model.forward(prefix, self.model.alone(len(prefix)))[-1:]
        of = (torch.tensor([x], device=hidden.device) for x in (self._keys[row], at, 0))
        (draw,), (logprob,), _, _ = unpack(self.model.draw(hidden, *of).cpu())
        self.ties += 1
        return draw, logprob
