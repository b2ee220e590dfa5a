"""Who holds a run's name, and what a resumed run must share with its beginning."""

import errno
import fcntl
import json
import os
import subprocess
import sys
from datetime import date

import pytest

import specrl.run.run
import specrl.train
from specrl.config import load as cli
from specrl.config.options import ConfigError
from specrl.run.data import Example
from specrl.run.run_dir import RunDir, data_digests, environment, same_data
from tests.runs import ROOT, words

HOLD = """
import sys
from specrl.config import load as config
from specrl.run.run_dir import RunDir
with RunDir(config.load(sys.argv[1:])).lock():
    print("held", flush=True)
    input()
"""


def load(folder, **options):
    return cli.load(words(folder, **options))


def lock(folder, **options):
    return RunDir(load(folder, **options)).lock()


def hold(folder):
    command = [sys.executable, "-c", HOLD, *words(folder)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


@pytest.mark.slow
def test_a_name_is_held_while_its_run_lives(tmp_path, capsys, monkeypatch):
    """The second start ends before it loads anything; the death of the first, however it comes, frees the name."""
    first = hold(tmp_path)
    monkeypatch.setattr(specrl.run.run, "build", lambda *_: pytest.fail("it began"))
    for resume in ("no", "auto"):
        argv = words(tmp_path, resume=resume)
        capsys.readouterr()
        assert cli.run(specrl.train.main, argv) == cli.USAGE_ERROR
        errors = capsys.readouterr().err.splitlines()
        assert len(errors) == 1
        assert f"(pid {first.pid} on {os.uname().nodename} since " in errors[0]
        assert "name=..." in errors[0]
    first.kill()
    first.communicate()
    with lock(tmp_path, resume="auto"):
        pass


def linked(lock, other):
    lock.symlink_to(other)


def hard_linked(lock, other):
    other.chmod(0o600)
    lock.hardlink_to(other)


@pytest.mark.parametrize(
    "plant",
    [linked, hard_linked, lambda lock, other: os.mkfifo(lock), lambda lock, other: lock.mkdir()],
    ids=["link", "hard link", "pipe", "directory"],
)
def test_what_is_no_lock_of_a_run_is_refused_and_nothing_is_lost(tmp_path, plant):
    (tmp_path / "run").mkdir()
    other = tmp_path / "thesis.txt"
    other.write_text("a" * 300)
    path = tmp_path / "run" / "run.lock"
    plant(path, other)
    with pytest.raises(ConfigError) as refused, lock(tmp_path):
        pytest.fail("it began")
    assert str(path) in str(refused.value)
    assert "give another name=" in str(refused.value)
    assert other.read_text() == "a" * 300


def test_a_lock_that_a_killed_run_left_is_taken_over(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.lock").write_text("pid 1 on a machine with a long name since 2020-01-01 00:00:00")
    with lock(tmp_path):
        assert (tmp_path / "run" / "run.lock").read_text().startswith(f"pid {os.getpid()} on ")


def no_locks(*_):
    raise OSError(errno.ENOLCK, "No locks available")


def test_where_nothing_can_be_locked_the_run_goes_on_and_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(fcntl, "flock", no_locks)
    with lock(tmp_path):
        assert "cannot be locked (No locks available): do not start this name again" in caplog.text


def test_checkpoints_without_their_config_are_not_gone_on_from(tmp_path):
    folder = tmp_path / "run" / "checkpoints" / "checkpoint-3"
    folder.mkdir(parents=True)
    (folder / "specrl.json").touch()
    for resume in ("no", "auto"):
        with (
            pytest.raises(ConfigError, match=r"has checkpoints and no config\.yaml"),
            lock(tmp_path, resume=resume),
        ):
            pass


# Data ----------------------------------------------------------------------------------------------------------------

ROWS = [Example("a", "What is 1 + 1?", "2", {"level": 1}), Example("b", "What is 2 + 2?", "4", {"level": None})]
OTHERS = {
    "id": [Example("c", "What is 1 + 1?", "2", {"level": 1}), ROWS[1]],
    "prompt": [Example("a", "What is 1 - 1?", "2", {"level": 1}), ROWS[1]],
    "chat": [Example("a", [{"role": "user", "content": "What is 1 + 1?"}], "2", {"level": 1}), ROWS[1]],
    "answer": [Example("a", "What is 1 + 1?", "3", {"level": 1}), ROWS[1]],
    "field": [Example("a", "What is 1 + 1?", "2", {"level": 2}), ROWS[1]],
    "order": ROWS[::-1],
    "fewer": ROWS[:1],
    "more": [*ROWS, ROWS[0]],
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_data_is_what_decides_a_run(other):
    began = data_digests(train=ROWS, test=ROWS)
    assert same_data(began, data_digests(train=list(ROWS), test=list(ROWS)), "x.jsonl") == began
    with pytest.raises(ConfigError, match=r"the train rows of data=x\.jsonl have changed"):
        same_data(began, data_digests(train=other, test=ROWS), "x.jsonl")
    with pytest.raises(ConfigError, match="the train and test rows"):
        same_data(began, data_digests(train=other, test=other), "x.jsonl")


def test_a_split_that_one_of_the_two_does_not_use_is_remembered():
    began = data_digests(train=ROWS, test=ROWS[:1])
    without = data_digests(train=ROWS, test=[])
    assert without.keys() == {"train"}, "trainer.eval_prompts=0"
    assert same_data(began, without, "x") == began
    assert same_data(without, began, "x") == began


def test_fields_of_any_type_have_a_digest_that_is_the_same_in_every_process():
    def digest(data):
        return data_digests(
            train=[Example("a", "p", None, {"image": object(), "data": data, "when": date(2025, 1, 2)})]
        )

    assert digest(b"\xff") == digest(b"\xff")
    assert digest(b"\xff") != digest(b"\xfe")


# Environment --------------------------------------------------------------------------------------------------------


def made(folder):
    run_dir = RunDir(load(folder))
    run_dir.path.mkdir()
    return run_dir


def test_the_environment_of_the_beginning_is_kept_and_compared_with(tmp_path):
    run_dir = made(tmp_path)
    began = environment("cpu", 1) | {"threads": 2}
    assert run_dir.keep_environment(began, resumed=False) == ""
    assert run_dir.keep_environment(dict(began), resumed=True) == ""
    now = began | {"threads": 1, "cpu": "Z80", "versions": began["versions"] | {"torch": "9.9", "ray": "0"}}
    for _ in range(2):
        said = run_dir.keep_environment(now, resumed=True)
        assert f"cpu: {began['cpu']} -> Z80; threads: 2 -> 1; torch: {began['versions']['torch']} -> 9.9. The" in said
        assert "ray" not in said
    assert json.loads((run_dir.path / "environment.json").read_text()) == began
    assert run_dir.keep_environment(now, resumed=False) == "", "a run that begins again"
    assert json.loads((run_dir.path / "environment.json").read_text()) == now


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, None])
def test_an_environment_that_was_lost_is_written_anew(tmp_path, text):
    run_dir = made(tmp_path)
    if text is not None:
        (run_dir.path / "environment.json").write_text(text)
    assert run_dir.keep_environment(environment("cpu", 1), resumed=True) == ""
    assert json.loads((run_dir.path / "environment.json").read_text())["threads"] >= 1
