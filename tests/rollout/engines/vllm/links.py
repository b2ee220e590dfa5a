"""Two workers with separate GPUs, one of which runs vLLM. vLLM's own endpoints run on both sides, without a GPU."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import ClassVar

import torch

from specrl.rollout.workers import delivery
from specrl.rollout.workers.worker import RolloutWorker, WorkerInfo


class Communicator:
    """Replaces NCCL's communicator: ranks meet through vLLM's code, and a broadcast uses their store."""

    made: ClassVar[list] = []

    def __init__(self, group, device):
        self.group, self.sent, self.open = group, [], True
        self.made.append(self)

    def broadcast(self, tensor, src, stream=None):
        if self.group.rank == src:
            self.sent.append(tensor.nbytes)
            self.group.broadcast_obj(tensor, src)
        else:
            tensor.copy_(self.group.broadcast_obj(None, src))

    def destroy(self):
        self.open = False


class Listener:
    """A second engine, which only records what it receives."""

    gpus = ("C",)

    def __init__(self):
        self.weights, self.calls, self.fails = {}, [], False

    def join(self, route, init):
        from vllm.distributed.weight_transfer.nccl_common import stateless_init_process_group

        self.calls.append((route, init["rank_offset"], init["world_size"]))
        self.packed = init["packed_buffer_size_bytes"]
        address = init["master_address"], init["master_port"]
        self.group = stateless_init_process_group(*address, init["rank_offset"], init["world_size"], device=None)

    def begin_update(self, version, metadata):
        self.calls.append(("begin", version))

    def receive(self, update):
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_consumer

        if self.fails:
            raise RuntimeError("this worker lost its GPU")
        types = (getattr(torch, name) for name in update["dtype_names"])
        named = zip(update["names"], zip(update["shapes"], types, strict=True), strict=True)
        packed_nccl_broadcast_consumer(named, self.group, 0, self.record, self.packed, device="cpu")

    def record(self, weights):
        self.weights.update((name, tensor.clone()) for name, tensor in weights)

    def finish_update(self, version, probe):
        self.calls.append(("finish", version))


class Link:
    """A Delivery to a vLLM engine on GPU B and a Listener on GPU C, from a trainer on GPU A."""

    def __init__(self, engine, patch):
        import vllm.distributed.device_communicators.pynccl as pynccl

        patch.setattr(pynccl, "PyNcclCommunicator", Communicator)
        patch.setattr(Communicator, "made", [])
        patch.setattr(torch.accelerator, "current_device_index", lambda: 0)
        patch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(synchronize=lambda: None))
        patch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        patch.setattr(delivery, "gpu_uuid", lambda: "A")
        self.listener = Listener()
        self.workers = [RolloutWorker(0), RolloutWorker(1)]
        self.workers[0].engine = engine
        self.workers[1].engine = SimpleNamespace(updates=self.listener, score=lambda tokens: [])
        self.delivery = delivery.Delivery(put=None, call=self.call, address="127.0.0.1")

    def call(self, method, args):
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda worker, its: worker.run(method, *its), self.workers, args))

    def send(self, weights, version, probe):
        self.delivery.take(weights)
        self.delivery.choose([WorkerInfo(0, "", ("B",)), WorkerInfo(1, "", ("C",))])
        self.delivery.send(version, probe)
