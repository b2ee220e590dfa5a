"""No page shows a command that is refused: all of them pass the checks of a dry run.

That each value of a choice also trains is the matter of tests/integration/test_options.py.
"""

import re
import runpy
import shlex
import sys

import pytest

from specrl.config import load as cli
from specrl.run import preflight
from specrl.run.policy import TINY_PATH
from tests.runs import ROOT

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md", "benchmarks/gpu/README.md")),
    *sorted((ROOT / "benchmarks" / "research").glob("*.md")),
    *sorted(file for name in ("docs", "configs", "examples") for file in (ROOT / name).iterdir() if file.is_file()),
    *sorted((ROOT / "specrl").glob("*.py")),
]
WORD = r"(?:'[a-z_.]+=[^'\n]*'|(?<!')[a-z_]+(?:\.[a-z_]+)*=(?:\[[^\]\s]*\]|[^\s`|;,\"'()\[\]\\])+)"
"""`key=value`, quoted or not."""
PLACEHOLDER = re.compile(r"[A-Z]{2}|^(outputs|mine|RUN)\b|\.jsonl$")
HERE = {  # in the place of what only the reader has
    "config": "grpo_math",
    "model": "tiny",
    "tokenizer": str(TINY_PATH),
    "data": "examples/own_dataset.jsonl",
    "rollout.drafter": str(TINY_PATH),
    "rollout.trained": str(TINY_PATH),
    "rollout.vllm.speculator": f"eagle={TINY_PATH}",
    "run": "{run}",
}
SIZES = {"trainer.prompts_per_step": "4", "rollout.max_new_tokens": "200"}
"""Added to commands with config=grpo: the embedded policy and the example data are smaller than a reader's."""


@pytest.fixture(autouse=True)
def a_machine_with_everything(tmp_path, monkeypatch):
    """Every package is installed, there is a GPU, and the reader has what other commands of the pages have made."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs").mkdir()
    for name in ("draft", "weak", "judge", "router"):
        (tmp_path / "outputs" / name).symlink_to(TINY_PATH)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.setattr(preflight, "find_spec", lambda name: name)
    monkeypatch.setattr("specrl.config.rules.find_spec", lambda name: name)
    monkeypatch.setattr("specrl.run.policy.device", lambda config: None)
    (tmp_path / "my_rewards.py").write_text("def brevity(prompt, completion, answer):\n    return 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    run = cli.load(["config=grpo_math", f"output_dir={tmp_path}", "name=run"])
    cli.save(run)
    (tmp_path / "run" / "model").symlink_to(TINY_PATH)
    yield tmp_path / "run"
    sys.modules.pop("my_rewards", None)


def filled(word, run=""):
    """The word with what is here in the place of what only the reader has."""
    key, _, value = word.partition("=")
    value = re.sub(r"\bN\b", "1", value)
    if PLACEHOLDER.search(value) and key in HERE:
        value = HERE[key].format(run=run)
    return key, value


def commands(text):
    """(module, words) of every command of ours that a text shows."""
    text = re.sub(r"\\\n[#\s]*", " ", text)
    found = re.findall(rf"-m specrl\.(\w+)((?:\s+(?:WORDS|{WORD}))*)", text)
    return [(module, [w for w in shlex.split(said) if w != "WORDS"]) for module, said in found]


@pytest.mark.slow
def test_every_command_of_the_pages_passes_its_dry_run(a_machine_with_everything, monkeypatch, capsys):
    shown = {(module, tuple(words)) for page in PAGES for module, words in commands(page.read_text(encoding="utf-8"))}
    shown = {(module, words) for module, words in shown if words and module != "env"}
    assert len(shown) > 50
    failed = []
    for module, words in sorted(shown):
        given = dict(filled(word, a_machine_with_everything) for word in words) | {"dry_run": "true"}
        if given.get("config") == "grpo":
            given |= SIZES
        name = f"specrl.{module}"
        monkeypatch.setattr(sys, "argv", [name, *(f"{key}={value}" for key, value in given.items())])
        monkeypatch.delitem(sys.modules, name, raising=False)
        with pytest.raises(SystemExit) as ended:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        if ended.value.code:
            failed.append(f"{module} {' '.join(words)}: {capsys.readouterr().err}")
    assert "\n".join(failed) == ""


def test_commands_are_found_in_prose_in_comments_and_over_lines():
    quoted = "python -m specrl.train config=a 'dataset.k={a: false}' b=c"
    assert commands(quoted) == [("train", ["config=a", "dataset.k={a: false}", "b=c"])]
    text = "Say `python -m specrl.train config=a \\\n#    'b.c=train[:90%]'` or `python -m specrl.bench WORDS x=1` now"
    assert commands(text) == [("train", ["config=a", "b.c=train[:90%]"]), ("bench", ["x=1"])]
