"""The equivalence suite: its statistics, its toy against sampling, and a small suite whose controls fail."""

import random
from dataclasses import replace
from statistics import fmean

import pytest
import torch

from benchmarks.research.equivalence import arms, toy
from benchmarks.research.equivalence.learning import Outcome, Run
from benchmarks.research.equivalence.tost import ALPHA, compare, power
from benchmarks.research.equivalence.verdicts import checks, line, trainer_checks
from specrl.rollout.config import RolloutConfig
from specrl.rollout.speculative import SpeculativeRollout
from specrl.rollout.types import Row

pytestmark = pytest.mark.long

# Statistics -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([0.001, -0.002, 0.003, 0.0, -0.001, 0.002], "equivalent"),
        ([0.05, 0.06, 0.055, 0.05, 0.06, 0.055], "different"),
        ([0.03, -0.04, 0.02, -0.03, 0.05, -0.01], "underpowered"),
        ([0.021, 0.019, 0.02, 0.022, 0.018, 0.02], "different"),  # on the margin: not equivalent, and not zero
        ([0.03, -0.01, 0.035, -0.005, 0.03, 0.0] * 3, "different"),
        ([0.033, -0.011] * 9, "not shown"),  # enough pairs, in between
        ([0.0, 0.0, 0.0], "equivalent"),  # bit-identical runs
        ([0.02, 0.02, 0.02], "different"),
    ],
)
def test_verdicts(differences, verdict):
    assert compare(differences, margin=0.02).verdict == verdict


def test_the_errors_are_those_promised():
    """On the margin it passes in ALPHA of the cases; with a true difference of zero in the stated power; else fails."""
    draw = random.Random(0)

    def passes(true: float, n: int = 12, sd: float = 0.02, repeats: int = 400) -> float:
        found = [compare([draw.gauss(true, sd) for _ in range(n)], 0.02) for _ in range(repeats)]
        return fmean(c.p < ALPHA for c in found)

    assert passes(0.02) == pytest.approx(ALPHA, abs=0.025)
    assert passes(0.0) == pytest.approx(power(12, 0.02, 0.02), abs=0.06)
    assert passes(0.04) < 0.01


# The toy --------------------------------------------------------------------------------------------------------------


def test_the_exact_expectation_is_that_of_the_products_samples():
    right = toy.right_transitions(3)
    policy = toy.TablePolicy(toy.initial_logits(3, right))
    config = RolloutConfig(max_new_tokens=toy.CAP)
    engine = toy.engine_of(policy, config)
    rows = [Row(f"{task}-{i}", (task, toy.END)) for task in range(toy.TASKS) for i in range(250)]
    done = SpeculativeRollout(engine, None, config, seed=0).generate(rows, visit=0, step=0).completions
    found = torch.tensor([toy.reward(c.tokens, right[r.prompt[0]].tolist()) for r, c in zip(rows, done, strict=True)])
    mean, exact = found.view(toy.TASKS, -1).mean(1), toy.expected_rewards(policy.logits, right)
    z = (mean - exact) / (exact * (1 - exact) / 250).sqrt()
    assert z.abs().max() < 4
    other = toy.expected_rewards(policy.logits + right, right)  # control: a policy that is a little better
    assert ((mean - other) / (other * (1 - other) / 250).sqrt()).abs().max() > 5


# A small suite --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outcomes():
    names = (arms.OFF, arms.AGAIN, arms.EXACT, arms.PUBLISHED, arms.FULL_REUSE)
    return {arm.name: [Run(arm, "grpo", seed).train() for seed in range(1)] for arm in names}


def test_exact_is_off_and_what_is_not_differs(outcomes):
    off, again, exact, published, full = outcomes.values()
    assert [(o.digest, o.final) for o in exact] == [(o.digest, o.final) for o in off]
    assert all(o.digest != a.digest and o.final != a.final for o, a in zip(off, again, strict=True))
    assert all(o.passes < o.tokens and o.rejected and o.unchanged for o in exact), "it did speculate"
    assert all(f.final < o.final - 0.05 for f, o in zip(full, off, strict=True)), "full reuse learns less"
    assert all(o.final > o.start + 0.1 for o in off)
    stored = max(o.recorded["stored"] for o in exact)
    assert stored < 1e-5 < 1e-2 < min(o.recorded["stored"] for o in published), "stored log-probs are others"


def planted(outcomes):
    """The small suite with every rule that `checks` reads, spreads and sizes as in a good result."""
    draw = random.Random(1)

    def like(name: str, shift: float, gap: float) -> list[Outcome]:
        base = outcomes[name][0]
        return [
            replace(base, final=0.5 + shift + draw.gauss(0, 0.01), gaps=[gap + draw.gauss(0, 0.003)]) for _ in range(16)
        ]

    off = like(arms.OFF.name, 0.0, 0.0)
    again = [replace(o, digest="other") for o in like(arms.AGAIN.name, 0.0, 0.0)]
    exact = [replace(outcomes[arms.EXACT.name][0], final=o.final, gaps=o.gaps, digest=o.digest) for o in off]
    return {
        arms.OFF.name: off,
        arms.AGAIN.name: again,
        arms.EXACT.name: exact,
        arms.PUBLISHED.name: like(arms.PUBLISHED.name, -0.05, 0.05),
        arms.FULL_REUSE.name: like(arms.FULL_REUSE.name, -0.2, -0.1),
        arms.CONSTANT.name: like(arms.PUBLISHED.name, -0.1, 0.05),
    }


def failed(found) -> list[str]:
    lines = [line("grpo", name, found) for name in found]
    return [check.name for check in checks("grpo", found, lines) if not check.ok]


def test_a_good_result_is_valid(outcomes):
    assert failed(planted(outcomes)) == []


@pytest.mark.parametrize(
    ("arm", "change", "names"),
    [
        (arms.FULL_REUSE, {"final": 0.5}, ["learning of 'control: full reuse'"]),
        (arms.FULL_REUSE, {"gaps": [0.0]}, ["gap of 'control: full reuse'"]),
        (arms.CONSTANT, {"gaps": [0.001]}, ["gap of 'control: constant noise'"]),
        (arms.PUBLISHED, {"gaps": [0.0]}, ["sold as exact"]),
        (arms.AGAIN, {"gaps": [0.03]}, ["gap of 'off, other noise'"]),
        (arms.AGAIN, {"final": 0.4}, ["A/A"]),
        (arms.EXACT, {"final": 0.5}, ["bit for bit"]),
        (arms.EXACT, {"rejected": 0}, ["rejected"]),
        (arms.EXACT, {"reused": 0}, ["used in every run"]),
        (arms.EXACT, {"unchanged": 0}, ["unchanged"]),
        (arms.EXACT, {"clipped": 0.01}, ["clips nothing"]),
        (arms.EXACT, {"recorded": {"reused": 1e-3, "new": 0.0, "stored": 0.0}}, ["reused tokens"]),
        (arms.PUBLISHED, {"recorded": {"reused": 0.0, "new": 0.0, "stored": 0.0}}, ["stored log-probs"]),
        (arms.OFF, {"start": 0.5}, ["learned"]),
    ],
)
def test_each_fault_makes_it_invalid(outcomes, arm, change, names):
    found = planted(outcomes)
    found[arm.name] = [replace(o, **change) for o in found[arm.name]]
    complaints = failed(found)
    assert all(any(name in complaint for complaint in complaints) for name in names), complaints


def test_the_check_of_the_real_trainers_can_fail():
    good = {"reused": 2e-5, "new": 2e-5, "logged": 2e-5, "stored": 1.0, "clipped": 0.0}
    good |= {"reused_tokens": 500, "new_tokens": 500, "stored_tokens": 500}
    assert all(check.ok for check in trainer_checks("grpo", good))
    for fault in ({"reused": 1e-3}, {"new": 1e-3}, {"stored": 1e-5}, {"clipped": 0.1}, {"reused_tokens": 0}):
        assert not all(check.ok for check in trainer_checks("grpo", good | fault)), fault
