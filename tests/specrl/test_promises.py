"""No page promises what is refused: the commands and options that they show pass the checks of a dry run.

That each value of a choice also trains is the matter of tests/integration/test_options.py.
"""

import re
import runpy
import shlex
import sys
from collections import Counter

import pytest

from specrl.config import load as cli
from specrl.config import options
from specrl.config.options import ConfigError
from specrl.config.schema import Config
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
KNOWN = options.options(Config)
LEAVES = Counter(key.rpartition(".")[2] for key in KNOWN)
FULL = {key.rpartition(".")[2]: key for key in KNOWN if LEAVES[key.rpartition(".")[2]] == 1} | {
    key: key for key in KNOWN
}
"""An option by its key, or by its last part where no other option has that: `acceptance=off` in a help text."""
PLACEHOLDER = re.compile(r"[A-Z]{2}|^(outputs|mine|RUN)\b|\.jsonl$")
HERE = {  # in the place of what only the reader has
    "config": "grpo_math",
    "model": "tiny",
    "tokenizer": str(TINY_PATH),
    "data": "examples/own_dataset.jsonl",
    "rollout.drafter": str(TINY_PATH),
    "rollout.judged.path": str(TINY_PATH),
    "rollout.vllm.speculator": f"eagle={TINY_PATH}",
    "run": "{run}",
}
SIZES = {"trainer.prompts_per_step": "4", "rollout.max_new_tokens": "200"}
"""Added to commands with config=grpo: the embedded policy and the example data are smaller than a reader's."""
LENIENT = {"rollout.acceptance": "lenient"}
DRAFTER = {"rollout.drafter": str(TINY_PATH)}
JUDGED = {"rollout.acceptance": "judged", "rollout.judged.path": str(TINY_PATH), "rollout.drafter": ""}
ROUTED = {"rollout.acceptance": "routed", "rollout.routed.path": str(TINY_PATH), **DRAFTER}
CONTEXTS = [
    *({"config": name} for name in ("grpo_math", "ppo_math", "dapo_math", "ray_grpo_math", "grpo_math_vllm")),
    *({"config": "grpo_math", **law} for law in (LENIENT, JUDGED, JUDGED | DRAFTER, ROUTED)),
    *({"config": "grpo_math", **law, "trainer.correction": "none"} for law in (JUDGED, ROUTED)),
    {"config": "grpo_math", **DRAFTER, "trainer.drafter.train": "true"},
    {"config": "grpo_math", "data": HERE["data"], "dataset.train_size": "0", "dataset.test_size": "0"},
    {"config": "grpo_math_vllm", "rollout.vllm.scheduling": "async"},
    {"config": "grpo_math", "reward.functions": "[math,format]"},
    {"config": "ppo_math", "trainer.beta": "0.05"},
    {"config": "examples/own_dataset.yaml"},
]
"""Runs in one of which each option that a page shows must be legal: what it is for, it names elsewhere."""


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


def promises(text):
    """What a text shows of options, as dictionaries: the words of a code span that says nothing else together."""
    text = re.sub(r"^```python\n.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)  # which has keyword arguments
    spans = [span.split() for span in re.findall(r"`([^`\n]+)`", text)]
    together = [span for span in spans if len(span) > 1 and all(re.fullmatch(WORD, word) for word in span)]
    found = []
    for words in [*together, *([word] for word in re.findall(rf"(?<![\w./:=]){WORD}", text))]:
        pairs = [filled(word.strip("'").rstrip(".:,")) for word in words]
        if all(FULL.get(key) for key, _ in pairs):
            found.append({FULL[key]: filled(f"{FULL[key]}={value}")[1] for key, value in pairs if value.strip(".")})
    return [pair for pair in found if pair]


def refused(said, contexts=CONTEXTS):
    """Why no run may have these options; empty where one may."""
    why = ""
    for training, context in [*((True, context) for context in contexts), (False, contexts[0])]:
        try:
            config = cli.load([f"{key}={value}" for key, value in (context | said).items()], training=training)
            preflight.needs(config)
            preflight.check(config, training, read="dataset" in str(said))
            return ""
        except ConfigError as error:
            why = why or str(error)
    return why


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


@pytest.mark.slow
def test_every_option_that_a_page_shows_is_legal_somewhere():
    pages = [page for page in PAGES if page.suffix != ".py"]  # the others have keyword arguments
    texts = [*(page.read_text(encoding="utf-8") for page in pages), *(option.help for option in KNOWN.values())]
    shown = {tuple(sorted(said.items())) for text in texts for said in promises(text)}
    assert len(shown) > 80
    assert {"head", str(TINY_PATH)} <= {value for said in shown for key, value in said if key == "rollout.drafter"}
    assert {str(dict(said)): why for said in sorted(shown) if (why := refused(dict(said)))} == {}


def test_planted_promises_are_found():
    page = "`rollout.drafter=head trainer.drafter.train=true`, acceptance=of and\n`rollout.group_size=N`. name=..."
    assert promises(page) == [
        {"rollout.drafter": "head", "trainer.drafter.train": "true"},
        {"rollout.drafter": "head"},
        {"trainer.drafter.train": "true"},
        {"rollout.acceptance": "of"},
        {"rollout.group_size": "1"},
    ]
    assert "expected one of" in refused({"rollout.acceptance": "of"})
    assert "does not exist" in refused({"rollout.drafter": "./none"})
    assert "rollout.drafter=DIR" in refused({"trainer.drafter.train": "true", "rollout.drafter": ""})
    quoted = "python -m specrl.train config=a 'dataset.k={a: false}' b=c"
    assert commands(quoted) == [("train", ["config=a", "dataset.k={a: false}", "b=c"])]
    assert promises("x 'dataset.system_prompt={a: b}' y") == [{"dataset.system_prompt": "{a: b}"}]
    text = "Say `python -m specrl.train config=a \\\n#    'b.c=train[:90%]'` or `python -m specrl.bench WORDS x=1` now"
    assert commands(text) == [("train", ["config=a", "b.c=train[:90%]"]), ("bench", ["x=1"])]
