"""The README's picture shows what the run's records say, or is refused."""

import json

import pytest

from benchmarks.picture import PictureConfig, main
from specrl.config.options import ConfigError


@pytest.fixture
def run(tmp_path):
    def make(**more):
        step = {"reward": 0.5, "timing_s/gen": 1.0, "timing_s/step": 5.0, "epoch": 1.0, **more}
        lines = [json.dumps(step | {"step": i}) for i in range(1, 11)]
        (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        return PictureConfig(str(tmp_path), str(tmp_path / "claim.png"))

    return make


def test_control_steps_are_drawn(run, tmp_path, capsys):
    assert main(run(**{"spec/plain_s": 2.0, "spec/control_mismatches": 0})) == 0
    assert (tmp_path / "claim.png").read_bytes().startswith(b"\x89PNG")
    assert "20.0 s plainly, 10.0 s with specrl" in capsys.readouterr().out


@pytest.mark.parametrize("more", [{}, {"spec/plain_s": 2.0, "spec/control_mismatches": 1}])
def test_planted_fault_a_run_that_shows_nothing_has_no_picture(run, more):
    with pytest.raises(ConfigError):
        main(run(**more))
