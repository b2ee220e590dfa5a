"""A copy of the policy in int8, weights and inputs, as a drafter that needs no training."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


class Int8Linear(nn.Module):
    """A linear layer that multiplies in int8: weights rounded by output, inputs by token (as in arXiv 2208.07339).

    Sums of integers have no order and a token's scale is its own, so that its result depends on no other token of the
    pass: the engine takes such a model, as it does not take one of torch's dynamic quantisation, whose inputs share a
    scale.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        weight = linear.weight.detach().float()
        self.register_buffer("scale", _scale(weight))
        self.register_buffer("weight", (weight / self.scale[:, None]).round_().to(torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, self.in_features).float()
        scale = _scale(flat)[:, None]
        sums = torch._int_mm((flat / scale).round_().to(torch.int8), self.weight.t())
        out = sums.float().mul_(scale).mul_(self.scale).to(x.dtype).view(*x.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias


def int8_copy(policy: nn.Module) -> nn.Module:
    """The policy with its layers' matrices in int8; embedding, norms and head are the policy's own."""
    return _with(policy, {policy.base_model_prefix: _rounded(policy.base_model)})


def _scale(x: Tensor) -> Tensor:
    """What 1 means in int8, for each row of x."""
    return x.abs().amax(-1).div_(127).clamp_(min=torch.finfo(torch.float32).tiny)


def _rounded(module: nn.Module) -> nn.Module:
    if isinstance(module, nn.Linear):
        return Int8Linear(module)
    return _with(module, {name: _rounded(child) for name, child in module.named_children()})


def _with(module: nn.Module, parts: dict[str, nn.Module]) -> nn.Module:
    """A shallow copy with other children: its own parameters are the module's."""
    made = copy.copy(module)
    made._modules = {**module._modules, **parts}
    return made
