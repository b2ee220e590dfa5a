"""The judge of a pair by the command: mined, trained, measured, used, and refused for another policy."""

import json
from types import SimpleNamespace

import pytest

from specrl.config import load as cli
from specrl.evaluate import EvaluateConfig
from specrl.evaluate import main as evaluate
from specrl.lossy import judging
from specrl.run.data import Example
from specrl.train_judge import TrainJudgeConfig
from specrl.train_judge import main as train_judge
from tests import runs

pytestmark = pytest.mark.long  # commands on a pair of models
REWARD = "[tests.rewards:few_digits]"


def words(folder, draft, *more):
    return runs.command(
        folder,
        *more,
        rollout__acceptance="off",
        rollout__drafter=draft,
        dataset__train_size=48,
        reward__functions=REWARD,
    )


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    return runs.build_policy(tmp_path_factory.mktemp("draft"), seed=1)


@pytest.fixture(scope="module")
def trained(draft, tmp_path_factory):
    folder = tmp_path_factory.mktemp("judge")
    assert cli.run(train_judge, words(folder, draft, f"out={folder / 'j'}"), TrainJudgeConfig, training=False) == 0
    return folder / "j"


def run_evaluate(folder, draft, capsys, *more):
    code = cli.run(evaluate, words(folder, draft, "samples=2", *more), EvaluateConfig, training=False)
    out, err = capsys.readouterr()
    return code, json.loads(out) if code == 0 else err


def test_an_evaluation_takes_a_judge_of_its_policy_and_refuses_that_of_another(trained, draft, tmp_path, capsys):
    other = runs.build_policy(tmp_path / "other", seed=2)
    settings = ["rollout.acceptance=judged", f"rollout.trained={trained}"]
    assert run_evaluate(tmp_path, draft, capsys, *settings)[0] == 0
    code, err = run_evaluate(tmp_path, draft, capsys, *settings, f"model={other}")
    assert code == 3
    assert "was trained for another policy" in err


def test_too_few_mismatches_are_one_line(draft, tmp_path, capsys):
    small = words(tmp_path, draft, "dataset.train_size=4", "mismatches=1", f"out={tmp_path / 'j'}")
    assert cli.run(train_judge, small, TrainJudgeConfig, training=False) == 2
    err = capsys.readouterr().err
    assert "dataset.train_size=4" in err
    assert err.count("\n") == 1


# --- from a run's stored texts


THIRDS = "[tests.rewards:thirds]"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run with its last texts."""
    folder = tmp_path_factory.mktemp("finished")
    runs.run(folder, reward__functions=THIRDS, dataset__train_size=24, trainer__epochs=2)
    return folder / "run"


def test_a_judge_is_mined_from_a_runs_stored_texts(finished, tmp_path, monkeypatch):
    problems = {"learned": set(), "tested": set()}
    mine = judging.mismatches
    test = judging.compare

    def mined(pair, drafts, *more):
        problems["learned"] |= {draft.problem for draft in drafts}
        return mine(pair, drafts, *more)

    def compared(pair, rules, drafts, *more):
        problems["tested"] |= {draft.problem for draft in drafts}
        return test(pair, rules, drafts, *more)

    monkeypatch.setattr(judging, "mismatches", mined)
    monkeypatch.setattr(judging, "compare", compared)
    options = {"dataset__train_size": 24, "reward__functions": THIRDS, "model": finished / "model"}
    argv = runs.command(tmp_path, f"cache={finished}", f"out={tmp_path / 'j'}", rollout__drafter="", **options)
    assert cli.run(train_judge, argv, TrainJudgeConfig, training=False) == 0
    report = json.loads((tmp_path / "j" / "router.json").read_text())["report"]
    assert 0 < report["important"] < report["mismatches"]
    rules = {line["rule"]: line for line in report["rules"]}
    assert list(rules) == ["exact", "judge"]
    assert (rules["exact"]["change"], rules["exact"]["change_pm"]) == (0, 0)
    assert rules["exact"]["accepted_ratio"] > 0, "stored texts are drafts"
    assert all(rules["exact"]["accepted_ratio"] <= line["accepted_ratio"] for line in rules.values())
    assert problems["tested"]
    assert problems["learned"].isdisjoint(problems["tested"]), "neither weights nor threshold saw them"


def test_the_interval_of_a_change_is_that_of_the_problems(monkeypatch):
    """Two drafts each of two problems, of which one is solved more often."""
    totals = iter([[0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]])
    monkeypatch.setattr(judging, "requests", lambda pair, drafts: [])
    monkeypatch.setattr(judging, "score", lambda *_: next(totals))
    done = [SimpleNamespace(tokens=[1], passes=1)], SimpleNamespace(accepted=0, drafted=0)
    pair = SimpleNamespace(judged=lambda rule: SimpleNamespace(generate=lambda requests: done))
    problems = [Example(id=name, prompt="", answer="1", fields={}) for name in ("a", "b")]
    drafts = [judging.Drafted(problem, n, sample) for n, problem in enumerate(problems) for sample in (0, 1)]
    _, line = judging.compare(pair, {"exact": None, "judge": None}, drafts, None)
    assert line["change"] == 0.5
    assert line["change_pm"] == pytest.approx(1.96 * 0.5)
