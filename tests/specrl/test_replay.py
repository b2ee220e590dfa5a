"""Offline replay: passes and tokens counted by hand, and as the engine counted them in a run."""

import json
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specrl.config import load as cli
from specrl.config.options import ConfigError
from specrl.replay import (
    Counts,
    ReplayOptions,
    Text,
    Visit,
    count,
    main,
    read_files,
    read_run,
    revisits,
    summarise,
)
from specrl.results.records import load_run
from specrl.rollout.cache.memory import Fingerprint, TrajectoryCache
from specrl.rollout.sections import SOURCES
from specrl.rollout.types import Trajectory

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


def test_a_capped_text_is_never_drafted_to_its_end():
    assert count_one(text(OLD, capped=True), [OLD], 0, POSITIONS) == Counts(1, 7, 7)
    assert count_one(text(OLD[:1], capped=True), [OLD], 0, POSITIONS) == Counts(1, 0, 0)


def test_a_shifted_text_is_picked_up_by_its_suffix_only():
    new = (9, *OLD)
    # 8 drafted, none kept, 9 drawn; then 7 drafted at the same positions, ... and none ever agrees.
    assert count_one(text(new), [OLD], 0, POSITIONS) == Counts(9, 8 + 7 + 6 + 5 + 4 + 3 + 2 + 1, 0)
    # 2 tokens must agree: 9, 10, 11 are drawn one by one (8 + 7 + 6 drafted), then 12..16 and the EOS ride one pass.
    assert count_one(text(new), [OLD]) == Counts(4, 8 + 7 + 6 + 6, 6)


def test_a_sibling_is_followed_where_the_own_text_ends():
    sibling = (50, 12, 13, 30, 31, 32, 1)
    # Own text: 10..13 kept of 4, 30 drawn. Then 13, 30 is found in the sibling: 31, 32 and the EOS.
    assert count_one(text((10, 11, 12, 13, 30, 31, 32, 1)), [(10, 11, 12, 13), sibling]) == Counts(2, 7, 7)


# --- several


def test_drafts_are_those_the_run_had():
    stored = [
        text((1,), step=0, sample_index=0),
        text((2,), step=0, sample_index=1),
        text((3,), step=2, sample_index=1),
        text((4,), step=2, sample_index=0),
        text((5,), step=5, sample_index=1),
        text((6,), step=5, sample_index=7),
        text((7,), step=9, example="b"),
    ]
    found = list(revisits(reversed(stored)))
    assert [[(t.step, t.sample_index) for t in visit.texts] for visit in found] == [[(2, 0), (2, 1)], [(5, 1), (5, 7)]]
    assert [[t.tokens for t in visit.stored] for visit in found] == [[(1,), (2,)], [(4,), (3,)]]
    olds = [[visit.old(t) for t in visit.texts] for visit in found]
    assert [[old and old.tokens for old in row] for row in olds] == [[(1,), (2,)], [(3,), None]]


def test_the_newest_text_is_followed_first_whatever_its_slot():
    # Both texts have 20, 21 and go on in their own ways; the newer one, of the later sample, is what the row does.
    older, newer = (20, 21, 30, 31, 32, 1), (20, 21, 40, 41, 42, 1)
    stored = [text(older, step=0, sample_index=0), text(newer, step=2, sample_index=1)]
    (visit,) = list(revisits([*stored, text((9, 20, 21, 40, 41, 42, 1), step=5, sample_index=2)]))[1:]
    assert [old.tokens for old in visit.stored] == [newer, older]
    # 9, 20 and 21 are drawn, then 40, 41, 42 and the EOS ride one pass.
    assert [(c.passes, c.accepted) for c in count(visit, 0, ("earlier",))] == [(4, 4)]
    swapped = Visit(visit.texts, visit.stored[::-1])
    assert [c.passes for c in count(swapped, 0, ("earlier",))] == [6], "negative control: 40 and 41 are drawn too"


def test_rows_draft_from_what_their_siblings_emit_meanwhile():
    old = (90, 91, 92, 93)
    ahead, behind = (10, 11, 12, 13, 14, 15, 1), (20, 21, 22, 23, 24, 10, 11, 12, 13, 14, 15, 1)
    visit = Visit((text(ahead, 4, 0), text(behind, 4, 1)), (text(old, sample_index=9),))
    alone, together = (count(visit, 4, sources) for sources in ((), ("group",)))
    assert [c.passes for c in alone] == [7, 12]
    assert [c.passes for c in together] == [7, 8], "20..24, 10 and 11 one by one, then 12..15 and the EOS in one pass"
    assert together[1].accepted == 4


def test_totals_by_hand():
    changed = (10, 11, 12, 99, 14, 15, 16, 1)
    texts = [text(OLD, 0), text(OLD, 4, 0), text(OLD, 0, 0, "b"), text(changed, 4, 0, "b"), text((1,), 4, 0, "c")]
    found = summarise(texts, POSITIONS, windows=(0, 3))
    assert {k: v for k, v in found.items() if k not in ("plain", "windows")} == {
        "rows": 2,
        "examples": 2,
        "tokens": 16,
        "steps": [4, 4],
        "draft_age": 4.0,
        "sources": ["prefix", "position"],
    }
    plain = found["plain"]
    assert (plain["passes_per_row"], plain["passes_max"], plain["tokens_per_pass"], plain["drafted"]) == (
        8.0,
        8,
        1.0,
        0,
    )
    whole, narrow = found["windows"]
    assert whole == {
        "window": 0,
        "passes_per_row": 1.5,
        "passes_max": 2,
        "tokens_per_pass": 16 / 3,
        "drafted": 20,
        "accepted": 15,
        "acceptance": 0.75,
        "reused_ratio": 15 / 16,
    }
    # The changed text: 3 kept and 99 drawn, then 3 kept and the EOS drawn.
    assert (narrow["passes_per_row"], narrow["drafted"], narrow["accepted"]) == (2.0, 12, 12)


def test_one_step_alone_is_an_error():
    with pytest.raises(ConfigError, match="No prompt has texts of two steps"):
        summarise([text(OLD), text(OLD, example="b")])


# --- reading


def snapshot(directory, entries):
    cache = TrajectoryCache(Fingerprint(), 100, [1])
    cache.put_many(
        [(e, s, Trajectory(tuple(t), 0, "stop" if t[-1] == 1 else "length", n, n)) for e, s, t, n in entries]
    )
    cache.save(directory, 9)


def test_snapshots_of_a_run_are_joined_and_a_text_in_two_of_them_counts_once(tmp_path):
    snapshot(tmp_path / "checkpoints" / "checkpoint-2" / "trajectories", [("a", 0, OLD, 1), ("b", 0, OLD[:3], 1)])
    snapshot(tmp_path / "checkpoints" / "checkpoint-10" / "trajectories", [("a", 0, OLD, 7), ("b", 0, OLD[:3], 1)])
    snapshot(tmp_path / "trajectories", [("a", 0, OLD, 7), ("b", 0, OLD[:3], 1)])
    texts = read_run(tmp_path)
    assert sorted((t.example_id, t.step, t.capped) for t in texts) == [("a", 1, False), ("a", 7, False), ("b", 1, True)]
    assert [(t.step, t.step - v.old(t).step) for v in revisits(texts) for t in v.texts] == [(7, 6)]


def test_files_with_ids_and_files_with_text(tmp_path):
    rows = [
        {"example_id": "a", "sample_index": 0, "step": step, "tokens": list(OLD), "finish": "stop"} for step in (1, 5)
    ]
    (tmp_path / "ids.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    assert read_files(tmp_path / "ids.jsonl") == [text(OLD, 1), text(OLD, 5)]
    folder = tmp_path / "completions"
    folder.mkdir()
    for step, finish in ((3, "stop"), (11, "length")):
        columns = {
            "example_id": ["a"],
            "sample_index": [2],
            "completion": ["12 + 5 = 17"],
            "tokens": [6],
            "finish": [finish],
        }
        pq.write_table(pa.table(columns), folder / f"step_{step}.parquet")
    late, early = sorted(read_files(folder), key=lambda t: -t.step)
    assert (early.step, late.step, early.sample_index, early.capped, late.capped) == (3, 11, 2, False, True)
    assert early.tokens[:-1] == late.tokens  # the EOS that decoding left out is put back


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            '{"example_id": "a", "sample_index": 0, "step": 1}',
            "line 1: KeyError 'completion'. Needed are example_id, sample_index",
        ),
        ('{"example_id": "a", "sample_index": 0, "tokens": [1]}', "line 1: TypeError"),
        ("[1]", "must hold objects with columns"),
        ("{", "line 1: not JSON"),
    ],
)
def test_unreadable_rows_are_named(tmp_path, content, message):
    file = tmp_path / "text.jsonl"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message) as error:
        read_files(file)
    assert str(file) in str(error.value)


# --- the command


def write(tmp_path):
    file = tmp_path / "ids.jsonl"
    rows = [{"example_id": "a", "sample_index": 0, "step": step, "tokens": OLD} for step in (1, 5)]
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def test_json(tmp_path, capsys):
    assert cli.run(main, [f"data={write(tmp_path)}", "json=true"], ReplayOptions) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["window"] for row in found["windows"]] == [0, 8, 16, 32, 64]
    assert found["windows"][0]["passes_per_row"] == 1.0
    assert "specrl.bench" in found["note"]


def test_the_table_says_what_it_counts(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "specrl.replay", f"data={write(tmp_path)}"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "Seconds need: python -m specrl.bench" in done.stdout
    assert "1 rows of 1 prompts, steps 5 to 5, drafts 4.0 steps old" in done.stdout
    assert "whole" in done.stdout
    assert "…" not in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "Give either run=DIR or data=PATH."),
        (["run=x", "data=y"], "Give either run=DIR or data=PATH."),
        (["run=no-such-run"], "No run at no-such-run."),
        (["path=x"], "Unknown option 'path'. Did you mean 'run'?"),
        (["data=no-such-file.jsonl"], "No .parquet or .jsonl file at no-such-file.jsonl."),
        (
            ["data=x", "sources=[prior]"],
            "sources has 'prior', which is none of prefix, position, earlier, prompt, group, contexts, redraw.",
        ),
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
    found = summarise(read_run(tmp_path / "run"), sources, windows=(8, 7))
    later = [record for record in load_run(tmp_path / "run").steps if record["spec/hit_rate"] == 1.0]
    assert len(later) == 6
    told = [
        sum(record["spec/passes_per_row"] for record in later) / 6,
        max(record["spec/passes_max"] for record in later),
        sum(record["spec/reused_tokens"] for record in later),
    ]
    right, wrong = ([row[key] for key in ("passes_per_row", "passes_max", "accepted")] for row in found["windows"])
    assert right == pytest.approx(told, rel=off)
    assert wrong != pytest.approx(told, rel=1e-6)  # another window is told apart
