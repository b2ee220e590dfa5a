"""Offline replay: passes and tokens counted by hand, and as the engine counted them in a run."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.replay import (
    Counts,
    ReplayOptions,
    Text,
    Visit,
    count,
    main,
    read_run,
    summarise,
)
from specrl.config import load as cli
from specrl.results.records import load_run
from specrl.rollout.sections import SOURCES

POSITIONS = ("prefix", "position")
OLD = (10, 11, 12, 13, 14, 15, 16, 1)


def text(tokens, step=1, sample_index=0, example="a", capped=False):
    return Text(example, sample_index, step, tuple(tokens), capped)


# --- one row


@pytest.mark.parametrize(
    ("new", "window", "want"),
    [
        # The same text: one pass with the whole draft, whose EOS ends the row, so no further token is drawn.
        (OLD, 0, Counts(1, 8, 8)),
        # Windows of 3: 3 + 1 free, then 3 + 1 free (the EOS).
        (OLD, 3, Counts(2, 6, 6)),
        # Windows of 8 cover the text exactly.
        (OLD, 8, Counts(1, 8, 8)),
        # One token replaced in the middle: 8 drafted, 3 kept, the draw 99 is free; the rest (4) goes on in place.
        ((10, 11, 12, 99, 14, 15, 16, 1), 0, Counts(2, 12, 7)),
        # Nothing in common: each pass drafts what is left of the old text and keeps nothing.
        ((20, 21, 1), 0, Counts(3, 8 + 7 + 6, 0)),
        # Shorter than the draft: the draft beyond the EOS was carried in vain.
        ((10, 11, 1), 0, Counts(1, 8, 2)),
        # Longer than the draft: the first pass keeps 7 and draws 17; nothing is left to draft.
        ((10, 11, 12, 13, 14, 15, 16, 17, 18, 1), 0, Counts(3, 8, 7)),
    ],
)
def test_passes_by_hand(new, window, want):
    assert count_one(text(new), [OLD], window, POSITIONS) == want


def count_one(new, olds, window=0, sources=SOURCES):
    """The text of sample 0, whose old text comes first; the others are those of the next samples."""
    stored = tuple(text(old, sample_index=sample_index) for sample_index, old in enumerate(olds))
    (counts,) = count(Visit((new,), stored), window, sources)
    return counts


# --- several


# --- reading


def test_without_revisits_in_snapshots_the_completions_are_read(tmp_path, capsys):
    folder = tmp_path / "completions"
    folder.mkdir()
    for step in (3, 11):
        columns = {"example_id": ["a"], "sample_index": [2], "tokens": [list(OLD)], "finish": ["stop"]}
        pq.write_table(pa.table(columns), folder / f"step_{step}.parquet")
    assert sorted(read_run(tmp_path)) == [text(OLD, 3, 2), text(OLD, 11, 2)]
    assert cli.run(main, [f"run={tmp_path}"], ReplayOptions) == 0
    table = capsys.readouterr().out
    assert "Seconds need: python -m benchmarks.paired" in table
    assert "1 rows of 1 prompts" in table
    assert "whole" in table


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "run is missing"),
        (["run=no-such-run"], "No run at no-such-run."),
        (["path=x"], "Unknown option 'path'."),
        (["run=.", "sources=[prio]"], "sources has 'prio'"),
    ],
)
def test_mistakes_are_one_line(words, message, capsys):
    assert cli.run(main, words, ReplayOptions) == cli.USAGE_ERROR
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}")
    assert error.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sources", "off"), [(["prefix", "position"], 1e-6), (["prefix", "position", "earlier", "group"], 0.03)]
)
def test_the_counts_are_the_engines_own(sources, off, tmp_path):
    """About, where texts are chosen between: by drafts of all rows in a pass, or of the prompts before."""
    from tests.runs import run

    options = {"rollout__budget__window": 8, "rollout__sources": f"[{','.join(sources)}]"}
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
