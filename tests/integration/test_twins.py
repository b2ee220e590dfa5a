"""A run that drafts from the log of another is the run without it, and a resumed run repeats steps from its own."""

import shutil

import pytest

from specrl.results.records import load_run
from tests.runs import SHORT, Recording, differences, run

pytestmark = pytest.mark.slow
OTHER = {"trainer__beta": 0.05, **SHORT}


def ratios(record: Recording, name: str) -> list[float]:
    return [step.get(f"spec/{name}") for step in load_run(record.folder).steps]


def test_a_twin_changes_nothing_but_passes(tmp_path):
    a = run(tmp_path, name="a", rollout__cache__log="true", **SHORT)
    without = run(tmp_path, name="without", **OTHER)
    twin = run(tmp_path, name="twin", rollout__twin=str(a.folder), **OTHER)
    assert differences(without, twin) == []
    assert ratios(twin, "twin_hit_rate") == [1.0] * 4
    assert sum(ratios(twin, "passes_per_row")) < sum(ratios(without, "passes_per_row")) * 0.7
    assert differences(without, a) != [], "the comparison was of two runs"
    filled = run(tmp_path, name="filled", rollout__twin=str(a.folder), rollout__fill=64, **OTHER)
    assert differences(without, filled) == []
    assert ratios(filled, "twin_hit_rate") == [1.0] * 4
    assert any(ratios(filled, "ahead_tokens")), "the twin's texts and rows of the next batch in the same passes"
    for file in (a.folder / "texts").iterdir():
        file.write_bytes(file.read_bytes()[:-7])
    damaged = run(tmp_path, name="damaged", rollout__twin=str(a.folder), rollout__cache__log="true", **OTHER)
    assert differences(without, damaged) == []


def test_a_resumed_run_repeats_lost_steps_from_its_own_log(tmp_path):
    options = {"rollout__cache__log": "true", "trainer__save_every": 2, **SHORT}
    whole = run(tmp_path, **options)
    shutil.rmtree(whole.folder / "checkpoints" / "checkpoint-4")
    again = run(tmp_path, resume="auto", **options)
    assert [step.tokens for step in again.steps] == [step.tokens for step in whole.steps[2:]]
    assert ratios(again, "twin_unchanged_ratio")[2:] == [1.0, 1.0]
