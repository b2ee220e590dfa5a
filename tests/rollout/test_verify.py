"""Acceptance rules by hand, and the distribution of responses by exact enumeration (design D2).

The engine is the real one. Its policy is a tiny random Llama with five tokens, so that every response can be listed
with its exact probability. Old and new policy are unrelated, so a bias would be as large as possible.
"""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch

import specrl.rollout.engines.local.sampler as sampler
from specrl.rollout import verify
from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.engines.local.engine import TransformersEngine
from specrl.rollout.keys import derive_key
from specrl.rollout.lossy.lenient import accept_lenient
from specrl.rollout.noise import keyed_sample
from specrl.rollout.types import Request
from specrl.rollout.verify import cut
from tests.engines import local
from tests.rollout.golden import Script
from tests.rollout.test_noise import chi_square, critical

# By hand --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p_new", "p_old", "u", "lenience", "accepted"),
    [
        ([], [], [], 1.0, 0),
        ([0.4, 0.1], [0.2, 0.2], [0.99, 0.49], 1.0, 2),
        ([0.4, 0.1], [0.2, 0.2], [0.99, 0.51], 1.0, 1),  # min(1, 0.1 / 0.2)
        ([0.1, 0.9], [0.2, 0.2], [0.51, 0.01], 1.0, 0),  # nothing after the first rejection
        ([0.1, 0.1], [0.2, 0.4], [0.74, 0.37], 1.5, 2),  # 0.75 and 0.375
        ([0.1, 0.1], [0.2, 0.4], [0.74, 0.38], 1.5, 1),
        ([0.0, 0.5], [0.5, 0.5], [1e-9, 0.1], 1.0, 0),  # outside the new nucleus
        ([math.nan, 0.5], [0.5, 0.5], [0.1, 0.1], 1.0, 0),  # NaN is never accepted
        ([0.4], [0.2], [0.9], 0.5, 1),  # min(1, l p / q) is 1: the ratio of 2 is not clipped before the lenience
        ([0.4], [0.2], [0.9], 0.4, 0),
    ],
)
def test_accept_lenient(p_new, p_old, u, lenience, accepted):
    new, old = (torch.tensor(p).log() for p in (p_new, p_old))
    assert accept_lenient(new, old, torch.tensor(u), lenience) == accepted


EOS, EOS2, A, B = 1, 2, 7, 8


@pytest.mark.parametrize(
    ("tokens", "eos_ids", "room", "want"),
    [
        ([EOS], {EOS}, 4, (1, "stop")),  # EOS first
        ([EOS, A, B], {EOS}, 4, (1, "stop")),
        ([A, EOS, B], {EOS}, 4, (2, "stop")),  # in the middle: no later token is kept
        ([A, B, EOS], {EOS}, 4, (3, "stop")),
        ([A, EOS2, EOS], {EOS, EOS2}, 4, (2, "stop")),  # several EOS ids: the first of any
        ([A, B, A, EOS], {EOS}, 4, (4, "stop")),  # a stop exactly at the cap
        ([A, B, A, EOS], {EOS}, 3, (3, "length")),  # the cap is reached first
        ([A, B], {EOS}, 3, (2, None)),  # continues
        ([], {EOS}, 3, (0, None)),
        ([EOS], set(), 2, (1, None)),  # no EOS id: only the cap ends a row
        ([EOS], {EOS}, 1, (1, "stop")),
    ],
)
def test_cut(tokens, eos_ids, room, want):
    assert cut(tokens, eos_ids, room) == want


# The distribution of responses ----------------------------------------------------------------------------------------

VOCAB, CAP, STOP, PROMPT, N = 5, 4, 0, (3, 2), 40_000
ALPHA = 1e-6


@pytest.fixture(scope="module")
def policies(build_model):
    new, old = (build_model("llama", seed, vocab=VOCAB, scale=9.0).eval() for seed in (1, 2))
    return new, old


def conditionals(model) -> dict[tuple, list[float]]:
    """p(next | response so far) for every response so far, by full forward passes without a cache."""
    table = {}
    for length in range(CAP):
        heads = list(itertools.product(range(1, VOCAB), repeat=length))
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*PROMPT, *head] for head in heads])).logits[:, -1]
        table |= dict(zip(heads, logits.double().softmax(-1).tolist(), strict=True))
    return table


def exact_law(p) -> dict[tuple, float]:
    law, open_ = {}, {(): 1.0}
    while open_:
        following = {}
        for head, mass in open_.items():
            for v in range(VOCAB):
                done = v == STOP or len(head) + 1 == CAP
                (law if done else following)[(*head, v)] = mass * p[head][v]
        open_ = following
    return law


def published_law(p, q, lenience: float) -> dict[tuple, float]:
    """SPEC-RL keeps min(q, l p). With the remaining mass, the rejected token and all later ones are sampled from p."""
    law, open_ = Counter(), {((), True): 1.0}
    while open_:
        following = Counter()
        for (head, drafting), mass in open_.items():
            kept = [min(q[head][v], lenience * p[head][v]) if drafting else 0.0 for v in range(VOCAB)]
            for v in range(VOCAB):
                done = v == STOP or len(head) + 1 == CAP
                for share, still in ((kept[v], True), ((1 - sum(kept)) * p[head][v], False)):
                    if done:
                        law[(*head, v)] += mass * share
                    elif share:
                        following[(*head, v), still] += mass * share
        open_ = following
    return dict(law)


def compared(counts, claimed) -> tuple[float, float]:
    """Statistic and critical value of a chi-square test at ALPHA."""
    assert set(counts) <= set(claimed), "a response that the distribution does not have"
    statistic, df = chi_square(np.array([counts[x] for x in claimed]), np.array([*claimed.values()]))
    return statistic, critical(df, ALPHA)


def non_centrality(true, claimed, n: int = N) -> float:
    return n * sum((true.get(x, 0.0) - m) ** 2 / m for x, m in claimed.items())


def engine_of(model, rule="exact", lenience=1.0, **settings) -> TransformersEngine:
    engine = local(
        model,
        SamplingParams(frozenset({STOP})),
        lenience=lenience if rule == "lenient" else None,
        rows_per_batch=5000,  # KV memory is irrelevant here, the number of passes is not
        tokens_per_pass=50_000,
        **{"window": CAP, **settings},
    )
    engine.tie_margin = 0.0
    return engine


def requests(drafts, name: str, logprobs=None):
    for i, draft in enumerate(drafts):
        drafter = None if draft is None else Script(draft)
        q = None if logprobs is None else logprobs[i]
        yield Request(PROMPT, derive_key(0, name, i, 0), CAP, drafter, q)


def sample(engine, drafts, name, logprobs=None):
    done, stats = engine.generate(list(requests(drafts, name, logprobs)))
    return done, stats, Counter(tuple(c.tokens) for c in done)


@pytest.fixture(scope="module")
def tables(policies):
    new, old = policies
    return conditionals(new), conditionals(old)


@pytest.fixture(scope="module")
def old_texts(policies):
    """Rollouts of the old policy by plain decoding, used as drafts."""
    done, _, counts = sample(engine_of(policies[1]), [None] * N, "old")
    return done, counts


@pytest.mark.slow
def test_plain_decoding_follows_the_law(old_texts, tables):
    _, counts = old_texts
    p, q = tables
    statistic, limit = compared(counts, exact_law(q))
    assert statistic < limit
    assert compared(counts, exact_law(p))[0] > 3 * limit  # control: the other policy's distribution


@pytest.mark.slow
@pytest.mark.parametrize("source", ["old policy", "adversarial"])
def test_exact_responses_follow_the_policy_whatever_the_draft(policies, tables, old_texts, source):
    p, q = tables
    if source == "old policy":
        drafts = [c.tokens for c in old_texts[0]]
    else:  # always the least likely token, so that acceptance itself selects
        worst, head = [], ()
        for _ in range(CAP):
            worst.append(min(range(1, VOCAB), key=lambda v: p[head][v]))
            head = tuple(worst)
        drafts = [worst] * (N // 2)
    done, stats, counts = sample(engine_of(policies[0]), drafts, source)
    claimed = exact_law(p)
    statistic, limit = compared(counts, claimed)
    assert non_centrality(exact_law(q), claimed, len(drafts)) > 3 * limit, "the test would not see the old policy's law"
    assert statistic < limit
    assert 0 < stats.accepted < stats.drafted, "both acceptances and rejections happened"
    assert {c.finish for c in done} == {"stop", "length"}


@pytest.mark.slow
def test_lenient_follows_the_published_law_and_not_the_exact_one(policies, tables, old_texts):
    """Without resampling from the residual a rule is not exact, and the product's lenient rule is of this kind."""
    (p, q), lenience = tables, math.exp(0.5)
    texts = old_texts[0][: N // 2]
    drafts, logprobs = [c.tokens for c in texts], [c.logprobs for c in texts]
    done, _, counts = sample(engine_of(policies[0], "lenient", lenience), drafts, "lenient", logprobs)
    published, exact = published_law(p, q, lenience), exact_law(p)
    statistic, limit = compared(counts, published)
    assert statistic < limit
    assert non_centrality(published, exact, N // 2) > 3 * limit, "not enough power to tell the two laws apart"
    assert compared(counts, exact)[0] > limit, "the bias of the published rule must show"
    assert compared(counts, published_law(p, q, 1.0))[0] > limit, "nor does it fit another lenience"
    shares = Counter(all(c.reused) for c in done)
    assert min(shares[True], shares[False]) > N / 100


# Planted wrong rules: the same assertion must reject them.


def always_accept(draws, draft):
    draws[: len(draft)] = draft
    return len(draft)


def position_off_by_one(logits, keys, positions, targets=None, **law):
    """Planted fault: the first two tokens of a response share their noise."""
    return keyed_sample(logits, keys, (positions - 1).clamp(min=0), targets, **law)


def equal_else_resample(logits, keys, positions, targets=None, **law):
    """mlx-swift-lm#459: if the sample differs from the draft, an independent second sample is emitted."""
    draws, *rest = keyed_sample(logits, keys, positions, targets, **law)
    return torch.where(draws == targets, draws, keyed_sample(logits, ~keys, positions, **law)[0]), *rest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        ("accept_exact", always_accept),
        ("keyed_sample", position_off_by_one),
        ("keyed_sample", equal_else_resample),
    ],
)
def test_wrong_rules_are_rejected(policies, tables, old_texts, monkeypatch, name, mutant):
    monkeypatch.setattr(sampler if name == "keyed_sample" else verify, name, mutant)
    _, _, counts = sample(engine_of(policies[0]), [c.tokens for c in old_texts[0][: N // 4]], mutant.__name__)
    statistic, limit = compared(counts, exact_law(tables[0]))
    assert statistic > limit
