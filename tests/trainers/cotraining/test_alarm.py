"""The alarm for a drafter whose drafts are never accepted is raised once, and never for a healthy drafter."""

import pytest

from specrl.rollout.types import EngineStats, RolloutError
from specrl.trainers.cotraining.alarm import DrafterAlarm


def after(alarm, *rollouts):
    """Metrics of rollouts in which that many of 100 draft tokens were accepted. None means no drafts."""
    found = []
    for stood in rollouts:
        alarm.observe([], 0, EngineStats(sources={} if stood is None else {"model": (100, stood)}))
        found.append(alarm.step())
    return found


def told(caplog):
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("stood", [[70, 72, 55, 40, 71, 69], [12] * 6, [None] * 6, [None, 60, None, 55]])
def test_a_healthy_drafter_is_never_told_of(caplog, stood):
    assert [line["drafter/dead"] for line in after(DrafterAlarm(), *stood)] == [0.0] * len(stood)
    assert told(caplog) == []


def test_a_drafter_that_was_never_any_good(caplog):
    lines = after(DrafterAlarm(), 2, 1, 0, 2)
    assert [line["drafter/dead"] for line in lines] == [1.0] * 4
    assert lines[0]["drafter/acceptance"] == 0.02
    (said,) = told(caplog)
    assert "2.0%" in said


def test_a_drafter_that_falls_and_recovers(caplog):
    lines = after(DrafterAlarm(), 70, 70, 70, *[10] * 9, *[80] * 4)
    dead = [line["drafter/dead"] for line in lines]
    assert dead[:5] == [0.0] * 5, "one bad rollout is none"
    assert dead[11] == 1.0
    assert dead[-1] == 0.0
    (said,) = told(caplog)
    assert "70.0%" in said


def test_a_few_tokens_decide_nothing(caplog):
    alarm, dead = DrafterAlarm(), []
    for _ in range(8):
        alarm.observe([], 0, EngineStats(sources={"model": (10, 0)}))
        dead.append(alarm.step()["drafter/dead"])
    assert dead == [0.0] * 6 + [1.0] * 2, "before and after the first 64"
    assert len(told(caplog)) == 1


def test_draws_that_were_thrown_away_are_told_of_at_once(caplog):
    counts = iter([5, 5, 9, 9])  # before, and after each rollout
    alarm = DrafterAlarm(lambda: next(counts))
    lines = after(alarm, None, None, None)
    assert [line["drafter/dropped"] for line in lines] == [0, 4, 0]
    assert [line["drafter/dead"] for line in lines] == [0.0, 1.0, 0.0]
    (said,) = told(caplog)
    assert "4 samples" in said


def test_a_resumed_alarm_knows_the_best(tmp_path, caplog):
    first = DrafterAlarm()
    after(first, 70, 70)
    first.save(tmp_path)
    second, forgetful = DrafterAlarm(), DrafterAlarm()
    second.load(tmp_path)
    assert after(second, *[10] * 9) == after(first, *[10] * 9)
    assert len(told(caplog)) == 2
    after(forgetful, *[10] * 9)
    assert len(told(caplog)) == 2, "control"
    (tmp_path / "alarm.json").write_text("{")
    with pytest.raises(RolloutError, match=r"alarm in .* cannot be read"):
        second.load(tmp_path)
