"""The code reward: tests of a row, and programs that misbehave."""

import os
import subprocess
import sys
import time
from contextlib import closing

import pytest

from specrl.reward.base import RewardError, Sample
from specrl.reward.code import CodeReward, extract_program
from specrl.reward.config import RewardConfig
from specrl.reward.loading import load_rewards
from specrl.reward.sandbox import MAX_OUTPUT, run

LIMITS = {"seconds": 10.0, "memory_mb": 512}
RIGHT = "Here it is:\n```python\ndef double(x):\n    return 2 * x\n```\nDone."
WRONG = RIGHT.replace("2 * x", "3 * x")
ADD = "a, b = map(int, input().split())\nprint(a + b)"


@pytest.fixture(scope="module")
def reward():
    with closing(CodeReward(RewardConfig(timeout_s=5, memory_mb=512))) as made:
        yield made


def scores(reward, completion: str, **fields) -> list:
    return reward([Sample("p", completion, None, fields)])


@pytest.mark.slow
def test_assertions_and_a_check_function_decide(reward):
    tests = ["assert double(2) == 4", "assert double(0) == 0"]
    humaneval = "def check(candidate):\n    assert candidate(3) == 6\n"
    for fields in ({"test_list": tests}, {"tests": "\n".join(tests)}, {"test": humaneval, "entry_point": "double"}):
        assert scores(reward, RIGHT, **fields) == [1.0]
        assert scores(reward, WRONG, **fields) == [0.0]


@pytest.mark.slow
def test_inputs_and_outputs_decide(reward):
    fields = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]}
    assert scores(reward, f"```python\n{ADD}\n```", **fields) == [1.0]
    assert scores(reward, f"```\n{ADD.replace('+', '-')}\n```", **fields) == [0.0]
    assert scores(reward, ADD, **fields) == [1.0], "a completion without a block is a program"


def test_the_last_complete_block_counts():
    assert extract_program("```python\na\n```\nor\n```py\nb\n```\n```python\nunfinished") == "b\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        "def double(x): return 2 * x\nraise SystemExit(0)",
        "import os\nos._exit(0)",
        "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
        "def double(x:",
        "double = bytearray(10**10)",
        "print('x' * 10**8)\ndef double(x): return 2 * x",
        "open('f', 'wb').write(b'x' * 10**8)\ndef double(x): return 2 * x",
    ],
)
def test_programs_that_misbehave_score_0(reward, program):
    assert scores(reward, program, tests="assert double(2) == 4") == [0.0]
    assert scores(reward, RIGHT, tests="assert double(2) == 4") == [1.0], "the worker goes on"


@pytest.mark.slow
@pytest.mark.parametrize(("on_limit", "score"), [("mask", None), ("zero", 0.0)])
def test_an_endless_program_is_over_the_limit_and_not_wrong(on_limit, score):
    config = RewardConfig(functions=["code"], timeout_s=1.5, max_failure_ratio=1, on_limit=on_limit)
    with closing(load_rewards(config)) as rewards:
        done = rewards.score([Sample("p", "while True: pass", None, {"tests": "assert True"})])
    assert done.total == [score]
    assert done.over_limit == {"code": 1}


def test_rows_without_tests_stop_the_run(reward):
    with pytest.raises(RewardError, match=r"no unit tests in the columns level.*inputs"):
        scores(reward, RIGHT, level="easy")


@pytest.mark.slow
def test_what_a_program_started_ends_with_it():
    mark = f"specrl-test-{os.getpid()}"
    child = f"import os, time\nos.fork()\nos.setsid() if os.getpid() != 1 else None\n{mark!r}\ntime.sleep(60)"
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="1 s"):
        run(child, seconds=1.0, memory_mb=512)
    assert time.monotonic() - began < 10
    time.sleep(0.2)
    commands = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert "specrl-code-" not in commands


@pytest.mark.slow
def test_a_program_has_its_own_directory_no_secrets_and_bounded_output(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "secret")
    ran = run("import os\nprint(os.listdir('.'), 'SECRET_TOKEN' in os.environ)", **LIMITS)
    assert ran.code == 0
    assert ran.output == "['program.py'] False\n"
    assert len(run("print('x' * 10**8)", **LIMITS).output) <= MAX_OUTPUT


def network_is_hidden() -> bool:
    """Whether this process may create a network namespace, asked of unshare(1)."""
    flag = "-n" if os.geteuid() == 0 else "-rn"
    return subprocess.run(["unshare", flag, "true"], capture_output=True).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or not network_is_hidden(), reason="needs network namespaces of Linux")
def test_a_program_has_no_network():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        attempt = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)"
        assert run(attempt, **LIMITS).code != 0
        assert subprocess.run([sys.executable, "-c", attempt]).returncode == 0, "control: it is there"
