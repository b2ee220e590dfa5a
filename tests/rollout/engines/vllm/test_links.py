"""Weights from GPU to GPU: vLLM's own endpoints run on both sides, over a replaced communicator or shared memory."""

from types import SimpleNamespace

import pytest
import torch

from specrl.rollout.types import RolloutError
from specrl.rollout.workers import delivery
from specrl.rollout.workers.worker import RolloutWorker, WorkerInfo
from specrl.trainers.weights import PolicyWeights
from tests.rollout.engines.vllm.engines import (
    Incomplete,
    assert_generates_as,
    close,
    moved,
    needs_vllm,
    probe_of,
    spec_of,
    start,
)
from tests.rollout.engines.vllm.links import Communicator, Link

pytestmark = needs_vllm


def test_workers_on_other_gpus_join_and_receive_every_weight(link, golden):
    connected, model = link
    engine, listener = connected.workers[0].engine, connected.listener
    first = engine.weight_version + 1
    for version in range(first, first + 3):
        new = moved(model, version)
        connected.send(PolicyWeights(new), version, probe_of(new))
        assert engine.weight_version == version
        assert_generates_as(engine, new, golden()[0])
        assert listener.weights.keys() == dict(new.named_parameters()).keys()
        assert all(torch.equal(listener.weights[name], p) for name, p in new.named_parameters())
        if version == first + 1:
            connected.delivery.unlink()  # as when a worker was replaced
    joins = [i for i, call in enumerate(listener.calls) if call == ("nccl", 2, 3)]
    assert joins == [0, 5], "once, and again after a worker was replaced"
    assert listener.calls[1:5] == [("begin", first), ("finish", first), ("begin", first + 1), ("finish", first + 1)]
    weight_bytes = sum(p.nbytes for p in model.parameters())
    assert sorted(sum(group.sent) for group in Communicator.made) == [0, 0, 0, 0, weight_bytes, 2 * weight_bytes]


def test_weights_over_a_link_are_proven_and_must_fit(link, loads):
    connected, model = link
    loads.clear()
    engine = connected.workers[0].engine
    version = engine.weight_version
    with pytest.raises(RolloutError, match="lacks 1"):
        connected.send(Incomplete(model), version + 1, None)
    assert loads == []
    assert sum(sum(group.sent) for group in Communicator.made) == 0
    with pytest.raises(RolloutError, match="does not run the weights it was sent"):
        connected.send(PolicyWeights(moved(model, 1)), version + 1, probe_of(moved(model, 2)))
    assert engine.weight_version == version
    with pytest.raises(RolloutError, match=f"version {version + 1} failed"):
        engine.generate([])


def test_a_worker_that_fails_ends_the_link(engine_of, saved, monkeypatch):
    """A collective waits for all ranks, so the remaining link must not be waited for."""
    engine_of()
    model, path = saved("qwen3")
    engine = start(spec_of(path))  # no other test continues in the middle of its update
    connected = Link(engine, monkeypatch)
    connected.listener.fails = True
    with pytest.raises(RolloutError, match="this worker lost its GPU"):
        connected.send(PolicyWeights(model), 1, probe_of(model))
    assert [group.open for group in Communicator.made if group.group.rank == 0] == [False]
    close(engine)


def test_workers_on_the_trainers_gpu_open_its_memory(updated, golden, monkeypatch):
    """vLLM's endpoints of CUDA IPC. A handle names memory of this process."""
    import vllm.distributed.weight_transfer.packed_tensor as packing

    from specrl.rollout.engines.vllm import weights

    shared, empty = [], torch.empty

    def export(buffer):
        shared.append(buffer)
        return None, (len(shared) - 1, *"-----", None)

    gpu, cpu = {"dtype": torch.uint8, "device": "cuda"}, {"device": "cpu"}
    engine, model = updated()
    monkeypatch.setattr(packing, "reduce_tensor", export)
    monkeypatch.setattr("torch.multiprocessing.reductions.rebuild_cuda_tensor", lambda name, *_: shared[name])
    monkeypatch.setattr(torch, "empty", lambda *size, **more: empty(*size, **more | (cpu if more == gpu else {})))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="A"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    monkeypatch.setattr(weights, "BUFFER", 1)  # the largest weight determines the size
    monkeypatch.setattr(delivery, "gpu_uuid", lambda: "A")
    worker, asked = RolloutWorker(0), []
    worker.engine = engine

    def ask(method, args):
        asked.append(method)
        assert worker.run(method, *args[0]) is None

    sender = delivery.Delivery(put=None, call=ask, address="")
    first = engine.weight_version + 1
    for version in (first, first + 1):
        new = moved(model, version)
        sender.take(PolicyWeights(new))
        sender.choose([WorkerInfo(0, "A", ("A",))])
        assert sender.route == "ipc"
        sender.send(version, probe_of(new))
        assert_generates_as(engine, new, golden()[0])
    sizes = [p.nbytes for p in model.parameters()]
    assert [buffer.nbytes for buffer in shared] == [max(sizes)] * 2
    chunks = asked.count("receive") // 2
    assert chunks > 1
    update = ["begin_update", *["receive"] * chunks, "finish_update"]
    assert asked == ["join", *update, *update]
