"""The driver's side of new weights: what an update must bring, how it is sent, and what sleep keeps of it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from vllm import LLM
from vllm.distributed.weight_transfer.base import TrainerWeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
from vllm.utils.network_utils import get_open_port

from specrl.rollout.drafting.frequent import FREQUENT_IDS
from specrl.rollout.engines.base import DRAFTER, NO_WEIGHTS, EngineSpec, Meta, Probe, Source
from specrl.rollout.engines.local.head import Head, is_head
from specrl.rollout.engines.vllm.worker import gpu_of, has_draft_model
from specrl.rollout.engines.weights import WeightCheck, in_memory_files
from specrl.rollout.types import RolloutError

WEIGHTS, KV = "weights", "kv_cache"
"""What vLLM's sleep takes from a GPU."""
BUFFER = 256 * 2**20  # bytes; on the trainer's GPU while weights are sent


def described(spec: EngineSpec) -> tuple[PreTrainedModel, PreTrainedModel | None]:
    """The policy and its draft model, if it has one, on the meta device: names and shapes of their weights."""
    policy = _described(spec.model, spec, spec.revision or None)
    source = spec.rollout.drafter
    if not source:
        return policy, None
    return policy, _head(source, policy) if is_head(source) else _described(source, spec)


def drafter_share(spec: EngineSpec, policy: PreTrainedModel, drafter: PreTrainedModel | None) -> float:
    """Weights that a pass of the draft model reads, as a share of those that a pass of the policy reads."""
    if drafter is None:
        return 0.0
    ids = FREQUENT_IDS if spec.rollout.vllm.tensor_parallel == 1 else 0
    return _weights_read(drafter, ids) / _weights_read(policy)


def _weights_read(model: PreTrainedModel, ids: int = 0) -> int:
    """Weights that a pass of few tokens reads. Args: ids: rows of the output layer; 0: all."""
    embeddings = {model.get_input_embeddings().weight, model.get_output_embeddings().weight}
    rows, width = model.get_output_embeddings().weight.shape
    layers = sum(weight.numel() for weight in model.parameters() if weight not in embeddings)
    return layers + min(ids or rows, rows) * width


def _described(source: str, spec: EngineSpec, revision: str | None = None) -> PreTrainedModel:
    """The model of a directory or hub id on the meta device; only its configuration is read."""
    code = {"trust_remote_code": spec.trust_remote_code}
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(source, revision=revision, **code)
        return AutoModelForCausalLM.from_config(config, **code)


def _head(directory: str, policy: PreTrainedModel) -> Head:
    """A complete head of this policy, which vLLM does not check; its weights are read and dropped."""
    with torch.device("meta"), warnings.catch_warnings(action="ignore", category=UserWarning):  # copies into nothing
        return Head.load(directory, policy)


class Updates:
    """The weights of one LLM: their version, how new ones reach it, and whether they are in memory.

    | the weights are | since | a rollout or score first |
    |---|---|---|
    | on the GPU | the start, an update, a waking | - |
    | on the host | a sleep at level 1: no Source brought all of them, the draft model's included | takes back both |
    | dropped | a sleep at level 2: their Source can be walked again | updates from that Source, with its probe |
    | dropped, without a Source | an update that failed | is refused |

    Asleep, vLLM has given back the GPU's memory for weights and for KV ("both"). An update takes back that for the
    weights, loads them, and takes back that for KV, whatever the state.

    Args:
        llm: vLLM, awake, with weights of version 0.
        weight_check: of the LLM's model.
        tensor_parallel: ranks of the LLM.
        sleeps: it gives the GPU's memory back between rollouts.
        prove: forgets older KV, and checks the probe of a version.
    """

    def __init__(
        self,
        llm: LLM,
        weight_check: WeightCheck,
        tensor_parallel: int,
        sleeps: bool,
        prove: Callable[[int, Probe | None], None],
    ):
        self._llm = llm
        self._weight_check = weight_check
        self._sleeps = sleeps
        self._prove = prove
        self.version = 0
        self.fault = ""
        """Why nothing can be generated with these weights."""
        self.gpus: tuple[str, ...] = tuple(filter(None, llm.collective_rpc(gpu_of)))
        """UUID of the GPU of each rank; empty on a CPU."""
        self.route: Literal["process", "memory"] = "process" if tensor_parallel == 1 else "memory"
        """Of the weights of this process: live tensors, or files in shared memory for ranks that are processes."""
        self._draft_model = any(llm.collective_rpc(has_draft_model))
        self._source: tuple[Source, Probe | None] | None = None
        self._asleep: set[str] = set()
        """What is not in the GPU's memory, of WEIGHTS and KV."""
        self._dropped = False
        """The weights, by a sleep at level 2."""
        llm.init_weight_transfer_engine({"init_info": {}})

    def update(self, weights: Iterable[tuple[str, Tensor]] | None, version: int, probe: Probe | None) -> None:
        """See Engine.update_weights."""
        self._announce(version)
        if weights is None:
            raise RolloutError(NO_WEIGHTS)
        source = weights if isinstance(weights, Source) else None
        self._weight_check.before(weights)
        with self._loading(version), self._handed_over(weights) as info:
            self._start()
            self._llm.update_weights({"update_info": info})
        self.finish_update(version, probe)
        # ranks do not wake together, which walking parts of all of them again would need: sleep keeps such weights
        self._source = None if source is None or source.collective else (source, probe)

    def join(self, route: str, init: dict[str, Any]) -> None:
        """Connects to a sender in another process, by ipc or nccl."""
        self._llm.init_weight_transfer_engine({"init_info": {"backend": route, "info": init}})

    def begin_update(self, version: int, metadata: Sequence[Meta]) -> None:
        """Raises RolloutError, with nothing loaded, when these weights do not fit the model."""
        self._announce(version)
        self._weight_check.check(metadata)
        with self._loading(version):
            self._start()

    def receive(self, update: dict[str, Any]) -> None:
        """Receives one chunk. Returns when the sender has sent it."""
        self._llm.update_weights({"update_info": {"chunk": update}})

    def finish_update(self, version: int, probe: Probe | None) -> None:
        """All weights are there: they are checked by the probe."""
        with self._loading(version):
            self._llm.finish_weight_update(weight_version=str(version))
        self._dropped = False
        self._take_back(KV)
        self._prove(version, probe)
        self.fault = ""
        self.version = version

    def wake(self) -> None:
        """Weights and KV are on the GPU afterwards."""
        if self._dropped:
            if self._source is None:
                raise RolloutError(f"{self.fault}; send the weights again")
            source, probe = self._source
            self.update(source, self.version, probe)
        self._take_back(WEIGHTS, KV)

    def sleep(self) -> None:
        """Gives the GPU's memory back, if it does so at all."""
        if self._sleeps:
            self._dropped = self._source is not None and self._brings_all(self._source[0])
            self._llm.sleep(level=2 if self._dropped else 1)
            self._asleep = {WEIGHTS, KV}

    def _brings_all(self, source: Source) -> bool:
        """It brings all that a sleep of level 2 drops."""
        return not self._draft_model or any(meta.name.startswith(DRAFTER) for meta in source.metadata())

    def _announce(self, version: int) -> None:
        if version < self.version:
            raise RolloutError(f"weight version {version} is older than the engine's {self.version}")
        self.fault = f"the update to weight version {version} failed"
        self._source = None

    @contextmanager
    def _handed_over(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Any]]:
        """Where the workers get the weights."""
        if self.route == "process":
            yield {"weights": self._weight_check.checked(weights)}
        else:
            with in_memory_files(self._weight_check.checked(weights)) as files:
                yield {"files": files}

    def _start(self) -> None:
        self._take_back(WEIGHTS)
        self._llm.start_weight_update()

    def _take_back(self, *tags: str) -> None:
        if wanted := [tag for tag in tags if tag in self._asleep]:
            self._llm.wake_up(tags=wanted)
            self._asleep -= set(wanted)
            if not self._asleep and self._llm.llm_engine.is_sleeping():  # vLLM 0.31's wake_up returns nothing
                raise RolloutError("vLLM could not take back its GPU memory; set rollout.vllm.sleep=false")

    @contextmanager
    def _loading(self, version: int) -> Iterator[None]:
        try:
            yield
        except RolloutError:
            raise
        except Exception as error:
            raise RolloutError(f"vLLM could not load weight version {version}: {error}") from error


def open_link(route: str | None, client: Any, source: Source, ranks: int, address: str) -> TrainerWeightTransferEngine:
    """Connects the trainer's process with all ranks of all engines; `send_weights` of the result walks its `source`.

    Args:
        route: ipc or nccl.
        client: a VLLMWeightSyncClient, which asks the engines' processes to do their part.
        ranks: of all engines together; this process is rank 0 of the group, and they are 1, 2 and so on.
        address: of this node, where the others reach it.
    """
    info: IPCTrainerInitInfo | NCCLTrainerInitInfo
    if route == "ipc":  # a weight must fit the buffer
        largest = max(math.prod(meta.shape) * meta.dtype.itemsize for meta in source.metadata())
        info = IPCTrainerInitInfo(rank=0, packed=True, packed_buffer_size_bytes=max(BUFFER, largest))
    else:
        info = NCCLTrainerInitInfo(
            rank=0,
            master_address=address,
            master_port=get_open_port(),
            world_size=1 + ranks,
            packed_buffer_size_bytes=BUFFER,
        )
    weights: Any = source  # vLLM's WeightSource, whose Meta is another class with the same fields
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=weights)
