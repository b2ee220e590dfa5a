"""From runs to the table: what each rule costs and saves, and whether the comparison could have failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.research.equivalence.arms import AGAIN, CONSTANT, EXACT, FULL_REUSE, OFF, PUBLISHED
from benchmarks.research.equivalence.learning import EPOCHS, GROUP, PROMPTS, Outcome
from benchmarks.research.equivalence.tost import Comparison, compare

MARGIN, GAP_MARGIN = 0.02, 0.01
"""Differences of the final expected reward, and gaps, that count as none; in units of the reward."""
TOLERANCE, TRAINER_TOLERANCE = 1e-5, 1e-4
"""Log-probs that count as the same, in nats: of the toy, and of the embedded policy, whose logits are larger."""
LATER_ROWS = PROMPTS * GROUP * (EPOCHS - 1)
Outcomes = Mapping[str, Sequence[Outcome]]
"""By the arm's name, in the order of seeds."""


@dataclass(frozen=True)
class Line:
    """One rule: means over seeds, counted from the second epoch on where it is about speed."""

    algorithm: str
    arm: str
    final: float
    """Exact expected reward after training."""
    learning: Comparison
    """Final reward less that of `off` with the same seed."""
    gap: Comparison
    """Mean reward of a batch less its exact expectation under the same weights."""
    passes: float
    """Forward passes of a row for each of its tokens; 1 without drafts."""
    reused: float
    """Share of tokens that came from drafts."""
    unchanged: float
    """Share of responses that are their sample's last one."""


@dataclass(frozen=True)
class Check:
    """Something that must hold for the table to mean anything."""

    name: str
    ok: bool
    found: str


def line(algorithm: str, arm: str, outcomes: Outcomes) -> Line:
    own, tokens = outcomes[arm], sum(o.tokens for o in outcomes[arm])
    differences = [o.final - off.final for o, off in zip(own, outcomes[OFF.name], strict=True)]
    return Line(
        algorithm,
        arm,
        fmean(o.final for o in own),
        compare(differences, MARGIN),
        compare([o.gap for o in own], GAP_MARGIN),
        passes=sum(o.passes for o in own) / tokens,
        reused=sum(o.reused for o in own) / tokens,
        unchanged=sum(o.unchanged for o in own) / (len(own) * LATER_ROWS),
    )


def checks(algorithm: str, outcomes: Outcomes, lines: Sequence[Line]) -> list[Check]:
    """Positive and negative controls, and that nothing was compared vacuously."""
    by_name = {found.arm: found for found in lines}
    found = [*_identity(outcomes), *_on_policy(outcomes), *_vacuity(outcomes)]
    for name in (OFF.name, AGAIN.name):
        found.append(_expect(f"gap of '{name}'", by_name[name].gap, "equivalent"))
    found.append(_expect(f"A/A: learning of '{AGAIN.name}'", by_name[AGAIN.name].learning, "equivalent"))
    for name in (FULL_REUSE.name, CONSTANT.name):
        found.append(_expect(f"must fail: learning of '{name}'", by_name[name].learning, "different"))
        found.append(_expect(f"must fail: gap of '{name}'", by_name[name].gap, "different"))
    found.append(
        _expect(f"must fail: gap of '{PUBLISHED.name}' sold as exact", by_name[PUBLISHED.name].gap, "different")
    )
    return [Check(f"{algorithm}: {check.name}", check.ok, check.found) for check in found]


def _expect(name: str, found: Comparison, verdict: str) -> Check:
    spread = f"{found.mean:+.4f}, 90 % [{found.low:+.4f}, {found.high:+.4f}], power {found.power:.2f}"
    return Check(name, found.verdict == verdict, f"{found.verdict}: {spread}")


def _identity(outcomes: Outcomes) -> list[Check]:
    off, exact, other = ([(o.digest, o.final) for o in outcomes[arm.name]] for arm in (OFF, EXACT, AGAIN))
    same, chance = (sum(a == b for a, b in zip(off, arm, strict=True)) for arm in (exact, other))
    return [
        Check(f"'{EXACT.name}' is 'off', bit for bit", same == len(off), f"{same} of {len(off)} runs"),
        Check(f"must fail: '{AGAIN.name}' is 'off'", chance == 0, f"{chance} of {len(off)} runs"),
    ]


def _on_policy(outcomes: Outcomes) -> list[Check]:
    every = [o for runs in outcomes.values() for o in runs]
    reused, new = (max(o.recorded[name] for o in every) for name in ("reused", "new"))
    clipped = max(o.clipped for o in every)
    stored = min(o.recorded["stored"] for o in outcomes[PUBLISHED.name])
    return [
        Check("recorded log-probs of reused tokens", reused <= TOLERANCE, f"within {reused:.1e}"),
        Check("recorded log-probs of new tokens", new <= TOLERANCE, f"within {new:.1e}"),
        Check("first inner step clips nothing", clipped == 0, f"{clipped:.1%} of tokens"),
        Check("must fail: stored log-probs instead", stored > 1000 * TOLERANCE, f"{stored:.2f} difference at least"),
    ]


def _vacuity(outcomes: Outcomes) -> list[Check]:
    drafting = [o for name, runs in outcomes.items() if name not in (OFF.name, AGAIN.name) for o in runs]
    verified = [
        o for name, runs in outcomes.items() if name.startswith("exact") or name == PUBLISHED.name for o in runs
    ]
    gains = [o.final - o.start for o in outcomes[OFF.name]]
    reused, rejected = min(o.reused / o.tokens for o in drafting), min(o.rejected for o in verified)
    unchanged, gain = min(o.unchanged for o in drafting), fmean(gains)
    return [
        Check("drafts were used in every run", reused > 0.05, f"at least {reused:.0%} of tokens"),
        Check("drafts were rejected in every run", rejected > 0, f"at least {rejected} tokens"),
        Check("responses were unchanged in every run", unchanged > 0, f"at least {unchanged}"),
        Check("the policy learned", gain > 5 * MARGIN, f"{gain:+.3f}"),
        Check("'off' drafts nothing", all(o.passes == o.tokens for o in outcomes[OFF.name]), "one pass a token"),
    ]


def trainer_checks(algorithm: str, found: Mapping[str, float]) -> list[Check]:
    """On-policy identity in the real trainer, from `on_policy.measure`."""
    counts = {name: int(found[f"{name}_tokens"]) for name in ("reused", "new", "stored")}
    named = {"reused": "reused tokens", "new": "new tokens", "logged": "tokens as the trainer logged them"}
    checked = [
        Check(f"recorded log-probs of {text}", found[name] <= TRAINER_TOLERANCE, f"within {found[name]:.1e}")
        for name, text in named.items()
    ]
    checked += [
        Check("first inner step clips nothing", found["clipped"] == 0, f"{found['clipped']:.1%} of tokens"),
        Check("both kinds of tokens were there", min(counts.values()) > 100, str(counts)),
        Check(
            "must fail: stored log-probs instead",
            found["stored"] > 1000 * TRAINER_TOLERANCE,
            f"{found['stored']:.2f} difference",
        ),
    ]
    return [Check(f"{algorithm} trainer: {check.name}", check.ok, check.found) for check in checked]
