"""Receipts of a finished run: sound ones are reproduced, forged ones are named."""

import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specrl.config.load import run as command_line
from specrl.rollout.cache.record import pack, unpack
from specrl.rollout.cache.snapshot import read_file, write_file
from specrl.rollout.receipts import DIGESTS, Receipts, digest, read_receipts
from specrl.rollout.types import CacheError
from specrl.trainers.checkpoint import Checkpoint
from specrl.verify import VerifyOptions, main
from tests.runs import SHORT, recorded

slow = pytest.mark.slow


@pytest.fixture
def finished(tmp_path) -> Path:
    """A copy of a finished run of four steps with a log, and checkpoints of steps 2 and 4."""
    record = recorded(rollout__cache__log="true", trainer__save_every=2, **SHORT)
    return Path(shutil.copytree(record.folder, tmp_path / "copy"))


def verify(run, capsys, *words):
    code = command_line(main, [f"run={run}", *words], schema=VerifyOptions)
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def forge(run, change, step=2):
    """Changes the rows of a step in the digests."""
    lines = [json.loads(line) for line in (run / DIGESTS).read_text().splitlines()]
    for line in lines:
        if line.get("step") == step:
            change(line["rows"])
    (run / DIGESTS).write_text("".join(json.dumps(line) + "\n" for line in lines))


@slow
@pytest.mark.parametrize(("words", "rows"), [([], 8), (["step=0"], 8), (["rows=3"], 3)])
def test_a_sound_run_is_reproduced_elsewhere(finished, capsys, words, rows):
    code, out, _ = verify(finished, capsys, *words)
    assert (code, out.split(" reproduced")[0]) == (0, f"{rows} of {rows} rows")
    assert "torch" in out
    assert "Not shown" in out


@slow
def test_a_digest_of_the_wrong_row_is_named(finished, capsys):
    def swap(rows):
        rows[1][4], rows[5][4] = rows[5][4], rows[1][4]

    forge(finished, swap)
    shutil.rmtree(finished / "texts")
    code, out, _ = verify(finished, capsys)
    assert (code, out.split(" reproduced")[0]) == (3, "6 of 8 rows")
    assert out.count("differs: example") == 2


@slow
def test_a_row_with_the_key_of_another_visit_is_named(finished, capsys):
    forge(finished, lambda rows: rows[0].__setitem__(2, rows[0][2] + 1))
    code, out, _ = verify(finished, capsys)
    assert (code, out.count("its key is")) == (3, 1)


@slow
@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda rows: rows.pop(3), "0 rows, not 1"),
        (lambda rows: rows.append(rows[0]), "2 rows, not 1"),
        (lambda rows: rows.__delitem__(slice(4, None)), "1 prompt in the rollout, not trainer.prompts_per_step=2"),
        (lambda rows: rows[2].__setitem__(0, "nobody"), "example nobody, sample 2: the data has no such example"),
        (lambda rows: rows[2].__setitem__(1, 4), "there are 4 samples, from 0 on"),
    ],
)
def test_rows_that_are_absent_unknown_or_there_twice_are_failures(finished, capsys, change, part):
    forge(finished, change)
    code, out, _ = verify(finished, capsys)
    assert (code, "wrong row: " in out) == (3, True)
    assert part in out


@slow
def test_a_damaged_log_is_named(finished, capsys):
    path = finished / "texts" / "step_2.parquet"
    path.write_bytes(path.read_bytes()[:-40])
    code, _, error = verify(finished, capsys)
    assert (code, error.count("\n"), str(path) in error) == (3, 1, True)


@slow
def test_a_forged_token_is_named_with_its_position(finished, capsys):
    path = finished / "texts" / "step_2.parquet"
    fingerprint, entries = read_file(path)
    name, sample, blob = entries[4]
    text = unpack(blob)
    tokens = [*text.tokens]
    tokens[1] += 1 if tokens[1] < 20 else -1
    entries[4] = name, sample, pack(replace(text, tokens=tokens))
    write_file(path, entries, fingerprint, compression="zstd")
    code, out, _ = verify(finished, capsys)
    assert (code, out.split(" reproduced")[0]) == (3, "7 of 8 rows")
    assert f"token 1: the log has id {tokens[1]}, these weights give id {text.tokens[1]}, gap" in out
    assert f"example {name}, sample {sample}" in out


@slow
def test_a_flipped_weight_is_damage_and_other_weights_give_other_tokens(finished, capsys):
    folder = finished / "checkpoints" / "checkpoint-2"
    file = folder / "model.safetensors"
    sound = file.read_bytes()
    file.write_bytes(sound[:-9] + bytes([sound[-9] ^ 64]) + sound[-8:])
    code, _, error = verify(finished, capsys)
    assert code == 3
    assert "model.safetensors has other bytes than were written" in error
    file.write_bytes(sound)
    noise = torch.Generator().manual_seed(0)
    other = {name: w + 0.3 * w.std() * torch.randn(w.shape, generator=noise) for name, w in load_file(file).items()}
    save_file(other, file, {"format": "pt"})
    marker = Checkpoint(folder).marker()
    Checkpoint(folder).complete({key: marker[key] for key in ("rollouts", "data")})
    code, out, _ = verify(finished, capsys)
    assert code == 3
    assert out.count("differs: example") > 2


@slow
def test_what_cannot_be_checked_is_said_in_one_line(finished, capsys):
    for word in ("step=1", "step=4"):
        code, _, error = verify(finished, capsys, word)
        assert (code, error.count("\n")) == (2, 1)
        assert "can be: 0, 2." in error
    config = finished / "config.yaml"
    config.write_text(config.read_text().replace("train_size: 4", "train_size: 3"))
    code, _, error = verify(finished, capsys)
    assert (code, error.count("\n")) == (2, 1)
    assert "are not those of the run" in error
    (finished / DIGESTS).unlink()
    assert "cannot be read" in verify(finished, capsys)[2]


# The file --------------------------------------------------------------------------------------------------------


def test_the_digest_is_of_the_key_the_tokens_and_the_end():
    texts = [(1, [5, 6], "stop"), (2, [5, 6], "stop"), (1, [5, 7], "stop"), (1, [5, 6], "length"), (1, [5], "stop")]
    assert len({digest(*text) for text in texts}) == 5
    assert len(digest(-(2**63), [1], "stop")) == 16


ABOUT = b'{"format": 2}\n'
ROW = '["a", 0, 1, 5, "00"]'


@pytest.mark.parametrize(
    ("content", "where"),
    [
        (b"", "line 1: must be about the run"),
        (b'{"format": 1}\n', "line 1: must be about the run, in format 2"),
        (b'{"step": 1, "rows": []}\n', "line 1: must be about the run"),
        (ABOUT + b'{"step": 1, "rows": [%s, ["a", 0, 1.0, 5, "00"]]}' % ROW.encode(), "line 2, row 2"),
        (ABOUT + b'\n{"step": "1", "rows": []}', "line 3: must be"),
        (ABOUT + b"[]", "line 2: must be"),
    ],
)
def test_a_malformed_line_or_row_is_named(tmp_path, content, where):
    (tmp_path / DIGESTS).write_bytes(content)
    with pytest.raises(CacheError, match=f"{DIGESTS}, {where}"):
        read_receipts(tmp_path)


def test_a_line_that_a_full_disk_cut_spoils_no_other(tmp_path, monkeypatch):
    receipts = Receipts(tmp_path, {"seed": 0}, 0)
    rows = [("a", 0, 0, 5, "00")]

    def cut(descriptor):
        os.ftruncate(descriptor, os.fstat(descriptor).st_size - 9)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "fsync", cut)
        receipts.add(0, rows)
    receipts.add(1, rows)
    assert list(read_receipts(tmp_path)[1]) == [1]


def test_lines_of_steps_that_are_repeated_and_torn_ones_are_removed(tmp_path):
    receipts = Receipts(tmp_path, {"seed": 0}, 0)
    rows = [("a", 0, 0, 5, "00")]
    for step in range(4):
        receipts.add(step, rows)
    with (tmp_path / DIGESTS).open("a") as file:
        file.write('{"step": 4, "rows": [["a", 0')
    resumed = Receipts(tmp_path, {"seed": 0}, 2)
    assert list(read_receipts(tmp_path)[1]) == [0, 1]
    resumed.add(2, rows)
    about, steps = read_receipts(tmp_path)
    assert about["seed"] == 0
    assert list(steps) == [0, 1, 2]
    assert steps[2][0].key == 5
