"""The alarm for a drafter whose drafts are rarely accepted is raised once, and never for a healthy drafter."""

import pytest

from specrl.rollout.types import EngineStats
from specrl.trainers.cotraining.alarm import DrafterAlarm


def after(alarm, *accepted, drafted=100):
    """Metrics of rollouts in which that many draft tokens were accepted. None means no drafts."""
    sources = [{} if number is None else {"model": (drafted, number)} for number in accepted]
    return [alarm.observe(EngineStats(sources=each)) for each in sources]


@pytest.mark.parametrize("accepted", [[70, 72, 55, 40, 71, 69], [12] * 6, [None, 60, None, 55]])
def test_a_healthy_drafter_raises_no_alarm(caplog, accepted):
    assert [line["drafter/dead"] for line in after(DrafterAlarm(), *accepted)] == [0.0] * len(accepted)
    assert caplog.records == []


def test_a_drafter_that_was_never_any_good(caplog):
    lines = after(DrafterAlarm(), 2, 1, 0, 2)
    assert [line["drafter/dead"] for line in lines] == [1.0] * 4
    assert lines[0]["drafter/acceptance"] == 0.02
    assert len(caplog.records) == 1


def test_a_drafter_that_falls_and_recovers(caplog):
    dead = [line["drafter/dead"] for line in after(DrafterAlarm(), 70, 70, 70, *[10] * 9, *[80] * 4)]
    assert dead[:5] == [0.0] * 5, "one bad rollout raises no alarm"
    assert dead[11] == 1.0
    assert dead[-1] == 0.0
    assert len(caplog.records) == 1


def test_a_few_tokens_decide_nothing():
    dead = [line["drafter/dead"] for line in after(DrafterAlarm(), *[0] * 8, drafted=10)]
    assert dead == [0.0] * 6 + [1.0] * 2, "before and after the first 64"


def test_discarded_samples_raise_the_alarm_at_once(caplog):
    counts = iter([5, 5, 9, 9])  # before, and after each rollout
    lines = after(DrafterAlarm(lambda: next(counts)), None, None, None)
    assert [line["drafter/dropped"] for line in lines] == [0, 4, 0]
    assert [line["drafter/dead"] for line in lines] == [0.0, 1.0, 0.0]
    assert len(caplog.records) == 1
