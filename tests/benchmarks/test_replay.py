"""Offline replay: passes and tokens are those that the engine counted in a run."""

import pytest

from benchmarks.replay import read_run, summarise
from specrl.results.records import load_run


@pytest.mark.long
@pytest.mark.parametrize(
    ("sources", "off"), [(["prefix", "position"], 1e-6), (["prefix", "position", "earlier", "group"], 0.03)]
)
def test_the_counts_are_the_engines_own(sources, off, tmp_path):
    """About, where texts are chosen between: by drafts of all rows in a pass, or of the prompts before."""
    from tests.runs import run

    options = {"rollout__draft_tokens": 8, "rollout__sources": f"[{','.join(sources)}]"}
    run(tmp_path, **options, trainer__save_every=3, trainer__keep_checkpoints=9)
    windows = summarise(read_run(tmp_path / "run"), sources, windows=(8, 7))["windows"][1:]
    later = [record for record in load_run(tmp_path / "run").steps if record["spec/hit_rate"] == 1.0]
    assert len(later) == 6
    measured = [
        sum(record["spec/passes_per_row"] for record in later) / 6,
        max(record["spec/passes_max"] for record in later),
        sum(record["spec/reused_tokens"] for record in later),
    ]
    right, wrong = ([row[key] for key in ("passes", "slowest", "accepted")] for row in windows)
    assert right == pytest.approx(measured, rel=off)
    assert wrong != pytest.approx(measured, rel=1e-6), "another window gives other counts"
