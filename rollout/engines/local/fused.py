"""One kernel for each norm of a model, where transformers computes it in eight."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rms_norms(model: nn.Module) -> list[tuple[nn.Module, float]]:
    """The modules that are root mean square norms, found by what they compute, and what each adds to the mean square.

    A norm with another formula, such as one that multiplies by 1 + weight, is not among them.
    """
    found = []
    for module in model.modules():
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if [name for name, _ in module.named_parameters()] == ["weight"] and isinstance(eps, float):
            weight = module.weight
            seeded = torch.Generator().manual_seed(0)
            x, other = (torch.randn(n, *weight.shape, generator=seeded).to(weight) for n in (2, 1))
            with torch.no_grad():
                own = torch.func.functional_call(module, {"weight": other[0]}, (x,))
                fused = F.rms_norm(x, weight.shape, other[0], eps)
            if own.shape == fused.shape and torch.allclose(own, fused, rtol=4 * torch.finfo(x.dtype).eps, atol=1e-6):
                found.append((module, eps))
    return found


@contextmanager
def fused(norms: list[tuple[nn.Module, float]]) -> Iterator[None]:
    """These norms in one kernel each for a while; they round once instead of twice, so bits differ.

    Those that are fused already stay so: a draft model may share the policy's.
    """
    norms = [(module, eps) for module, eps in norms if "forward" not in vars(module)]
    try:
        for module, eps in norms:
            module.forward = partial(_rms_norm, module, eps)
        yield
    finally:
        for module, _ in norms:
            del module.forward


def _rms_norm(module: nn.Module, eps: float, x: Tensor) -> Tensor:
    return F.rms_norm(x, module.weight.shape, module.weight, eps)
