"""SIGTERM in the middle of a step: the step is finished and saved, and the run goes on as if nothing had happened."""

import signal
import subprocess
import sys
import time

import pytest

from specrl.config import TERMINATED
from tests.runs import ROOT, run, words
from trainers.checkpoint import newest, step_of

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("algorithm", [{}, {"config": "ppo_math"}], ids=["grpo", "ppo"])
def test_a_terminated_run_saves_and_resumes_as_the_uninterrupted_one(tmp_path, algorithm):
    whole = run(tmp_path / "whole", trainer__epochs=9, **algorithm)
    long = words(tmp_path, trainer__epochs=40, **algorithm)  # enough to be hit
    process = subprocess.Popen(
        [sys.executable, "-m", "specrl.train", *long],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count('"loss"') > 3) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == TERMINATED, output
    assert "which is saved; resume=auto goes on" in output
    saved = newest(tmp_path / "run" / "checkpoints")
    step = step_of(saved)
    assert list((saved / "trajectories").iterdir())
    assert 4 <= step < 27, "in the middle"
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("epochs: 40", "epochs: 9"))
    rest = run(tmp_path, resume="auto", trainer__epochs=9, **algorithm)
    assert [s.tokens for s in rest.steps] == [s.tokens for s in whole.steps[step:]]
    assert rest.losses == whole.losses[-len(rest.losses) :]
    assert all((w == whole.weights[n]).all() for n, w in rest.weights.items())


def test_the_signal_is_given_back(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    run(tmp_path, trainer__max_steps=1)
    assert signal.getsignal(signal.SIGTERM) is before
