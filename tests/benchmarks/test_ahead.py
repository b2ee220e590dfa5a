"""Runs in turns: a pair that differs or shows nothing is no result."""

import json
from types import SimpleNamespace

import pytest

from benchmarks import ahead
from specrl.config.options import ConfigError
from specrl.rollout.types import RolloutError


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
