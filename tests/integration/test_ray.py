"""Training with Ray workers is training in one process, bit for bit, whatever happens to workers or driver."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.runs import ROOT, differences, recorded, run, words

pytestmark = pytest.mark.long
RAY = {
    "cluster__num_workers": 2,
    "cluster__task_timeout_s": 12,
    "trainer__epochs": 2,
    "trainer__save_every": 2,
}


@pytest.fixture(scope="module")
def undisturbed():
    """The run in one process."""
    return recorded(trainer__epochs=2)


def workers(driver: psutil.Process) -> list[psutil.Process]:
    """Of a pool, of which the driver has one."""
    return [child for child in driver.children(recursive=True) if "RolloutWorker" in " ".join(child.cmdline())]


def disturbed(trainer):
    """Kills one worker before the third rollout and stops another before the fifth, while they work ahead."""
    pool, generate, calls = trainer.rollouts.engine, trainer.rollouts.engine.generate, [0]
    pool.struck = []

    def strike(requests):
        calls[0] += 1
        if sig := {3: signal.SIGKILL, 5: signal.SIGSTOP}.get(calls[0]):
            serving = workers(psutil.Process())
            pid = serving[calls[0] % len(serving)].pid
            pool.struck.append((sig, pid))
            os.kill(pid, sig)
        return generate(requests)

    pool.generate = strike


def test_a_run_whose_workers_are_killed_and_hung_is_the_undisturbed_run(undisturbed, tmp_path):
    got = run(tmp_path, disturbed, **RAY, rollout__fill=64)
    pool = got.trainer.rollouts.engine
    assert any(step.metrics["spec/ahead_ratio"] > 0 for step in got.steps)  # how many, time decides
    assert any(step.metrics.get("spec/ahead_tokens") for step in got.steps)
    assert [sig for sig, _ in pool.struck] == [signal.SIGKILL, signal.SIGSTOP]
    assert pool.replaced == 2
    assert differences(got, undisturbed) == []
    assert got.steps[-1].reuse > 0
    assert not any(psutil.pid_exists(pid) for _, pid in pool.struck)


def test_a_run_whose_driver_is_killed_resumes_as_the_undisturbed_run(undisturbed, tmp_path):
    driver = subprocess.Popen(
        [sys.executable, "-m", "specrl.train", *words(tmp_path, **RAY)], cwd=ROOT, stdout=subprocess.DEVNULL
    )
    metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 180
    while not (metrics.exists() and metrics.read_text().count("\n") > 2) and time.monotonic() < deadline:
        time.sleep(0.1)
    serving = workers(psutil.Process(driver.pid))
    assert len(serving) == 2
    driver.kill()
    driver.wait()
    assert psutil.wait_procs(serving, 30)[1] == []
    rest = run(tmp_path, resume="auto", **RAY | {"cluster__num_workers": 0})
    assert 0 < len(rest.steps) < len(undisturbed.steps)
    missing = len(undisturbed.steps) - len(rest.steps)
    whole_rest = type(undisturbed)(
        undisturbed.trainer, undisturbed.folder, undisturbed.steps[missing:], undisturbed.losses[-len(rest.losses) :]
    )
    assert differences(rest, whole_rest) == []
