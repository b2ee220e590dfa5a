"""A model at work on a batch of rows whose texts it, a drafter or another model writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from rollout.engines.local.attention import Pass, RaggedKV
from rollout.engines.local.ragged import RaggedModel, chunks
from rollout.verify import Drawn, accept_exact


class Reader:
    """A model with its KV over rows: reads tokens behind what a row holds and draws behind every one of them.

    A row holds its prompt but the last token at first, and then what it was fed. Rolling back is forgetting how far a
    row was written; positions beyond are written over.

    Draws whose two best scores are closer than `tie_margin` could differ between passes of different shapes, whose
    logits differ in the last bits. They are taken from a pass over the row's prefix alone, whose shape depends on
    nothing but the prefix, so that every route draws the same token. About 1 token in 20 000 needs it.

    Args:
        model: runs the passes, within its `inference`.
        prompts: token ids of each row's prompt, at least one each; their KV is computed by `prefill`.
        keys: noise keys of the rows.
    """

    def __init__(
        self, model: RaggedModel, prompts: Sequence[Sequence[int]], keys: Sequence[int], tie_margin: float = 0.0
    ):
        self.model, self._prompts, self._keys, self._tie_margin = model, list(prompts), list(keys), tie_margin
        self._held: list[list[int]] = [[] for _ in prompts]  # what was fed, from the prompt's last token on
        self._agreed = [0] * len(self._held)  # of that, the tokens known to be the row's text; see `lacking`
        self._kv: RaggedKV | None = None
        self.passes = self.forward_tokens = self.ties = self.width = 0
        """Of all passes; of the last one, the positions it covers."""

    def prefill(self) -> None:
        """Computes the KV of every prompt but its last token, if that was not done."""
        if self._kv is None:
            self._kv, spent = self.model.prefill(self._prompts)
            self.forward_tokens += spent

    def follow(self, texts: Mapping[int, Sequence[int]], last: bool = True) -> dict[int, Drawn]:
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
        self._agreed[row] = min(self._agreed[row], length + 1)

    def select(self, rows: Sequence[int]) -> None:
        """Keeps the given rows, in that order."""
        columns = (self._prompts, self._keys, self._held, self._agreed)
        self._prompts, self._keys, self._held, self._agreed = ([column[row] for row in rows] for column in columns)
        if self._kv is not None:
            self._kv.select(torch.tensor(rows, device=self.model.device, dtype=torch.long))

    def parts(self, feed: Mapping[int, Sequence[int]]) -> Iterator[dict[int, Sequence[int]]]:
        """Cuts what many rows are fed into what fits one pass each; at least one row."""
        rows = sorted(feed)
        for first, last in chunks([len(feed[row]) for row in rows], self.model.limits.tokens_per_pass):
            yield {row: feed[row] for row in rows[first:last]}

    def read(
        self, feed: Mapping[int, Sequence[int]], after: Mapping[int, int] | None = None, ends: bool = False
    ) -> dict[int, Drawn]:
        """One pass: writes new tokens behind each row, and draws.

        Args:
            feed: row -> its new tokens, at least one; rows ascending.
            after: row -> the token that follows them in its text, where that is known.
            ends: draw behind the last token of each row only.
        """
        self.prefill()
        rows, after = list(feed), after or {}
        first, lengths = rows[0], [len(feed.get(row, ())) for row in range(rows[0], rows[-1] + 1)]
        starts = [len(self._prompts[first + i]) - 1 + len(self._held[first + i]) if n else 0
                  for i, n in enumerate(lengths)]  # fmt: skip
        layout = Pass(self._kv, first, starts, lengths, self.model.device)
        hidden = self.model.forward([token for row in rows for token in feed[row]], layout)
        self.passes, self.forward_tokens, self.width = self.passes + 1, self.forward_tokens + len(hidden), layout.width
        if ends:
            hidden = hidden[torch.tensor([len(feed[row]) for row in rows], device=hidden.device).cumsum(0) - 1]
        keys, at, targets, spans = [], [], [], []
        for row in rows:
            tokens, held = feed[row], self._held[row]
            draws = 1 if ends else len(tokens)
            spans.append((len(keys), len(held) + len(tokens) - draws))
            keys += [self._keys[row]] * draws
            at += range(spans[-1][1], len(held) + len(tokens))
            targets += [*tokens[len(tokens) - draws + 1 :], after.get(row, 0)]
            held += tokens
        columns = self.model.draw(hidden, keys, at, targets)
        spans.append((len(keys), 0))
        drawn = {}
        for i, row in enumerate(rows):
            (first, start), last = spans[i], spans[i + 1][0]
            draws, logprobs, text, gaps = (column[first:last] for column in columns)
            self._break_ties(row, start, draws, logprobs, gaps)
            usable = not any(gap != gap for gap in gaps)
            drawn[row] = Drawn(start, draws, logprobs, text, usable, (hidden, first))
        return drawn

    def _break_ties(self, row: int, start: int, draws: list[int], logprobs: list[float], gaps: list[float]) -> None:
        for i, gap in enumerate(gaps):
            if gap < self._tie_margin:
                prefix = [*self._prompts[row][:-1], *self._held[row][: start + i + 1]]
                hidden = self.model.forward(prefix, self.model.alone(len(prefix)))[-1:]
                (draws[i],), (logprobs[i],), _, _ = self.model.draw(hidden, [self._keys[row]], [start + i])
                self.ties += 1
