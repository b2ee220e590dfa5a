"""Weights in files in memory, which other processes read."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from specrl.rollout.engines.weights import in_memory_files

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
