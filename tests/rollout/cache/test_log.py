"""The log of a run and the run that drafts from it: by key, whatever happened to the files."""

import pytest

from specrl.rollout.cache.log import TEXTS, ResponseLog, Twin
from specrl.rollout.cache.memory import TrajectoryCache
from specrl.rollout.cache.snapshot import Fingerprint, read_file
from specrl.rollout.config import RolloutConfig
from specrl.rollout.keys import derive_key
from specrl.rollout.speculative import SpeculativeRollout
from specrl.rollout.types import CacheError, Completion, EngineStats, Row, Trajectory

SAME = Fingerprint({"tokenizer": "t", "seed": "0"})


def key(sample, visit=0):
    return derive_key(0, "a", sample, visit)


def text(sample, visit=0, step=0):
    return "a", sample, Trajectory((10 + sample, 20 + visit, 1), key(sample, visit), "stop", step, step, 1.0)


def logged(run, fingerprint=SAME, steps=2):
    """The log of a run: two samples of a prompt, one visit a step."""
    log = ResponseLog(run, fingerprint)
    for step in range(steps):
        log.add(step, [text(sample, visit=step, step=step) for sample in (0, 1)])
    return log


def twin(*runs, fingerprint=SAME):
    return Twin(runs, fingerprint)


def test_every_response_is_found_by_its_key(tmp_path):
    stats = logged(tmp_path).stats()
    found = twin(tmp_path)
    wanted = [key(0, 1), key(1, 0), key(7)]
    assert {k: t.tokens for k, t in found.texts(wanted).items()} == {key(0, 1): (10, 21, 1), key(1, 0): (11, 20, 1)}
    assert found.texts([key(0, 1)]).keys() == {key(0, 1)}, "what is not asked for any more is forgotten"
    assert (stats["cache/log_lost"], found.stats()["cache/twin_left_out"]) == (0, 0)
    fingerprint, entries = read_file(tmp_path / TEXTS / "step_1.parquet")
    assert (fingerprint, len(entries)) == (SAME, 2)


class Recording:
    """An engine that remembers the first drafts, and answers with token 5."""

    own_weights = False
    weight_version = 0

    def generate(self, requests):
        self.drafts = [list(r.drafter.propose([], 9)) for r in requests]
        self.sources = [r.drafter.source for r in requests]
        return [Completion([5], [0.0], [0.0], [False], "length", 0, 1) for _ in requests], EngineStats()


def first_drafts(tmp_path, visit):
    engine = Recording()
    config = RolloutConfig(max_new_tokens=9, sources=[])
    rollout = SpeculativeRollout(engine, TrajectoryCache(SAME), config, 0, twin=twin(tmp_path))
    batch = rollout.generate([Row("a", (2, 3))] * 3, visit=visit, step=0)
    return engine.drafts, engine.sources, batch.twin


def test_rows_draft_first_from_the_text_of_their_key(tmp_path):
    logged(tmp_path)
    drafts, sources, same = first_drafts(tmp_path, visit=1)
    assert drafts == [[10, 21, 1], [11, 21, 1], []]
    assert sources[:2] == ["twin", "twin"]
    assert same == [False, False, None]


def test_control_a_text_of_another_visit_is_not_the_rows(tmp_path, monkeypatch):
    """Planted: the twin is asked for the visit before. The same check sees it."""
    logged(tmp_path)
    expected = first_drafts(tmp_path, visit=1)[0]
    texts = Twin.texts
    other = {key(sample, 1): key(sample, 0) for sample in range(3)}

    def of_the_visit_before(self, keys):
        found = texts(self, [other[k] for k in keys])
        return {k: found[other[k]] for k in keys if other[k] in found}

    monkeypatch.setattr(Twin, "texts", of_the_visit_before)
    assert first_drafts(tmp_path, visit=1)[0] != expected


@pytest.mark.parametrize("damage", ["cut", "bit", "foreign", "text"])
def test_damaged_and_foreign_files_are_left_out_and_counted(tmp_path, damage):
    logged(tmp_path)
    file = tmp_path / TEXTS / "step_1.parquet"
    data = bytearray(file.read_bytes())
    if damage == "cut":
        data = data[: len(data) // 2]
    elif damage == "bit":
        data[40] ^= 4  # of a page
    elif damage == "text":
        data = b"no parquet"
    if damage == "foreign":
        logged(tmp_path / "other", Fingerprint({"tokenizer": "t", "seed": "1"}))
        data = (tmp_path / "other" / TEXTS / "step_1.parquet").read_bytes()
    file.write_bytes(data)
    found = twin(tmp_path)
    found.check(tmp_path)
    assert found.texts([key(0, 0), key(0, 1)]).keys() == {key(0, 0)}
    assert found.texts([key(0, 1)]) == {}
    assert found.left_out == 1, "once"


@pytest.mark.parametrize(
    ("fingerprint", "message"),
    [
        (Fingerprint({"tokenizer": "t", "seed": "3"}), "seed was '0' there, is '3' here"),
        (Fingerprint({"tokenizer": "u", "seed": "0"}), "tokenizer was 't' there, is 'u' here"),
    ],
)
def test_a_run_with_other_keys_or_tokens_is_refused(tmp_path, fingerprint, message):
    logged(tmp_path)
    with pytest.raises(CacheError, match=message):
        twin(tmp_path, fingerprint=fingerprint).check(tmp_path)


def test_a_run_without_a_log_is_refused_with_what_it_has(tmp_path):
    with pytest.raises(CacheError, match=r"rollout\.cache\.log=true; rollout\.cache\.start_from="):
        twin(tmp_path).check(tmp_path)


def test_an_earlier_run_is_preferred(tmp_path):
    logged(tmp_path / "own", steps=1)
    log = ResponseLog(tmp_path / "other", SAME)
    log.add(0, [("a", 0, Trajectory((33, 1), key(0), "stop", 0, 0))])
    assert twin(tmp_path / "own", tmp_path / "other").texts([key(0)])[key(0)].tokens == (10, 20, 1)
    assert twin(tmp_path / "other", tmp_path / "own").texts([key(0)])[key(0)].tokens == (33, 1)


def test_what_cannot_be_written_is_counted_and_logged_once(tmp_path, caplog):
    (tmp_path / TEXTS).write_text("in the way")
    log = logged(tmp_path, steps=3)
    assert log.stats()["cache/log_lost"] == 3
    assert sum("The run goes on" in record.message for record in caplog.records) == 1
