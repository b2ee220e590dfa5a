"""Other uses of a draft model: drafting during verification (PEARL, Mirror-SD, EasySpec), several guesses.

On the machines of `benchmarks.research.budget` a pass of the policy over n rows and t tokens takes
a + r n + (b + c w) t ms, and one of the draft model over n rows a given share of a plain pass of the policy over them.
Which drafts are accepted is measured: the draft model's keyed draws along the policy's texts. A batch runs until its
last row has ended, every draft of a rollout has the same length, and each method gets its best length:

- in turn: drafting, then verification, for all rows; what the engine does
- 2, 4 guesses: the draft model's next best tokens, by its logits and the policy's noise, are verified with each draft
  token; where the draft is wrong and one of them is right, one more token is accepted (trees: SpecTr, Recursive SD,
  DySpec)

The draft model has a device of its own where both work at once:

- halves: two half-batches alternate, one drafting while the other is verified (no guess is wasted)
- ahead: while a draft is verified, the next one is made as if all of it were accepted, with a guess of the token that
  the policy samples after it; rows where that was wrong draft again (PEARL)
- free: drafting takes no time, the bound of any overlap (Mirror-SD with every branch drafted, EasySpec)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from rich.console import Console

from benchmarks.research.budget import MACHINES
from benchmarks.research.selfspec.layers import early_exit
from benchmarks.research.selfspec.texts import own_texts, ranks
from specrl.results import tables

ROWS = (1, 8, 64, 256)
SHARES = (0.05, 0.125, 0.3)  # of a plain pass of the policy: a head, one layer of eight, a small model
LENGTHS = (1, 2, 3, 4, 6, 8)
POSITIONS = 150  # that a token attends to
FIRST_LAYERS = 2
Ranks = Sequence[Sequence[int]]
"""How many of the draft model's tokens score higher than the policy's: see `Text.ranks`."""


@dataclass(frozen=True)
class Machine:
    """Milliseconds of passes. Args: costs: (a, r, b, c) as in MACHINES; share: of a plain pass that drafting takes."""

    costs: tuple[float, float, float, float]
    share: float

    def policy(self, rows: int, tokens: int) -> float:
        a, row, token, place = self.costs
        return a + row * rows + (token + place * POSITIONS) * tokens

    def drafting(self, rows: int, length: int) -> float:
        return length * self.share * self.policy(rows, rows) if rows else 0.0

    def verifying(self, rows: int, length: int, guesses: int = 1) -> float:
        return self.policy(rows, rows * (length * guesses + 1))


class Batch:
    """Positions of rows in their texts. Args: guesses: guesses verified for each token of a draft."""

    def __init__(self, ranks: Ranks, guesses: int = 1):
        self._ranks, self._guesses = ranks, guesses
        self._at = [0] * len(ranks)

    @property
    def going(self) -> int:
        return sum(at < len(text) for at, text in zip(self._at, self._ranks, strict=True))

    def settle(self, length: int) -> int:
        """A pass with drafts of `length` tokens; how many rows that go on were right, also with the next token."""
        right = 0
        for i, text in enumerate(self._ranks):
            if (at := self._at[i]) >= len(text):
                continue
            end = next((n for n in range(at, min(at + length, len(text))) if text[n]), min(at + length, len(text)))
            if end < at + length:
                end += end < len(text) and text[end] < self._guesses
            else:
                right += end + 1 < len(text) and not text[end]
            self._at[i] = end + 1
        return right


def plain(machine: Machine, ranks: Ranks) -> float:
    """ms of decoding without drafts."""
    lengths = sorted(map(len, ranks))
    return sum(machine.policy(n, n) for n in (sum(length > at for length in lengths) for at in range(lengths[-1])))


def in_turn(machine: Machine, ranks: Ranks, length: int, guesses: int = 1) -> float:
    batch, now = Batch(ranks, guesses), 0.0
    while rows := batch.going:
        now += machine.drafting(rows, length) + machine.verifying(rows, length, guesses)
        batch.settle(length)
    return now


def halves(machine: Machine, ranks: Ranks, length: int) -> float:
    parts, ended = [Batch(ranks[::2]), Batch(ranks[1::2])], [0.0, 0.0]
    drafter = policy = 0.0  # when each is free
    while any(part.going for part in parts):
        for i, part in enumerate(parts):
            if rows := part.going:
                drafter = max(drafter, ended[i]) + machine.drafting(rows, length)
                policy = ended[i] = max(policy, drafter) + machine.verifying(rows, length)
                part.settle(length)
    return policy


def ahead(machine: Machine, ranks: Ranks, length: int) -> float:
    batch, now, ready = Batch(ranks), 0.0, 0
    while rows := batch.going:
        now += machine.drafting(max(0, rows - ready), length)
        now += max(machine.verifying(rows, length), machine.drafting(rows, length + 1))
        ready = batch.settle(length)
    return now


def free(machine: Machine, ranks: Ranks, length: int) -> float:
    return in_turn(Machine(machine.costs, 0.0), ranks, length)


WAYS: dict[str, Callable[[Machine, Ranks, int], float]] = {
    "in turn": in_turn,
    "2 guesses": partial(in_turn, guesses=2),
    "4 guesses": partial(in_turn, guesses=4),
    "halves": halves,
    "ahead": ahead,
    "free": free,
}


def measure(policy, tokenizer, draft_model, texts: int, console: Console) -> dict:
    """Speed over plain decoding of each way, at its best length."""
    model = draft_model or early_exit(policy, FIRST_LAYERS)
    found = ranks(model, own_texts(policy, tokenizer, texts))
    seen = [rank for text in found for rank in text]
    agreement = {f"best {n}": sum(rank < n for rank in seen) / len(seen) for n in (1, 2, 4)}
    lines = [line for name in MACHINES for line in speeds(name, found)]
    show(console, lines, agreement["best 1"])
    name = f"distilled, {model.config.num_hidden_layers} layer(s)" if draft_model else f"first {FIRST_LAYERS} layers"
    return {"draft model": name, "agreement": agreement, "positions": len(seen), "lines": lines}


def speeds(name: str, found: Ranks) -> Iterator[dict]:
    """For each size of a batch and share; texts come again where there are more rows."""
    for rows in ROWS:
        given = [found[i % len(found)] for i in range(rows)] if rows > 1 else None
        for share in SHARES:
            machine = Machine(MACHINES[name], share)
            line = {"machine": name, "rows": rows, "share": share}
            for way, run in WAYS.items():
                line[way], line[f"{way}: length"] = best(machine, run, [given] if given else [[one] for one in found])
            yield line


def best(machine: Machine, run: Callable, batches: Sequence[Ranks]) -> tuple[float, int]:
    """(speed over plain decoding, draft length), of all batches together; 0 for no drafts."""
    alone = sum(plain(machine, batch) for batch in batches)
    times = {length: sum(run(machine, batch, length) for batch in batches) for length in LENGTHS}
    length = min(times, key=times.get)
    return (alone / times[length], length) if times[length] < alone else (1.0, 0)


def show(console: Console, lines: Sequence[dict], agreement: float) -> None:
    for name in dict.fromkeys(line["machine"] for line in lines):
        rows = [
            (
                f"{line['rows']} rows, {line['share']:g}",
                *(f"{line[way]:.2f}x ({line[f'{way}: length']})" for way in WAYS),
            )
            for line in lines
            if line["machine"] == name
        ]
        title = f"{name}: speed over plain decoding (draft length); {agreement:.1%} of the draft tokens agree"
        tables.show(console, title, ("rows, share of a pass", *WAYS), rows)
