"""What engines share: garbage collection while they work, a container's memory, and weights in files in memory."""

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from specrl.rollout import verify
from specrl.rollout.engines.base import container_bytes, gc_frozen
from specrl.rollout.engines.weights import in_memory_files
from tests.engines import local
from tests.rollout.golden import SAMPLING, requests_of


@pytest.fixture(autouse=True)
def nothing_frozen():
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_what_is_there_is_left_alone_and_given_back():
    with gc_frozen():
        assert gc.get_freeze_count() > 10_000
    assert gc.get_freeze_count() == 0
    with pytest.raises(KeyError), gc_frozen():
        raise KeyError
    assert gc.get_freeze_count() == 0


def test_an_engine_works_with_the_heap_at_rest(golden, monkeypatch):
    model, cases, _ = golden("llama")
    frozen, accepted = [], verify.accept_exact

    def accept(*of):
        if not frozen:  # counting them is slow
            frozen.append(gc.get_freeze_count())
        return accepted(*of)

    monkeypatch.setattr(verify, "accept_exact", accept)
    local(model, SAMPLING).generate(requests_of(cases))
    assert frozen[0] > 10_000
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({"memory.max": "1000\n", "memory.current": "400\n", "memory.stat": "anon 300\ninactive_file 50\n"}, 650),
        ({"memory.max": "max\n", "memory.current": "400\n", "memory.stat": "anon 300\n"}, sys.maxsize),
        (
            {
                "memory/memory.limit_in_bytes": "1000\n",
                "memory/memory.usage_in_bytes": "400\n",
                "memory/memory.stat": "inactive_file 9\ntotal_inactive_file 60\n",
            },
            660,
        ),
        ({}, sys.maxsize),
    ],
    ids=["version 2", "no limit", "version 1", "no container"],
)
def test_a_containers_limit_counts_as_memory(tmp_path, files, left):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert container_bytes(tmp_path) == left


# Weights in files in memory, which other processes read ---------------------------------------------------------------


KEPT = """
import sys, torch
from specrl.rollout.engines.weights import in_memory_files
with in_memory_files(iter([("a", torch.ones(1 << 20)), ("b", torch.arange(3))])) as files:
    print(*files, flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_another_process_reads_the_weights_and_nothing_outlives_a_killed_writer():
    before = set(os.listdir("/dev/shm"))
    writer = subprocess.Popen([sys.executable, "-c", KEPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    (file,) = writer.stdout.readline().split()
    with safe_open(file, "pt") as weights:
        assert set(weights.keys()) == {"a", "b"}
        assert weights.get_tensor("b").tolist() == [0, 1, 2]
    assert set(os.listdir("/dev/shm")) <= before, "no name that somebody would have to remove"
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    assert not Path(file).exists()


def test_large_weights_go_in_several_files(monkeypatch):
    monkeypatch.setattr("specrl.rollout.engines.weights.FILE_BYTES", 50)
    sent = {name: torch.full((20,), value) for name, value in (("a", 1.0), ("b", 2.0), ("c", 3.0))}
    with in_memory_files(sent.items()) as files:
        read = {}
        for file in files:
            with safe_open(file, "pt") as weights:
                read |= {name: weights.get_tensor(name) for name in weights.keys()}  # noqa: SIM118
    assert len(files) == 3
    assert {name: tensor.tolist() for name, tensor in read.items()} == {n: t.tolist() for n, t in sent.items()}
