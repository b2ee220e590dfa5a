"""Delivery of weights to a pool's workers, over a link or through the store, also if a worker is replaced in between.

A real Ray cluster whose workers declare GPUs, and a fake of vLLM's sender.
"""

import os
import signal
import sys
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest

from specrl.rollout.build import build_engine
from specrl.rollout.config import RolloutConfig
from specrl.rollout.engines.base import EngineSpec
from specrl.rollout.sections import ClusterConfig
from specrl.rollout.types import Request, RolloutError
from specrl.rollout.workers.delivery import Delivery, choose_route
from specrl.rollout.workers.pool import RolloutPool
from specrl.rollout.workers.worker import WorkerInfo
from specrl.run.cluster import connect
from specrl.trainers.weights import PolicyWeights, probe
from tests.engines import local

TEXT = tuple(range(3, 40))
CLUSTER = ClusterConfig(num_workers=2, task_timeout_s=120)


class Collected:
    """Records the weights that it receives, and loads them into a transformers engine."""

    def __init__(self, engine):
        self.engine, self.gpus, self.joined, self.weights = engine, (f"GPU of {os.getpid()}",), [], None

    def join(self, route, init):
        self.joined.append((route, init["rank_offset"]))

    def begin_update(self, version, metadata):
        self.expected, self.weights = [meta.name for meta in metadata], {}

    def receive(self, update):
        self.weights |= update

    def finish_update(self, version, probe):
        assert list(self.weights) == self.expected
        self.engine.update_weights(self.weights.items(), version, probe)


def build(spec):
    engine = build_engine(spec)
    engine.updates = Collected(engine)
    return engine


class Sender:
    """Replaces vLLM's endpoint in the trainer's process. Sends three weights at a time."""

    def __init__(self, client, source, ranks):
        self.client, self.source, self.sent, self.closed = client, source, 0, False
        client.init_weight_transfer_engine({"rank_offset": 1, "world_size": 1 + ranks})

    def send_weights(self):
        self.client.start_weight_update()
        weights = list(self.source)
        for i in range(0, len(weights), 3):
            self.client.update_weights(dict(weights[i : i + 3]))
        self.client.finish_weight_update()
        self.sent += 1

    def shutdown(self):
        self.closed = True


@pytest.fixture
def senders(monkeypatch):
    """The senders that were opened, with their numbers of ranks."""
    opened = []

    def open_link(route, client, source, ranks, address):
        opened.append(Sender(client, source, ranks))
        return opened[-1]

    monkeypatch.setitem(sys.modules, "specrl.rollout.engines.vllm.weights", SimpleNamespace(open_link=open_link))
    monkeypatch.setattr("specrl.rollout.workers.delivery.gpu_uuid", lambda: "GPU of the trainer")
    return opened


def started(*gpus):
    return [WorkerInfo(i, "", tuple(each)) for i, each in enumerate(gpus)]


def delivery(puts=None, asked=None):
    """A delivery that records its puts and calls."""
    note = lambda method, args: asked is not None and asked.append((method, args))  # noqa: E731
    return Delivery(put=lambda arrays: puts.append(arrays) or len(puts), call=note, address="here")


@pytest.mark.parametrize(
    ("route", "trainer", "ranks", "trainers", "reason"),
    [
        ("ipc", "A", ["A"], 1, "share the trainer's GPU"),
        ("ipc", "A", ["A", "A"], 1, "share the trainer's GPU"),
        ("memory", "A", ["A"], 2, "not from 2"),
        ("nccl", "A", ["B"], 1, "GPU of its own"),
        ("nccl", "A", ["B", "C", "D"], 2, "GPU of its own"),
        ("memory", "A", ["B", "B"], 1, "a GPU for each rank"),
        ("memory", "A", ["A", "B"], 1, "a GPU for each rank"),
        ("memory", "A", ["B", ""], 1, "without a GPU"),
        ("memory", "", ["B", "C"], 1, "trainer has no GPU"),
    ],
)
def test_the_route_follows_from_the_gpus_of_both_sides(route, trainer, ranks, trainers, reason):
    chosen, why = choose_route(trainer, ranks, trainers)
    assert chosen == route
    assert reason in why


@pytest.fixture
def source(build_model):
    return PolicyWeights(build_model("qwen3", seed=1))


def test_the_store_gets_weights_when_they_are_first_asked_for_and_once(source):
    puts = []
    shipped = delivery(puts)
    assert shipped.stored() is None
    shipped.take(iter(source))
    assert puts == []
    assert [shipped.stored(), shipped.stored()] == [1, 1]
    assert puts[0].keys() == {meta.name for meta in source.metadata()}
    shipped.take(source)
    assert shipped.stored() == 2


def test_parts_of_a_policy_are_not_gathered_for_one_worker(source, senders):
    """The other processes would not take part, and this one would block."""
    puts = []
    shipped = delivery(puts, [])
    source.collective = True
    shipped.take(source)
    shipped.choose(started("A", "B"))
    shipped.send(1, None)
    with pytest.raises(RolloutError, match=r"nccl .* resume=auto"):
        shipped.stored()
    assert puts == []


def test_weights_that_can_be_walked_once_follow_a_link(source, senders):
    """A worker that is replaced in between gets them from the store."""
    puts = []
    shipped = delivery(puts, [])
    shipped.take(source)
    shipped.choose(started("A", "B"))
    shipped.send(1, None)
    assert shipped.linked
    shipped.take(iter(source))
    assert shipped.stored() == 1
    shipped.choose(started("A", "B"))
    assert shipped.route == "memory"
    assert shipped.stored() == 1
    assert puts[0].keys() == {meta.name for meta in source.metadata()}


@pytest.mark.long
def test_a_pool_is_linked_and_replaces_workers_all_the_same(build_model, tmp_path, senders):
    model = build_model("llama")
    model.save_pretrained(tmp_path)
    config = RolloutConfig(draft_tokens=6, ahead="off")
    spec = EngineSpec(model=str(tmp_path), eos_ids=frozenset({1, 7}), rollout=config)
    requests = [Request([5, 6, 8 + key % 3], key, 12) for key in range(8)]
    with connect(replace(CLUSTER)):
        pool = RolloutPool(spec, CLUSTER, build)
        try:
            for version in (1, 2, 3):
                new = build_model("llama", seed=version)
                pool.update_weights(PolicyWeights(new), version, probe(new, TEXT))
                if version == 2:  # a worker dies whose weights are in no store
                    victim = next(p for p in psutil.Process().children(recursive=True) if "RolloutWorker" in p.name())
                    os.kill(victim.pid, signal.SIGKILL)
                done, _ = pool.generate(requests)
                want, _ = local(new, pool_sampling(spec), window=6).generate(requests)
                assert [c.tokens for c in done] == [c.tokens for c in want]
                assert {c.version for c in done} == {version}
            assert pool.replaced == 1
            assert [(sender.sent, sender.closed) for sender in senders] == [(2, True), (1, False)], "formed anew"
        finally:
            pool.close()
        assert [sender.closed for sender in senders] == [True, True]


def pool_sampling(spec):
    from specrl.rollout.engines.base import SamplingParams

    return SamplingParams(spec.eos_ids)
