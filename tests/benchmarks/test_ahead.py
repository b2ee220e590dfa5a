"""Runs in turns: what is saved, and runs that differ."""

import json
from types import SimpleNamespace

import pytest

from benchmarks import ahead
from specrl.config.options import ConfigError
from specrl.rollout.types import RolloutError


def step(epoch, seconds, rollout, sync=0.1, **more):
    return {"epoch": epoch, "step": 1, "seconds": seconds, "rollout": rollout, "sync": sync,
            "rest": seconds - rollout - sync, **more}  # fmt: skip


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
