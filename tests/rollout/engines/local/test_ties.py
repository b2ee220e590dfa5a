"""Near-ties are decided canonically, so that a pass's rounding does not change a token."""

import random

import pytest

from specrl.rollout.engines.local.engine import TransformersEngine
from specrl.rollout.types import Request
from tests.rollout.golden import (
    SAMPLING,
    Script,
    corrupt,
    differing,
    drafts_of_every_quality,
    engine_of,
    nearly_tied_keys,
    noisy,
    requests_of,
)


def test_draws_that_are_decided_canonically_are_the_same(golden):
    model, cases, want = golden("llama")
    engine = engine_of(model, window=5)
    engine.tie_margin = 0.5
    plain, stats = engine.generate(requests_of(cases))
    assert differing(plain, want) == []
    assert stats.ties > 20
    done, stats = engine.generate(requests_of(cases, drafts_of_every_quality([t for t, _, _ in want])))
    assert differing(done, plain) == []
    assert stats.ties > 20
    engine.tie_margin = 0.0
    _, stats = engine.generate(requests_of(cases))
    assert stats.ties == 0


@pytest.mark.slow
def test_rounding_that_depends_on_the_pass_flips_tokens_only_without_the_tie_margin(tiny):
    model, prompt = tiny("llama"), [5, 9, 30]
    keys = nearly_tied_keys(model, prompt, 3e-5)
    assert len(keys) >= 5

    def differences(tie_margin):
        engine = engine_of(noisy(model), window=4)
        engine.tie_margin = tie_margin
        plain, _ = engine.generate([Request(prompt, key, 8) for key in keys])
        drafts = [Script(corrupt(c.tokens, random.Random(i), 0.2)) for i, c in enumerate(plain)]
        done, stats = engine.generate([Request(prompt, k, 8, d) for k, d in zip(keys, drafts, strict=True)])
        return differing(done, plain, tolerance=1e-3), stats.ties

    same, ties = differences(TransformersEngine(model, SAMPLING).tie_margin)
    assert same == [], "the margin that is the default is enough for what is hardly rounding any more"
    assert ties >= len(keys)
    flipped, ties = differences(0.0)
    assert flipped, "the planted rounding did not flip anything: the test has no power"
    assert ties == 0
    same, ties = differences(1e-3)
    assert same == []
    assert ties >= len(keys)
