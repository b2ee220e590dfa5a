"""Killable workers: deadlines, crashes, memory, threads, forks, orphans."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import pytest

from specrl.reward.base import LimitError, RewardError
from specrl.reward.config import RewardConfig
from specrl.reward.pool import DeadlineError, WorkerError, WorkerPool

ROOT = Path(__file__).parents[2]
HANDLERS = """
    import gc, os, signal, socket, subprocess, sys, time

    def make():
        return run

    def run(payload):
        command, value = payload
        if command == "echo":
            return value
        if command == "sleep":
            time.sleep(value)
        if command == "hold":  # C code that never lets another Python thread run
            return str(9 ** 9 ** value)
        if command == "stubborn":
            for number in (signal.SIGTERM, signal.SIGALRM, signal.SIGINT, signal.SIGIO):
                signal.signal(number, signal.SIG_IGN)
            while True:
                pass
        if command == "child":
            process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
            with open(value, "w") as file:
                file.write(str(process.pid))
            time.sleep(60)
        if command == "memory":
            return len(bytearray(value))
        if command == "full_once":
            if os.path.exists(value):
                return "in a new worker"
            open(value, "w").close()
            bytearray(2**30)
        if command == "kill_self":
            os.kill(os.getpid(), signal.SIGKILL)
        if command == "exit":
            sys.exit(3)
        if command == "raise":
            raise KeyError(value)
        if command == "print":
            print(value)
            return sys.stdin.read()
        if command == "object":
            return object()
        if command == "pid":
            return os.getpid()
        if command == "service":  # takes a while, and hangs once the service is gone
            time.sleep(0.3)
            while os.path.exists(value):
                time.sleep(0.1)
        if command == "late":
            raise TimeoutError(value)
        if command == "dribble":  # a reply that has begun, white space first, and goes on past its deadline
            (channel,) = [x for x in gc.get_objects() if isinstance(x, socket.socket)]
            for _ in range(20):
                channel.send(b" ")
                time.sleep(value / 20)
            return "late"

    def make_slowly():
        time.sleep(60)

    def make_nothing():
        raise ImportError("no such grammar")

    def make_dead():
        os._exit(7)
"""


@pytest.fixture
def handlers(tmp_path, monkeypatch):
    (tmp_path / "worker_handlers.py").write_text(textwrap.dedent(HANDLERS))
    monkeypatch.syspath_prepend(str(tmp_path))
    return "worker_handlers:make"


@pytest.fixture
def pool(handlers):
    with closing(WorkerPool(handlers, RewardConfig(timeout_s=0.5, memory_mb=512))) as pool:
        yield pool


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone_within(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while alive(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def timed_out(pool: WorkerPool, payload: object) -> float:
    """Seconds until the call timed out, the worker being warm."""
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"reward\.timeout_s=0.5"):
        pool.call(payload)
    return time.monotonic() - start


@pytest.mark.parametrize("payload", [["hold", 9], ["stubborn", 0]])
def test_a_hanging_call_is_killed_at_its_deadline_and_the_pool_stays_healthy(pool, payload):
    pool.start()
    (pid,) = pool.pids()
    assert 0.5 <= timed_out(pool, payload) < 2.5
    assert not alive(pid)
    assert pool.call(["echo", "next"]) == "next"
    assert pool.pids() != [pid]


def test_a_reply_that_dribbles_past_its_deadline_is_too_late(pool):
    assert pool.call(["dribble", 0]) == "late"
    timed_out(pool, ["dribble", 2])


def by_the_text(pool, *payloads) -> list:
    """Of each payload that reached a limit, whether the pool says that it was the text's own doing."""
    return [outcome.caused_by_text for outcome in pool.map(payloads) if isinstance(outcome, LimitError)]


@pytest.mark.slow
@pytest.mark.parametrize(("hard", "workers"), [(["hold", 9], 2), (["memory", 2**30], 1)])
def test_a_limit_is_the_texts_doing_when_the_workers_answer_others(handlers, hard, workers):
    with closing(WorkerPool(handlers, RewardConfig(timeout_s=0.5, memory_mb=512, workers=workers))) as pool:
        assert by_the_text(pool, hard, hard) == [False, False], "nothing was ever answered"
        assert by_the_text(pool, ["echo", 1], hard, hard, ["echo", 2]) == [True, True]
        assert by_the_text(pool, hard) == [True]


@pytest.mark.slow
def test_a_limit_is_not_the_texts_doing_when_what_the_workers_need_is_gone(handlers, tmp_path):
    service = ["service", str(tmp_path / "down")]
    with closing(WorkerPool(handlers, RewardConfig(timeout_s=1.5))) as pool:
        assert pool.map([["echo", 1], service, ["echo", 2]]) == [1, None, 2]
        (tmp_path / "down").touch()
        assert by_the_text(pool, ["echo", 1], service) == [False], "what is answered without the service says nothing"
        (tmp_path / "down").unlink()
        assert by_the_text(pool, service, ["sleep", 60]) == [True]


def test_a_timeout_of_the_functions_own_is_its_own_failure(pool):
    outcomes = pool.map([["echo", 1], ["late", "the judge did not answer"]])
    assert isinstance(outcomes[1], TimeoutError)
    assert not isinstance(outcomes[1], DeadlineError)


def test_threads_share_the_pool_without_mixing_answers(handlers):
    with closing(WorkerPool(handlers, RewardConfig(workers=2, timeout_s=5))) as pool, ThreadPoolExecutor(6) as threads:
        assert list(threads.map(pool.call, [["echo", i] for i in range(100)])) == list(range(100))
        assert pool.map([["echo", i] for i in range(9)]) == list(range(9))
        assert len(pool.pids()) == 2


def test_start_up_has_its_own_deadline(handlers):
    with closing(WorkerPool("worker_handlers:make_slowly", RewardConfig(timeout_s=60), start_timeout_s=0.5)) as pool:
        with pytest.raises(RewardError, match=r"make_slowly.* not ready after 0\.5 s"):
            pool.start()
        assert pool.pids() == []


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("worker_handlers:make_nothing", "no such grammar"),
        ("worker_handlers:make_dead", r"died twice while starting \(exit code 7"),
        ("worker_handlers:absent", "no attribute 'absent'"),
        ("no_such_module:make", "No module named 'no_such_module'"),
    ],
)
def test_a_worker_that_cannot_start_is_a_reward_error(handlers, target, words):
    with closing(WorkerPool(target)) as pool:
        for _ in range(2):  # the slot is not lost
            with pytest.raises(RewardError, match=words):
                pool.call(["echo", 1])
        assert pool.pids() == []


def test_memory_is_bounded(pool):
    assert pool.call(["memory", 2**20]) == 2**20
    with pytest.raises(LimitError, match=r"reward\.memory_mb=512(?s:.*)MemoryError"):
        pool.call(["memory", 2**30])
    assert pool.call(["echo", 1]) == 1


def test_memory_that_earlier_requests_took_costs_no_score(pool, tmp_path):
    assert pool.call(["full_once", str(tmp_path / "full")]) == "in a new worker"


def test_a_worker_killed_while_idle_is_replaced(pool):
    pool.start()
    (pid,) = pool.pids()
    os.kill(pid, signal.SIGKILL)
    assert gone_within(pid, 2)
    assert pool.call(["echo", 1]) == 1


def test_an_input_that_kills_its_worker_fails_alone(pool):
    with pytest.raises(WorkerError, match=r"died twice on this input \(exit code -9"):
        pool.call(["kill_self", 0])
    outcomes = pool.map([["echo", 1], ["kill_self", 0], ["exit", 0], ["raise", "why"], ["object", 0], ["echo", 2]])
    assert [outcomes[0], outcomes[-1]] == [1, 2]
    assert all(isinstance(outcome, WorkerError) for outcome in outcomes[1:-1])
    assert "KeyError: 'why'" in str(outcomes[3])
    assert "line " in str(outcomes[3])
    assert "not JSON serializable" in str(outcomes[4])


def test_prints_and_stdin_of_user_code_do_not_touch_the_protocol(pool):
    assert pool.call(["print", '{"value": 1}\n']) == ""
    assert pool.call(["echo", 2]) == 2


def test_inputs_must_be_json(pool):
    with pytest.raises(TypeError):
        pool.call(["echo", object()])
    assert pool.call(["echo", "\ud800 \n"]) == "\ud800 \n"


def test_grandchildren_go_with_the_worker(pool, tmp_path):
    timed_out(pool, ["child", str(tmp_path / "pid")])
    assert gone_within(int((tmp_path / "pid").read_text()), 2)


def test_close_ends_everything_and_is_idempotent(handlers):
    pool = WorkerPool(handlers, RewardConfig(workers=2, timeout_s=30))
    with ThreadPoolExecutor(3) as threads:
        calls = [threads.submit(pool.call, ["sleep", 30]) for _ in range(3)]  # the third waits for a free worker
        deadline = time.monotonic() + 10
        while len(pool.pids()) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        pids = pool.pids()
        pool.close()
        pool.close()
        assert [type(call.exception(5)) for call in calls] == [RewardError] * 3
    assert len(pids) == 2
    assert not any(alive(pid) for pid in pids)
    with pytest.raises(RewardError, match="closed"):
        pool.call(["echo", 1])


def run_script(tmp_path: Path, body: str) -> subprocess.Popen:
    script = tmp_path / "parent.py"
    script.write_text(
        "from specrl.reward.config import RewardConfig\nfrom specrl.reward.pool import WorkerPool\n"
        + textwrap.dedent(body)
    )
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    return subprocess.Popen([sys.executable, str(script)], env=env, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("task", ["None", '["hold", 9]', '["stubborn", 0]'])
def test_workers_die_with_a_killed_parent_that_has_a_forked_child(handlers, tmp_path, task):
    """The child, such as a data loader's, never uses the pool and outlives the parent."""
    parent = run_script(
        tmp_path,
        f"""
        import os, threading, time
        pool = WorkerPool("worker_handlers:make", RewardConfig(timeout_s=60))
        pool.start()
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
        task = {task}
        if task:
            threading.Thread(target=pool.call, args=(task,)).start()
            time.sleep(0.3)
        print(*pool.pids(), child, flush=True)
        time.sleep(60)
        """,
    )
    pid, child = map(int, parent.stdout.readline().split())
    try:
        assert alive(pid)
        parent.kill()
        parent.wait(5)
        assert gone_within(pid, 2)
        assert alive(child)
    finally:
        parent.stdout.close()
        for process in (pid, child):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def test_a_forked_child_gets_workers_of_its_own(handlers, tmp_path):
    parent = run_script(
        tmp_path,
        """
        import os, sys
        pool = WorkerPool("worker_handlers:make", RewardConfig(timeout_s=10))
        mine = pool.call(["pid", 0])
        child = os.fork()
        theirs = pool.call(["pid", 0])
        if child == 0:
            assert theirs != mine
            pool.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert pool.call(["pid", 0]) == mine == theirs
        print("good")
        """,
    )
    assert parent.communicate(timeout=20)[0] == "good\n"
    assert parent.returncode == 0
