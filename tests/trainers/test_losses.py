import math

import pytest
import torch

from specrl.trainers.correction import correction_weights
from specrl.trainers.cotraining.distil import forward_kl, largest, total_variation
from specrl.trainers.ppo.objectives import value_loss

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


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask"])
def test_on_policy_text_is_not_weighted(mode):
    logp = torch.randn(4, 9, generator=torch.Generator().manual_seed(0)) - 3
    assert correction_weights(logp, logp.clone(), torch.ones(4, 9), mode, 2.0).equal(torch.ones(4, 9))


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask"])
def test_padding_never_matters(mode):
    base = correction_weights(LOGP, BEHAVIOUR, MASK, mode, 5.0)
    other = LOGP.clone()
    other[1, 2] = 50.0
    assert correction_weights(other, BEHAVIOUR, MASK, mode, 5.0).equal(base)
    assert not correction_weights(other, BEHAVIOUR, torch.ones_like(MASK), mode, 5.0).equal(base)  # control


# Distillation

P, Q = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
FORWARD = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)


@pytest.mark.parametrize(
    ("loss", "want"),
    [
        (forward_kl, FORWARD),
        (total_variation, 0.25),
    ],
)
def test_distillation_losses_by_hand(loss, want):
    student, teacher = Q + 3.0, P - 1.0  # logits: a constant has no effect
    assert loss(student, teacher).tolist() == pytest.approx([want], abs=1e-6)
    assert loss(student.bfloat16(), teacher).dtype == torch.float32
    assert loss(teacher, teacher).tolist() == pytest.approx([0.0], abs=1e-6)
    if loss is forward_kl:
        assert loss(teacher, student).item() != pytest.approx(want, abs=1e-3)  # control: the direction matters


def logits_of(n=50, vocab=17):
    generator = torch.Generator().manual_seed(0)
    student, teacher = (2 * torch.randn(n, vocab, generator=generator) for _ in range(2))
    return student.requires_grad_(), teacher


def gradient(loss, student):
    return torch.autograd.grad(loss.mean(), student)[0]


def policy_gradient(student, teacher, plus=1):
    """-E_q[r grad log q] with r = 1 where p > q, summed over the vocabulary. `plus=-1` is a planted wrong sign."""
    p, log_q = teacher.softmax(-1), student.log_softmax(-1)
    q = log_q.exp().detach()
    reward = plus * (p > q).float()
    return gradient(-(q * reward * log_q).sum(-1), student)


def test_gradients_of_the_distillation_losses():
    student, teacher = logits_of()
    p, q = teacher.softmax(-1), student.softmax(-1)
    assert torch.allclose(gradient(forward_kl(student, teacher), student), (q - p) / len(p), atol=1e-7)
    half = 0.5 * (p - q).abs().sum(-1)
    assert torch.allclose(total_variation(student, teacher), half, atol=1e-6)
    by_autograd = gradient(half, student)
    assert torch.allclose(gradient(total_variation(student, teacher), student), by_autograd, atol=1e-7)
    assert torch.allclose(policy_gradient(student, teacher), by_autograd, atol=1e-7)
    assert not torch.allclose(policy_gradient(student, teacher, plus=-1), by_autograd, atol=1e-3)  # control


@pytest.mark.parametrize(("share", "want"), [(0.4, [0, 0, 1, 0, 1]), (0.01, [0, 0, 1, 0, 0]), (1.0, [1] * 5)])
def test_the_largest_values_are_kept(share, want):
    assert largest(torch.tensor([0.1, -3.0, 5.0, 0.0, 2.0]), share).int().tolist() == want
    assert largest(torch.zeros(5), share).all(), "ties stay"


# PPO ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "old", "target", "loss"),
    [
        (0.5, 0.5, 1.0, 0.125),
        (0.9, 0.5, 1.0, 0.045),  # clipped at 0.7: the larger error counts
        (0.2, 0.5, 1.0, 0.32),  # moved away: the unclipped error is larger
    ],
)
def test_clipped_value_error_by_hand(value, old, target, loss):
    actual = value_loss(torch.tensor([[value]]), torch.tensor([[old]]), torch.tensor([[target]]))
    assert actual.item() == pytest.approx(loss)
