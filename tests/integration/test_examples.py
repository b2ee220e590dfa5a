"""The commands and the code of the pages run, and the files of examples/ as their docstrings say, on tiny models."""

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from contextlib import nullcontext
from unittest import mock

import pytest

import specrl.train
from specrl.config import load as cli
from tests import runs
from tests.blocks import PAGES, ROOT, SHELL_LANGUAGES, blocks, commands, source, treatment

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


def test_custom_router(script):
    names = script("custom_router.py")
    assert names["stats"].steps > names["stats"].escalated > 0


def test_custom_engine(script):
    names = script("custom_engine.py")
    assert names["naive"].tokens == names["fast"].tokens


@pytest.mark.slow
def test_rollout_loop(script):
    names = script("rollout_loop.py")
    assert names["step"] == 2
    assert names["reused"] > names["count"] / 4, "the third visit drafts with what the second one stored"


def test_importing_specrl_silences_trls_warning_about_vllm():
    lines = (EXAMPLES / "trl_reusing.py").read_text().splitlines()
    imported = [line.split()[1] for line in lines if line.startswith("from ")]
    assert imported.index("specrl") < imported.index("trl"), "specrl silences what trl says when it is imported"
    said = "import warnings; warnings.warn('TRL currently supports vLLM versions from 0.22.0'); warnings.warn('other')"
    for code, count in ((said, 2), (f"import specrl; {said}", 1)):
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.stderr.count("UserWarning") == count


@pytest.mark.slow
def test_trl_reusing(script):
    assert script("trl_reusing.py")["turn"].batch.stats.accepted > 0


@pytest.mark.slow
def test_trl_tools(script):
    turns = script("trl_tools.py")["trainer"].specrl.turns
    assert len(turns) > 1, "the policy calls the tool"
    assert all(turn.batch.stats.accepted > 0 for turn in turns[:2])


@pytest.mark.long
def test_trl_vllm(tmp_path):
    """In a process of its own, as vLLM is started in it."""
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCH_COMPILE_DISABLE": "1"}
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(EXAMPLES / "trl_vllm.py")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    accepted, tokens = re.search(r"(\d+) of (\d+) tokens accepted", done.stdout).groups()
    assert int(accepted) <= int(tokens) > 0, "how many are drafted, the seconds of this machine decide"


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


# The pages ------------------------------------------------------------------------------------------------------------

SMALL = {
    "specrl.train": "dataset.train_size=8 dataset.test_size=1 rollout.group_size=2 rollout.max_new_tokens=24 "
    "rollout.measure_every=2 trainer.prompts_per_step=4 trainer.rows_per_pass=8 trainer.max_steps=4 "
    "trainer.eval_prompts=1 report.plots=false",
    "specrl.bench": "dataset.train_size=8 dataset.test_size=1 rollout.max_new_tokens=24 rows=8 repeats=1",
    "specrl.evaluate": "samples=2",
    "specrl.report": "plots=false",
}
"""What a test adds to the commands of the pages, so that they take seconds."""


@pytest.fixture(scope="module")
def readers(tmp_path_factory):
    """Values for what a reader replaces: a model and data that suffice for a config of real size, and a run."""
    folder = tmp_path_factory.mktemp("reader")
    rows = ({"question": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(40))
    (folder / "data.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return {
        "PATH_OR_HUB_ID": str(runs.build_policy(folder / "model", max_position_embeddings=2048)),
        "FILE.jsonl": str(folder / "data.jsonl"),
        "config=mine.yaml": "config=grpo",
        "DIR": "outputs/grpo_math",
    }


def execute(command, how):
    """Runs a line of a page in the current directory; a command of specrl in this process, in few steps."""
    if how == "shell":
        path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
        subprocess.run(command, shell=True, check=True, timeout=60, env={**os.environ, "PATH": path})
        return
    _, _, module, *words = shlex.split(command)
    if not any(word.startswith(("config=list", "help=", "dry_run=")) for word in words):
        words += ["dry_run=true"] if how == "dry run" else SMALL.get(module, "").split()
    installed = mock.patch("specrl.run.preflight.find_spec", lambda name: name)
    with mock.patch.object(sys, "argv", [module, *words]), installed if how == "dry run" else nullcontext():
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            if end.code:
                raise AssertionError(f"{command} ended with {end.code}") from end


def lines(page):
    """The commands of a page that a test runs, and how."""
    shell = [block for block in blocks(page, page.read_text(encoding="utf-8")) if block.language in SHELL_LANGUAGES]
    treated = [(line, treatment(block, line)) for block in shell for line in commands(block)]
    return [(line, how) for line, how in treated if how in ("run", "dry run", "shell")]


@pytest.mark.long
@pytest.mark.parametrize("page", [page for page in PAGES if lines(page)], ids=lambda page: page.name)
def test_the_commands_of_a_page_run(page, readers, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if page.name == "cache-format.md":
        execute("python -m specrl.train config=grpo_math", "run")
    for line, how in lines(page):
        for placeholder, value in readers.items():
            line = line.replace(placeholder, value)
        execute(line, how)


@pytest.mark.slow
def test_the_code_of_extending_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    page = ROOT / "docs" / "extending.md"
    python = [block for block in blocks(page, page.read_text(encoding="utf-8")) if block.language == "python"]
    names = {"__name__": "example"}
    for block in python:
        if named := re.match(r"# (\w+\.py)\n", block.text):
            (tmp_path / named[1]).write_text(block.text)
        exec(compile("\n" * block.first_line + block.text, str(page), "exec"), names)
    assert names["brevity"]("1 + 1?", "", None) == 1, "the reward of the first block"
    assert names["batch"].stats.accepted > 0, "the loop of the last block, whose second visit drafts"


def test_the_code_of_adapters_runs():
    page = ROOT / "docs" / "adapters.md"
    (block,) = [block for block in blocks(page, page.read_text(encoding="utf-8")) if block.language == "python"]
    sent = []

    def answer(prompt_ids, extra_args):
        sent.append(extra_args)
        return [5, 6, 7]

    names = {"prompt_ids": [1, 2], "longer_ids": [1, 2, 5, 6, 7, 3], "step": 0, "i": 0, "answer": answer}
    exec(source(block), names)
    assert len(sent) == 1
    assert names["ticket"].turn == 1, "the next turn of the conversation"
