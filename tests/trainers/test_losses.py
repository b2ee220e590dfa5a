import math

import pytest
import torch

from trainers.losses import adapted_beta, clipped, correction_weights, kl_estimate, policy_loss, value_loss

LN2 = math.log(2)
# ratios by row: (1/4, 1, 8), (2, 2, padding), (1, 1, 1)
LOGP = torch.tensor([[-2.0 - 2 * LN2, -1.0, -1.0], [-1.0, -1.0, -9.0], [-0.5, -0.5, -0.5]])
BEHAVIOUR = torch.tensor([[-2.0, -1.0, -1.0 - 3 * LN2], [-1.0 - LN2, -1.0 - LN2, -1.0], [-0.5, -0.5, -0.5]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1]])


@pytest.mark.parametrize(
    ("mode", "cap", "want"),
    [
        ("none", 2.0, [[1, 1, 1], [1, 1, 1], [1, 1, 1]]),
        ("token_truncate", 2.0, [[0.25, 1, 2], [2, 2, 1], [1, 1, 1]]),
        ("token_truncate", 1.0, [[0.25, 1, 1], [1, 1, 1], [1, 1, 1]]),
        ("token_truncate", 100.0, [[0.25, 1, 8], [2, 2, 1], [1, 1, 1]]),
        ("token_mask", 2.5, [[0, 1, 0], [2, 2, 1], [1, 1, 1]]),
        ("token_mask", 4.5, [[0.25, 1, 0], [2, 2, 1], [1, 1, 1]]),
        ("token_mask", 1.5, [[0, 1, 0], [0, 0, 1], [1, 1, 1]]),
        ("sequence_truncate", 100.0, [[2, 2, 2], [4, 4, 4], [1, 1, 1]]),  # 1/4 * 1 * 8, and 2 * 2 without the padding
        ("sequence_truncate", 3.0, [[2, 2, 2], [3, 3, 3], [1, 1, 1]]),
        ("sequence_mask", 3.0, [[2, 2, 2], [0, 0, 0], [1, 1, 1]]),
        ("sequence_mask", 5.0, [[2, 2, 2], [4, 4, 4], [1, 1, 1]]),
    ],
)
def test_hand_values(mode, cap, want):
    weights = correction_weights(LOGP, BEHAVIOUR, MASK, mode, cap)
    assert torch.allclose(weights, torch.tensor(want, dtype=torch.float32), atol=1e-5)


def test_small_sequence_ratios_are_masked_but_not_truncated():
    logp, behaviour, mask = torch.tensor([[-2.0, -2.0]]), torch.tensor([[-1.0, -1.0]]), torch.ones(1, 2)
    assert correction_weights(logp, behaviour, mask, "sequence_mask", 3.0).tolist() == [[0.0, 0.0]]
    kept = correction_weights(logp, behaviour, mask, "sequence_truncate", 3.0)
    assert torch.allclose(kept, torch.full((1, 2), math.exp(-2)))


@pytest.mark.parametrize("mode", ["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_on_policy_text_is_not_weighted(mode):
    logp = torch.randn(4, 9, generator=torch.Generator().manual_seed(0)) - 3
    assert correction_weights(logp, logp.clone(), torch.ones(4, 9), mode, 2.0).equal(torch.ones(4, 9))


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_padding_never_matters(mode):
    base = correction_weights(LOGP, BEHAVIOUR, MASK, mode, 5.0)
    other = LOGP.clone()
    other[1, 2] = 50.0
    assert correction_weights(other, BEHAVIOUR, MASK, mode, 5.0).equal(base)
    assert not correction_weights(other, BEHAVIOUR, torch.ones_like(MASK), mode, 5.0).equal(base)  # control


def test_truncated_weights_make_an_unbiased_estimate_where_nothing_is_cut():
    """E_q[w f] = E_p[f], by exact summation over four tokens; a wrong direction of the ratio would not."""
    p, q = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.4, 0.3, 0.2, 0.1])
    f = torch.tensor([1.0, -2.0, 3.0, 5.0])
    weights = correction_weights(p.log()[:, None], q.log()[:, None], torch.ones(4, 1), "token_truncate", 10.0)[:, 0]
    assert (q * weights * f).sum().item() == pytest.approx((p * f).sum().item(), abs=1e-5)
    inverted = correction_weights(q.log()[:, None], p.log()[:, None], torch.ones(4, 1), "token_truncate", 10.0)[:, 0]
    assert (q * inverted * f).sum().item() != pytest.approx((p * f).sum().item(), abs=0.5)


# PPO ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "low", "high"),
    [
        (1.0, 2.0, -2.0, 0, 0),
        (1.1, 2.0, -2.2, 0, 0),
        (1.5, 2.0, -2.6, 0, 1),  # up to 1 + high
        (0.5, 2.0, -1.0, 0, 0),  # too rare and wanted: free to grow
        (0.5, -2.0, 1.6, 1, 0),  # down to 1 - low
        (1.5, -2.0, 3.0, 0, 0),  # too frequent and unwanted: free to fall
    ],
)
def test_clipped_surrogate_by_hand(ratio, advantage, loss, low, high):
    logp = torch.tensor([[math.log(ratio) - 1]], requires_grad=True)
    given = (logp, torch.tensor([[-1.0]]), torch.tensor([[advantage]]), 0.2, 0.3)
    found = policy_loss(*given)
    assert found.item() == pytest.approx(loss)
    assert [part.item() for part in clipped(*given)] == [low, high]
    found.sum().backward()
    assert (logp.grad.item() == 0) == bool(low or high), "clipped tokens have no gradient"


def test_the_gradient_at_ratio_one_is_reinforce():
    logp = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    policy_loss(logp, logp.detach(), torch.tensor([[3.0, -0.5]]), 0.2, 0.2).sum().backward()
    assert logp.grad.tolist() == [[-3.0, 0.5]]


@pytest.mark.parametrize(
    ("value", "old", "target", "clip", "loss"),
    [
        (0.5, 0.5, 1.0, 0.2, 0.125),
        (0.9, 0.5, 1.0, 0.2, 0.045),  # held at 0.7: the larger error counts
        (0.9, 0.5, 1.0, 0.0, 0.005),  # not clipped
        (0.2, 0.5, 1.0, 0.2, 0.32),  # moved away: its own error is the larger
    ],
)
def test_clipped_value_error_by_hand(value, old, target, clip, loss):
    found = value_loss(torch.tensor([[value]]), torch.tensor([[old]]), torch.tensor([[target]]), clip)
    assert found.item() == pytest.approx(loss)


def test_kl_estimate_is_unbiased_and_never_negative():
    p, q = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.4, 0.3, 0.2, 0.1])
    estimate = kl_estimate(p.log(), q.log())
    assert (estimate >= 0).all()
    assert (p * estimate).sum().item() == pytest.approx((p * (p / q).log()).sum().item(), abs=1e-6)
    wrong = kl_estimate(q.log(), p.log())  # the other direction
    assert (p * wrong).sum().item() != pytest.approx((p * (p / q).log()).sum().item(), abs=1e-2)


@pytest.mark.parametrize(("kl", "want"), [(0.1, 0.5), (0.11, 0.505), (5.0, 0.51), (0.09, 0.495), (0.0, 0.49)])
def test_the_kl_weight_moves_towards_its_target(kl, want):
    assert adapted_beta(0.5, kl, 0.1) == pytest.approx(want)
