"""New weights for a running vLLM: what may come, and the end in vLLM's workers that loads it.

Importing this module registers the transfer with vLLM.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from specrl.rollout.drafter import is_head
from specrl.rollout.engines.base import DRAFTER, EngineSpec
from specrl.rollout.engines.local.head import Head
from specrl.rollout.engines.transfer import Meta
from specrl.rollout.types import RolloutError

TRANSFER = "specrl"
_SHM = Path("/dev/shm")
_FILE_BYTES = 1 << 30  # what is held twice while weights are written


@dataclass(frozen=True)
class Named:
    """The weights of one model."""

    shapes: dict[str, tuple[int, ...]]
    tied: set[str]
    """Copies of other weights: an update may bring them, vLLM makes its own."""
    needed: set[str]

    @classmethod
    def of(cls, model: PreTrainedModel, prefix: str = "") -> Named:
        """Those of a model, whose tensors may hold nothing."""
        tied = set(model.all_tied_weights_keys)
        return cls(
            {prefix + name: tuple(tensor.shape) for name, tensor in model.state_dict().items()},
            {prefix + name for name in tied},
            {prefix + name for name, _ in model.named_parameters() if name not in tied},
        )


class Weights:
    """The names and shapes of a model's weights: what an update must bring, and may bring of its draft model's.

    Args: spec: names the models.
    """

    def __init__(self, spec: EngineSpec):
        model, source = _described(spec.model, spec, spec.revision or None), spec.rollout.drafter
        policy, drafter = Named.of(model), Named({}, set(), set())
        if source:
            drafter = Named.of(_head(source, model) if is_head(source) else _described(source, spec), DRAFTER)
        self.shapes, self.tied = policy.shapes | drafter.shapes, policy.tied | drafter.tied
        self._needed, self._drafter = policy.needed, drafter.needed

    def check(self, metadata: Sequence[Meta]) -> None:
        """Raises RolloutError: a weight is unknown, missing, given twice or of another shape."""
        for _ in self.checked((meta.name, torch.empty(meta.shape, device="meta")) for meta in metadata):
            pass

    def checked(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same tensors but for tied ones, each checked as it comes; raises like `check`."""
        seen: set[str] = set()
        for name, tensor in weights:
            self._check(name, tensor, seen)
            seen.add(name)
            if name not in self.tied:
                yield name, tensor.detach()
        needed = self._needed if seen.isdisjoint(self._drafter) else self._needed | self._drafter
        if missing := needed - seen:
            raise RolloutError(f"the update lacks {len(missing)} of the model's weights, such as {min(missing)!r}")

    @contextmanager
    def written(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
        """A private directory in shared memory with the weights as safetensors, removed afterwards; raises like
        `check`."""
        path = tempfile.mkdtemp(prefix="specrl-", dir=_SHM if _SHM.is_dir() else None)  # mode 0700
        try:
            part: dict[str, Tensor] = {}
            for n, (name, tensor) in enumerate(self.checked(weights)):
                part[name] = tensor.to("cpu", copy=True).contiguous()
                if sum(t.nbytes for t in part.values()) > _FILE_BYTES:
                    save_file(part, f"{path}/{n}.safetensors")
                    part = {}
            save_file(part, f"{path}/last.safetensors")
            yield path
        finally:
            shutil.rmtree(path)

    def _check(self, name: str, tensor: Tensor, seen: set[str]) -> None:
        if name not in self.shapes:
            raise RolloutError(f"the update names the weight {name!r}, which the engine's model does not have")
        if tuple(tensor.shape) != self.shapes[name]:
            shapes = f"{tuple(tensor.shape)}, the engine's model has {self.shapes[name]}"
            raise RolloutError(f"the update gives the weight {name!r} the shape {shapes}")
        if name in seen:
            raise RolloutError(f"the update brings the weight {name!r} twice")


@dataclass
class Init(WeightTransferInitInfo):
    """Who sends."""

    backend: str = ""
    """vLLM's own end that receives, ipc or nccl; empty where the driver hands over tensors or files."""
    info: dict[str, Any] = field(default_factory=dict)
    """What that end needs to connect."""


@dataclass
class Update(WeightTransferUpdateInfo):
    """Where the weights are: one of these."""

    weights: Iterable[tuple[str, Tensor]] | None = None
    """Live tensors, for a worker in the driver's process: the model's own load is the only copy."""
    path: str = ""
    """Directory of safetensors files with Hugging Face names."""
    chunk: dict[str, Any] | None = None
    """What vLLM's own end is told."""


class Transfer(WeightTransferEngine[Init, Update]):
    """A worker's end. vLLM reloads layer by layer, as from a checkpoint."""

    init_info_cls, update_info_cls = Init, Update
    drafter: torch.nn.Module | None = None
    """vLLM's draft model, whose weights may follow the policy's."""
    _linked: WeightTransferEngine | None = None
    _reloading: tuple[torch.nn.Module, ...] = ()

    def init_transfer_engine(self, init_info: Init) -> None:
        self.shutdown()
        if init_info.backend:
            config = WeightTransferConfig(backend=init_info.backend)
            self._linked = WeightTransferEngineFactory.create_engine(config, self.vllm_config, self.device, self.model)
            self._linked.init_transfer_engine(self._linked.parse_init_info(init_info.info))

    def start_weight_update(self) -> None:
        self._reloading = ()
        self._reload(self.model)

    def receive_weights(self, update_info: Update) -> None:
        try:
            if update_info.chunk is not None:
                self._linked.set_weight_update_target(self, self.model_config)  # which asks it to `load_weights`
                self._linked.receive_weights(self._linked.parse_update_info(update_info.chunk))
            else:
                self.load_weights(update_info.weights or _tensors(update_info.path))
        except BaseException:  # or the next update would go on with what layers have half received
            self._finalize(self._reloading)
            raise

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Each model takes its own, as they come; the draft model is left alone if none does."""
        for drafts, part in groupby(weights, key=lambda pair: pair[0].startswith(DRAFTER)):
            if drafts and self._reloading == (self.model,):
                theirs = {layer for layer in self.model.modules() if [*layer.parameters(recurse=False)]}
                self._reload(*_own(self.drafter, theirs))
            if drafts:
                self.drafter.load_weights((name.removeprefix(DRAFTER), tensor) for name, tensor in part)
            else:
                self.model.load_weights(part)

    def finish_weight_update(self) -> None:
        rest = self._reloading
        if self._linked is not None:
            self._linked.reset_weight_update_target()
            self._linked.finish_weight_update()  # which also lets go of the sender's memory
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
        if self._linked is not None:
            self._linked.shutdown()
            self._linked = None


def refresh_tied_head(model: torch.nn.Module) -> None:
    """Packs the output layer anew: the CPU build multiplies with a packed copy, which a reload leaves stale if tied."""
    head = getattr(model, "lm_head", None)
    if hasattr(head, "cpu_linear"):
        head.quant_method.process_weights_after_loading(head)


def _own(drafter: torch.nn.Module, theirs: set[torch.nn.Module]) -> Iterator[torch.nn.Module]:
    """The parts of a draft model without the policy's layers that hold weights: a head borrows two of them."""
    if theirs.isdisjoint(drafter.modules()):
        yield drafter
    elif drafter not in theirs:
        for part in drafter.children():
            yield from _own(part, theirs)


def gpu_of(worker: Any) -> str:
    """UUID of the GPU that one of vLLM's workers computes on; empty for none."""
    return str(torch.cuda.get_device_properties(worker.device).uuid) if worker.device.type == "cuda" else ""


def has_draft_model(worker: Any) -> bool:
    """One of vLLM's workers drafts with a model, or with layers, that have weights of their own."""
    return isinstance(worker.get_draft_model(), torch.nn.Module)


def _described(source: str, spec: EngineSpec, revision: str | None = None) -> PreTrainedModel:
    """A model directory's or hub id's, of which only the configuration is read."""
    code = {"trust_remote_code": spec.trust_remote_code}
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(source, revision=revision, **code)
        return AutoModelForCausalLM.from_config(config, **code)


def _head(directory: str, policy: PreTrainedModel) -> Head:
    """One that is whole and the policy's, which vLLM does not ask; its weights are read and let go of."""
    with torch.device("meta"), warnings.catch_warnings(action="ignore", category=UserWarning):  # copies into nothing
        return Head.load(directory, policy)


def _tensors(path: str) -> Iterator[tuple[str, Tensor]]:
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            yield from ((name, tensors.get_tensor(name)) for name in tensors.keys())  # noqa: SIM118


if TRANSFER not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(TRANSFER, Transfer)
