import math

import pytest
import torch

from specrl.trainers.correction import correction_weights
from specrl.trainers.cotraining.distil import forward_kl, largest
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


def test_the_distillation_loss_by_hand():
    student, teacher = Q + 3.0, P - 1.0  # logits: a constant has no effect
    assert forward_kl(student, teacher).tolist() == pytest.approx([FORWARD], abs=1e-6)
    assert forward_kl(student.bfloat16(), teacher).dtype == torch.float32
    assert forward_kl(teacher, teacher).tolist() == pytest.approx([0.0], abs=1e-6)
    assert forward_kl(teacher, student).item() != pytest.approx(FORWARD, abs=1e-3), "control: the direction matters"


def test_the_gradient_of_the_distillation_loss():
    generator = torch.Generator().manual_seed(0)
    student, teacher = (2 * torch.randn(50, 17, generator=generator) for _ in range(2))
    (gradient,) = torch.autograd.grad(forward_kl(student.requires_grad_(), teacher).mean(), student)
    assert torch.allclose(gradient, (student.softmax(-1) - teacher.softmax(-1)) / 50, atol=1e-7)


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
