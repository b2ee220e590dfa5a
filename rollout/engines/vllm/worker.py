"""What runs inside vLLM's workers. vLLM imports this module there, because its start names `WorkerExtension`.

Importing it also registers the weight transfer with vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from specrl.rollout.engines.base import DRAFTER
from specrl.rollout.engines.vllm.device import DeviceTexts
from specrl.rollout.engines.vllm.draft_ids import draft_from
from specrl.rollout.engines.vllm.planned_v2 import install_planned
from specrl.rollout.engines.vllm.sampler import RolloutVerifier, install, propose_as_planned, share_noise

if TYPE_CHECKING:
    from specrl.rollout.engines.vllm.planned import PlannedDrafts

TRANSFER = "specrl"


class WorkerExtension:
    """Methods that the driver calls on every worker by name."""

    model_runner: Any
    weight_transfer_engine: Any
    get_draft_model: Any

    def specrl_install_v1(self, drafts: PlannedDrafts, chunk: int) -> None:
        """See KeyedDrafter.serve; in process only."""
        self.model_runner.drafter.serve(drafts, chunk, self.model_runner.model)

    def specrl_install_v2(self, with_model: bool) -> None:
        """Requests are sampled by their keys; drafts come with the scheduler's plan."""
        install_planned(self.model_runner, with_model)
        if with_model:
            self.weight_transfer_engine.drafter = self.get_draft_model()

    def specrl_draft_from(self, ids: np.ndarray) -> str:
        """See `draft_from`."""
        return draft_from(self.model_runner, ids)

    def specrl_install_device(self, texts: bool) -> None:
        """Requests are sampled by their keys; drafts come from their texts, or else from vLLM's own speculator."""
        install(self.model_runner, RolloutVerifier)
        if texts:
            DeviceTexts(self.model_runner)
        else:
            share_noise(self.model_runner)
            self.weight_transfer_engine.drafter = self.get_draft_model()
        propose_as_planned(self.model_runner)


def gpu_of(worker: Any) -> str:
    """UUID of the GPU that one of vLLM's workers computes on; empty for none."""
    return str(torch.cuda.get_device_properties(worker.device).uuid) if worker.device.type == "cuda" else ""


def has_draft_model(worker: Any) -> bool:
    """One of vLLM's workers drafts with a model, or with layers, that have weights of their own."""
    return isinstance(worker.get_draft_model(), torch.nn.Module)


@dataclass
class Init(WeightTransferInitInfo):
    """Who sends weights."""

    backend: str = ""
    """vLLM's own receiver, ipc or nccl; empty where the driver hands over tensors or files."""
    info: dict[str, Any] = field(default_factory=dict)
    """What that receiver needs to connect."""


@dataclass
class Update(WeightTransferUpdateInfo):
    """Where the weights are: one of these."""

    weights: Iterable[tuple[str, Tensor]] | None = None
    """Live tensors, for a worker in the driver's process: the model's own load is the only copy."""
    files: Sequence[str] = ()
    """Safetensors files with Hugging Face names."""
    chunk: dict[str, Any] | None = None
    """The update info of vLLM's own receiver."""


class Transfer(WeightTransferEngine[Init, Update]):
    """Loads new weights in a worker. vLLM reloads layer by layer, as from a checkpoint."""

    init_info_cls, update_info_cls = Init, Update
    drafter: Any = None
    """vLLM's draft model, whose weights may follow the policy's."""
    _receiver: WeightTransferEngine | None = None
    _reloading: tuple[torch.nn.Module, ...] = ()

    def init_transfer_engine(self, init_info: Init) -> None:
        self.shutdown()
        if init_info.backend:
            config = WeightTransferConfig(backend=init_info.backend)
            receiver = WeightTransferEngineFactory.create_engine(config, self.vllm_config, self.device, self.model)
            self._receiver = receiver
            receiver.init_transfer_engine(receiver.parse_init_info(init_info.info))

    def start_weight_update(self) -> None:
        self._reloading = ()
        self._reload(self.model)

    def receive_weights(self, update_info: Update) -> None:
        try:
            if update_info.chunk is not None:
                receiver: Any = self._receiver
                receiver.set_weight_update_target(self, self.model_config)  # whose `load_weights` it calls
                receiver.receive_weights(receiver.parse_update_info(update_info.chunk))
            else:
                self.load_weights(update_info.weights or _tensors(update_info.files))
        except BaseException:  # or the next update would continue with half of this one in some layers
            self._finalize(self._reloading)
            raise

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Each model loads its weights as they come; the draft model is left alone if none is its own."""
        for drafts, part in groupby(weights, key=lambda pair: pair[0].startswith(DRAFTER)):
            if drafts and self._reloading == (self.model,):
                shared = {layer for layer in self.model.modules() if [*layer.parameters(recurse=False)]}
                self._reload(*_unshared(self.drafter, shared))
            if drafts:
                self.drafter.load_weights((name.removeprefix(DRAFTER), tensor) for name, tensor in part)
            else:
                model: Any = self.model
                model.load_weights(part)

    def finish_weight_update(self) -> None:
        rest = self._reloading
        if self._receiver is not None:
            self._receiver.reset_weight_update_target()
            self._receiver.finish_weight_update()  # which also releases the sender's memory
            rest = self._reloading[1:]
        self._finalize(rest)
        for model in self._reloading:
            refresh_tied_head(model)

    def _reload(self, *models: torch.nn.Module) -> None:
        for model in models:
            initialize_layerwise_reload(model)
        self._reloading += models

    def _finalize(self, models: Iterable[torch.nn.Module]) -> None:
        for model in models:
            finalize_layerwise_reload(model, self.model_config)

    def shutdown(self) -> None:
        if self._receiver is not None:
            self._receiver.shutdown()
            self._receiver = None


def refresh_tied_head(model: torch.nn.Module) -> None:
    """Packs the output layer again: CPU builds multiply with a packed copy, which is stale after a reload if tied."""
    head: Any = getattr(model, "lm_head", None)
    if hasattr(head, "cpu_linear"):
        head.quant_method.process_weights_after_loading(head)


def _unshared(drafter: torch.nn.Module, shared: set[torch.nn.Module]) -> Iterator[torch.nn.Module]:
    """The parts of a draft model without the policy's layers that hold weights: a head borrows two of them."""
    if shared.isdisjoint(drafter.modules()):
        yield drafter
    elif drafter not in shared:
        for part in drafter.children():
            yield from _unshared(part, shared)


def _tensors(files: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    for file in files:
        with safe_open(file, "pt") as tensors:
            yield from ((name, tensors.get_tensor(name)) for name in tensors.keys())  # noqa: SIM118


if TRANSFER not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(TRANSFER, Transfer)
