"""Packed passes on GPUs: of few sizes, without a wait in between, captured as CUDA graphs when a shape comes again."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from specrl.rollout.config import RolloutConfig
from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.engines.local import varlen
from specrl.rollout.engines.local.graphs import Graphs, cuda_graphs
from specrl.rollout.engines.local.kv import KV
from specrl.rollout.engines.local.model import InFlightPass, Layout, PackedModel

log = logging.getLogger(__name__)


class StaticModel(PackedModel):
    """See `PackedModel`. A pass is one copy to the device, the computation there, and one copy back.

    Attributes:
        record: captures a pass; None if passes are not captured.
    """

    layout = varlen.StaticPass
    overlaps = True

    def __init__(self, model: PreTrainedModel, sampling: SamplingParams, limits: RolloutConfig | None = None):
        self._norms = rms_norms(model)
        super().__init__(model, sampling, limits)
        if self.sampler.rounds:
            log.warning("tokens are sampled from rounded logits, which flips about one in 300: %s", self.sampler.rounds)
        self.record = cuda_graphs() if self.device.type == "cuda" else None

    def kv(self, slabs: int, capacity: int) -> KV:
        """See `PackedModel.kv`. The passes over these slabs share their captured graphs."""
        return KV(slabs, capacity, self.layout.heads_first, Graphs(self.record) if self.record else None)

    def launch(
        self,
        tokens: Sequence[int] | np.ndarray,
        layout: Layout,
        noise: Sequence[np.ndarray],
        picked: np.ndarray | None = None,
    ) -> InFlightPass:
        """See `PackedModel.launch`. Samples after all tokens, as the sizes of passes are few."""
        assert isinstance(layout, varlen.StaticPass)
        self.check_stop()
        graphs = layout.kv.graphs if layout.max_queries == varlen.QUERIES else None
        layout.fill(tokens, *noise)
        buffer = layout.send(graphs.buffer(layout.shape) if graphs else None)

        def step() -> tuple[Tensor, Tensor]:
            layout.layers.clear()
            hidden = self.decode(layout.ids(tokens), layout)
            return self.sampler(hidden, layout.keys, layout.sampled_positions, layout.targets), hidden

        samples, hidden = graphs.run(layout.shape, buffer, step) if graphs else step()
        if graphs:
            hidden = hidden.clone()  # the next replay overwrites it
        on_host = torch.empty(samples.shape, dtype=torch.int32, pin_memory=samples.is_cuda)
        on_host.copy_(samples, non_blocking=True)
        done = torch.cuda.Event() if samples.is_cuda else None
        if done:
            done.record()
        picked = np.arange(len(tokens)) if picked is None else picked
        return InFlightPass(on_host[:, : len(tokens)], hidden, picked, done)

    @contextmanager
    def inference(self) -> Iterator[None]:
        """See `PackedModel.inference`."""
        with fused(self._norms), super().inference():
            yield


# One kernel for each norm, where transformers takes eight ------------------------------------------------------------


def rms_norms(model: nn.Module) -> list[tuple[nn.Module, float]]:
    """The modules that compute a root mean square norm, and the epsilon that each adds to the mean square.

    They are recognised by their results, so a norm with another formula, such as one that multiplies by 1 + weight, is
    not among them.
    """
    norms = []
    for module in model.modules():
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if [name for name, _ in module.named_parameters()] == ["weight"] and isinstance(eps, float):
            weight = module.get_parameter("weight")
            generator = torch.Generator().manual_seed(0)
            x, other = (torch.randn(n, *weight.shape, generator=generator).to(weight) for n in (2, 1))
            with torch.no_grad():
                own = torch.func.functional_call(module, {"weight": other[0]}, (x,))
                fused = F.rms_norm(x, weight.shape, other[0], eps)
            if own.shape == fused.shape and torch.allclose(own, fused, rtol=4 * torch.finfo(x.dtype).eps, atol=1e-6):
                norms.append((module, eps))
    return norms


@contextmanager
def fused(norms: list[tuple[nn.Module, float]]) -> Iterator[None]:
    """Runs these norms in one kernel each. They round once instead of twice, so their bits differ.

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
    weight = module.get_parameter("weight")
    return F.rms_norm(x, weight.shape, weight, eps)
