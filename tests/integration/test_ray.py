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
    "cluster__task_timeout_s": 10,
    "cluster__object_store_mb": 100,
    "trainer__save_every": 3,
}


@pytest.fixture(scope="module")
def whole():
    """The run in one process."""
    return recorded()


def workers(driver: psutil.Process) -> list[psutil.Process]:
    """Of a pool, of which the driver has one."""
    return [child for child in driver.children(recursive=True) if "RolloutWorker" in " ".join(child.cmdline())]


def disturbed(trainer):
    """Kills one worker before the fourth rollout and stops the other before the sixth."""
    pool, generate, calls = trainer.rollouts.engine, trainer.rollouts.engine.generate, [0]
    pool.struck = []

    def strike(requests):
        calls[0] += 1
        if sig := {4: signal.SIGKILL, 6: signal.SIGSTOP}.get(calls[0]):
            pid = workers(psutil.Process())[calls[0] % 2].pid
            pool.struck.append((sig, pid))
            os.kill(pid, sig)
        return generate(requests)

    pool.generate = strike


def test_a_run_whose_workers_are_killed_and_hung_is_the_undisturbed_run(whole, tmp_path):
    got = run(tmp_path, disturbed, **RAY)
    pool = got.trainer.rollouts.engine
    assert [sig for sig, _ in pool.struck] == [signal.SIGKILL, signal.SIGSTOP]
    assert pool.replaced == 2
    assert differences(got, whole) == []
    assert got.steps[-1].reuse > 0
    assert not any(psutil.pid_exists(pid) for _, pid in pool.struck)
    assert differences(run(tmp_path, name="other", seed=1), whole) != [], "the comparison sees another run"


def test_a_run_whose_driver_is_killed_resumes_as_the_undisturbed_run(whole, tmp_path):
    driver = subprocess.Popen(
        [sys.executable, "-m", "specrl.train", *words(tmp_path, **RAY)], cwd=ROOT, stdout=subprocess.DEVNULL
    )
    metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 180
    while not (metrics.exists() and metrics.read_text().count("\n") > 4) and time.monotonic() < deadline:
        time.sleep(0.1)
    serving = workers(psutil.Process(driver.pid))
    assert len(serving) == 2
    driver.kill()
    driver.wait()
    assert psutil.wait_procs(serving, 30)[1] == []
    rest = run(tmp_path, resume="auto", **RAY)
    assert 0 < len(rest.steps) < len(whole.steps)
    missing = len(whole.steps) - len(rest.steps)
    whole_rest = type(whole)(whole.trainer, whole.folder, whole.steps[missing:], whole.losses[-len(rest.losses) :])
    assert differences(rest, whole_rest) == []
