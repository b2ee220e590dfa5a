"""Visits, keys, noise and keyed sampling. The oracles are numpy or pure Python and import nothing from the product."""

import json
import math

import numpy as np
import pytest
import torch

from specrl.rollout.keys import Visits, derive_key, generation
from specrl.rollout.noise import (
    gumbel,
    hash_tokens,
    keyed_sample,
    process_logits,
    row_words,
    uniform,
)

GOLDEN_HASHES = [
    [342616534, 2976409913, 2232206930, 1698134186],
    [921175762, 3734127126, 1095554201, 1091441821],
    [1425729671, 2956843823, 1791173764, 3585840079],
]
GOLDEN_KEYS = [-2435613784819202347, 4326335886346179688]

M32, M64 = (1 << 32) - 1, (1 << 64) - 1
EDGE_KEYS = [0, 1, -1, 42, 2**63 - 1, -(2**63), 0x1234567890ABCDEF, -7046029254386353131]


def keys_of(n: int, name: str = "k") -> torch.Tensor:
    return torch.tensor([derive_key(0, name, i, 0) for i in range(n)])


def noise(keys, positions, vocab) -> torch.Tensor:
    return gumbel(*row_words(torch.as_tensor(keys), torch.as_tensor(positions)), vocab)


# An independent implementation, in unbounded Python integers ----------------------------------------------------------


def reference_words(key: int, position: int) -> tuple[int, int]:
    x = (key & M64) ^ ((position * 0x9E3779B97F4A7C15 + 1) & M64)
    for mult in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):  # Murmur3's 64-bit finaliser
        x = ((x ^ (x >> 33)) * mult) & M64
    x ^= x >> 33
    return x & M32, x >> 32


def reference_hash(low: int, high: int, token: int) -> int:
    x = (token * 0x9E3779B1 + low) & M32
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & M32
    x = ((x ^ (x >> 15)) + high) & M32
    x = ((x ^ (x >> 16)) * 0x846CA68B) & M32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & M32
    return x ^ (x >> 16)


def reference_hashes(keys, positions, vocab) -> np.ndarray:
    rows = [reference_words(k, t) for k, t in zip(keys, positions, strict=True)]
    return np.array([[reference_hash(low, high, v) for v in range(vocab)] for low, high in rows], dtype=np.uint64)


def test_integers_match_an_independent_implementation():
    keys = EDGE_KEYS * 4
    positions = [0] * 8 + [1] * 8 + [7] * 8 + [2**20] * 8
    words = row_words(torch.tensor(keys), torch.tensor(positions))
    got = hash_tokens(*words, 300).numpy().view(np.uint32)
    want = reference_hashes(keys, positions, 300)
    assert (got == want).all()
    assert [w.item() & M32 for w in (words[0][5], words[1][5])] == list(reference_words(keys[5], positions[5]))
    shifted = reference_hashes(keys, [t + 1 for t in positions], 300)  # control: the position matters
    assert (got == shifted).mean() < 1e-3
    high = hash_tokens(*row_words(torch.tensor([3]), torch.tensor([5])), 152_000)[0, -3:].numpy().view(np.uint32)
    low_high = reference_words(3, 5)
    assert high.tolist() == [reference_hash(*low_high, v) for v in range(151_997, 152_000)]


def test_golden_values():
    """A change of the hash would silently change the samples of every resumed run."""
    got = hash_tokens(*row_words(torch.tensor([0, -1, 2**40]), torch.tensor([0, 3, 1000])), 4).numpy().view(np.uint32)
    assert got.tolist() == GOLDEN_HASHES
    assert [derive_key(0, "ex-0", 0, 0), derive_key(7, "é", 3, 2, "control")] == GOLDEN_KEYS


def test_gumbel_and_uniform_match_float64():
    keys, positions = keys_of(50).tolist(), list(range(50))
    bits = reference_hashes(keys, positions, 64) & np.uint64(0x7FFFFFFF)
    u = (bits.astype(np.float64) + 0.5) / 2**31
    want = -np.log(-np.log1p(-u))
    got = noise(keys, positions, 64).double().numpy()
    # 1 - u is rounded for u near 1, where G is most negative and never decides a sample
    assert np.abs(got - want)[want > 0].max() < 2e-6
    assert np.abs(got - want).max() < 0.2
    assert np.allclose(uniform(torch.tensor(keys), torch.tensor(positions)).double(), u[:, 0], rtol=2e-7, atol=0)


# Keys and generations -------------------------------------------------------------------------------------------------


def test_keys_are_distinct_over_everything_that_names_a_rollout():
    names = [f"ex-{i}" for i in range(20)] + ["", "ex", "ex\x00", "ex 1", "1", "11"]
    keys = [
        derive_key(seed, name, slot, gen, domain)
        for seed in (0, 1, 11)
        for name in names
        for slot in range(12)
        for gen in range(12)
        for domain in ("rollout", "control", "replay")
    ]
    assert len(set(keys)) == len(keys)
    assert len({k & 0xFF for k in keys}) == 256  # the low byte is used as well
    assert len({derive_key(0, "a", s * g, 0) for s in range(5) for g in range(5)}) < 25  # control: it collides


@pytest.mark.parametrize("replay", [0.0, 0.25, 0.5, 0.875, 1.0])
def test_generation_keeps_the_share_that_is_asked_for(replay):
    slots, visits = 500, 8
    table = np.array([[generation(3, f"ex{s % 50}", s // 50, v, replay) for v in range(visits)] for s in range(slots)])
    assert (table[:, 0] == 0).all()
    assert (np.diff(table) >= 0).all(), "a generation never goes back"
    assert (table <= np.arange(visits)).all()
    kept = table[:, 1:] == table[:, :-1]
    assert ((table[:, 1:] == np.arange(1, visits)) == ~kept).all(), "not a replay means this visit's own noise"
    sigma = math.sqrt(replay * (1 - replay) / kept.size)
    assert abs(kept.mean() - replay) <= 5 * sigma
    if 0 < replay < 1:  # and the decisions of successive visits are independent
        both = (kept[:, 1:] & kept[:, :-1]).mean()
        assert abs(both - replay**2) < 5 * math.sqrt(replay**2 / kept[:, 1:].size)


def test_a_batch_is_one_visit_to_each_of_its_prompts():
    visits = Visits()
    assert visits.next(["a", "a", "b"]) == [0, 0, 0]
    assert visits.next(["b", "b"]) == [1, 1]
    assert visits.next(["a", "b", "c"]) == [1, 2, 0]


def test_counting_goes_on_from_what_was_saved():
    visits = Visits()
    visits.next(["a", "b"])
    visits.next(["a"])
    assert Visits(json.loads(json.dumps(visits.state()))).next(["a", "b", "c"]) == [2, 1, 0]


# Its distribution -----------------------------------------------------------------------------------------------------


def test_the_upper_tail_follows_the_law_down_to_1e_5():
    """Large G decide whether unlikely tokens are sampled: P(G > g) = 1 - exp(-exp(-g))."""
    sample = noise(keys_of(200, "tail"), torch.arange(200), 50_000)
    n = sample.numel()
    for probability in (1e-2, 1e-3, 1e-4, 1e-5, 1e-6):
        above = int((sample > -math.log(-math.log1p(-probability))).sum())
        assert abs(above - n * probability) < 5 * math.sqrt(n * probability), probability
    coarse = torch.floor((-torch.exp(-sample.double())).exp().mul(2**12)) / 2**12  # control: 12-bit uniforms
    above = int((coarse >= 1 - 1e-5).sum())
    assert abs(above - n * 1e-5) > 5 * math.sqrt(n * 1e-5)


def correlation(a, b) -> float:
    a, b = a.double().flatten() - a.double().mean(), b.double().flatten() - b.double().mean()
    return float((a * b).mean() / (a.std(correction=0) * b.std(correction=0)))


def test_noise_is_independent_across_positions_keys_and_tokens():
    keys, vocab = keys_of(100, "i"), 1000
    base = noise(keys, torch.full((100,), 5), vocab)
    others = {
        "next position": noise(keys, torch.full((100,), 6), vocab),
        "far position": noise(keys, torch.full((100,), 5 + 4096), vocab),
        "next key": noise(keys + 1, torch.full((100,), 5), vocab),
        "key bit 33": noise(keys ^ (1 << 33), torch.full((100,), 5), vocab),
        "other key": noise(keys.roll(1), torch.full((100,), 5), vocab),
        "next token": base.roll(1, dims=1),
        "token + 256": base.roll(256, dims=1),
    }
    for name, other in others.items():
        assert abs(correlation(base, other)) < 5 / math.sqrt(base.numel()), name
        assert abs(correlation((base > 3).float(), (other > 3).float())) < 5 / math.sqrt(base.numel()), name
    assert correlation(base, base) > 0.999  # control
    # small consecutive keys, as a user might choose them
    small = noise(torch.arange(100), torch.zeros(100, dtype=torch.long), vocab)
    assert abs(correlation(small[:-1], small[1:])) < 5 / math.sqrt(small[1:].numel())
    column = small.double().mean(0)  # no token is favoured over the keys
    assert ((column - 0.5772).abs() < 5.5 * 1.2825 / 10).all()


def test_the_noise_of_two_visits_is_independent():
    """Case 21 / D8: 4,000 cells of probability 1/2 in two successive visits. The reference reuses one seed."""
    logits = torch.zeros(4000, 2)
    at = torch.arange(4000) % 50

    def accepted(visit, replay):
        generations = [generation(0, f"ex{i // 8}", i % 8, visit, replay) for i in range(4000)]
        keys = torch.tensor([derive_key(0, f"ex{i // 8}", i % 8, g) for i, g in enumerate(generations)])
        return keyed_sample(logits, keys, at)[0], uniform(keys, at)

    (first, u), (second, v) = accepted(3, 0.0), accepted(4, 0.0)
    assert abs(correlation(first, second)) < 0.08
    assert abs(correlation(u, v)) < 0.08
    assert correlation(accepted(3, 1.0)[0], accepted(4, 1.0)[0]) > 0.9999  # control: a constant key
    half = correlation(accepted(3, 0.5)[0], accepted(4, 0.5)[0])
    assert abs(half - 0.5) < 0.08


# The sampling distribution (D1) ---------------------------------------------------------------------------------------

DRAWS = 20_000


def critical(df: int, alpha: float) -> float:
    """Upper chi-square quantile by Wilson and Hilferty, with z by bisection on erfc. Slightly too high for df = 1."""
    low, high = 0.0, 20.0
    for _ in range(100):
        mid = (low + high) / 2
        low, high = (mid, high) if math.erfc(mid / math.sqrt(2)) / 2 > alpha else (low, mid)
    return df * (1 - 2 / (9 * df) + low * math.sqrt(2 / (9 * df))) ** 3


def chi_square(counts: np.ndarray, p: np.ndarray) -> tuple[float, int]:
    """Statistic and degrees of freedom. Cells below 5 expected are pooled; a sample of probability 0 gives infinity."""
    n = counts.sum()
    if counts[p == 0].any():
        return math.inf, 1
    big = p * n >= 5
    observed, expected = counts[big].astype(float), p[big] * n
    rest = p[~big].sum() * n
    if rest >= 5:
        observed, expected = np.append(observed, counts[~big].sum()), np.append(expected, rest)
    elif rest:
        at = expected.argmin()
        observed[at] += counts[~big].sum()
        expected[at] += rest
    return float(((observed - expected) ** 2 / expected).sum()), max(len(observed) - 1, 1)


def laws() -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    out = []
    for vocab in (2, 8, 257):
        out += [rng.dirichlet(np.ones(vocab)), rng.dirichlet(np.full(vocab, 0.3))]
        zeros = rng.dirichlet(np.ones(vocab)) * (np.arange(vocab) % 2 == 0)
        out.append(zeros / zeros.sum())
        spiked = rng.dirichlet(np.ones(vocab)) * 2e-3
        spiked[vocab // 2] += 1 - 2e-3
        out.append(spiked / spiked.sum())
    return out


def product(logits, keys, at):
    return keyed_sample(logits, keys, at)[0]


def reused(logits, keys, at):
    return keyed_sample(logits, keys[:1].expand_as(keys), torch.zeros_like(at))[0]


def flipped(logits, keys, at):
    return (logits - noise(keys, at, logits.shape[1])).argmax(-1)


def flat_noise(logits, keys, at):
    u = torch.rand(logits.shape, generator=torch.Generator().manual_seed(1))
    return (logits + u).argmax(-1)


def no_noise(logits, keys, at):
    return logits.argmax(-1)


def tempered_twice(logits, keys, at):
    return keyed_sample(logits / 0.7, keys, at)[0]


def test_draws_follow_the_law_and_wrong_rules_do_not():
    tests, rejected = laws(), dict.fromkeys((reused, flipped, flat_noise, no_noise, tempered_twice), 0)
    alpha = 1e-6 / len(tests)
    for i, p in enumerate(tests):
        keys = keys_of(DRAWS // 4, f"law{i}").repeat_interleave(4)
        at = torch.arange(DRAWS) % 4
        logits = torch.tensor(p).log().float().expand(DRAWS, -1)
        statistic, df = chi_square(np.bincount(product(logits, keys, at), minlength=len(p)), p)
        assert statistic < critical(df, alpha), f"law {i}"
        if (p > 0).sum() > 1:
            for wrong in rejected:
                statistic, df = chi_square(np.bincount(wrong(logits, keys, at), minlength=len(p)), p)
                rejected[wrong] += statistic > critical(df, alpha)
    assert rejected[reused] >= 9, rejected
    assert min(rejected.values()) >= 6, {rule.__name__: n for rule, n in rejected.items()}


def test_draws_follow_the_processed_law():
    rng = np.random.default_rng(3)
    for i, (temperature, top_k, top_p) in enumerate([(0.7, 0, 1.0), (1.3, 5, 1.0), (1.0, 0, 0.8), (0.9, 6, 0.9)]):
        p = rng.dirichlet(np.ones(12))
        law = processed_by_hand(np.log(p), temperature, top_k, top_p)
        keys, at = keys_of(DRAWS, f"processed{i}"), torch.arange(DRAWS) % 5
        settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        logits = torch.tensor(np.log(p)).float().expand(DRAWS, -1)
        draws = keyed_sample(logits, keys, at, **settings)[0]
        statistic, df = chi_square(np.bincount(draws, minlength=12), law)
        assert statistic < critical(df, 1e-7)
        plain = keyed_sample(logits, keys, at)[0]
        statistic, df = chi_square(np.bincount(plain, minlength=12), law)
        assert statistic > critical(df, 1e-7)  # control: the unprocessed distribution differs


# Processing -----------------------------------------------------------------------------------------------------------


def processed_by_hand(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    z = logits.astype(np.float64) / temperature
    if top_k:
        z = np.where(z >= np.sort(z)[-top_k], z, -np.inf)
    p = np.exp(z - z.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    mass = 0.0
    for v in order:
        if mass >= top_p:
            p[v] = 0
        mass += p[v]
    return p / p.sum()


def test_the_nucleus_boundary():
    p = torch.tensor([[0.125, 0.5, 0.25, 0.125]])  # exact in binary
    kept = {
        0.49: [False, True, False, False],
        0.5: [False, True, False, False],
        0.51: [False, True, True, False],
        0.75: [False, True, True, False],
        0.76: [True, True, True, True],  # of two equal tokens both are kept
        0.9: [True, True, True, True],
        1.0: [True, True, True, True],
    }
    for top_p, want in kept.items():
        assert process_logits(p.log(), top_p=top_p).isfinite()[0].tolist() == want, top_p
    hot = process_logits(p.log(), temperature=0.5, top_p=0.75)  # squares: 1/22, 16/22, 4/22, 1/22
    assert hot.isfinite()[0].tolist() == [False, True, True, False]
    assert process_logits(p.log(), temperature=2.0, top_p=0.75).isfinite()[0].tolist() == [True, True, True, True]


def nucleus_by_hand(logits: np.ndarray, top_p: float) -> np.ndarray:
    """bool [N, V] in float64: tokens for which all likelier tokens together have a mass below `top_p`."""
    p = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    kept = []
    for row in p / p.sum(-1, keepdims=True):
        values, counts = np.unique(row, return_counts=True)
        likelier = np.append(np.cumsum((values * counts)[::-1])[-2::-1], 0.0)
        kept.append(likelier[np.searchsorted(values, row)] < top_p)
    return np.array(kept)


@pytest.mark.parametrize(("kind", "fault"), [(torch.float32, 1e-3), (torch.bfloat16, 0.02)])
def test_the_nucleus_is_the_same_in_any_order_and_as_in_float64(kind, fault):
    g = torch.Generator().manual_seed(8)
    logits = (torch.randn(12, 30_000, generator=g) * 2).to(kind)
    order = torch.randperm(30_000, generator=g)
    other = 0
    for top_p in (0.3, 0.9, 0.99):
        kept = process_logits(logits, top_p=top_p) > -torch.inf
        assert (process_logits(logits[:, order], top_p=top_p) > -torch.inf).equal(kept[:, order])
        assert kept.equal(torch.tensor(nucleus_by_hand(logits.float().numpy(), top_p)))
        other += int((kept != torch.tensor(nucleus_by_hand(logits.float().numpy(), top_p + fault))).any())
    assert other == 3, "control: a little more mass is seen"


def test_top_k_comes_before_the_nucleus_and_both_after_temperature():
    rng = np.random.default_rng(0)
    for _ in range(10):
        logits = rng.normal(size=20) * 2
        for settings in [(0.7, 5, 0.9), (1.4, 3, 0.6), (1.0, 0, 0.5), (1.0, 7, 1.0)]:
            z = process_logits(torch.tensor(logits[None]), *settings)
            want = processed_by_hand(logits, *settings)
            assert np.allclose(z.softmax(-1)[0].numpy(), want, atol=1e-6)
    z = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert process_logits(z, top_k=2, top_p=0.55).isfinite().sum() == 1  # 0.4 / 0.7 of the two remaining tokens
    assert process_logits(z, top_p=0.55).isfinite().sum() == 2  # control: of all four
    ties = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    assert process_logits(ties, top_k=1).isfinite().tolist() == [[False, True, True, True, False]]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 1.3])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.7), (5, 0.7)])
def test_logprobs_are_those_of_the_processed_law(temperature, top_k, top_p):
    logits = torch.randn(40, 30, generator=torch.Generator().manual_seed(2)) * 2
    targets = torch.arange(40) % 30
    settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    draws, logp, logp_targets, gap = keyed_sample(logits, keys_of(40), torch.arange(40), targets, **settings)
    want = process_logits(logits, temperature, top_k, top_p).log_softmax(-1)
    assert torch.allclose(logp, want.gather(1, draws[:, None])[:, 0], atol=1e-6)
    assert torch.allclose(logp_targets, want.gather(1, targets[:, None])[:, 0], atol=1e-6)
    assert logp.isfinite().all()
    assert (logp <= 1e-6).all()
    assert (gap >= 0).all()
    if (top_k, top_p) != (0, 1.0):
        assert logp_targets.isinf().any(), "a target outside the cut has probability 0"
    alone = keyed_sample(logits, keys_of(40), torch.arange(40), **settings)
    assert alone[0].equal(draws)
    assert alone[2].equal(alone[1]), "without targets the draws are the targets"


def test_greedy_draws_ignore_the_noise():
    logits = torch.randn(20, 30, generator=torch.Generator().manual_seed(2))
    draws, _, _, gap = keyed_sample(logits, keys_of(20), torch.arange(20), temperature=0.0)
    best = logits.topk(2).values
    assert draws.equal(logits.argmax(-1))
    assert torch.allclose(gap, best[:, 0] - best[:, 1])
    assert not keyed_sample(logits, keys_of(20), torch.arange(20))[0].equal(draws)  # control


CUTS = [{}, {"temperature": 0.0}, {"top_p": 0.5}, {"top_k": 2}, {"top_k": 2, "top_p": 0.5}]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("settings", CUTS, ids=str)
def test_unusable_logits_give_a_nan_gap(bad, settings):
    logits = torch.zeros(3, 6)
    logits[1, 4] = bad
    assert keyed_sample(logits, keys_of(3), torch.arange(3), **settings)[3].isnan().tolist() == [False, True, False]
    nothing_left = torch.full((1, 6), -torch.inf)
    assert keyed_sample(nothing_left, keys_of(1), torch.arange(1), **settings)[3].isnan().all()
