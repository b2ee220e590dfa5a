"""Every research script runs to its end at its smallest size. Its figures and verdict are in benchmarks/research."""

import json
import time
from importlib import import_module

import pytest
import torch

from benchmarks import ablation
from benchmarks.research.equivalence import arms, on_policy
from specrl.config import load as cli
from specrl.rollout.engines.local.head import Head
from specrl.rollout.engines.local.model import PackedModel
from specrl.tiny import load_tiny
from tests.runs import ROOT

pytestmark = pytest.mark.long

NEVER_SLOWER = ["repeats=1", "loops=1", "rollout.max_new_tokens=16"]
SMALLEST = {
    "equivalence.arms": {"ARMS": (arms.OFF, arms.AGAIN, arms.EXACT, arms.PUBLISHED, *arms.CONTROLS)},
    "equivalence.learning": {"EPOCHS": 2},
    "equivalence.on_policy": {"OPTIONS": on_policy.OPTIONS | {"dataset.train_size": 4, "rollout.max_new_tokens": 24}},
}
"""Constants of the scripts, and what they are here."""


def script(name):
    return import_module(f"benchmarks.research.{name}")


def by_words(name, schema, *words):
    """Runs a script that takes `key=value` words and `out=FILE`."""
    module = script(name)

    def run(folder):
        filled = [word.format(folder=folder) for word in (*words, "out={folder}/out.json")]
        assert cli.run(module.main, filled, getattr(module, schema), training=False) == 0

    return run


def equivalence(folder):
    """So small that it shows nothing, which makes the result invalid."""
    module = script("equivalence.__main__")
    assert module.main(module.Options(seeds=2, out=str(folder / "out.json"))) == 1


def real_head(folder):
    model, tokenizer = load_tiny()
    for part in (Head.of(model), tokenizer):
        part.save_pretrained(folder / "head")
    small = ["rows=8", "temperatures=[1.0]", "rollout.max_new_tokens=16"]
    by_words("real_head", "HeadConfig", "config=grpo_math", "rollout.drafter={folder}/head", *small)(folder)
    (line,) = json.loads((folder / "out.json").read_text())["lines"]
    assert line["old text"]["passes"] < line["old text"]["plain_passes"] == 16
    assert line["chains"] > 0


def test_acceptance_by_position_by_hand():
    shares = script("real_head").by_position([(4, 0), (4, 1), (4, 4), (2, 2)])
    assert shares == [3 / 4, 2 / 3, 1.0, 1.0], "the chain of two has no third token"


RUNS = {
    "budget": by_words("budget", "BudgetConfig", "rows=[1]", "repeats=1", "few=true"),
    "equivalence": equivalence,
    "host": by_words("host", "HostConfig", "rows=16", "tokens=60", "repeats=1"),
    "never_slower": by_words("never_slower", "NeverSlowerConfig", "config=grpo_math", "sizes=[8]", *NEVER_SLOWER),
    "real_head": real_head,
}


def test_every_script_is_run():
    paths = (ROOT / "benchmarks" / "research").iterdir()
    scripts = {path.stem for path in paths if path.suffix == ".py" and "__main__" in path.read_text()}
    assert scripts | {"equivalence"} == set(RUNS)


@pytest.mark.parametrize("name", RUNS)
def test_it_runs_to_its_end(name, tmp_path, monkeypatch, capsys):
    for module, constants in SMALLEST.items():
        for constant, value in constants.items():
            monkeypatch.setattr(script(module), constant, value)
    monkeypatch.setattr(ablation, "REGIMES", {"little drift": 0.02})
    for module, replaced in (
        (time, "perf_counter"),
        (PackedModel, "forward"),
        (ablation, "SIZES"),
        (ablation, "WINDOWS"),
    ):
        monkeypatch.setattr(module, replaced, getattr(module, replaced))  # what `budget` replaces is put back
    monkeypatch.setattr(torch, "compile", lambda function=None, **_: function or (lambda given: given))
    RUNS[name](tmp_path)
    out = tmp_path / "out.json"
    printed = capsys.readouterr().out
    assert json.loads(out.read_text()) if out.exists() else printed
