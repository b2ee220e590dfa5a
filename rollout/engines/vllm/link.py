"""The trainer's end of vLLM's weight transfer between GPUs of several processes."""

from __future__ import annotations

import math
from typing import Literal

from vllm.distributed.weight_transfer.base import TrainerWeightTransferEngine, VLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
from vllm.utils.network_utils import get_open_port

from specrl.rollout.engines.transfer import Source

BUFFER = 256 * 2**20  # bytes; on the trainer's GPU while weights are sent


def open_link(
    route: Literal["ipc", "nccl"], client: VLLMWeightSyncClient, source: Source, ranks: int, address: str
) -> TrainerWeightTransferEngine:
    """Connects this process with all ranks of all engines; `send_weights` of what it returns walks its `source`.

    Args:
        client: asks the engines' processes to do their part.
        ranks: of all engines together; this process is rank 0 of the group, and they are 1, 2 and so on.
        address: of this node, where the others find it.
    """
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
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
