"""SIGTERM or Ctrl-C in the middle of a step: the step is finished and saved, and the run goes on as if nothing had
happened; a second Ctrl-C stops at once."""

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

import specrl.run.run
import specrl.train
from specrl.config import load as cli
from specrl.config.load import INTERRUPTED, TERMINATED
from specrl.trainers import callbacks
from specrl.trainers.callbacks import StopOnSignal
from specrl.trainers.checkpoint import completed, newest
from tests.runs import ROOT, SPARE_VLLM, by_two_processes, run, words


@pytest.mark.long
def test_a_terminated_run_saves_and_resumes_as_the_uninterrupted_one(tmp_path):
    uninterrupted = run(tmp_path / "uninterrupted", trainer__epochs=6)
    long = words(tmp_path, trainer__epochs=40)  # enough to be hit
    unusable = tmp_path / "path" / "vllm.py"
    unusable.parent.mkdir()
    unusable.write_text("raise RuntimeError('TRL imports vLLM where it is installed, which takes seconds')")
    process = subprocess.Popen(
        [sys.executable, "-m", "specrl.train", *long],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(unusable.parent)},
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
    step = saved.step
    assert list((saved.trajectories).iterdir())
    assert 4 <= step < 18, "in the middle"
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("epochs: 40", "epochs: 6"))
    rest = run(tmp_path, resume="auto", trainer__epochs=6)
    assert [s.tokens for s in rest.steps] == [s.tokens for s in uninterrupted.steps[step:]]
    assert rest.losses == uninterrupted.losses[-len(rest.losses) :]
    assert all((w == uninterrupted.weights[n]).all() for n, w in rest.weights.items())


AT_THE_END = """
import json, os, signal, sys
from pathlib import Path
import specrl.train
from specrl.config import load as config
from specrl.run.run import Run

folder, save = Path(sys.argv[1]), Run.save

def hit(run):
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGTERM)
    save(run)

Run.save = hit
code = config.run(specrl.train.main, json.loads((folder / "words.json").read_text()))
(folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(code))
"""


@pytest.mark.long
def test_a_signal_to_one_process_during_the_last_save_ends_all_after_it(tmp_path):
    (tmp_path / "words.json").write_text(json.dumps(words(tmp_path, trainer__max_steps=1)))
    codes, said = by_two_processes(tmp_path, SPARE_VLLM + AT_THE_END, 120)
    assert codes == [TERMINATED, TERMINATED], "the processes agree, and none is missed by another"
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    assert not (tmp_path / "run" / "report.md").exists()
    assert "specrl.report run=" in said[0]


@pytest.fixture
def interrupted(tmp_path, monkeypatch, capfd):
    """interrupted(steps, options) -> exit code and output of a run that gets a SIGINT in each of these rollouts."""
    before = signal.getsignal(signal.SIGINT)

    def attempt(at: list[int], **options) -> tuple[int, str]:
        build = specrl.run.run.build_trainer

        def prepared(*args):
            trainer = build(*args)
            finish = trainer.rollouts.finish

            def hit():
                for _ in range(at.count(trainer.rollouts.version)):
                    os.kill(os.getpid(), signal.SIGINT)
                return finish()

            trainer.rollouts.finish = hit
            return trainer

        monkeypatch.setattr(specrl.run.run, "build_trainer", prepared)
        code = cli.run(specrl.train.main, words(tmp_path, **options))
        monkeypatch.undo()
        return code, "".join(capfd.readouterr())

    yield attempt
    signal.signal(signal.SIGINT, before)


@pytest.mark.long
def test_ctrl_c_saves_the_step_and_the_run_goes_on_as_the_uninterrupted_one(tmp_path, interrupted):
    options = {"trainer__max_steps": 4}
    uninterrupted = run(tmp_path, name="uninterrupted", **options)
    code, output = interrupted([1], **options)
    assert code == INTERRUPTED
    assert output.count("interrupted: finishing the step and saving it; Ctrl-C once more stops at once") == 1
    assert "interrupted after step 2, which is saved; resume=auto goes on" in output
    rest = run(tmp_path, resume="auto", **options)
    assert [step.tokens for step in rest.steps] == [step.tokens for step in uninterrupted.steps[2:]]
    assert all((w == uninterrupted.weights[n]).all() for n, w in rest.weights.items())


def test_a_launcher_that_passes_a_ctrl_c_on_does_not_make_it_two(monkeypatch, capfd):
    """The terminal sends it to all processes, and torchrun once more."""
    before, now = [signal.getsignal(number) for number in StopOnSignal.SIGNALS], [0.0]
    monkeypatch.setattr(callbacks.time, "monotonic", lambda: now[0])
    state = SimpleNamespace(global_step=3, is_world_process_zero=True)
    with StopOnSignal(1) as stop:
        stop.on_train_begin(SimpleNamespace(world_size=2), state, None)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        now[0] += 5
        with pytest.raises(KeyboardInterrupt, match="interrupted; step 3 is saved"):
            os.kill(os.getpid(), signal.SIGINT)
    assert capfd.readouterr().err.count("Ctrl-C once more") == 1
    assert stop.received == signal.SIGINT
    assert [signal.getsignal(number) for number in StopOnSignal.SIGNALS] == before


def test_a_second_ctrl_c_stops_at_once_and_says_what_is_saved(tmp_path, interrupted):
    code, output = interrupted([2, 2], trainer__save_every=2)
    assert (code, "error: interrupted; step 2 is saved; resume=auto goes on" in output) == (INTERRUPTED, True)
    assert [checkpoint.step for checkpoint in completed(tmp_path / "run" / "checkpoints")] == [2]
    code, output = interrupted([0, 0], name="early")
    assert (code, "error: interrupted; no step is saved" in output) == (INTERRUPTED, True)
