"""Drafts that do not pay cost next to nothing: rollouts of a simulated machine, whose passes take a known time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from specrl.rollout.drafting.budget import Budget
from specrl.rollout.drafting.cost import SHARE, Account
from specrl.rollout.drafting.drafting import Drafting
from specrl.rollout.drafting.suffix import PromptTexts, SuffixDrafter
from specrl.rollout.types import EngineStats, Request

MACHINES = {
    "a small model on a CPU": (6.4e-3, 1.7e-4, 2.0e-5, 1e-7, 0.0),
    "a real model on a CPU": (45e-3, 4e-4, 2.0e-3, 1e-5, 0.0),
    "a real model on an old CPU": (96e-3, 0.0, 6.6e-3, 2e-6, 3e-3),
    "a GPU": (8.0e-3, 2e-5, 3e-5, 0.0, 0.0),
}
"""Seconds of a pass, of each of its rows and tokens, of each position to which a token is padded, and what each token
beyond 32 costs more."""
ROWS = {
    "a small model on a CPU": (8, 32, 64, 256),
    "a real model on a CPU": (8, 16, 32),
    "a real model on an old CPU": (8, 16, 32),
    "a GPU": (8, 32, 256),
}
PROMPT, TOKENS, ROLLOUTS = 60, 96, 6
DRAFTS = Request([1], 0, TOKENS, SuffixDrafter(PromptTexts()))
PLAIN = Request([1], 0, TOKENS, plain=True)


@dataclass
class Text:
    """The draft of a row: the first `right` tokens are what it samples, and later ones with probability `later`."""

    right: int
    later: float

    def accepted(self, position: int, drafted: int, rng: random.Random) -> int:
        for k in range(drafted):
            if position + k >= self.right and rng.random() >= self.later:
                return k
        return drafted


TEXTS = {
    "useless": lambda rng: Text(0, 0.02),
    "cut": lambda rng: Text(rng.randrange(TOKENS), 0.02),
    "drifted": lambda rng: Text(rng.randrange(TOKENS // 2), 0.4),
    "old text at high entropy": lambda rng: Text(0, 0.3),
    "the first half": lambda rng: Text(TOKENS // 2, 0.02),
    "a few tokens": lambda rng: Text(int(rng.expovariate(1 / 6)), 0.3),
    "nearly right": lambda rng: Text(0, 0.93),
    "the slowest rows need every pass": lambda rng: Text(0, 0.97 if rng.random() < 0.7 else 0.05),
}


def rollouts(machine: str, rows: int, text: str, asking: float = 0.01, load: float = 0.0) -> float:
    """Seconds of plain decoding over those with drafts, for some rollouts of one run, see `run`."""
    plain_s, spent_s = (
        sum(column) for column in zip(*run(machine, rows, [text] * ROLLOUTS, asking, load), strict=True)
    )
    return plain_s / spent_s


def run(
    machine: str, rows: int, texts: list[str], asking: float = 0.01, load: float = 0.0, controls: int = 0
) -> Iterator[tuple[float, float]]:
    """Seconds of plain decoding, and those with drafts, of each rollout of one run.

    Args:
        texts: of each rollout.
        asking: time to get the drafts of a pass, as a share of `fixed`.
        load: other work makes each pass longer by up to this factor.
        controls: plain rollouts that follow each.
    """
    fixed, row_s, token_s, position_s, beyond_s = MACHINES[machine]
    rng = random.Random(0)
    budget = Budget(padded=position_s > 0)
    drafting = Drafting(budget)

    def pass_s(live: int, tokens: int, width: int) -> float:
        beyond = beyond_s * max(0, tokens - 32)
        return (fixed + row_s * live + (token_s + position_s * width) * tokens + beyond) * (1 + load * rng.random())

    for live, tokens in ((1, 1), (1, 256), (32, 32), (32, 64)):
        budget.calibrate([(tokens, pass_s(live, tokens, tokens // live))], live, tokens // live)
    for text in texts:
        plain_s = spent_s = 0.0
        drafting.begin([DRAFTS])
        drafts = [TEXTS[text](rng) for _ in range(rows)]
        lengths = [rng.randint(TOKENS // 2, TOKENS) for _ in range(rows)]
        states, emitted = ["start"] * rows, [0] * rows
        for passed in range(TOKENS):
            live = sum(length > passed for length in lengths)
            plain_s += pass_s(live, live, PROMPT + passed) if live else 0.0
        passes = 0
        while active := [i for i in range(rows) if emitted[i] < lengths[i]]:
            budget.observe_lead(min(emitted[i] for i in active) - passes)
            passes += 1
            spent_s += one_pass(budget, active, drafts, states, emitted, pass_s, asking * fixed, rng)
        drafting.end([], EngineStats())
        for _ in range(controls):
            drafting.begin([PLAIN])
            drafting.end([], EngineStats())
        yield plain_s, spent_s


def one_pass(budget, active, texts, states, emitted, pass_s, asking, rng) -> float:
    """What an engine does for a pass of the rows `active`. Returns its seconds, those of the drafters included."""
    before = sum(emitted[i] for i in active)
    asked = budget.skipping_plan() is None
    width = PROMPT + max(emitted[i] for i in active)
    plan = {}
    if asked:
        buckets = [(states[i], "prefix") for i in active]
        plan = budget.affordable(buckets, budget.plan(buckets, width=width)).lengths
    drafts = {i: plan[states[i], "prefix"] if asked else 0 for i in active}
    tokens = len(active) + sum(drafts.values())
    seconds = pass_s(len(active), tokens, width)
    for i, drafted in drafts.items():
        seen = drafted or 1  # where nothing is drafted the first token of the proposal is compared with the sample
        accepted = texts[i].accepted(emitted[i], seen, rng)
        if asked:
            budget.observe_draft((states[i], "prefix"), seen, accepted)
            states[i] = "agreeing" if accepted == seen else "diverged" if accepted else "lost"
        emitted[i] += 1 + (accepted if drafted else 0)
    new = sum(emitted[i] for i in active) - before
    budget.observe_pass(tokens, seconds, len(active), width, new, asking=asking if asked else None)
    return seconds + asking * asked


@pytest.mark.parametrize(("asking", "load", "least"), [(0.01, 0.0, 0.98), (0.2, 0.0, 0.975), (0.01, 1.0, 0.96)])
@pytest.mark.parametrize("machine", MACHINES)
def test_no_text_makes_a_rollout_slower(machine, asking, load, least):
    found = {(rows, text): rollouts(machine, rows, text, asking, load) for rows in ROWS[machine] for text in TEXTS}
    assert min(found.values()) > least, found


def test_evidence_counts_for_its_own_bucket():
    assert worst("a real model on a CPU") > 0.99


def test_what_pays_is_drafted():
    assert rollouts("a GPU", 32, "the first half") > 1.7
    assert rollouts("a real model on a CPU", 8, "the first half") > 1.38
    assert rollouts("a small model on a CPU", 256, "drifted") > 1.45


def after_slow_rows(controls: int) -> float:
    """Seconds of plain decoding over those of the last rollout, whose text pays. The slowest rows of earlier ones need
    every pass, and plain rollouts follow each."""
    texts = ["the slowest rows need every pass"] * 4 + ["nearly right"] * 5
    *_, (plain_s, spent_s) = run("a real model on a CPU", 16, texts, controls=controls)
    return plain_s / spent_s


def test_plain_rollouts_between_change_nothing():
    assert after_slow_rows(controls=3) == after_slow_rows(controls=0) > 1.4


def test_control_plain_rollouts_that_count_are_seen(monkeypatch):
    monkeypatch.setattr(Drafting, "begin", lambda self, requests: self.budget.next_rollout())
    assert after_slow_rows(controls=3) != after_slow_rows(controls=0)


def test_a_pass_in_which_the_machine_stalled_ends_the_drafts_of_its_rollout_alone():
    account = Account()
    account.observe(20.0, -19.0)
    assert account.balance_s < 0
    account.open()
    account.observe(0.1, 0.0)
    assert account.balance_s > 0


def test_a_rollout_may_lose_half_of_what_earlier_drafts_have_saved():
    account = Account()
    account.observe(0.0, 8.0)
    account.open()
    assert account.balance_s == 4.0


def worst(machine: str, asking: float = 0.01) -> float:
    return min(rollouts(machine, rows, text, asking) for rows in ROWS[machine] for text in TEXTS)


def unpaid(self, seconds, saved_s):
    """Planted: what drafts lose is not charged."""
    self.balance_s += SHARE * seconds + max(saved_s, 0.0)


def test_control_losses_that_are_not_charged_are_seen(monkeypatch):
    monkeypatch.setattr(Account, "observe", unpaid)
    assert worst("a small model on a CPU", asking=0.2) < 0.96


def test_control_the_evidence_of_another_bucket_is_seen(monkeypatch):
    learn = Budget.observe_draft
    monkeypatch.setattr(Budget, "observe_draft", lambda self, _, *seen: learn(self, ("agreeing", "prefix"), *seen))
    assert worst("a real model on a CPU") < 0.99
