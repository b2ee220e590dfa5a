import random
import tracemalloc
from dataclasses import replace

import pytest

from specrl.rollout.cache.memory import Fingerprint, TrajectoryCache
from specrl.rollout.types import CacheError, Trajectory

EOS = 1


def trajectory(length=5, step=0, seed=0, **fields) -> Trajectory:
    ids = random.Random(f"{seed}/{step}/{length}").choices(range(2, 100), k=length - 1)
    return replace(Trajectory((*ids, EOS), key=seed, finish="stop", version=step, step=step), **fields)


def empty(max_mb: float = 512) -> TrajectoryCache:
    return TrajectoryCache(Fingerprint(), max_mb=max_mb)


def contents(cache: TrajectoryCache, examples, sample_indices=range(8)) -> dict:
    return {(e, s): t for e in examples for s in sample_indices if (t := cache.get(e, s)) is not None}


def test_counters_never_go_back():
    cache = empty()
    cache.put("a", 0, trajectory(step=7))
    cache.put("a", 0, trajectory(step=7, seed=1))
    with pytest.raises(CacheError, match=r"is of step 5, version 5, but step 7, version 7 .* went back"):
        cache.put("a", 0, trajectory(step=5))
    with pytest.raises(CacheError, match="went back"):
        cache.put("a", 0, trajectory(step=8, version=0))
    assert cache.get("a", 0) == trajectory(step=7, seed=1)


def fill(cache, names, step=0, sample_indices=2, length=200):
    for name in names:
        cache.put_many(
            (name, sample_index, trajectory(length, step, seed=sample_index)) for sample_index in range(sample_indices)
        )


def test_the_example_not_stored_for_longest_goes_first_and_looking_up_does_not_count():
    names = [f"ex-{i:02}" for i in range(100)]
    probe = empty()
    fill(probe, names)
    cache = empty(max_mb=probe.bytes / 2**20)
    fill(cache, names)
    assert cache.evictions == 0
    cache.get("ex-00", 0)
    cache.siblings("ex-01")
    fill(cache, ["new-0", "new-1", "new-2"])
    gone = {name for name in names if not cache.siblings(name)}
    assert gone == {"ex-00", "ex-01", "ex-02"}
    assert cache.evictions == 6


def test_ten_times_the_budget_stays_within_it():
    limit = 2**18
    cache = empty(max_mb=limit / 2**20)
    names = [f"ex-{i}" for i in range(10 * limit // 1800)]
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for name in names:
        fill(cache, [name])
        assert cache.bytes <= limit
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held - before <= 1.1 * limit
    kept = [name for name in names if cache.siblings(name)]
    assert kept == names[-len(kept) :]
    assert cache.bytes > 0.9 * limit
    assert len(cache) + cache.evictions == 2 * len(names)


def test_of_one_example_the_oldest_sample_goes_first_and_the_newest_last():
    one = empty()
    one.put("a", 0, trajectory(1000))
    cache = empty(3.5 * one.bytes / 2**20)
    for sample_index, step in [(0, 2), (1, 1), (2, 2), (3, 2)]:
        cache.put("a", sample_index, trajectory(1000, step=step))
    assert {*contents(cache, "a")} == {("a", 0), ("a", 2), ("a", 3)}, "sample 1 was the oldest"
    cache.put("a", 4, trajectory(1000, step=2))
    assert ("a", 4) in contents(cache, "a"), "of equal ages the one that was just stored is evicted last"


def test_two_processes_end_up_with_the_same_store():
    """Each process looks up and stores half of the step, then all merge the gathered entries in rank order."""
    processes = [empty(max_mb=0.06), empty(max_mb=0.06)]
    names = [f"ex-{i}" for i in range(40)]
    for step in range(6):
        batch = random.Random(step).sample(names, 8)
        gathered = []
        for rank, cache in enumerate(processes):
            own = [(name, sample_index) for name in batch[rank::2] for sample_index in range(4)]
            for name, sample_index in own:
                cache.get(name, sample_index)
            cache.put_many((name, sample_index, trajectory(90, step, seed=sample_index)) for name, sample_index in own)
            gathered += [(name, sample_index, cache.get(name, sample_index)) for name, sample_index in own]
        for cache in processes:
            cache.merge(gathered)
        assert contents(processes[0], names) == contents(processes[1], names)
    assert processes[0].evictions > 0


def test_merge_keeps_the_newer_entry():
    cache = empty()
    cache.put("a", 0, trajectory(step=5))
    cache.merge([("a", 0, trajectory(step=4)), ("a", 1, trajectory(step=4))])
    assert [t.step for t in cache.siblings("a")] == [5, 4]


def test_a_batch_evicts_none_of_its_own_prompts():
    probe = empty()
    fill(probe, "abc")
    cache = empty(max_mb=probe.bytes / 2**20)
    fill(cache, "abc")
    cache.put_many([("c", 0, trajectory(220, step=1)), ("a", 0, trajectory(200, step=1))])
    assert {example for example, _ in contents(cache, "abc")} == {"a", "c"}
    assert cache.get("a", 1) == trajectory(200, seed=1), "of the prompt that was stored longest ago"
