"""New weights for a running vLLM: what may come, and the end in vLLM's workers that loads it.

Importing this module registers the transfer with vLLM.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rollout.engines.base import EngineSpec
from rollout.engines.transfer import Meta
from rollout.types import RolloutError

TRANSFER = "specrl"
_SHM = Path("/dev/shm")
_FILE_BYTES = 1 << 30  # what is held twice while weights are written


class Weights:
    """The names and shapes of a model's weights: what an update must bring.

    Args: spec: names the model; only its configuration is read.
    """

    def __init__(self, spec: EngineSpec):
        code = {"trust_remote_code": spec.trust_remote_code}
        config = AutoConfig.from_pretrained(spec.model, revision=spec.revision or None, **code)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, **code)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self.tied = set(model.all_tied_weights_keys)
        """Copies of other weights: an update may bring them, vLLM makes its own."""
        self.needed = {name for name, _ in model.named_parameters()} - self.tied

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
        if missing := self.needed - seen:
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
    """Live tensors, for a worker in the driver's process; they are copied to where the model lies, by nobody before."""
    path: str = ""
    """Directory of safetensors files with Hugging Face names."""
    chunk: dict[str, Any] | None = None
    """What vLLM's own end is told."""


class Transfer(WeightTransferEngine[Init, Update]):
    """A worker's end. vLLM reloads layer by layer, as from a checkpoint."""

    init_info_cls, update_info_cls = Init, Update
    _linked: WeightTransferEngine | None = None

    def init_transfer_engine(self, init_info: Init) -> None:
        self.shutdown()
        if init_info.backend:
            config = WeightTransferConfig(backend=init_info.backend)
            self._linked = WeightTransferEngineFactory.create_engine(config, self.vllm_config, self.device, self.model)
            self._linked.init_transfer_engine(self._linked.parse_init_info(init_info.info))

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Update) -> None:
        try:
            if update_info.chunk is not None:
                self._linked.receive_weights(self._linked.parse_update_info(update_info.chunk))
            else:
                self.model.load_weights(update_info.weights or _tensors(update_info.path))
        except BaseException:  # or the next update would go on with what layers have half received
            finalize_layerwise_reload(self.model, self.model_config)
            raise

    def finish_weight_update(self) -> None:
        if self._linked is not None:
            self._linked.finish_weight_update()  # which also lets go of the sender's memory
        else:
            finalize_layerwise_reload(self.model, self.model_config)
        refresh_tied_head(self.model)

    def shutdown(self) -> None:
        if self._linked is not None:
            self._linked.shutdown()
            self._linked = None


def refresh_tied_head(model: torch.nn.Module) -> None:
    """Packs the output layer anew: the CPU build multiplies with a packed copy, which a reload leaves stale if tied."""
    head = getattr(model, "lm_head", None)
    if hasattr(head, "cpu_linear"):
        head.quant_method.process_weights_after_loading(head)


def gpu_of(worker: Any) -> str:
    """UUID of the GPU that one of vLLM's workers computes on; empty for none."""
    return str(torch.cuda.get_device_properties(worker.device).uuid) if worker.device.type == "cuda" else ""


def _tensors(path: str) -> Iterator[tuple[str, Tensor]]:
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            yield from ((name, tensors.get_tensor(name)) for name in tensors.keys())  # noqa: SIM118


if TRANSFER not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(TRANSFER, Transfer)
