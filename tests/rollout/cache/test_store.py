import fcntl
import os
import stat
from dataclasses import replace

import pyarrow.parquet as pq
import pytest

from specrl.rollout.cache.memory import Fingerprint
from specrl.rollout.cache.record import unpack
from specrl.rollout.cache.snapshot import LOCK, SNAPSHOT
from specrl.rollout.types import CacheError, Trajectory
from tests.rollout.cache.stored import EOS, PRINT, contents, entries, load, saved


@pytest.mark.parametrize(("count", "seed"), [(0, 0), (1, 1), (511, 2), (1500, 3)])
def test_round_trip(tmp_path, count, seed):
    given = entries(count, logprobs=True, seed=seed)
    original, loaded = saved(tmp_path, given), load(tmp_path)
    assert contents(loaded, given) == given
    assert (len(loaded), loaded.bytes) == (count, original.bytes)
    assert (loaded.dropped, loaded.skipped, loaded.quarantined) == (0, 0, 0)
    assert sorted(os.listdir(tmp_path)) == [LOCK, SNAPSHOT]


def test_least_recently_used_order_survives(tmp_path):
    given = entries(400)
    original = saved(tmp_path, given)
    smaller = load(tmp_path, max_mb=original.bytes / 2**21)
    assert contents(smaller, given) == given[-len(smaller) :]
    assert 150 < len(smaller) < 250


def test_any_parquet_reader_can_read_it(tmp_path):
    given = entries(20, logprobs=True)
    saved(tmp_path, given)
    rows = pq.read_table(tmp_path / SNAPSHOT).to_pylist()
    assert [(row["example_id"], row["sample_index"], unpack(row["trajectory"])) for row in rows] == given
    assert [row["key"] for row in rows] == [t.key for _, _, t in given]


def test_missing_directory_is_an_empty_cache(tmp_path, caplog):
    assert len(load(tmp_path / "none")) == 0
    assert not caplog.records


def test_data_then_rename_then_directory_reach_the_disk(tmp_path, monkeypatch):
    calls, fsync, rename = [], os.fsync, os.replace

    def recorded_fsync(descriptor):
        status = os.fstat(descriptor)
        calls.append("fsync directory" if stat.S_ISDIR(status.st_mode) else f"fsync {status.st_size}")
        fsync(descriptor)

    def recorded_replace(source, target):
        calls.append(f"rename {os.path.getsize(source)}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    saved(tmp_path, entries())
    size = (tmp_path / SNAPSHOT).stat().st_size
    assert calls == [f"fsync {size}", f"rename {size}", "fsync directory"]


def test_another_identity_is_an_error(tmp_path):
    saved(tmp_path, entries())
    other = Fingerprint({"tokenizer": "t2", "template": "x"}, PRINT.sampling)
    with pytest.raises(CacheError) as error:
        load(tmp_path, other)
    for part in (
        "dataset was 'd1' there, is 'absent' here",
        "template was 'absent' there, is 'x' here",
        "tokenizer was 't1' there, is 't2' here",
        "move it away",
    ):
        assert part in str(error.value)


def test_another_law_only_costs_the_logprobs(tmp_path):
    given = entries(logprobs=True)
    saved(tmp_path, given)
    other = Fingerprint(PRINT.identity, {"temperature": "0.7"})
    with pytest.raises(CacheError, match=r"temperature was '1\.0' there, is '0\.7' here"):
        load(tmp_path, other, check_sampling=True)
    loaded = load(tmp_path, other)
    assert contents(loaded, given) == [(e, s, replace(t, logprobs=None)) for e, s, t in given]


def test_steps_after_the_checkpoint_are_not_used(tmp_path):
    early, late = entries(40, step=5), entries(60, step=7)[40:]
    saved(tmp_path, early + late)
    loaded = load(tmp_path, max_step=5)
    assert contents(loaded, early + late) == early
    assert (loaded.skipped, loaded.dropped) == (20, 0)
    loaded.put(*entries(60, step=6)[50])
    late = load(tmp_path, max_step=6)
    assert (contents(late, early), len(late), late.skipped) == (early, 40, 20), "nor those of the very next step"
    assert load(tmp_path, max_step=7).skipped == 0


def test_malformed_entries_on_disk_are_dropped(tmp_path, caplog):
    given = entries(60)
    saved(tmp_path, given)
    bad = {entry[:2] for entry in given if max(entry[2].tokens) >= 900}
    loaded = load(tmp_path, vocab_size=900)
    assert contents(loaded, given) == [entry for entry in given if entry[:2] not in bad]
    assert loaded.dropped == loaded.stats()["cache/dropped"] == len(bad) > 10
    assert f"{len(bad)} of 60 entries are malformed" in caplog.text
    assert load(tmp_path, eos_ids=[2]).dropped == 60


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tokens": ()}, "it has no tokens"),
        ({"tokens": (5, 1000, EOS)}, "token id 1000 is outside 0..999"),
        ({"tokens": (5, -1, EOS)}, "token id -1 is outside"),
        ({"tokens": (5, 6)}, "finish is 'stop' but the last token is 6"),
        ({"finish": "length"}, "finish is 'length' but"),
        ({"logprobs": (-1.0, float("nan"))}, "log-prob nan"),
        ({"logprobs": (-1.0, float("-inf"))}, "log-prob -inf"),
        ({"logprobs": (-1.0, 0.5)}, "log-prob 0.5"),
    ],
)
def test_a_bad_entry_on_disk_is_named(tmp_path, caplog, fields, reason):
    good = Trajectory((5, EOS), 1, "stop", 0, 0)
    saved(tmp_path, [("ok", 0, good), ("ex-7", 2, replace(good, **fields))])
    loaded = load(tmp_path)
    assert (len(loaded), loaded.dropped) == (1, 1)
    assert f"The first is example 'ex-7', sample_index 2: {reason}" in caplog.text


def test_a_pipe_or_a_link_in_place_of_the_lock_is_named_and_does_not_hold_the_run(tmp_path, caplog):
    os.mkfifo(tmp_path / LOCK)
    saved(tmp_path, entries())
    assert "it is a pipe" in caplog.text
    (tmp_path / LOCK).unlink()
    (tmp_path / LOCK).symlink_to(tmp_path / "elsewhere")
    saved(tmp_path, entries())
    assert "it is a symbolic link" in caplog.text
    assert not (tmp_path / "elsewhere").exists()


def test_a_second_writer_fails_at_once(tmp_path, caplog):
    saved(tmp_path, entries())
    with open(tmp_path / LOCK) as held:
        fcntl.flock(held, fcntl.LOCK_SH)  # a lock that two writers could share would not block this one
        saved(tmp_path, entries(1))
        assert "Another run is writing" in caplog.text
        assert len(load(tmp_path)) == 60, "reading needs no lock"
    saved(tmp_path, entries(1))
    assert len(load(tmp_path)) == 1


def test_the_first_failed_save_after_each_successful_one_is_logged(tmp_path, caplog):
    cache, blocked = saved(tmp_path / "cache", entries(4)), tmp_path / "a file"
    blocked.write_text("")
    for directory in (blocked, blocked, tmp_path / "cache", blocked):
        cache.save(directory, 1)
    assert cache.write_errors == 3
    assert sum("goes on without saving" in record.message for record in caplog.records) == 2
