"""Runs in turns: who may go on, what a step took, and runs that differ."""

import json
import os
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from benchmarks import ahead
from benchmarks.ahead_run import Baton, Turns
from specrl.config.options import ConfigError
from specrl.rollout.types import RolloutError
from tests.runs import ROOT


def step(epoch, seconds, rollout, sync=0.1, **more):
    return {"epoch": epoch, "step": 1, "seconds": seconds, "rollout": rollout, "sync": sync,
            "rest": seconds - rollout - sync, **more}  # fmt: skip


def batons():
    ends = socket.socketpair()
    return [Baton(end.detach()) for end in ends]


def test_one_waits_until_the_other_passes_on_or_ends():
    one, other = batons()
    went = []
    waiting = threading.Thread(target=lambda: [went.append(other.wait()) for _ in range(3)], daemon=True)
    waiting.start()
    waiting.join(0.2)
    assert not went, "it has no turn yet"
    one.pass_on()
    waiting.join(0.2)
    assert len(went) == 1, "one turn"
    one.socket.close()
    waiting.join(10)
    assert len(went) == 3, "the other one has ended, and nobody is left to wait for"
    other.pass_on()  # to nobody


def test_a_turn_is_a_rollout_with_its_updates_and_ends_with_the_weights_sent():
    events = []
    baton = SimpleNamespace(wait=lambda: events.append("wait"), pass_on=lambda: events.append("pass on"))
    rollouts = SimpleNamespace(sync=lambda: events.append("sync"))
    run = SimpleNamespace(
        trainer=SimpleNamespace(rollouts=rollouts),
        config=SimpleNamespace(trainer=SimpleNamespace(steps_per_rollout=2)),
    )
    turns = Turns(run, baton)
    for at in range(6):
        turns.on_step_begin(None, SimpleNamespace(global_step=at), None)
    assert events == ["wait", *["sync", "pass on", "wait"] * 2]
    assert [turn["step"] for turn in turns.done] == [1, 3]
    assert all(turn["seconds"] >= turn["sync"] >= 0 for turn in turns.done)


@pytest.mark.slow
def test_workers_have_a_core_of_their_own_and_a_missing_one_is_an_error():
    code = (  # in a process of its own, which `pin` pins
        "import os, subprocess, sys; from benchmarks.ahead_run import pin\n"
        "sleep = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
        "started = [subprocess.Popen([*sleep, name]) for name in ('Rollout' + 'Worker', 'specrl.reward.worker')]\n"
        "try:\n"
        "    pin(2)\n"
        "finally:\n"
        "    print([sorted(os.sched_getaffinity(pid)) for pid in (0, *(process.pid for process in started))])\n"
        "    [process.kill() for process in started]\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    own, worker = sorted(os.sched_getaffinity(0))[:2]
    assert json.loads(done.stdout) == [[own], [worker], [own]]
    assert "1 of 2 rollout workers" in done.stderr


def test_what_is_saved_by_hand():
    ahead_of = {"ahead": 1.5, "ended": 0.5, "unchanged": 0.25}
    off = [step(1, 4.0, 2.0), step(2, 3.0, 1.0)]
    auto = [step(1, 2.5, 0.5, **ahead_of), step(2, 2.5, 0.5, **ahead_of)]
    first, second, whole = ahead.by_epoch(off, auto)
    assert [line["epoch"] for line in (first, second, whole)] == ["1", "2", "all"]
    assert (first["speedup"], second["speedup"], whole["speedup"]) == pytest.approx((1.6, 1.2, 1.4))
    # max(2.0, 1.9) + 0.5 + 0.1, and max(1.0, 1.9) + 0.5 + 0.1
    assert (first["due"], second["due"], whole["due"]) == pytest.approx((2.6, 2.5, 2.55))
    assert whole["auto"]["unchanged"] == 0.25
    assert "unchanged" not in whole["off"]
    over = ahead.over_repeats([first, first | {"speedup": 1.8}])
    assert (over["speedup"], over["error"]) == pytest.approx((1.7, 0.1))
    assert ahead.over_repeats([first])["error"] is None


@pytest.fixture
def ended(monkeypatch):
    """Both runs have ended so."""

    def end(weights=(b"same", b"same"), codes=(0, 0), turns=3):
        def start(words, end, folder):
            at, own = ahead.RUNS.index(words["name"]), folder / words["name"]
            (own / "model").mkdir(parents=True)
            (own / ahead.WEIGHTS).write_bytes(weights[at])
            (folder / f"{words['name']}.log").write_text("error: what went wrong\n")
            done = [{"step": i, "seconds": 2.0, "sync": 0.5} for i in range(1, turns + 1)]
            (own / ahead.TURNS_FILE).write_text(json.dumps(done))
            record = {"timing_s/gen": 1.0, "timing_s/reward": 0.1, "epoch": 0.5}
            lines = [json.dumps(record | {"step": i}) + "\n" for i in range(1, turns + 2)]
            (own / "metrics.jsonl").write_text("".join(lines))
            return SimpleNamespace(wait=lambda: codes[at])

        monkeypatch.setattr(ahead, "start", start)

    return end


def test_the_first_step_is_left_out(ended, tmp_path):
    ended()
    off, auto = ahead.pair({"seed": "0"}, tmp_path)
    assert off == auto
    assert [(line["step"], line["epoch"], line["rest"]) for line in off] == [(2, 1, 0.5), (3, 1, 0.5)]


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ({"weights": (b"same", b"others")}, RolloutError, "other weights"),
        ({"codes": (0, 3)}, RolloutError, "ahead=auto ended with code 3: error: what went wrong"),
        ({"turns": 1}, ConfigError, "three steps"),
    ],
)
def test_planted_fault_a_pair_that_shows_nothing(ended, tmp_path, fault, error, message):
    ended(**fault)
    with pytest.raises(error, match=message):
        ahead.pair({"seed": "0"}, tmp_path)
