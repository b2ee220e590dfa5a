"""Weight updates of vLLM: copies on the way, recovery from failed updates, and sleep.

The tests need no GPU. For transfers from GPU to GPU, vLLM's endpoints run on both sides, over this file's communicator.
"""
# ruff: noqa: F811 - the fixtures of test_vllm, which tests name as arguments

import importlib.util
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import ClassVar
from unittest import mock

import pytest
import torch

from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.engines.local.engine import TransformersEngine
from specrl.rollout.engines.transfer import Meta
from specrl.rollout.types import RolloutError
from specrl.trainers.weights import PolicyWeights
from tests.rollout.engines.vllm.test_vllm import (  # noqa: F401 - fixtures
    EOS_IDS,
    TEXT,
    engine_of,
    golden,
    moved,
    probe_of,
    saved,
    shared_memory,
    spec_of,
    updated,
)
from tests.rollout.golden import differing, requests_of
from tests.runs import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: pip install 'specrl[vllm]'"),
]


class Walked(PolicyWeights):
    """Keeps what it yields, so that no other tensor can reuse its address."""

    def __init__(self, policy, dtype=None):
        super().__init__(policy, dtype)
        self.walks = []

    def __iter__(self):
        self.walks.append({})
        for name, tensor in super().__iter__():
            self.walks[-1][name] = tensor
            yield name, tensor


class Misdeclared(PolicyWeights):
    """Declares one weight differently from the model."""

    def __init__(self, policy, change):
        super().__init__(policy)
        self.change = change

    def metadata(self):
        return self.change(super().metadata())


@pytest.fixture
def loads(monkeypatch):
    """The tensors that vLLM's model received, by name, as one dict per call."""
    from vllm.model_executor.models.llama import LlamaForCausalLM
    from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

    given = []
    for kind in (Qwen3ForCausalLM, LlamaForCausalLM):

        def load_weights(self, weights, load=kind.load_weights):
            given.append({})

            def seen():
                for name, tensor in weights:
                    given[-1][name] = tensor
                    yield name, tensor

            return load(self, seen())

        monkeypatch.setattr(kind, "load_weights", load_weights)
    return given


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_the_model_is_given_the_live_tensors(updated, shared_memory, loads, family):
    engine, model = updated(family)
    loads.clear()  # vLLM's own load from the model's files
    new = moved(model, 1)
    before, listed = shared_memory.stat().st_mtime_ns, set(os.listdir("/dev/shm"))
    engine.update_weights(PolicyWeights(new), 1, probe_of(new))
    (given,) = loads
    live = {name: p.data_ptr() for name, p in new.named_parameters()}
    assert {name: tensor.data_ptr() for name, tensor in given.items()} == live, "0 bytes were copied before the load"
    assert shared_memory.stat().st_mtime_ns == before
    assert {name for name in os.listdir("/dev/shm") if name.startswith("specrl")} <= listed


def test_what_walking_makes_is_not_copied_again(updated, loads):
    """Merged adapters and casts are new tensors, which are passed to the model without a copy."""
    from peft import LoraConfig, get_peft_model

    engine, model = updated()
    wrapped = get_peft_model(moved(model, 1), LoraConfig(r=4, target_modules="all-linear"))
    for dtype in (None, torch.bfloat16):
        source = Walked(wrapped, dtype)
        engine.update_weights(source, 1)
        assert {n: t.data_ptr() for n, t in loads[-1].items()} == {n: t.data_ptr() for n, t in source.walks[-1].items()}
        assert {t.dtype for t in loads[-1].values()} == {dtype or torch.float32}


def test_the_engine_keeps_its_weights_while_the_trainer_changes_its_own(updated):
    engine, model = updated()
    new = moved(model, 1)
    engine.update_weights(PolicyWeights(new), 1, probe_of(new))
    before = engine.score(TEXT)
    with torch.no_grad():
        for p in new.parameters():
            p.add_(1.0)
    assert engine.score(TEXT) == before


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda metas: [*metas, Meta("model.extra", torch.float32, (1,))], "model.extra"),
        (lambda metas: metas[:-1], "lacks 1"),
        (lambda metas: [*metas, metas[0]], "twice"),
        (lambda metas: [*metas[:-1], Meta(metas[-1].name, torch.float32, (3,))], r"\(3,\)"),
    ],
    ids=["unknown", "missing", "twice", "shape"],
)
def test_what_is_declared_wrongly_is_refused_before_anything_is_loaded(updated, golden, loads, change, word):
    engine, model = updated()
    loads.clear()
    new, before = moved(model, 1), engine.score(TEXT)
    with pytest.raises(RolloutError, match=word):
        engine.update_weights(Misdeclared(new, change), 1, probe_of(new))
    assert loads == []
    assert engine.score(TEXT) == before
    with pytest.raises(RolloutError, match="version 1 failed; send the weights again"):
        engine.generate(requests_of(golden()[0]))


@pytest.mark.parametrize("reached", [3, 12])
def test_a_whole_update_repairs_what_a_broken_one_left(updated, reached):
    """vLLM counts the weights that a layer has received, and would treat the remaining ones as a complete update."""
    engine, model = updated()

    def broken():
        yield from list(PolicyWeights(moved(model, 1)))[:reached]
        raise OSError("the trainer is gone")

    with pytest.raises(RolloutError, match="trainer is gone"):
        engine.update_weights(broken(), 1)
    new = moved(model, 2)
    engine.update_weights(PolicyWeights(new), 2, probe_of(new))


RANKS = """
import sys
from transformers import AutoModelForCausalLM
from vllm import LLM
from specrl.rollout.config import RolloutConfig
from specrl.rollout.engines.base import EngineSpec
from specrl.rollout.engines.vllm.settings import settings
from specrl.rollout.engines.vllm.weights import Updates, WeightCheck
from specrl.rollout.engines.vllm.worker import TRANSFER
from specrl.rollout.types import RolloutError
from tests.rollout.engines.vllm.test_vllm import TEXT, moved, probe_of
from specrl.trainers.weights import PolicyWeights
from vllm import SamplingParams

def prove(version, probe):
    llm.reset_prefix_cache()
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False)
    (output,) = llm.generate({"prompt_token_ids": list(TEXT)}, params, use_tqdm=False)
    scores = output.prompt_logprobs
    probe.check([scores.logprobs[first] for first in scores.start_indices[1:]], version)

if __name__ == "__main__":
    config = RolloutConfig(engine="vllm", max_new_tokens=30)
    config.vllm.kv_cache_mb, config.vllm.tensor_parallel = 16, 2
    spec = EngineSpec(model=sys.argv[1], eos_ids=frozenset({1}), rollout=config)
    extension = "specrl.rollout.engines.vllm.worker.WorkerExtension"
    llm = LLM(**settings(spec), worker_extension_cls=extension, weight_transfer_config={"backend": TRANSFER})
    updates, model = Updates(llm, WeightCheck(spec), 2, False, prove), AutoModelForCausalLM.from_pretrained(sys.argv[1])
    assert updates.route == "memory", "these ranks are processes"
    for version in (1, 2):
        new = moved(model, version)
        updates.update(PolicyWeights(new), version, probe_of(new))
    try:
        updates.update(iter(list(PolicyWeights(new))[:-1]), 3, None)
        sys.exit("an update that lacks a weight was taken")
    except RolloutError as error:
        assert "lacks 1" in str(error)
    try:
        updates.update(PolicyWeights(moved(model, 3)), 3, probe_of(new))
        sys.exit("wrong weights were taken")
    except RolloutError as error:
        assert "does not run the weights it was sent" in str(error)
    llm.llm_engine.engine_core.shutdown()
"""


@pytest.mark.long
def test_two_ranks_in_processes_of_their_own(saved):
    own = {"PYTHONPATH": str(ROOT), "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(
        [sys.executable, "-c", RANKS, str(saved("llama")[1])],
        env={**os.environ, **own, "TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


# Sleep ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def sleeper(saved, updated, monkeypatch):
    """(engine, model, calls): an engine that assumes a GPU. Sleep at level 2 overwrites the weights, as on a GPU; on a
    CPU vLLM accepts the calls and keeps its memory.
    """
    from vllm import LLM

    import specrl.rollout.engines.vllm.engine as module

    here = module.settings(spec_of(saved("qwen3")[1]))
    with monkeypatch.context() as patch:
        patch.setattr(module, "settings", lambda spec: here)
        patch.setattr(module, "current_platform", SimpleNamespace(is_cpu=lambda: False))
        engine, model = updated()
    calls, sleep, wake_up, update = [], LLM.sleep, LLM.wake_up, LLM.update_weights

    def asleep(llm, level):
        calls.append(level)
        if level == 2:
            llm.collective_rpc(lose)
        sleep(llm, level)

    def awake(llm, tags):
        calls.append("+".join(tags))
        return wake_up(llm, tags)

    def loaded(llm, request):
        calls.append("load")
        update(llm, request)

    monkeypatch.setattr(LLM, "sleep", asleep)
    monkeypatch.setattr(LLM, "wake_up", awake)
    monkeypatch.setattr(LLM, "update_weights", loaded)
    return engine, model, calls


@torch.no_grad()
def lose(worker):
    for p in worker.get_model().parameters():
        p.fill_(float("nan"))


def texts_of(engine, model, cases):
    """The engine's texts, after checking that they are the model's."""
    want, _ = TransformersEngine(model, SamplingParams(EOS_IDS)).generate(requests_of(cases))
    assert differing(engine.generate(requests_of(cases))[0], want, 1e-4) == []


def test_nothing_is_restored_only_to_be_overwritten(sleeper, golden):
    engine, model, calls = sleeper
    cases, _ = golden()
    texts_of(engine, model, cases)
    texts_of(engine, model, cases)
    assert calls == [1, "weights+kv_cache", 1], "nobody can bring the weights of the file again: they are kept"
    calls.clear()
    new = moved(model, 1)
    engine.update_weights(PolicyWeights(new), 1, probe_of(new))
    texts_of(engine, new, cases)
    assert calls == ["weights", "load", "kv_cache", 2]
    calls.clear()
    newer = moved(model, 2)
    engine.update_weights(PolicyWeights(newer), 2, probe_of(newer))
    texts_of(engine, newer, cases)
    assert calls == ["weights", "load", "kv_cache", 2]


def test_a_rollout_without_an_update_before_it_has_the_weights_all_the_same(sleeper, golden):
    engine, model, calls = sleeper
    cases, _ = golden()
    new = moved(model, 1)
    source = Walked(new)
    engine.update_weights(source, 1, probe_of(new))
    texts_of(engine, new, cases)
    calls.clear()
    texts_of(engine, new, cases)
    assert calls == ["weights", "load", "kv_cache", 2]
    assert len(source.walks) == 2
    assert engine.weight_version == 1
    engine.score(TEXT)
    texts_of(engine, new, cases)
    assert calls == ["weights", "load", "kv_cache", 2] * 3, "a score gives the memory back too"


def test_weights_that_all_ranks_must_walk_are_kept(sleeper, golden):
    """One rank may wake up when no other rank takes part in gathering."""
    engine, model, calls = sleeper
    cases, _ = golden()
    new = moved(model, 1)
    source = Walked(new)
    source.collective = True
    engine.update_weights(source, 1, probe_of(new))
    texts_of(engine, new, cases)
    texts_of(engine, new, cases)
    assert calls == ["load", 1, "weights+kv_cache", 1]
    assert len(source.walks) == 1


def test_a_source_that_changed_without_an_update_is_found(sleeper, golden):
    engine, model, _ = sleeper
    cases, _ = golden()
    new = moved(model, 1)
    engine.update_weights(PolicyWeights(new), 1, probe_of(new))
    engine.generate(requests_of(cases))
    with torch.no_grad():
        new.model.norm.weight.mul_(1.1)
    with pytest.raises(RolloutError, match="does not run the weights it was sent"):
        engine.generate(requests_of(cases))
    with pytest.raises(RolloutError, match="version 1 failed; send the weights again"):
        engine.generate(requests_of(cases))


class Asleep:
    """An LLM that reports only the level of its sleep. Args: drafter: its draft model."""

    def __init__(self, drafter):
        self.levels = []
        self.worker = SimpleNamespace(get_draft_model=lambda: drafter, device=torch.device("cpu"))
        for name in ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"):
            setattr(self, name, lambda *_, **__: None)

    def collective_rpc(self, ask):
        return [ask(self.worker)]

    def sleep(self, level):
        self.levels.append(level)

    def wake_up(self, tags):
        return True


@pytest.mark.parametrize("drafts", [False, True])
def test_a_draft_model_that_no_update_brings_is_kept_asleep(saved, drafts):
    """Level 2 discards it too, and a rollout would continue with random weights, as slowly as without a draft model."""
    from specrl.rollout.engines.vllm.weights import Updates, WeightCheck

    model, path = saved("qwen3")
    llm = Asleep(model if drafts else None)
    spec = spec_of(path, drafter=str(path) if drafts else "")
    updates = Updates(llm, WeightCheck(spec), 1, True, lambda version, probe: None)
    updates.update(PolicyWeights(model), 1, None)
    updates.sleep()
    assert llm.levels == [1 if drafts else 2]
    if drafts:
        updates.update(PolicyWeights(model, drafter=model), 2, None)
        updates.sleep()
        assert llm.levels == [1, 2]


def test_weights_that_can_be_walked_only_once_are_kept_asleep(sleeper, golden):
    engine, model, calls = sleeper
    cases, _ = golden()
    new = moved(model, 1)
    engine.update_weights(iter(PolicyWeights(new)), 1, probe_of(new))
    texts_of(engine, new, cases)
    texts_of(engine, new, cases)
    assert calls == ["load", 1, "weights+kv_cache", 1]


def test_an_update_that_fails_asleep_leaves_nothing_to_generate_with(sleeper, golden):
    engine, model, calls = sleeper
    cases, _ = golden()
    new = moved(model, 1)
    engine.update_weights(PolicyWeights(new), 1, probe_of(new))
    engine.generate(requests_of(cases))
    with pytest.raises(RolloutError, match="lacks 1"):
        engine.update_weights(Misdeclared(new, lambda metas: metas[:-1]), 2, probe_of(new))
    for use in (lambda: engine.generate(requests_of(cases)), lambda: engine.score(TEXT)):
        with pytest.raises(RolloutError, match="version 2 failed; send the weights again"):
            use()
    calls.clear()
    engine.update_weights(PolicyWeights(new), 2, probe_of(new))
    texts_of(engine, new, cases)
    assert calls == ["weights", "load", "kv_cache", 2]


def test_memory_is_given_back_after_scores_failures_and_rollouts_without_rows(sleeper, golden, monkeypatch):
    """Otherwise the trainer's next update would run out of GPU memory."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    engine, model, calls = sleeper
    cases, _ = golden()
    texts_of(engine, model, cases)
    calls.clear()
    engine.score([3, 4, 5])
    assert calls == ["weights+kv_cache", 1]
    calls.clear()
    failing = mock.patch.object(CPUModelRunner, "execute_model", side_effect=MemoryError("planted"))
    with failing, pytest.raises(MemoryError, match="planted"):
        engine.generate(requests_of(cases))
    assert calls == ["weights+kv_cache", 1]
    new = moved(model, 1)
    engine.update_weights(PolicyWeights(new), 1, probe_of(new))
    calls.clear()
    assert engine.generate([])[0] == []
    assert calls == [2], "of a worker that has no rows of the batch"
    texts_of(engine, new, cases)
    assert calls == [2, "weights", "load", "kv_cache", 2]


def test_memory_that_does_not_come_back_is_an_error(sleeper, golden, monkeypatch):
    from vllm import LLM

    engine, _, _ = sleeper
    engine.generate(requests_of(golden()[0]))
    monkeypatch.setattr(LLM, "wake_up", lambda llm, tags: False)
    with pytest.raises(RolloutError, match=r"rollout\.vllm\.sleep=false"):
        engine.generate(requests_of(golden()[0]))


# From GPU to GPU ------------------------------------------------------------------------------------------------------


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
        self.heard, self.calls, self.fails = {}, [], False

    def join(self, route, init):
        self.calls.append((route, init["rank_offset"], init["world_size"]))
        self.packed = init["packed_buffer_size_bytes"]
        self.group = stateless_group(init)

    def begin_update(self, version, metadata):
        self.calls.append(("begin", version))

    def receive(self, update):
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_consumer

        if self.fails:
            raise RuntimeError("this worker lost its GPU")
        types = (getattr(torch, name) for name in update["dtype_names"])
        named = zip(update["names"], zip(update["shapes"], types, strict=True), strict=True)
        hear = lambda pairs: self.heard.update((name, tensor.clone()) for name, tensor in pairs)  # noqa: E731
        packed_nccl_broadcast_consumer(named, self.group, 0, hear, self.packed, device="cpu")

    def finish_update(self, version, probe):
        self.calls.append(("finish", version))


def stateless_group(init):
    from vllm.distributed.weight_transfer.nccl_common import stateless_init_process_group

    place = init["master_address"], init["master_port"]
    return stateless_init_process_group(*place, init["rank_offset"], init["world_size"], device=None)


@pytest.fixture
def linked(updated, monkeypatch):
    """(delivery, engine, model, listener): two workers with separate GPUs, one of which runs vLLM."""
    import vllm.distributed.device_communicators.pynccl as pynccl

    import specrl.rollout.workers.delivery as module
    from specrl.rollout.workers.worker import Failure, RolloutWorker, WorkerInfo

    monkeypatch.setattr(pynccl, "PyNcclCommunicator", Communicator)
    monkeypatch.setattr(Communicator, "made", [])
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(module, "gpu_uuid", lambda: "A")
    engine, model = updated()
    listener = Listener()
    workers = [RolloutWorker(0), RolloutWorker(1)]
    workers[0].engine, workers[1].engine = engine, SimpleNamespace(updates=listener, score=lambda tokens: [])

    def ask(method, args):
        with ThreadPoolExecutor() as pool:
            results = list(pool.map(lambda worker, own: worker.run(method, *own), workers, args))
        if failed := [result for result in results if isinstance(result, Failure)]:
            raise RolloutError(str(failed[0]))

    delivery = module.Delivery(put=None, call=ask, address="127.0.0.1")
    started = [WorkerInfo(0, "", True, ("B",)), WorkerInfo(1, "", True, listener.gpus)]
    yield delivery, started, engine, model, listener
    delivery.unlink()


def test_workers_on_other_gpus_join_and_receive_every_weight(linked, golden):
    delivery, started, engine, model, listener = linked
    cases, _ = golden()
    for version in (1, 2):
        new = moved(model, version)
        delivery.take(PolicyWeights(new))
        delivery.choose(started)
        delivery.send(version, probe_of(new))
        assert engine.weight_version == version
        texts_of(engine, new, cases)
        assert listener.heard.keys() == dict(new.named_parameters()).keys()
        assert all(torch.equal(listener.heard[name], p) for name, p in new.named_parameters())
    assert listener.calls == [("nccl", 2, 3), ("begin", 1), ("finish", 1), ("begin", 2), ("finish", 2)], "joined once"
    weight_bytes = sum(p.nbytes for p in model.parameters())
    assert sorted(sum(group.sent) for group in Communicator.made) == [0, 0, 2 * weight_bytes]


def test_weights_over_a_link_are_proven_too(linked):
    delivery, started, engine, model, _ = linked
    delivery.take(PolicyWeights(moved(model, 1)))
    delivery.choose(started)
    with pytest.raises(RolloutError, match="does not run the weights it was sent"):
        delivery.send(1, probe_of(moved(model, 2)))
    assert engine.weight_version == 0
    with pytest.raises(RolloutError, match="version 1 failed"):
        engine.generate([])


def test_what_does_not_fit_is_refused_before_it_is_sent(linked, loads):
    delivery, started, _, model, _ = linked
    loads.clear()
    delivery.take(Misdeclared(model, lambda metas: metas[:-1]))
    delivery.choose(started)
    with pytest.raises(RolloutError, match="lacks 1"):
        delivery.send(1, None)
    assert loads == []
    assert sum(sum(group.sent) for group in Communicator.made) == 0


def test_a_worker_that_fails_ends_the_link(linked):
    """A collective waits for all ranks, so the remaining link must not be waited for."""
    delivery, started, _, model, listener = linked
    delivery.take(PolicyWeights(model))
    delivery.choose(started)
    listener.fails = True
    with pytest.raises(RolloutError, match="this worker lost its GPU"):
        delivery.send(1, probe_of(model))
    assert [group.open for group in Communicator.made if group.group.rank == 0] == [False]


def test_a_link_is_formed_anew_after_a_worker_was_replaced(linked):
    delivery, started, engine, model, listener = linked
    for version in (1, 2):
        new = moved(model, version)
        delivery.take(PolicyWeights(new))
        delivery.choose(started)
        delivery.send(version, probe_of(new))
        assert engine.weight_version == version
        delivery.unlink()
    assert [call for call in listener.calls if call[0] == "nccl"] == [("nccl", 2, 3)] * 2
    assert [group.open for group in Communicator.made if group.group.rank == 0] == [False, False]
    assert [group.open for group in Communicator.made if group.group.rank == 1] == [False, True]


def test_workers_on_the_trainers_gpu_open_its_memory(updated, golden, monkeypatch):
    """vLLM's endpoints of CUDA IPC. A handle names memory of this process."""
    import vllm.distributed.weight_transfer.packed_tensor as packing

    import specrl.rollout.engines.vllm.weights as link
    import specrl.rollout.workers.delivery as module
    from specrl.rollout.workers.worker import RolloutWorker, WorkerInfo

    shared, empty = [], torch.empty

    def export(buffer):
        shared.append(buffer)
        return None, (len(shared) - 1, *"-----", None)

    gpu, cpu = {"dtype": torch.uint8, "device": "cuda"}, {"device": "cpu"}
    monkeypatch.setattr(packing, "reduce_tensor", export)
    monkeypatch.setattr("torch.multiprocessing.reductions.rebuild_cuda_tensor", lambda name, *_: shared[name])
    monkeypatch.setattr(torch, "empty", lambda *size, **given: empty(*size, **given | (cpu if given == gpu else {})))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="A"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    monkeypatch.setattr(link, "BUFFER", 1)  # the largest weight determines the size
    monkeypatch.setattr(module, "gpu_uuid", lambda: "A")
    engine, model = updated()
    worker, asked = RolloutWorker(0), []
    worker.engine = engine

    def ask(method, args):
        asked.append(method)
        assert worker.run(method, *args[0]) is None

    delivery = module.Delivery(put=None, call=ask, address="")
    for version in (1, 2):
        new = moved(model, version)
        delivery.take(PolicyWeights(new))
        delivery.choose([WorkerInfo(0, "A", True, ("A",))])
        assert delivery.route == "ipc"
        delivery.send(version, probe_of(new))
        texts_of(engine, new, golden()[0])
    sizes = [p.nbytes for p in model.parameters()]
    assert [buffer.nbytes for buffer in shared] == [max(sizes)] * 2
    chunks = asked.count("receive") // 2
    assert chunks > 1
    update = ["begin_update", *["receive"] * chunks, "finish_update"]
    assert asked == ["join", *update, *update]
