"""The README's picture says what its runs say, or is not drawn."""

import json

import pytest

from benchmarks.picture import PictureConfig, main
from specrl.config.options import ConfigError


@pytest.fixture
def made(tmp_path):
    def make(name, gen_s, **more):
        folder = tmp_path / name
        (folder / "model").mkdir(parents=True)
        (folder / "model" / "model.safetensors").write_bytes(more.pop("weights", b"same"))
        step = {"reward": 0.5, "timing_s/gen": gen_s, "timing_s/step": 5.0, "epoch": 1.0, **more}
        lines = [json.dumps(step | {"step": i}) for i in range(1, 11)]
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        return str(folder)

    return make


def test_a_run_and_its_baseline(made, tmp_path, capsys):
    out = tmp_path / "claim.png"
    assert main(PictureConfig(made("own", 1.0), made("plain", 3.0), str(out))) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    assert "30.0 s plainly, 10.0 s with specrl: 3.00x" in capsys.readouterr().out


def test_a_run_alone_shows_its_control_steps(made, tmp_path, capsys):
    own = made("own", 1.0, **{"spec/plain_s": 2.0, "spec/control_mismatches": 0})
    assert main(PictureConfig(own, out=str(tmp_path / "claim.png"))) == 0
    assert "20.0 s plainly, 10.0 s with specrl" in capsys.readouterr().out


@pytest.mark.parametrize("fault", [{"weights": b"others"}, {"reward": 0.6}])
def test_planted_fault_runs_that_differ_have_no_picture(made, tmp_path, fault):
    with pytest.raises(ConfigError, match="other weights" if "weights" in fault else "other rewards"):
        main(PictureConfig(made("own", 1.0), made("plain", 3.0, **fault), str(tmp_path / "claim.png")))


@pytest.mark.parametrize("more", [{}, {"spec/plain_s": 2.0, "spec/control_mismatches": 1}])
def test_planted_fault_a_run_that_shows_nothing_has_no_picture(made, tmp_path, more):
    with pytest.raises(ConfigError, match="10 rows that differ" if more else "no control step"):
        main(PictureConfig(made("own", 1.0, **more), out=str(tmp_path / "claim.png")))
