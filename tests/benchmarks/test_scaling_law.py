"""The laws by which benchmarks/scaling.py goes on from what it measured."""

from itertools import product

import pytest

from benchmarks.scaling_law import (
    COUNTS,
    RATIOS,
    Shared,
    Terms,
    at_ratio,
    extrapolate_sync,
    fit_sync,
    fit_terms,
    misfit,
    step,
    step_report,
    with_history,
)
from benchmarks.scaling_tables import show

SYNC = {"a_s": 0.003, "put_s_per_mb": 0.0002, "b_s_per_worker": 0.002, "copy_s_per_worker_mb": 0.00005}


def terms(g=1.0, u=1.0, v=0.1, sync=0.0):
    """Of one worker, all of it work that further workers share."""
    return Terms(Shared(0.0, g), u, Shared(0.0, v), sync_s=sync, sync_s_per_worker=0.0)


def seconds(*args, workers=1, **kwargs):
    found = step(terms(*args, **kwargs), workers)
    return [found[f"{way}_s"] for way in ("synchronous", "ahead", "one_step_off")]


def points(rollout, verify, rest=1.5, workers=(1, 2)):
    return [
        {"workers": n, "rollout_s": rollout.over(n), "verify_s": verify.over(n), "rest_s": rest, "sync_s": 0.04}
        | {"unchanged_ratio": 0.9}
        for n in workers
    ]


def test_one_worker_shares_with_nobody():
    spread = Shared(tail_s=0.3, work_s=2.0)
    assert (spread.over(1), spread.over(4), spread.over(1000)) == pytest.approx((2.3, 0.8, 0.302))
    assert seconds(2.0, 1.0, 0.25, 0.5) == pytest.approx([3.5, 2.625, 2.5])


def test_where_the_rollout_is_short_ahead_leaves_its_verification():
    assert seconds(0.01, 1.0, 0.002) == pytest.approx([1.01, 1.002, 1.0])


def test_where_the_rollout_is_long_ahead_saves_the_rest_and_verifies_little():
    assert seconds(100.0, 1.0, 0.5) == pytest.approx([101.0, 100.005, 100.0])


def test_every_term_counts_at_its_number_of_workers():
    found = step(Terms(Shared(0.2, 1.6), 0.5, Shared(0.05, 0.4), sync_s=0.01, sync_s_per_worker=0.02), workers=4)
    g, v, sync = 0.6, 0.15, 0.09
    assert found == pytest.approx(
        {"synchronous_s": g + 0.5 + sync, "ahead_s": g + v * 0.5 / g + sync, "one_step_off_s": g + sync}
    )


@pytest.mark.parametrize("sync", [0.0, 3.0])
def test_ahead_lies_between_the_others_unless_verifying_costs_more_than_it_hides(sync):
    sizes = (0.01, 0.5, 1.0, 7.0)
    for g, u, v in product(sizes, sizes, (0.0, 0.005, 0.5, 2.0)):
        synchronous, ahead, one_off = seconds(g, u, v, sync)
        assert one_off <= ahead
        assert (ahead <= synchronous) == (v <= g)  # and slower where it is more: the control


def test_drafts_of_old_text_shorten_the_rollout_alone():
    plain, drafted = terms(2.51), with_history(terms(2.51))
    assert drafted.rollout == Shared(0.0, pytest.approx(1.0))
    assert (drafted.rest_s, drafted.verify, drafted.sync(3)) == (plain.rest_s, plain.verify, plain.sync(3))


@pytest.mark.parametrize("workers", [1, 2, 1000])
def test_a_ratio_holds_at_its_number_of_workers_and_verification_goes_along(workers):
    measured = Terms(Shared(0.2, 1.6), 0.5, Shared(0.05, 0.2), 0.0, 0.0)
    scaled = at_ratio(measured, workers, 4)
    assert scaled.rollout.over(workers) == pytest.approx(4 * 0.5)
    shares = [t.verify.over(workers) / t.rollout.over(workers) for t in (measured, scaled)]
    assert shares[0] == pytest.approx(shares[1])


def test_the_terms_come_back_from_what_they_measure():
    rollout, verify = Shared(0.4, 2.0), Shared(0.1, 0.3)
    measured = points(rollout, verify)
    found = fit_terms(measured, SYNC, mb=10)
    assert (found.rollout.tail_s, found.rollout.work_s) == pytest.approx((0.4, 2.0))
    assert (found.verify.tail_s, found.verify.work_s) == pytest.approx((0.1, 0.3))
    assert (found.rest_s, found.sync(4)) == pytest.approx((1.5, 0.003 + 0.002 + 4 * (0.002 + 0.0005)))
    assert misfit(found, measured) < 1e-9


def test_no_term_is_negative_and_the_misfit_says_so():
    """More than twice as fast by two, and slower by two."""
    for one, two in ((2.0, 0.9), (1.0, 1.5)):
        measured = [{"workers": n, "rollout_s": s, "verify_s": s, "rest_s": 1.0} for n, s in ((1, one), (2, two))]
        found = fit_terms(measured, SYNC, mb=10)
        assert min(found.rollout.tail_s, found.rollout.work_s) == 0.0
        assert misfit(found, measured) > 0.01


def test_the_law_of_sync_comes_back_from_what_it_says():
    measured = [
        {"workers": n, "mb": mb, "seconds": 0.003 + 0.0002 * mb + n * (0.002 + 0.00005 * mb)}
        for n, mb in product((1, 2, 3), (1, 10, 100))
    ]
    found = fit_sync(measured)
    assert found.pop("largest_relative_error") < 1e-9
    assert found == pytest.approx(SYNC)


def test_only_plain_steps_of_measured_workers_are_not_extrapolated():
    report = step_report(points(Shared(0.4, 2.0), Shared(0.1, 0.3)), SYNC, mb=5)
    assert len(report["by_ratio"]) == 2 * len(COUNTS) * len(RATIOS)
    assert all(line["extrapolated"] for line in report["by_ratio"])
    known = [(line["workers"], line["history"]) for line in report["by_workers"] if not line["extrapolated"]]
    assert known == [(1, False), (2, False)]


def test_printed_on_80_columns_with_a_mark_on_what_is_extrapolated(capsys):
    measured = [{"workers": 3, "mb": 400.0, "seconds": 0.1}]
    report = {"rows": 64, "in_process_s": 1.5, "two_workers_s": 1.25, "workers_over_in_process": 0.83}
    report |= {"sync_s": 0.04, "train_s": 1.5, "sync_share_of_step": 0.01, "sync": measured}
    report |= {"law": {**SYNC, "largest_relative_error": 0.18}, "extrapolated": extrapolate_sync(SYNC)}
    show({**report, "step": step_report(points(Shared(0.4, 2.0), Shared(0.1, 0.3)), SYNC, mb=5)})
    out = capsys.readouterr().out.splitlines()
    assert max(map(len, out)) <= 80
    tables = "\n".join(out).split("By the law, ")[1:]
    marked = [
        [line.split()[0] for line in table.splitlines() if line[2:3].isdigit()][: len(COUNTS)] for table in tables
    ]
    assert marked[0][:3] == ["1", "2", "4*"]
    assert marked[1][:3] == ["1*", "2*", "4*"]
