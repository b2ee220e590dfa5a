"""Rollout workers on a real local Ray cluster: neither their number nor their failures change a token.

Faults are real signals to worker processes, or prompts whose first token makes `Faulty` misbehave. It also writes its
process id next to the policy, of which each pool has a copy.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from specrl.rollout.build import build_engine
from specrl.rollout.config import RolloutConfig
from specrl.rollout.engines.base import EngineSpec, Probe, SamplingParams
from specrl.rollout.sections import ClusterConfig
from specrl.rollout.types import EngineStats, RolloutError
from specrl.rollout.workers import calls
from specrl.rollout.workers.ahead import following
from specrl.rollout.workers.pool import RolloutPool
from specrl.run.cluster import connect
from specrl.trainers.weights import PolicyWeights, probe
from tests import engines
from tests.rollout.golden import differing
from tests.rollout.workers.faulty import (
    DEADLY,
    EOS_IDS,
    POISON,
    SLOW,
    build,
    build_deaf,
    build_linked,
    drafters,
    noted,
    requests_of,
)

ROOT = Path(__file__).parents[3]
CLUSTER = ClusterConfig(num_workers=2, task_timeout_s=120)

pytestmark = pytest.mark.long  # a real cluster, whose workers die


@pytest.fixture(scope="module")
def spec(tmp_path_factory, build_model):
    folder = tmp_path_factory.mktemp("policy")
    build_model("llama").save_pretrained(folder)
    config = RolloutConfig(draft_tokens=6)
    return EngineSpec(model=str(folder), eos_ids=EOS_IDS, rollout=config)


@pytest.fixture(scope="module")
def started():
    """One Ray cluster for the file, with resources for several pools."""
    with connect(replace(CLUSTER, num_workers=7)):
        yield


@pytest.fixture(scope="module")
def own(spec, tmp_path_factory):
    """own(): the spec with a copy of the policy for one pool."""
    return lambda: replace(spec, model=str(shutil.copytree(spec.model, tmp_path_factory.mktemp("workers") / "policy")))


@pytest.fixture(scope="module")
def start(started, own):
    """start(workers, build): a pool of faulty engines."""
    return lambda workers, build=build: RolloutPool(own(), replace(CLUSTER, num_workers=workers), build)


@pytest.fixture(scope="module")
def pools(start, build_model):
    """pools(workers): a pool of faulty engines, shared by tests and restarted if it has stopped."""
    made = {}

    def works(pool):
        """Whether the pool is open. First waits for a replacement that the previous test left starting."""
        try:
            pool.update_weights(state(build_model, 0).items(), pool.weight_version)
        except RolloutError:
            return False
        return True

    def get(workers=2, **settings):
        if workers not in made or not works(made[workers]):
            made[workers] = start(workers)
        made[workers].cluster = replace(CLUSTER, num_workers=workers, **settings)
        return made[workers]

    yield get
    for pool in made.values():
        pool.close()


def pids_of(pool):
    """The pool's processes."""
    return {pid for pid in noted(Path(pool.spec.model), "pids") if not gone(pid)}


@pytest.fixture(scope="module")
def local(spec):
    """The same engine in this process."""
    return build_engine(spec)


def test_workers_take_rows_of_the_next_batch_into_their_passes(started, own, local):
    """Those of a baseline are its own."""
    spec = own()
    pool = RolloutPool(replace(spec, rollout=replace(spec.rollout, fill=64)), CLUSTER)
    now, later = requests_of(8), requests_of(8, visit=1)
    whole = {request.key: c.tokens for request, c in zip(later, local.generate(later)[0], strict=True)}
    pool.begin(later)
    done, stats = pool.generate(now)
    texts, _ = pool.stop()
    assert differing(done, local.generate(now)[0]) == []
    assert stats.ahead_tokens > 0
    assert texts.keys() == whole.keys()
    assert all([*text.tokens] == whole[key][: len(text.tokens)] for key, text in texts.items())
    pool.begin(later)
    _, stats = pool.generate([replace(request, plain=True) for request in now])
    assert stats.ahead_tokens == 0
    pool.close()


def gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


# The end of the driver ------------------------------------------------------------------------------------------------


DRIVER = """
import sys, time
sys.path.insert(0, {root!r})
import psutil
from tests.rollout.workers.test_workers import *

with connect(replace(CLUSTER, num_workers=1)):
    pool = RolloutPool(EngineSpec(model={model!r}, eos_ids=EOS_IDS, rollout=RolloutConfig()), replace(CLUSTER, num_workers=1), build)
    done, _ = pool.generate(requests_of(4))
    pids = [child.pid for child in psutil.Process().children(recursive=True)]
    assert pids_of(pool) <= {{*pids}}
    print(*pids_of(pool), flush=True)
    print(*pids, flush=True)
    {then}
"""  # noqa: E501


def drive(folder, spec, then):
    """Starts a driver that finds the code only by its sys.path. Returns it, its worker and all its processes."""
    code = DRIVER.format(root=str(ROOT), model=spec.model, then=then)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    driver = subprocess.Popen([sys.executable, "-c", code], cwd=folder, env=environment, stdout=subprocess.PIPE)
    workers, pids = ([int(pid) for pid in driver.stdout.readline().split()] for _ in range(2))
    assert len(workers) == 1
    assert len(pids) >= 3, "gcs, raylet and the worker"
    return driver, workers, pids


@pytest.fixture(scope="module")
def killed(tmp_path_factory, spec):
    """The worker of a driver that was killed during a rollout, and all its other processes."""
    driver, workers, pids = drive(tmp_path_factory.mktemp("killed"), spec, "time.sleep(600)")
    assert not any(map(gone, pids))
    driver.kill()
    driver.wait(60)
    return workers, pids


def test_workers_end_with_a_driver_that_is_killed(killed):
    """The last test of this file checks the driver's other processes."""
    workers, _ = killed
    assert wait_until(lambda: all(map(gone, workers)))


# Identity -------------------------------------------------------------------------------------------------------------


def test_the_number_of_workers_changes_nothing(pools, local):
    pool = pools(2)
    plain, _ = local.generate(requests_of())
    assert differing(pool.generate(requests_of())[0], plain) == []
    texts = [c.tokens for c in plain]
    drafted, stats = pool.generate(requests_of(drafts=drafters(texts)))
    assert differing(drafted, plain) == []
    assert stats.accepted > 50
    assert sum(map(sum, (c.reused for c in drafted))) == stats.accepted
    other, _ = pool.generate(requests_of(visit=1))
    assert len(differing(other, plain)) > 20, "the comparison must notice other noise"


def test_a_worker_without_rows_is_called_too(pools, local):
    """Its engine must load new weights and sleep again after the rollout, or it would occupy a shared GPU."""
    pool, rows = pools(2), requests_of()
    rows = [row for row in rows if row.prompt == rows[0].prompt]
    assert differing(pool.generate(rows)[0], local.generate(rows)[0]) == []
    assert len(noted(Path(pool.spec.model), "idle")) == 1
    assert pool.generate([]) == ([], EngineStats())


# Weights --------------------------------------------------------------------------------------------------------------


def state(build_model, seed):
    return build_model("llama", seed).state_dict()


def probe_of(engine, tokens=(3, 9, 20, 33)):
    return Probe(tokens, tuple(engine.score(tokens)), 1e-5)


def test_new_weights_arrive_bit_by_bit_also_in_replaced_workers(pools, spec, build_model):
    pool, engine = pools(2), build_engine(spec)
    version = pool.weight_version + 1
    engine.update_weights(state(build_model, 1).items(), version)
    old, _ = pool.generate(requests_of())
    pool.update_weights(state(build_model, 1).items(), version, probe_of(engine))
    want, _ = engine.generate(requests_of())
    done, _ = pool.generate(requests_of())
    assert differing(done, want) == []
    assert {c.version for c in done} == {version} == {pool.weight_version}
    assert len(differing(old, want)) > 20
    assert pool.score([3, 9, 20]) == engine.score([3, 9, 20]), "the same bits give the same log-probs"
    before, replaced = pids_of(pool), pool.replaced
    pid = max(before)
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: gone(pid)), "killed while idle"
    assert differing(pool.generate(requests_of())[0], want) == []
    assert pool.replaced == replaced + 1
    pool.update_weights(state(build_model, 1).items(), version)  # one may still start while the other did its rows
    assert len(pids_of(pool)) == len(before) == 2
    pool.update_weights(state(build_model, 0).items(), version + 1)
    with pytest.raises(RolloutError, match=f"weight version {version} is older than the workers' {version + 1}"):
        pool.update_weights(state(build_model, 0).items(), version)
    with pytest.raises(RolloutError, match="an update has to bring them"):
        pool.update_weights(None, version + 2)
    assert pool.weight_version == version + 1


def test_a_worker_that_ignores_weights_is_caught_by_the_probe(start, spec, build_model):
    engine = build_engine(spec)
    old, _ = engine.generate(requests_of())
    engine.update_weights(state(build_model, 1).items(), 1)
    pool = start(1, build_deaf)
    pids = pids_of(pool)
    assert len(pids) == 1
    pool.update_weights(state(build_model, 1).items(), 1)
    assert differing(pool.generate(requests_of())[0], old) == [], "without a probe the old weights go unnoticed"
    with pytest.raises(RolloutError, match=r"worker 0 .*does not run the weights it was sent"):
        pool.update_weights(state(build_model, 1).items(), 2, probe_of(engine))
    with pytest.raises(RolloutError, match="closed"):
        pool.generate(requests_of())
    assert wait_until(lambda: all(map(gone, pids)))


def test_a_pool_is_linked_and_replaces_workers_all_the_same(started, build_model, tmp_path, senders):
    build_model("llama").save_pretrained(tmp_path)
    config = RolloutConfig(draft_tokens=6, ahead="off")
    spec = EngineSpec(model=str(tmp_path), eos_ids=EOS_IDS, rollout=config)
    before, tokens = serving(), tuple(range(3, 40))
    pool = RolloutPool(spec, CLUSTER, build_linked)
    for version in (1, 2, 3):
        new = build_model("llama", seed=version)
        pool.update_weights(PolicyWeights(new), version, probe(new, tokens))
        if version == 2:  # a worker dies whose weights are in no store
            os.kill(min(serving() - before), signal.SIGKILL)
        done, _ = pool.generate(requests_of(8))
        want, _ = engines.local(new, SamplingParams(EOS_IDS), window=6).generate(requests_of(8))
        assert differing(done, want) == []
        assert {c.version for c in done} == {version}
    assert pool.replaced == 1
    assert [(sender.sent, sender.closed) for sender in senders] == [(2, True), (1, False)], "formed anew"
    pool.close()
    assert [sender.closed for sender in senders] == [True, True]


def serving():
    """The processes of the workers of all pools."""
    return {p.pid for p in psutil.Process().children(recursive=True) if "RolloutWorker" in p.name()}


# Faults ---------------------------------------------------------------------------------------------------------------


def test_a_worker_lost_while_it_serves_is_replaced_and_its_rows_done_again(pools, local, monkeypatch):
    """The worker of the slow prompt hangs, twice; test_ray.py kills one too."""
    monkeypatch.setattr("specrl.rollout.workers.pool.MOST_LOSSES", 1)
    pool, requests, hit = pools(2, task_timeout_s=6), requests_of(marks=[SLOW]), []
    folder, replaced = Path(pool.spec.model), pool.replaced

    def strike():
        if wait_until(lambda: noted(folder, "slow")):
            hit.append(noted(folder, "slow")[0])
            time.sleep(0.3)
            os.kill(hit[-1], signal.SIGSTOP)

    for times in (1, 2):  # the calls that end between them are what the limit of losses counts from
        shutil.rmtree(folder / "slow", ignore_errors=True)
        thread = threading.Thread(target=strike)
        thread.start()
        done, _ = pool.generate(requests)
        thread.join()
        assert differing(done, local.generate(requests)[0]) == []
        assert pool.replaced >= replaced + times
        assert wait_until(lambda: gone(hit[-1])), "also a stopped process is killed"


# Ahead ----------------------------------------------------------------------------------------------------------------


def beginnings(texts, requests, local) -> bool:
    """Whether all tokens rolled out ahead are prefixes of the local engine's responses."""
    whole = {r.key: c.tokens for r, c in zip(requests, local.generate(requests)[0], strict=True)}
    return all(list(text.tokens) == whole[key][: len(text.tokens)] for key, text in texts.items())


def test_a_worker_without_rows_begins_the_next_batch_before_this_one_has_ended(pools, local):
    pool, coming = pools(2), requests_of(visit=1)
    pool.begin(coming)
    pool.generate(requests_of(marks=[SLOW]))  # one worker is a second slower than the other
    texts, seconds = pool.stop()
    assert beginnings(texts, coming, local)
    assert sum(text.finish is not None for text in texts.values()) > len(coming) // 4
    assert seconds > 0
    assert pool.stop() == ({}, 0.0), "it is over"
    pool.generate(requests_of())
    assert pool.stop() == ({}, 0.0)


def test_what_is_there_is_verified_by_whoever_gets_the_row(pools, local):
    pool, coming = pools(2), requests_of(visit=1)
    pool.begin(coming)
    pool.generate(requests_of(8))
    assert wait_until(lambda: len(pool.score([3, 9])) == 1), "which stops it, and lets it go on"
    time.sleep(1)
    texts, _ = pool.stop()
    drafted = [following(r, texts[r.key].tokens) if r.key in texts else r for r in coming]
    done, stats = pool.generate(drafted)
    assert differing(done, local.generate(coming)[0]) == []
    drafts, accepted = stats.sources["ahead"]
    assert drafts == accepted > 0, "with the same weights every token stands"


def test_new_weights_wait_for_what_runs_ahead_to_stop(pools, local, build_model):
    pool, coming = pools(2), requests_of(visit=1, marks=[SLOW])
    folder, version = Path(pool.spec.model), pool.weight_version
    shutil.rmtree(folder / "ahead", ignore_errors=True)
    pool.begin(coming)
    pool.generate(requests_of())
    assert wait_until(lambda: noted(folder, "ahead"))
    pool.update_weights(state(build_model, 1).items(), version + 1)
    texts, _ = pool.stop()
    assert beginnings(texts, coming, local), "all of it is text of the weights before"
    pool.update_weights(local.model.state_dict().items(), version + 2)


def test_a_worker_that_dies_again_and_again_stops_the_run(pools, monkeypatch):
    monkeypatch.setattr("specrl.rollout.workers.pool.MOST_LOSSES", 1)
    pool = pools(1)
    with pytest.raises(RolloutError) as stop:
        pool.generate(requests_of(4, marks=[DEADLY]))
    assert re.search(r"2 workers were lost without a finished call", str(stop.value))
    assert re.search(r"The last: worker 0 \(pid \d+\) with 4 rows died: .*SYSTEM_ERROR", str(stop.value))
    assert psutil.Process().children(recursive=True), "Ray itself lives on"
    with pytest.raises(RolloutError, match="closed"):
        pool.generate([])


def test_what_an_engine_raises_stops_the_run(pools):
    with pytest.raises(RolloutError, match=r"worker 0 \(pid \d+\) failed in generate: Traceback") as stop:
        pools(1).generate(requests_of(marks=[POISON]))
    assert re.search(r"in generate\n[\s\S]*ValueError: cannot digest this prompt", str(stop.value))


def test_workers_that_cannot_start_say_why(started, spec, monkeypatch):
    one = replace(CLUSTER, num_workers=1)
    with pytest.raises(RolloutError, match=r"(?s)worker 0 failed in start: .*no/such/model"):
        RolloutPool(replace(spec, model="no/such/model"), one)
    monkeypatch.setattr(calls, "LOADING_S", 1.0)
    with pytest.raises(
        RolloutError, match=r"within 1 s; it needs 99 CPUs and 0 GPUs, and the cluster has .* free. Ask"
    ):
        RolloutPool(spec, replace(one, cpus_per_worker=99, task_timeout_s=1))


def test_close_ends_the_processes_and_may_be_called_twice(pools):
    pool = pools(2)
    pids = pids_of(pool)
    assert len(pids) == 2
    pool.close()
    pool.close()
    assert wait_until(lambda: all(map(gone, pids)))


def test_nothing_outlives_a_driver_that_was_killed(killed):
    """Two agents of Ray look for its cluster for a minute before they exit, while the tests above run."""
    _, pids = killed
    assert wait_until(lambda: all(map(gone, pids)), 150), [psutil.Process(p).cmdline() for p in pids if not gone(p)]
