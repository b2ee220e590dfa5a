"""Co-training inside GRPO changes the drafter and never the policy, and is saved and resumed with the run."""

import json
from functools import cache

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from specrl.rollout.engines.local.head import Head
from specrl.rollout.lossy.judge import JudgeHead
from specrl.rollout.lossy.pair import fingerprint
from specrl.trainers.cotraining.trainer import DrafterTrainer
from tests import runs
from tests.runs import SHORT, differences, run

pytestmark = pytest.mark.long  # complete runs

ON = {
    "trainer__drafter__train": "true",
    "trainer__drafter__learning_rate": 1e-2,
    "trainer__drafter__share": 0.5,
}
PPO = {"config": "ppo_math", "trainer__updates_per_rollout": 2, "trainer__minibatches": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cotraining")


@pytest.fixture(scope="module")
def drafter(folder):
    return runs.drafter(folder / "drafter")


@pytest.fixture(scope="module")
def head(folder):
    """A head for `runs.policy()`. Its layer has no norms, so its matrices are scaled down by 60."""
    made = Head.of(AutoModelForCausalLM.from_pretrained(runs.policy()))
    with torch.no_grad():
        for weight in made.layers.parameters():
            weight.mul_(1.0 if weight.dim() == 1 else 1 / 60)
    made.save_pretrained(folder / "head")
    return str(folder / "head")


@pytest.fixture(scope="module")
def made(folder, drafter):
    """made(on): the recording and the records of such a run, cached."""

    @cache
    def get(on: bool):
        name = f"on-{on}"
        recording = run(folder, name=name, rollout__drafter=drafter, **(ON if on else {}))
        return recording, records(folder / name)

    return get


def records(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def measured(lines: list[dict]) -> list[dict]:
    """The co-training metrics of each step, without seconds."""
    return [{key: v for key, v in line.items() if key.startswith("drafter/")} for line in lines]


def test_the_policy_is_the_same_with_and_without(made):
    (off, _), (on, _) = made(False), made(True)
    assert differences(off, on) == []
    assert len(on.steps) == len(on.losses) == 9
    initial = load_file(f"{off.trainer.rollouts.engine.drafting.model.model.name_or_path}/model.safetensors")
    for recording, moved in ((off, False), (on, True)):
        weights = recording.trainer.rollouts.engine.drafting.model.model.state_dict()
        assert all(torch.equal(weights[name], tensor) for name, tensor in initial.items()) != moved, "control"


def test_the_trained_drafter_is_the_one_that_drafts(folder, drafter, made):
    on, lines = made(True)
    assert on.trainer.rollouts.drafter_trainer.drafter is on.trainer.rollouts.engine.drafting.model.model
    untrained = run(folder, name="untrained", rollout__drafter=drafter, **ON | {"trainer__drafter__learning_rate": 0.0})
    agreed, initial = ([line["drafter/agreement"] for line in each] for each in (lines, records(untrained.folder)))
    assert agreed[0] == initial[0], "before the first update"
    assert sum(agreed[3:]) / 6 > sum(initial[3:]) / 6 + 0.03
    assert all("spec/acceptance_model" in line for line in lines[:3]), "later texts may serve all rows"


def test_every_step_says_what_co_training_did(made):
    on, lines = made(True)
    assert on.trainer.rollouts.drafter_trainer.progress.rollouts == len(lines), "its texts are chosen anew for each"
    for line in lines:
        assert {"drafter/loss", "drafter/tokens", "drafter/agreement"} <= line.keys()
        assert line["drafter/active"] == 1.0
        assert line["timing_s/drafter"] > 0.0
        assert line["timing_s/drafter"] + line["timing_s/gen"] + line["timing_s/update"] <= line["timing_s/step"]
    assert not any(key.startswith("drafter/loss") for line in made(False)[1] for key in line)


def test_a_head_is_trained_beside_any_batches_of_updates(folder, head):
    """Tokens, losses and weights are those without it."""
    options = SHORT | PPO | {"rollout__sources": "[]"}
    off = run(folder, name="without", rollout__drafter=head, **options)
    on = run(folder, name="head", rollout__drafter=head, **options, **ON)
    assert differences(off, on) == []
    lines = records(on.folder)
    assert sum("drafter/loss" in line for line in lines) >= len(on.steps)
    assert any(line.get("spec/acceptance_model", 0.0) > 0 for line in lines), "control: it drafted"
    engine = on.trainer.rollouts.engine
    assert on.trainer.rollouts.drafter_trainer.drafter is engine.drafting.model.model
    kept = load_file(on.folder / "drafter" / "model.safetensors")
    initial = load_file(f"{head}/model.safetensors")
    assert kept.keys() == initial.keys()
    assert not any(torch.equal(kept[name], initial[name]) for name in ("fc.weight", "layers.0.mlp.down_proj.weight"))


def test_a_resumed_run_is_the_undisturbed_one(folder, drafter, made):
    options = ON | {"rollout__drafter": drafter}
    uninterrupted, lines = made(True)
    first = run(folder, name="cut", trainer__max_steps=4, trainer__save_every=4, **options)
    second = run(folder, name="cut", trainer__save_every=4, resume="auto", **options)
    assert differences(uninterrupted, first + second) == []
    assert measured(records(folder / "cut")) == measured(lines)
    ended, expected = (r.trainer.rollouts.drafter_trainer.drafter.state_dict() for r in (second, uninterrupted))
    assert all(torch.equal(tensor, expected[key]) for key, tensor in ended.items())


def test_a_resume_that_forgets_the_drafter_is_seen(folder, drafter, made, monkeypatch):
    """Control of the test above."""
    options = ON | {"rollout__drafter": drafter}
    run(folder, name="forgets", trainer__max_steps=4, trainer__save_every=4, **options)
    monkeypatch.setattr("specrl.trainers.cotraining.trainer.DrafterTrainer.load", lambda *args: None)
    second = run(folder, name="forgets", resume="auto", trainer__save_every=4, **options)
    assert measured(records(folder / "forgets")) != measured(made(True)[1])
    assert differences(made(True)[0], second)[0] == "9 rollouts against 5", "only the policy's part is whole"
    assert all(torch.equal(tensor, second.weights[key]) for key, tensor in made(True)[0].weights.items())


def test_the_drafter_is_kept_beside_the_model(folder, made):
    on, _ = made(True)
    kept = AutoModelForCausalLM.from_pretrained(folder / "on-True" / "drafter")
    trained = on.trainer.rollouts.drafter_trainer.drafter.state_dict()
    assert all(torch.equal(tensor, trained[name]) for name, tensor in kept.state_dict().items())


@pytest.mark.long
def test_workers_have_copies_that_follow(folder, drafter):
    """Ray workers draft with the trained drafter as well as an engine that shares it, and the policy is the same."""
    options = SHORT | ON | {"rollout__drafter": drafter, "rollout__sources": "[]", "rollout__draft_tokens": 3}
    here = run(folder, name="here", **options)
    away = run(folder, name="away", cluster__num_workers=1, rollout__ahead="off", **options)
    assert differences(here, away) == []
    rollouts = away.trainer.rollouts
    assert rollouts.drafter is rollouts.drafter_trainer.drafter
    ours, theirs = (records(folder / name) for name in ("here", "away"))
    assert measured(ours) == measured(theirs)
    assert [line["spec/acceptance_model"] for line in ours] == [line["spec/acceptance_model"] for line in theirs]


def test_under_a_judge_the_drafter_learns_and_resumes(folder, drafter, monkeypatch):
    """There the drafter decides what is sampled, so a resume needs the very weights that it had."""
    policy = AutoModelForCausalLM.from_pretrained(runs.policy())
    judge = JudgeHead(torch.ones(policy.config.hidden_size), 0.0, 0.5)  # accepts what it is asked about now and then
    judge.save(folder / "judge", {"policy": fingerprint(policy)})
    options = SHORT | ON | {"rollout__acceptance": "judged", "rollout__trained": folder / "judge"}
    options |= {"rollout__drafter": drafter, "rollout__sources": "[]", "trainer__save_every": 2}
    whole = run(folder, name="judged", **options)
    assert all({"drafter/loss", "spec/behaviour_kl"} <= line.keys() for line in records(folder / "judged"))
    untrained = run(folder, name="judged-off", **options | {"trainer__drafter__train": "false"})
    assert "tokens of step 2" in differences(whole, untrained), "control: it decides what is sampled"
    first = run(folder, name="judged-cut", trainer__max_steps=2, **options)
    assert differences(whole, first + run(folder, name="judged-cut", resume="auto", **options)) == []
    run(folder, name="judged-forgets", trainer__max_steps=2, **options)
    monkeypatch.setattr(DrafterTrainer, "load", lambda *given: None)
    forgotten = first + run(folder, name="judged-forgets", resume="auto", **options)
    assert differences(whole, forgotten)[0] == "tokens of step 2", "planted fault"
