"""Processor time of a drafting pass without a model.

    python -m benchmarks.research.host rows=512 tokens=1500 out=FILE

Rolls out texts that are known beforehand as the local engine would: drafts are proposed, laid out, settled by the exact
rule and learned from. Passes take no time, and the budget is given the seconds of `PASS_S`. Prompts have groups of
rows; each row's text is its old one with some tokens replaced, inserted or removed. Times the parts of each pass on one
thread, and of these the index of the texts.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from specrl.config import load as cli
from specrl.rollout.config import RolloutConfig
from specrl.rollout.drafting.budget import Budget
from specrl.rollout.drafting.draft import Draft
from specrl.rollout.drafting.drafting import Drafting
from specrl.rollout.drafting.ngrams import NGrams
from specrl.rollout.drafting.suffix import PromptTexts, SuffixDrafter
from specrl.rollout.engines.local.kv import KV
from specrl.rollout.engines.local.model import InFlightPass
from specrl.rollout.engines.local.reader import Reader
from specrl.rollout.engines.local.varlen import StaticPass
from specrl.rollout.engines.response import Response
from specrl.rollout.sections import doc
from specrl.rollout.types import EngineStats, Request
from specrl.rollout.verify import TargetSamples, exact

GROUP = 8
PROMPT = 200  # tokens
EOS, VOCAB = 1, 150_000
EOS_IDS = frozenset([EOS])
PASS_S = (4e-3, 4e-5, 6e-6)
"""Seconds of a pass, of each row and of each token: about a 1.7B policy in bf16 on one H100."""
INDEX, INDEXING = NGrams, ("add", "find")


@dataclass
class HostConfig:
    rows: int = doc(512, "rows of a batch, in groups of 8")
    tokens: int = doc(1500, "mean length of a response")
    agreement: float = doc(0.97, "share of a text's tokens that are those of the sample_index's old text")
    old: bool = doc(True, "prompts have texts of an earlier visit; without, rows draft from each other")
    repeats: int = doc(3, "rollouts; the fastest counts")
    out: str = doc("", "write the figures to this JSON file")


@dataclass
class Work:
    """Texts to be rolled out, by row, and those that each prompt has."""

    truths: list[list[int]]
    olds: list[tuple[int, ...] | None]


def work(config: HostConfig, seed: int = 0) -> Work:
    """Texts are phrases of their prompt, phrases that all prompts share, and other tokens between them."""
    rng, made = random.Random(seed), Work([], [])
    shared = book(rng)
    for _ in range(config.rows // GROUP):
        phrases = [*book(rng), *shared]
        for _ in range(GROUP):
            old = written(rng, phrases, round(config.tokens * rng.uniform(0.6, 1.4)))
            made.olds.append(tuple(old) if config.old else None)
            made.truths.append([*edited(rng, old[:-1], 1 - config.agreement), EOS])
    return made


def book(rng: random.Random) -> list[list[int]]:
    return [[rng.randrange(2, VOCAB) for _ in range(rng.randint(4, 16))] for _ in range(50)]


def written(rng: random.Random, phrases: Sequence[Sequence[int]], length: int) -> list[int]:
    text: list[int] = []
    while len(text) < length - 1:
        text += rng.choice(phrases) if rng.random() < 0.5 else [rng.randrange(2, 2000) for _ in range(6)]
    return [*text[: length - 1], EOS]


def edited(rng: random.Random, text: Sequence[int], share: float) -> Iterator[int]:
    """The text with a share of its tokens changed: two thirds replaced, others gone, or after a new one."""
    for token in text:
        change = rng.random() / share
        if change >= 1:
            yield token
        elif change < 2 / 3:
            yield rng.randrange(2, VOCAB)
        elif change < 5 / 6:
            yield rng.randrange(2, VOCAB)
            yield token


class Policy:
    """A model whose passes take no time, as far as drafting and a reader know it: on a GPU's static passes."""

    vocab, context = VOCAB, 1 << 20
    layout, device, limits = StaticPass, "cpu", RolloutConfig(tokens_per_pass=1 << 20)
    draws: list[int]
    """What the next pass will say, given the texts."""

    def timing(self, rows: int, tokens: int) -> tuple[int, float]:
        return tokens, cost(rows, tokens)

    def kv(self, slabs: int, capacity: int) -> KV:
        return KV(slabs, capacity, heads_first=False)

    def forward(self, tokens: Sequence[int], layout: StaticPass) -> Sequence[int]:
        """Of the prompts; only the number of its states is looked at."""
        return tokens

    def launch(self, tokens: Sequence[int], layout: StaticPass, noise, picked: None) -> InFlightPass:
        layout.fill(tokens, *noise)
        return InFlightPass(torch.stack([self.draws, *[self.logprobs] * 3]), torch.empty(0), np.arange(len(tokens)))

    def will_say(self, draws: Sequence[int]) -> None:
        self.draws = torch.tensor(draws, dtype=torch.int32)
        self.logprobs = torch.full((len(draws),), 0.5).view(torch.int32)


def cost(rows: int, tokens: int) -> float:
    fixed, row, token = PASS_S
    return fixed + row * rows + token * tokens


class Unhurried(Budget):
    """Knows not how long asking takes, so that its plans depend on the texts alone."""

    def observe_pass(self, *args, asking: float | None = None, **more) -> None:
        super().observe_pass(*args, asking=None if asking is None else 0.0, **more)


class Rollout:
    """One rollout of known texts. Seconds by part are those of all its passes."""

    def __init__(self, config: HostConfig, made: Work):
        self.rows, self.truths, self.stats = requested(config, made), made.truths, EngineStats()
        self.drafting, self.policy = Drafting(Unhurried()), Policy()
        self.drafting.attach(self.policy)
        self.drafting.begin([row.request for row in self.rows])
        requests = [row.request for row in self.rows]
        self.reader = Reader(self.policy, requests)
        self.drafting.open(requests, len(requests), self.reader)
        self.reader.admit({row.number: [] for row in self.rows})
        self.passes: list[tuple[int, Counter[str]]] = []
        """Rows of each pass, and its seconds by part."""

    def run(self) -> None:
        while active := [row for row in self.rows if row.finish is None]:
            self.seconds = Counter()
            with self.timed("asking"):
                drafts = self.drafting.propose(active, self.stats)
            self.policy.will_say(self.draw(active, drafts))
            with self.timed("layout"):
                feed = {row.number: [row.last, *draft.tokens] for row, draft in zip(active, drafts, strict=True)}
                (part,) = self.reader.parts(feed)
                drawn = self.reader.collect(self.reader.launch(part))
            with self.timed("settling"):
                self.settle(active, drafts, drawn, sum(map(len, part.values())))
            self.passes.append((len(active), self.seconds))
            self.reader.leave([row.number for row in active if row.finish])
        assert [row.tokens for row in self.rows] == self.truths

    def draw(self, rows: Sequence[Response], drafts: Sequence[Draft]) -> list[int]:
        """What a pass draws."""
        draws: list[int] = []
        for row, draft in zip(rows, drafts, strict=True):
            at, n = len(row.tokens), len(draft.tokens) + 1
            known = self.truths[row.request.key][at : at + n]
            draws += known + [EOS] * (n - len(known))
        return draws

    def settle(
        self, rows: Sequence[Response], drafts: Sequence[Draft], drawn: Iterator[tuple[int, TargetSamples]], tokens: int
    ) -> None:
        """As engines do after a pass of `tokens` tokens."""
        brought = 0
        for row, draft, (number, of_row) in zip(rows, drafts, drawn, strict=True):
            accepted = exact(row.request.key, draft, of_row)
            emitted = row.emit(accepted, EOS_IDS)
            self.reader.rollback(number, len(row.tokens) - 1)
            self.stats.count(draft.source, len(draft.tokens), min(accepted.drafted, emitted))
            self.drafting.learn(row, draft, accepted.tokens, accepted.drafted)
            brought += len(accepted.tokens)
        seconds, asking = cost(len(rows), tokens), self.drafting.asking
        self.drafting.budget.observe_pass(tokens, seconds, len(rows), self.reader.width, brought, asking=asking)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        began = time.thread_time()
        yield
        self.seconds[part] += time.thread_time() - began


def requested(config: HostConfig, made: Work) -> list[Response]:
    rows = []
    for first in range(0, config.rows, GROUP):
        olds = made.olds[first : first + GROUP]
        prompt = [first + 2] * PROMPT
        texts = PromptTexts([old for old in olds if old is not None], prompt=prompt)
        for i, old in enumerate(olds, first):
            request = Request(prompt, i, 4 * config.tokens, SuffixDrafter(texts, old))
            rows.append(Response(request, number=i))
    return rows


@contextmanager
def indexing(seconds: Counter[str]) -> Iterator[None]:
    """Times what goes into the index within."""
    kept = {name: getattr(INDEX, name) for name in INDEXING}

    def timed(name: str):
        def call(*args):
            began = time.thread_time()
            found = kept[name](*args)
            seconds[name] += time.thread_time() - began
            return found

        return call

    for name in kept:
        setattr(INDEX, name, timed(name))
    try:
        yield
    finally:
        for name, function in kept.items():
            setattr(INDEX, name, function)


def main(config: HostConfig) -> int:
    made = work(config)
    lines = [line(config, made) for _ in range(config.repeats)]
    best = min(lines, key=lambda found: found["pass_ms"]["all"])
    best["index_ms"] = {name: min(found["index_ms"][name] for found in lines) for name in best["index_ms"]}
    print(json.dumps(best, indent=2))
    if config.out:
        result = {"options": asdict(config), **best}
        Path(config.out).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


def line(config: HostConfig, made: Work) -> dict:
    """One rollout: milliseconds of a pass while nearly all rows go on, by part, and of all indexing."""
    rollout, index = Rollout(config, made), Counter(dict.fromkeys(INDEXING, 0.0))
    with indexing(index):
        rollout.run()
    full = [seconds for rows, seconds in rollout.passes if rows > 0.9 * config.rows]
    total, tokens = sum((seconds for _, seconds in rollout.passes), Counter()), sum(map(len, made.truths))
    return {
        "pass_ms": {"all": 1e3 * statistics.median(seconds.total() for seconds in full)}
        | {part: 1e3 * statistics.median(seconds[part] for seconds in full) for part in total},
        "first_pass_ms": 1e3 * full[0].total(),
        "index_ms": {name: 1e3 * seconds for name, seconds in index.items()},
        "rollout_s": total.total(),
        "passes": len(rollout.passes),
        "full_passes": len(full),
        "draft_tokens": rollout.stats.drafted / sum(rows for rows, _ in rollout.passes),
        "emitted_tokens": tokens / sum(rows for rows, _ in rollout.passes),
        "sources": rollout.stats.sources,
    }


if __name__ == "__main__":
    raise SystemExit(cli.run(main, schema=HostConfig))
