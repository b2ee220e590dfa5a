"""Kills, damaged and foreign files, full disks: no wrong entry is served, and no acknowledged save is lost."""

import json
import logging
import os
import pickle
import random
import signal
import struct
import subprocess
import sys
import time
from hashlib import blake2b

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specrl.rollout.cache import snapshot
from specrl.rollout.cache.snapshot import FORMAT, LOCK, SNAPSHOT
from specrl.rollout.types import CacheError
from tests.rollout.cache.stored import contents, entries, load, saved


def write_atomically(directory):
    for step in range(1000):
        saved(directory, entries(300, step), step)
        os.write(1, f"ack {step}\n".encode())


def write_in_place(directory):
    """Control that must fail: writes the same file in place."""
    saved(directory, entries(300))
    with open(f"{directory}/{SNAPSHOT}", "rb") as file:
        payload = file.read()
    for step in range(1000):
        with open(f"{directory}/{SNAPSHOT}", "wb", buffering=0) as file:
            for at in range(0, len(payload), 1024):
                file.write(payload[at : at + 1024])
        os.write(1, f"ack {step}\n".encode())


ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
FORKS = """
import os, sys
import test_store_damage as test
test.saved(sys.argv[2], test.entries(1))  # what pyarrow loads at first use is loaded before the forks
for _ in sys.stdin:
    child = os.fork()
    if child == 0:
        getattr(test, sys.argv[1])(sys.argv[2])
        os._exit(0)
    os.write(1, b"pid %d\\n" % child)
    os.waitpid(child, 0)
    os.write(1, b"dead\\n")
"""


def kills(writer, directory, count):
    """Kills a writer `count` times at a random time after its first acknowledged save. Yields the last such step."""
    rng = random.Random(7)
    command = [sys.executable, "-c", FORKS, writer, str(directory)]
    forks = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENVIRONMENT, bufsize=0)
    try:
        for _ in range(count):
            forks.stdin.write(b"\n")
            told = {}
            while "pid" not in told or "ack" not in told:
                told.update([forks.stdout.readline().decode().split()])
            time.sleep(rng.random() * 0.04)
            os.kill(int(told["pid"]), signal.SIGKILL)
            while (line := forks.stdout.readline().decode().split()) != ["dead"]:
                told.update([line])
            yield int(told["ack"])
    finally:
        forks.stdin.close()
        forks.terminate()
        forks.wait(10)


@pytest.mark.long
def test_a_killed_writer_loses_nothing_it_acknowledged(tmp_path):
    leftovers = 0
    for acknowledged in kills("write_atomically", tmp_path, 70):
        loaded = load(tmp_path)
        step = loaded.get("ex-é0", 0).step
        assert step in (acknowledged, acknowledged + 1)
        assert contents(loaded, entries(300, step)) == entries(300, step)
        assert (loaded.dropped, loaded.quarantined) == (0, 0)
        leftovers += os.path.exists(tmp_path / f"{SNAPSHOT}.tmp")
    assert leftovers > 0  # otherwise no kill hit a write
    saved(tmp_path, entries(1))
    assert sorted(os.listdir(tmp_path)) == [LOCK, SNAPSHOT]


@pytest.mark.long
def test_the_kill_test_can_fail(tmp_path, caplog):
    caplog.set_level(logging.CRITICAL)
    assert any(contents(load(tmp_path), entries(300)) != entries(300) for _ in kills("write_in_place", tmp_path, 40))


@pytest.fixture
def damaged(tmp_path, caplog):
    """Loads a snapshot of 600 entries with changed bytes. Returns the cache, and counts of lost and altered entries."""
    caplog.set_level(logging.CRITICAL)
    given = entries(600, logprobs=True)
    saved(tmp_path, given)
    path = tmp_path / SNAPSHOT
    intact = path.read_bytes()

    def attempt(change):
        path.write_bytes(change(bytearray(intact)))
        loaded = load(tmp_path)
        wrong = [entry for entry in contents(loaded, given) if entry not in lookup]
        lost = len(given) - len(loaded)
        return loaded, lost, wrong

    lookup = set(given)
    attempt.size = len(intact)
    return attempt


def test_truncated_file_is_put_aside(damaged, tmp_path):
    rng = random.Random(0)
    for size in [0, 1, 4, 8, 12, damaged.size - 8, damaged.size - 1, *rng.sample(range(damaged.size), 43)]:
        loaded, lost, _ = damaged(lambda data, size=size: data[:size])
        assert (loaded.quarantined, lost) == (1, 600)
        assert (tmp_path / f"{SNAPSHOT}.corrupt").stat().st_size == size
        assert not (tmp_path / SNAPSHOT).exists()


def flips(size, count=200):
    rng = random.Random(1)
    for offset in rng.sample(range(size), count):
        bit = 1 << rng.randrange(8)

        def flip(data, offset=offset, bit=bit):
            data[offset] ^= bit
            return data

        yield flip


def test_flipped_bits_are_never_served(damaged):
    found = 0
    for flip in flips(damaged.size):
        loaded, lost, wrong = damaged(flip)
        assert not wrong
        assert lost == (600 if loaded.quarantined else 0), "all or nothing"
        found += loaded.quarantined
    assert found >= 190  # a few bits have no meaning, such as those of column statistics


def test_the_flip_test_can_fail(damaged, monkeypatch):
    class Agrees(bytes):
        def __ne__(self, other):
            return False

    monkeypatch.setattr(snapshot, "digest_of", lambda header, rows: Agrees())
    assert any(damaged(flip)[2] for flip in flips(damaged.size))


class Canary:
    def __reduce__(self):
        return os.mkdir, (os.environ["SPECRL_CANARY"],)


def foreign_parquet(**metadata):
    """A parquet file with an extension type whose metadata is a pickle, which old pyarrow versions would execute."""
    kind = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": pickle.dumps(Canary())}
    field = pa.field("example_id", pa.string(), metadata=kind)
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table([["a"]], schema=pa.schema([field])).replace_schema_metadata(metadata), sink)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize(
    "make",
    [
        lambda: pickle.dumps(Canary()),
        lambda: b"PAR1" + pickle.dumps(Canary()) + b"PAR1",
        lambda: b"PK\x03\x04archive/data.pkl" + pickle.dumps(Canary()),
        lambda: random.Random(0).randbytes(5000),
        lambda: b"",
        foreign_parquet,
        lambda: foreign_parquet(**{"specrl.cache": "{}", "specrl.cache.digest": "00"}),
    ],
    ids=["pickle", "pickle-in-parquet-magic", "torch", "random", "empty", "parquet", "forged-parquet"],
)
def test_foreign_file_is_put_aside_and_never_run(tmp_path, monkeypatch, caplog, make):
    monkeypatch.setenv("SPECRL_CANARY", str(tmp_path / "ran"))
    (tmp_path / SNAPSHOT).write_bytes(make())
    loaded = load(tmp_path)
    assert (len(loaded), loaded.quarantined) == (0, 1)
    assert len(caplog.records) == 1
    assert "starting with an empty trajectory cache" in caplog.text
    assert os.listdir(tmp_path) == [f"{SNAPSHOT}.corrupt"]
    saved(tmp_path, entries())
    assert len(load(tmp_path)) == 60


def rewrite(directory, fields: object):
    """Replaces the header of a saved file, with the digest of the new one."""
    table = pq.read_table(directory / SNAPSHOT)
    header = json.dumps(fields).encode()
    rows = list(zip(*table.to_pydict().values(), strict=True))
    metadata = {"specrl.cache": header, "specrl.cache.digest": digest_by_hand(header, rows)}
    pq.write_table(table.replace_schema_metadata(metadata), directory / SNAPSHOT)


def digest_by_hand(header: bytes, rows) -> str:
    """As the page of the format says."""
    digest = blake2b(header, digest_size=16)
    for example_id, sample_index, key, blob in rows:
        name = example_id.encode()
        digest.update(struct.pack("<qqqq", sample_index, key, len(name), len(blob)) + name + blob)
    return digest.hexdigest()


@pytest.mark.parametrize("number", [3, FORMAT + 1])
def test_another_format_is_refused_and_stays(tmp_path, number):
    saved(tmp_path, entries())
    rewrite(tmp_path, {"format": number, "step": 0})
    with pytest.raises(CacheError, match=f"is of trajectory cache format {number}, and this is {FORMAT}.*Move"):
        load(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [LOCK, SNAPSHOT]


@pytest.mark.parametrize("column", ["example_id", "sample_index", "key", "trajectory"])
def test_rows_whose_fields_were_exchanged_are_put_aside(tmp_path, column):
    saved(tmp_path, entries(8))
    table = pq.read_table(tmp_path / SNAPSHOT)
    at, field = table.schema.get_field_index(column), table.schema.field(column)
    other = pa.array(table[column].to_pylist()[::-1], field.type)
    pq.write_table(table.set_column(at, field, other), tmp_path / SNAPSHOT)
    loaded = load(tmp_path)
    assert (len(loaded), loaded.quarantined) == (0, 1)
    assert (tmp_path / f"{SNAPSHOT}.corrupt").exists()


def test_what_is_no_file_is_refused_and_never_waited_for(tmp_path):
    os.mkfifo(tmp_path / SNAPSHOT)
    with pytest.raises(CacheError, match=r"cannot be read: it is .* not a file.*Move it away"):
        load(tmp_path)


def test_directory_in_place_of_the_file_and_file_in_place_of_the_directory(tmp_path, caplog):
    (tmp_path / SNAPSHOT).mkdir()
    with pytest.raises(CacheError, match=r"cannot be read: it is a directory.*Move it away"):
        load(tmp_path)
    saved(tmp_path, entries())
    assert f"was not saved in '{tmp_path}'" in caplog.text
    (tmp_path / "file").touch()
    with pytest.raises(CacheError, match="cannot be read: Not a directory"):
        load(tmp_path / "file")
    saved(tmp_path / "file", entries())
    assert f"was not saved in '{tmp_path / 'file'}' at step 0: File exists" in caplog.text


FULL = """
import logging, resource, sys
from test_store_damage import *
logging.basicConfig(stream=sys.stdout, format="%(message)s")
cache = saved(sys.argv[1], entries(60), 3)
cache.put_many(entries(4000, step=4))
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
cache.save(sys.argv[1], 4)
cache.save(sys.argv[1], 5)
print("failed", cache.write_errors)
"""


def test_full_disk_leaves_the_old_snapshot(tmp_path):
    command = [sys.executable, "-c", FULL, str(tmp_path)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, env=ENVIRONMENT).stdout
    assert said.count("was not saved") == 1, "the second failure in a row is not logged"
    assert "at step 4: File too large. The last complete snapshot is intact" in said
    assert "failed 2" in said
    assert contents(load(tmp_path), entries(60)) == entries(60)
    assert sorted(os.listdir(tmp_path)) == [LOCK, SNAPSHOT]


def test_a_sound_file_for_which_memory_runs_out_is_not_damaged(tmp_path, monkeypatch):
    saved(tmp_path, entries(20))

    def out_of_memory(*args, **kwargs):
        raise MemoryError("malloc of size 8192 failed")

    with monkeypatch.context() as patch:
        patch.setattr("pyarrow.parquet.ParquetFile.read_row_group", out_of_memory)
        with pytest.raises(CacheError, match=r"cannot be read: memory ran out \(malloc of size 8192 failed\)"):
            load(tmp_path)
    loaded = load(tmp_path)
    assert (len(loaded), loaded.quarantined) == (20, 0)
