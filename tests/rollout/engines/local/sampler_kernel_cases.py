"""The sampling kernels on Triton's interpreter, compared with rollout/noise.py.

test_sampler.py runs this file in a process with TRITON_INTERPRET=1 from its start. The interpreter has no CUDA math
functions, so numpy's replace the three that the kernels use.
"""

import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime.interpreter import TensorHandle

from specrl.rollout.engines.local import sampler_kernel
from specrl.rollout.engines.local.sampler import unpack
from specrl.rollout.noise import hash_tokens, keyed_sample, masses, process_logits, row_words
from tests.interpreter import quicken

CLOSE = 3e-6
"""A few units in the last place of scores and log-probs around 16."""


quicken()


def stand_in(function):
    return lambda x: tl.tensor(TensorHandle(function(x.handle.data), x.handle.dtype), x.type)


for name in ("exp", "log", "log1p"):
    setattr(libdevice, name, stand_in(getattr(np, name)))


@triton.jit
def integers(keys, positions, zs, hashes, weights, vocab, BLOCK: tl.constexpr):
    n, token = tl.program_id(0), tl.arange(0, BLOCK)
    inside = token < vocab
    z = tl.load(zs + n * vocab + token, mask=inside, other=-float("inf"))
    found = sampler_kernel.token_hash(tl.load(keys + n), tl.load(positions + n), token)
    tl.store(hashes + n * vocab + token, found.to(tl.int32, bitcast=True), mask=inside)
    tl.store(weights + n * vocab + token, sampler_kernel.weigh(z, tl.max(z)), mask=inside)


def rows(n, vocab, kind=torch.float32, seed=0):
    """logits, keys, positions, targets."""
    g = torch.Generator().manual_seed(seed)
    logits = (torch.randn(n, vocab, generator=g) * 3).to(kind)
    keys = torch.randint(-(2**63), 2**63 - 1, (n,), generator=g)
    positions, targets = (torch.randint(0, most, (n,), generator=g) for most in (9000, vocab))
    return logits, keys, positions, targets


def law(temperature=1.0, top_k=0, top_p=1.0):
    return temperature, top_k, top_p


def agree(given, law, ids=None) -> bool:
    """Whether the kernels agree with noise.py: equal samples, and floats equal except for the last bits."""
    logits, keys, positions, targets = given
    temperature, top_k, top_p = law
    want = keyed_sample(logits, keys, positions, targets, ids, temperature=temperature, top_k=top_k, top_p=top_p)
    draws, *floats = unpack(sampler_kernel.keyed_sample(*given, *law, ids))
    near = (
        torch.tensor(a).allclose(b, rtol=0, atol=CLOSE, equal_nan=True) for a, b in zip(floats, want[1:], strict=True)
    )
    return draws == want[0].tolist() and all(near)


LAWS = [(t, k, p) for t in (0.0, 0.7, 1.0) for k in (0, 1, 5, 50) for p in (1.0, 0.95, 0.3)]
FEW = [law(), law(0.7, 50, 0.95), law(0.0, 5), law(1.0, 0, 0.3)]
SHAPES = [(1, 7, LAWS), (3, 1000, LAWS[::5]), (5, 4099, FEW[:2])]


@pytest.mark.parametrize(("n", "vocab", "laws"), SHAPES, ids=lambda x: "" if isinstance(x, list) else str(x))
def test_the_same_draws_and_logprobs_as_on_a_cpu(n, vocab, laws):
    given = rows(n, vocab, torch.bfloat16 if n == 3 else torch.float32)
    for law in laws:
        assert agree(given, law), law


@pytest.mark.parametrize("law", FEW[:2], ids=str)
def test_and_of_the_ids_that_columns_are_given(law):
    given = rows(3, 4099)
    ids = torch.randperm(152_000, generator=torch.Generator().manual_seed(1))[:4099].sort().values.int()
    assert agree(given, law, ids)
    draws = sampler_kernel.keyed_sample(*given, *law, ids)[0]
    assert torch.isin(draws, ids).all()
    assert not draws.equal(sampler_kernel.keyed_sample(*given, *law)[0]), "control"


def test_integers_are_the_same():
    logits, keys, positions, _ = rows(5, 4099)
    logits[1, 7], logits[2] = -torch.inf, logits[2] * 30
    hashes, weights = torch.zeros(5, 4099, dtype=torch.int32), torch.zeros(5, 4099, dtype=torch.int64)
    integers[(5,)](keys, positions, logits, hashes, weights, 4099, BLOCK=8192)
    assert hashes.equal(hash_tokens(*row_words(keys, positions), 4099))
    assert weights.equal(masses(logits, logits.amax(-1, keepdim=True)))
    assert weights[1, 7] == 0
    assert not hashes.equal(hash_tokens(*row_words(keys, positions + 1), 4099)), "control"


def test_temperatures_divide_as_on_a_cpu():
    """A multiplication by the reciprocal or a fast division would move some thresholds and log-probs."""
    for temperature in (0.3, 0.7, 1.1, 1.7):
        z = torch.randn(1, 4096, generator=torch.Generator().manual_seed(1)) * 9
        assert agree((z, *rows(1, 4096)[1:]), law(temperature, 7, 0.6))


# Tokens kept by top-k and top-p ---------------------------------------------------------------------------------------


def kept_by_kernel(logits, law):
    """bool [N, V]: the tokens that the kernel keeps."""
    (n, vocab), (temperature, top_k, top_p) = logits.shape, law
    floors = torch.empty(n)
    settings = {"TOP_K": top_k, "TOP_P": top_p, "SCALED": temperature != 1.0, "BLOCK": 16}
    sampler_kernel.search[(n,)](logits, floors, vocab, temperature, **settings)
    return (logits / temperature >= floors[:, None]) & (logits > -torch.inf)


def adversarial():
    """Logits [N, 24] with ties at the threshold, zeros of both signs, one-ulp steps, and masses that equal top_p."""
    g = torch.Generator().manual_seed(3)
    steps = torch.tensor(1.0).view(torch.int32) + torch.arange(24, dtype=torch.int32)
    halves = torch.cat([-torch.arange(1.0, 24), torch.tensor([-23.0])]) * math.log(2)
    return torch.stack(
        [
            torch.randn(24, generator=g),
            torch.randint(0, 4, (24,), generator=g).float(),  # ties everywhere
            torch.zeros(24),
            torch.tensor([0.0, -0.0] * 12),
            steps.view(torch.float32)[torch.randperm(24, generator=g)],
            -steps.view(torch.float32)[torch.randperm(24, generator=g)],
            halves.float()[torch.randperm(24, generator=g)],  # 1/2, 1/4, ...: their partial sums equal top_p exactly
            torch.cat([torch.full((20,), -torch.inf), torch.tensor([1.0, 1.0, 0.5, -3e38])]),
            torch.randn(24, generator=g) * 1e-30,
        ]
    )


@pytest.mark.parametrize("law", [law(1, 5), law(1, 1), law(1, 0, 0.5), law(1, 0, 0.75), law(0.7, 4, 0.3)], ids=str)
def test_a_cut_keeps_the_same_tokens(law):
    logits = adversarial()
    want = process_logits(logits, *law) > -torch.inf
    assert kept_by_kernel(logits, law).equal(want)
    assert not want.all()


def test_the_edge_of_the_nucleus_is_the_same_in_large_rows():
    """The last token kept and the first one removed, in rows with many masses near the threshold."""
    for top_p in (0.3, 0.9, 0.999999):
        logits = torch.randn(3, 9001, generator=torch.Generator().manual_seed(5)) * 2
        z = process_logits(logits, top_p=top_p)
        last = z.masked_fill(z == -torch.inf, torch.inf).argmin(-1)
        first = logits.masked_fill(z > -torch.inf, -torch.inf).argmax(-1)
        for targets, stays in ((last, True), (first, False)):
            packed = sampler_kernel.keyed_sample(logits, torch.arange(3), torch.arange(3), targets, 1.0, 0, top_p)
            assert [math.isfinite(x) for x in unpack(packed)[2]] == [stays] * 3


# Rows are independent -------------------------------------------------------------------------------------------------


def test_a_row_depends_on_nothing_beside_it():
    given = rows(6, 4099)
    turned = torch.randperm(6, generator=torch.Generator().manual_seed(2))
    for law in FEW[:2]:
        together = sampler_kernel.keyed_sample(*given, *law)
        alone = [sampler_kernel.keyed_sample(*(x[i : i + 1] for x in given), *law) for i in (0, 2, 5)]
        assert torch.cat(alone, 1).equal(together[:, [0, 2, 5]])
        assert sampler_kernel.keyed_sample(*(x[turned] for x in given), *law).equal(together[:, turned])


@pytest.mark.parametrize("law", [*FEW[1:3], law(0.7)], ids=str)
def test_infinite_and_missing_logits(law):
    logits, keys, positions, targets = rows(6, 4099)
    logits[0, 100:] = -torch.inf
    logits[1, :4097] = -torch.inf
    logits[2] = -torch.inf
    logits[3, 4098] = torch.nan
    logits[4, 17] = torch.inf
    good = [0, 1, 5]
    assert agree(tuple(x[good] for x in (logits, keys, positions, targets)), law)
    draws, _, _, gaps = unpack(sampler_kernel.keyed_sample(logits, keys, positions, targets, *law))
    assert [math.isnan(gap) for gap in gaps] == [False, False, True, True, True, False]
    assert draws[3:5] == [4098, 17]
    assert draws[2] == 0


def test_no_rows_and_strided_rows():
    given = rows(4, 100)
    assert sampler_kernel.keyed_sample(*(x[:0] for x in given), *law()).shape == (4, 0)
    wide = torch.stack([given[0], given[0] + 1], -1)[..., 0]
    assert not wide.is_contiguous()
    assert sampler_kernel.keyed_sample(wide, *given[1:], *law()).equal(sampler_kernel.keyed_sample(*given, *law()))


# The distribution, and planted faults ---------------------------------------------------------------------------------


def position_late(given):
    return given[0], given[1], given[2] + 1, given[3]


def target_beside(given):
    return *given[:3], (given[3] + 1) % given[0].shape[1]


@pytest.mark.parametrize("fault", [position_late, target_beside])
def test_wrong_rows_are_seen(fault, monkeypatch):
    given, draw = rows(3, 1000), sampler_kernel.keyed_sample
    assert agree(given, law())
    monkeypatch.setattr(sampler_kernel, "keyed_sample", lambda *all: draw(*fault(all[:4]), *all[4:]))
    assert not agree(given, law())


@pytest.mark.parametrize(
    ("fault", "law"),
    [
        ({"MIX_A": "MIX_B", "MIX_B": "MIX_A"}, law()),
        ({"ROUND_A": "ROUND_B", "ROUND_B": "ROUND_A"}, law()),
        ({"STEP": "ROUND_A"}, law()),
        ({"P1": "P2"}, law(1, 0, 0.3)),
    ],
    ids=str,
)
def test_swapped_constants_are_seen(fault, law, monkeypatch):
    for name, value in {name: getattr(sampler_kernel, other) for name, other in fault.items()}.items():
        monkeypatch.setattr(sampler_kernel, name, value)
    assert not agree(rows(5, 1000), law)


@pytest.mark.parametrize("off", [lambda found: found + 1, lambda found: found - 1], ids=["above", "below"])
@pytest.mark.parametrize("law", [law(1, 5), law(1, 0, 0.5)], ids=str)
def test_a_threshold_off_by_one_is_seen(off, law, monkeypatch):
    """One token more or less, in rows whose neighbouring logits differ by one ulp."""
    logits, bisect = adversarial()[4:6], sampler_kernel.bisect
    want = process_logits(logits, *law) > -torch.inf
    assert kept_by_kernel(logits, law).equal(want)
    monkeypatch.setattr(sampler_kernel, "bisect", lambda *a, **k: off(bisect(*a, **k)))
    assert not kept_by_kernel(logits, law).equal(want)
