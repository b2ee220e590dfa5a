"""A run with rollouts ahead is the run without, bit for bit; and the trainers announce the rows that come.

Here the engine has time to spare in this process, so that what was rolled out ahead is the same every time; with real
workers, killed and stopped while they work ahead: test_ray.py.
"""

from unittest import mock

import pytest

import specrl.run.run
from specrl.rollout.build import build_engine
from tests.engines import Spare
from tests.integration.test_identity import DYNAMIC
from tests.runs import differences, recorded, run

pytestmark = pytest.mark.slow
RUNS = {
    "ppo": {"config": "ppo_math", "trainer__minibatches": 2, "trainer__epochs": 2},
    "two updates in pieces, replay, control steps and evaluations": {
        "trainer__epochs": 2,
        "trainer__updates_per_rollout": 2,
        "trainer__rows_per_pass": 4,
        "rollout__replay": 0.5,
        "rollout__measure_every": 2,
        "trainer__eval_every": 2,
        "trainer__eval_prompts": 4,
    },
    "a last batch that is left out": {"dataset__train_size": 6, "trainer__epochs": 2},
}


def ahead(folder, passes=1 << 30, prepare=lambda trainer: None, **options):
    """The run with an engine that has time for so many passes between its calls."""

    def make(spec, model=None, scorer=None):
        return Spare(build_engine(spec), passes)

    with mock.patch.object(specrl.run.run, "build_engine", make):
        return run(folder, prepare, **options)


@pytest.mark.parametrize("name", RUNS)
def test_the_run_is_the_same_and_the_rows_that_come_were_known(tmp_path, name):
    got = ahead(tmp_path, **RUNS[name])
    assert differences(got, recorded(**RUNS[name])) == []
    first, *rest = [step.metrics for step in got.steps]
    assert first["spec/ahead_mb"] == 0
    assert all(line["spec/ahead_done_ratio"] == 1 for line in rest), "every row, across the ends of epochs too"
    assert all(line["spec/ahead_ratio"] > 0.3 for line in rest)


def test_nothing_is_begun_behind_the_last_step(tmp_path):
    got = ahead(tmp_path, trainer__max_steps=4)
    assert len(got.trainer.rollouts.engine.began) == 3
    assert got.trainer.rollouts.engine.stop() == ({}, 0.0)


def test_dynamic_sampling_costs_guesses_only(tmp_path):
    got = ahead(tmp_path, **DYNAMIC)
    assert differences(got, recorded(**DYNAMIC)) == []
    assert any(step.metrics["refill/prompts"] for step in got.steps)
    for step in got.steps[1:]:
        asked = len(step.ids) - 4 * step.metrics["refill/prompts"]
        assert step.metrics["spec/ahead_done_ratio"] >= asked / len(step.ids), "all but further prompts were known"


def test_a_resumed_run_is_the_same_and_checkpoints_hold_nothing_of_it(tmp_path):
    options = {"trainer__epochs": 2, "trainer__save_every": 3}
    uninterrupted = ahead(tmp_path, name="uninterrupted", **options)
    without = run(tmp_path, name="without", **options)
    assert stored(uninterrupted) == stored(without) != {}
    begun = ahead(tmp_path, name="parts", trainer__max_steps=3, **options)
    rest = ahead(tmp_path, name="parts", **options, resume="auto")
    assert differences(begun + rest, uninterrupted) == differences(without, uninterrupted) == []
    assert rest.steps[0].metrics["spec/ahead_mb"] == 0


def stored(got) -> dict[str, bytes]:
    """What the checkpoints hold of the rollouts."""
    root = got.folder / "checkpoints"
    return {str(f.relative_to(root)): f.read_bytes() for f in root.rglob("*") if f.is_file() and "traject" in str(f)}
