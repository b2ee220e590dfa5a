"""New weights for a running vLLM: written once to shared memory by the driver, loaded from there by every worker.

Importing this module registers the transfer with vLLM.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rollout.engines.base import EngineSpec
from rollout.types import RolloutError

TRANSFER = "specrl_shm"
_SHM = Path("/dev/shm")
_FILE_BYTES = 1 << 30  # what is held twice while weights are written


class Weights:
    """The names and shapes of a model's weights, and a way to hand new ones to vLLM.

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

    @contextmanager
    def written(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
        """A private directory in shared memory with the weights as safetensors, removed afterwards.

        Raises:
            RolloutError: a weight is unknown, missing, given twice or of another shape.
        """
        path = tempfile.mkdtemp(prefix="specrl-", dir=_SHM if _SHM.is_dir() else None)  # mode 0700
        try:
            seen: set[str] = set()
            part: dict[str, Tensor] = {}
            for name, tensor in weights:
                self._check(name, tensor, seen)
                seen.add(name)
                if name not in self.tied:
                    part[name] = tensor.detach().to("cpu", copy=True).contiguous()
                if sum(t.nbytes for t in part.values()) > _FILE_BYTES:
                    save_file(part, f"{path}/{len(seen)}.safetensors")
                    part = {}
            if missing := self.needed - seen:
                raise RolloutError(f"the update lacks {len(missing)} of the model's weights, such as {min(missing)!r}")
            save_file(part, f"{path}/{len(seen)}.safetensors")
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
class ShmInit(WeightTransferInitInfo):
    """Nothing to set up."""


@dataclass
class ShmUpdate(WeightTransferUpdateInfo):
    """Where the weights are."""

    path: str
    """Directory of safetensors files with Hugging Face names."""


class ShmTransfer(WeightTransferEngine[ShmInit, ShmUpdate]):
    """A worker's end. vLLM reloads layer by layer, as from a checkpoint."""

    init_info_cls, update_info_cls = ShmInit, ShmUpdate

    def init_transfer_engine(self, init_info: ShmInit) -> None:
        """Nothing to connect."""

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: ShmUpdate) -> None:
        self.model.load_weights(_tensors(update_info.path))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        refresh_tied_head(self.model)

    def shutdown(self) -> None:
        """Nothing to release."""


def refresh_tied_head(model: torch.nn.Module) -> None:
    """Packs the output layer anew: the CPU build multiplies with a packed copy, which a reload leaves stale if tied."""
    head = getattr(model, "lm_head", None)
    if hasattr(head, "cpu_linear"):
        head.quant_method.process_weights_after_loading(head)


def _tensors(path: str) -> Iterator[tuple[str, Tensor]]:
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            yield from ((name, tensors.get_tensor(name)) for name in tensors.keys())  # noqa: SIM118


if TRANSFER not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(TRANSFER, ShmTransfer)
