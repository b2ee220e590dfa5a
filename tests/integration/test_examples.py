"""The files of examples/ run as their docstrings say, on the embedded model."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import specrl.train
from specrl.config import load as cli

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SHORT = ["trainer.max_steps=1", "trainer.eval_prompts=2", "rollout.max_new_tokens=48", "report.plots=false"]


@pytest.fixture
def script(tmp_path, monkeypatch):
    """script(name): the names a script has defined after it ran, in a directory of its own."""
    monkeypatch.chdir(tmp_path)
    return lambda name: runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_custom_reward(script, capsys):
    script("custom_reward.py")
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["1.00", "0.50", "0.00"]


def test_custom_drafter(script):
    names = script("custom_drafter.py")
    assert names["drafted"].tokens == names["plain"].tokens
    assert names["drafted"].passes < names["plain"].passes
    assert names["stats"].sources.keys() == {"lookup"}, "no other drafter had a part in it"


def test_rollout_loop(script):
    names = script("rollout_loop.py")
    assert names["step"] == 2
    assert names["reused"] > names["count"] / 4, "the third visit drafts with what the second one stored"


def test_importing_specrl_silences_trls_warning_about_vllm():
    lines = (EXAMPLES / "trl_three_lines.py").read_text().splitlines()
    imported = [line.split()[1] for line in lines if line.startswith("from ")]
    assert imported.index("specrl") < imported.index("trl"), "specrl silences what trl says when it is imported"
    said = "import warnings; warnings.warn('TRL currently supports vLLM versions from 0.22.0'); warnings.warn('other')"
    for code, count in ((said, 2), (f"import specrl; {said}", 1)):
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.stderr.count("UserWarning") == count


@pytest.mark.slow
def test_trl_three_lines(script):
    assert script("trl_three_lines.py")["reuse"].last.stats.accepted > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["custom_reward.py", "own_dataset.yaml"])
def test_the_command_of_an_example_trains(name, tmp_path, monkeypatch):
    text = (EXAMPLES / name).read_text().replace("\\\n", "")
    (command,) = re.findall(r"python -m specrl\.train (.*)", text)
    monkeypatch.chdir(ROOT)
    assert cli.run(specrl.train.main, [*command.split(), *SHORT, f"output_dir={tmp_path}"]) == 0
    (metrics,) = tmp_path.glob("*/metrics.jsonl")
    line = json.loads(metrics.read_text().splitlines()[1])
    assert line["reward/failed"] == 0
    assert ("rewards/closeness/mean" in line) == (name == "custom_reward.py")
