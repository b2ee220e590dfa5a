"""How far a draft model's law is from the policy's, at each of N positions."""

from __future__ import annotations

from torch import Tensor


def forward_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(teacher || student) [N], in nats: the student covers all that the teacher may draw.

    Args: student, teacher: finite logits [N, V] of any float type, of the same temperature.
    """
    p, q = teacher.float().log_softmax(-1), student.float().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def total_variation(student: Tensor, teacher: Tensor) -> Tensor:
    """Half the sum of |p - q| [N], 0 to 1; logits [N, V] may be -inf.

    Keyed draws of both laws agree with a probability between (1 - TV) / (1 + TV) and 1 - TV (arXiv 2408.07978).
    """
    return (teacher.float().softmax(-1) - student.float().softmax(-1)).clamp(min=0).sum(-1)


def tvd(student: Tensor, teacher: Tensor) -> Tensor:
    """Total variation [N] with the gradient of TVD++ (arXiv 2403.00858). Logits [N, V].

    The gradient of TV is that of a policy with reward r(v) = 1 where p(v) > q(v), negated; TVD++ normalises r by its
    mean and deviation over the batch. Summed over the whole vocabulary instead of sampled, the mean drops out and the
    deviation sqrt(m (1 - m)), m the batch mean of E_q[r], divides.
    """
    p, q = teacher.float().softmax(-1), student.float().softmax(-1).detach()
    m = ((p > q) * q).sum(-1).mean()
    deviation = (m * (1 - m)).sqrt().clamp(min=0.01)  # 0 where the student has arrived
    return total_variation(student, teacher) / deviation


def largest(values: Tensor, share: float) -> Tensor:
    """True [N] for the values [N] that reach the (1 - share) quantile, at least one; ties with it are kept."""
    n = values.numel()
    kept = min(n, max(1, round(share * n)))
    return values >= values.kthvalue(n - kept + 1).values
