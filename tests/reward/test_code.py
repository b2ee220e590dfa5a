"""The code reward: forms of tests, which program of a response counts, and programs that misbehave or cheat."""

import json
from contextlib import closing

import pytest

from specrl.reward.base import Sample
from specrl.reward.code import CodeReward
from specrl.reward.config import RewardConfig
from specrl.reward.loading import load_rewards
from specrl.reward.unit_tests import UnitTests, extract_program, unit_tests

RIGHT = "def double(x):\n    return 2 * x\n\nclass Solver:\n    def double(self, x):\n        return double(x)"
WRONG = RIGHT.replace("2 * x", "3 * x")
READS = "print(2 * int(input()))"
ASSERTS = ["assert double(2) == 4", "assert double(0) == 0"]
PAIRS = {"inputs": ["2\n", "5\n"], "outputs": ["4\n", "10"]}
CALLS = {"inputs": [[2], [5]], "outputs": [4, 10], "fn_name": "double"}
CLASS = (
    "import unittest\nfrom solution import double\nclass TestIt(unittest.TestCase):\n"
    "    def test_it(self):\n        self.assertEqual(double(2), 4)\n"
)
FUNCTIONS = {
    "a list": {"test_list": ASSERTS},
    "text": {"tests": "\n".join(ASSERTS)},
    "JSON text of a list": {"tests": json.dumps(ASSERTS)},
    "Python text of a list": {"tests": str(ASSERTS)},
    "with code before": {"test_list": ["assert twice(2) == 4"], "test_setup_code": "twice = double"},
    "check": {"test": "def check(candidate):\n    assert candidate(3) == 6\n", "entry_point": "double"},
    "check that is called": {"test": "def check(f):\n    assert f(3) == 6\ncheck(double)"},
    "test functions": {"tests": "from solution import *\ndef test_it():\n    assert double(3) == 6\n"},
    "test class": {"tests": "class TestIt:\n    def test_it(self):\n        assert double(3) == 6\n"},
    "unittest": {"tests": CLASS},
    "calls": CALLS,
    "calls as JSON text": {"input_output": json.dumps(CALLS)},
    "calls of one wanted value in a list": {**CALLS, "outputs": [[4], [10]]},
    "calls with arguments by line": {"inputs": ["2", "5\n"], "outputs": ["4", "10"], "fn_name": "double"},
    "calls of CodeContests": {"tests": [{"input": [2], "output": 4}], "fn_name": "double"},
    "calls of LiveCodeBench": {
        "public_test_cases": json.dumps([{"input": "2", "output": "4", "testtype": "functional"}]),
        "metadata": json.dumps({"func_name": "double"}),
    },
    "check of an expression": {"test": "def check(f):\n    assert f(3) == 6\n", "entry_point": "Solver().double"},
    "another module's name": {"tests": "from your_module import double as d\nassert d(3) == 6\n"},
    "unittest.main": {"tests": CLASS + "unittest.main()"},
    "objects of calls": {"tests": [{"input": [2], "output": 4, "fn_name": "double"}]},
}
PROGRAMS = {
    "pairs": PAIRS,
    "pairs of numbers": {"inputs": [2, 5], "outputs": [4, 10]},
    "pairs of lists of lines": {"inputs": [["2"], ["5"]], "outputs": [["4"], ["10"]]},
    "pairs as JSON text": {"inputs": json.dumps(PAIRS["inputs"]), "outputs": json.dumps(PAIRS["outputs"])},
    "input_output": {"input_output": json.dumps(PAIRS)},
    "objects": {"tests": [{"input": "2\n", "output": "4\n", "type": "stdin_stdout"}]},
    "lists of inputs and outputs": {"public_tests": {"input": ["2\n"], "output": ["4\n"]}},
    "pairs as lists": {"tests": [["2\n", "4\n"]]},
    "cases in an object": {
        "verification_info": json.dumps(
            {"language": "python", "test_cases": [{"input": "2\n", "output": "4\n", "type": "stdin_stdout"}]}
        )
    },
    "JSON text of objects": {"tests": json.dumps([{"input": "2\n", "output": "4\n"}])},
}
UNKNOWN = {
    "no column": ({"level": "easy"}, "no unit tests in the columns level"),
    "prose": ({"tests": "see the statement"}, "cannot be run"),
    "an empty list as text": ({"tests": "[]"}, "is no form of tests"),
    "calls that nothing checks": ({"tests": "double(2)"}, "nothing in them can fail"),
    "check without its candidate": ({"tests": "def check(f):\n    assert f(1) == 2"}, "entry_point"),
    "more inputs": ({"inputs": ["1", "2"], "outputs": ["3"]}, "equal length"),
    "arguments without a function": ({"inputs": [{"a": 1}], "outputs": [2]}, "fn_name"),
    "an object": ({"tests": {"a": 1}}, "is no form of tests"),
    "a fixture": ({"tests": "def test_it(tmp_path):\n    assert double(2) == 4\n"}, "needs pytest"),
    "set-up": ({"tests": "class TestIt:\n    def setup_method(self): pass\n    def test_it(self): assert 0"}, "pytest"),
    "a function without a name": (
        {"tests": [{"input": "1", "output": "2", "testtype": "functional"}]},
        "call a function, and nothing names it",
    ),
    "a module that is not here": ({"tests": "import nowhere\nassert double(2) == 4"}, "No module named 'nowhere'"),
    "a function of the tests": ({"tests": "assert double(lambda: 2) == 4\nassert 0"}, "pass a function"),
    "a class derived from the program's": (
        {"tests": "class Mine(Solver): pass\nassert Mine().double(2) == 4"},
        "derive Mine from a class",
    ),
    "an empty program passes": ({"tests": "def run():\n    assert double(2) == 4\n"}, "an empty program passes"),
    "wanted output is empty": ({"inputs": ["2"], "outputs": ["\n"]}, "an empty program passes"),
}


ONLY_WITH_A_PROGRAM = "a function of the tests", "a class derived from the program's"


@pytest.fixture(scope="module")
def reward():
    with closing(CodeReward(RewardConfig(timeout_s=10, memory_mb=512))) as made:
        yield made


def score(reward, completion: str, fields: dict, prompt: str = "p"):
    (outcome,) = reward([Sample(prompt, completion, None, fields)])
    return outcome


def block(code: str, info: str = "python") -> str:
    return f"```{info}\n{code}\n```"


@pytest.mark.slow
@pytest.mark.parametrize("form", [*FUNCTIONS, *PROGRAMS])
def test_every_form_of_tests_decides(reward, form):
    fields = (FUNCTIONS | PROGRAMS)[form]
    right = RIGHT if form in FUNCTIONS else READS
    assert reward.check([Sample("p", "", None, fields)]) == [None]
    assert score(reward, block(right), fields) == 1.0
    assert score(reward, block(right.replace("2 *", "3 *")), fields) == 0.0
    assert score(reward, "I do not know.", fields) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("form", UNKNOWN)
def test_tests_that_cannot_fail_or_be_read_give_no_score(reward, form):
    fields, message = UNKNOWN[form]
    outcome = score(reward, block(RIGHT), fields)
    assert isinstance(outcome, ValueError)
    assert message in str(outcome)
    if form not in ONLY_WITH_A_PROGRAM:
        assert str(reward.check([Sample("p", "", None, fields)])[0]) == str(outcome)


@pytest.mark.slow
def test_a_method_of_solution_is_called_too(reward):
    method = "class Solution:\n    def double(self, x):\n        return 2 * x"
    assert score(reward, block(method), CALLS) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wanted", "returns", "value"),
    [
        (0.3, "0.1 + 0.2", 1.0),
        (0.3, "0.31", 0.0),
        (1, "1.0", 1.0),
        (1, "True", 0.0),
        ([1, 2], "(1, 2)", 1.0),
        ([1, 2], "[2, 1]", 0.0),
        ({"a": [1]}, "{'a': (1,)}", 1.0),
        (None, "None", 1.0),
        ("1", "1", 0.0),
    ],
)
def test_returned_values_are_compared_as_json(reward, wanted, returns, value):
    fields = {"inputs": [[1]], "outputs": [wanted], "fn_name": "f"}
    assert score(reward, block(f"def f(x):\n    return {returns}"), fields) == value


ASKS = UnitTests(source="assert double(2) == 4")
READ = UnitTests(pairs=(("2", "4"),))


@pytest.mark.parametrize(
    ("text", "tests", "program"),
    [
        (RIGHT, ASKS, RIGHT),
        (f"{READS}\n```", READ, READS),
        (block(RIGHT), ASKS, RIGHT),
        (block(WRONG) + "\nNo:\n" + block(RIGHT), ASKS, RIGHT),
        (block(RIGHT) + "\nFor example:\n" + block("print(double(3))"), ASKS, RIGHT),
        (block(RIGHT) + "\nprints\n" + block("6", ""), ASKS, RIGHT),
        (block(READS) + "\nRun it:\n" + block("python a.py", "bash"), READ, READS),
        (block("pip install x", "bash") + "\n" + block(READS, ""), READ, READS),
        (block(READS, "Python title='a.py'"), READ, READS),
        (block(READS, "py").replace("```", "~~~~"), READ, READS),
        (block(READS).replace("\n", "\r\n"), READ, READS),
        ("1. So:\n\n   ```python3\n   " + READS + "\n   ```", READ, READS),
        (block(READS, "") + "\nOutput:\n" + block("4", ""), READ, READS),
        (f"```python\n{READS}", READ, READS),
        (f"```python\n{READS}\n``` And so on.", READ, READS),
    ],
)
def test_the_program_of_a_response(text, tests, program):
    assert extract_program(text, tests).strip() == program


def test_names_that_tests_ask_for():
    assert unit_tests({"tests": "import math\nx = 1\nassert f(x) == g(math.pi)"}).needs == {"f", "g"}
    assert unit_tests(FUNCTIONS["unittest"]).needs == {"double"}
    assert unit_tests(CALLS).needs == {"double", "Solution"}


@pytest.mark.slow
def test_thoughts_have_no_program(reward):
    thought = f"<think>\n{block(RIGHT)}\n"
    assert score(reward, thought, FUNCTIONS["a list"]) == 0.0
    assert score(reward, thought + "</think>\n" + block(WRONG), FUNCTIONS["a list"]) == 0.0
    assert score(reward, f"<think>\n{block(WRONG)}\n</think>\n" + block(RIGHT), FUNCTIONS["a list"]) == 1.0


ALWAYS = "class Always:\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n"
MAIN = "import sys\nmain = sys.modules['__main__']\n"
CHEATS = {
    "exits": "def double(x): return 2\nraise SystemExit(0)",
    "exits at once": "import os\nos._exit(0)",
    "exits when it is called": "import sys\ndef double(x): sys.exit(0)",
    "kills itself": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "is no Python": "def double(x:",
    "takes memory": "double = bytearray(10**10)",
    "prints without end": "print('x' * 10**8)\ndef double(x): return 2 * x",
    "writes without end": "open('f', 'wb').write(b'x' * 10**8)\ndef double(x): return 2 * x",
    "equals everything": f"{ALWAYS}def double(x): return Always()",
    "equals everything in a list": f"{ALWAYS}class double(list):\n    def __eq__(self, other): return True\n",
    "a number that equals all": "class N(int):\n    def __eq__(self, other): return True\ndef double(x): return N(9)",
    "reads its own file": "import re\ntext = open(__file__).read()\nprint(text)\ndef double(x): return 0",
    "hooks exceptions": "import os, sys\nsys.excepthook = lambda *_: os._exit(0)\ndef double(x): return 0",
    "prints at the end": "import atexit\natexit.register(print, 'true')\ndef double(x): return 0",
    "replaces assertion errors": "import builtins\nbuiltins.AssertionError = OSError\ndef double(x): return 0",
    "replaces isinstance": "import builtins\nbuiltins.all = lambda *_: True\ndef double(x): return [0]",
    "equals everything, of no module": ALWAYS + "Always.__module__ = 'builtins'\ndef double(x): return Always()",
    "a class made by type": "E = type('E', (), {'__eq__': lambda *_: True})\ndef double(x): return E()",
    "mock.ANY": "from unittest.mock import ANY\ndef double(x): return ANY",
    "differs from nothing": "class D:\n    def __sub__(self, other): return 0\ndef double(x): return D()",
    "replaces unittest": "import unittest\nunittest.TestCase.run = lambda s, r=None: r\n"
    "unittest.TestResult.wasSuccessful = lambda s: True\ndef double(x): return 0",
    "replaces json and ast": "import ast, json\nparse = ast.parse\nast.parse = lambda *a, **k: parse('x = 1')\n"
    "loads = json.loads\njson.loads = lambda s: loads(s.replace('assert', 'str'))\ndef double(x): return 0",
    "replaces what runs it": MAIN + "for name in ('do', 'judged', 'passes'): setattr(main, name, lambda *_: True)\n"
    "def double(x): return 0",
    "looks for the tests in frames": "import re, sys\n"
    "wanted = re.compile(r'double\\(2\\)(?: ==|,) (\\d)|\\[\\[2\\], (\\d)')\n"
    "def double(x):\n    frame = sys._getframe()\n    while frame:\n"
    "        for value in [*frame.f_locals.values(), *frame.f_globals.values()]:\n"
    "            if found := wanted.search(str(value)): return 2 * x\n        frame = frame.f_back\n    return 0",
    "reads every descriptor": "import os, threading\ndef steal():\n    for fd in range(3, 40):\n"
    "        try: os.write(fd, b'{\"passed\": true}\\n')\n        except OSError: pass\n"
    "threading.Thread(target=steal).start()\ndef double(x): return 0",
    "pretends that it was not confined": "import os\ndef double(x): os._exit(125)",
    "pretends that it took too long": "import os\nos._exit(124)",
    "returns what does not travel": "def double(x): return (2 * x for _ in '1')",
    "misses a module": "def double(x):\n    import nowhere\n    return 2 * x",
    "answers that tests are unsupported": "class Unsupported(BaseException): pass\n"
    "def double(x): raise Unsupported('no')",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("how", CHEATS)
@pytest.mark.parametrize("form", ["a list", "unittest", "calls"])
def test_programs_that_misbehave_or_cheat_score_0(reward, how, form):
    assert score(reward, CHEATS[how], FUNCTIONS[form]) == 0.0
    assert score(reward, RIGHT, FUNCTIONS[form]) == 1.0, "the worker goes on"


@pytest.mark.slow
@pytest.mark.parametrize("status", [1, 124, 125, 137])
def test_no_exit_status_of_a_program_is_a_failure_of_the_machine(reward, status):
    assert score(reward, block(f"import os\nprint(2 * int(input()), flush=True)\nos._exit({status})"), PAIRS) == 0.0


@pytest.mark.slow
def test_what_a_program_changes_in_place_is_changed(reward):
    sorts = "def sort(x):\n    x.sort()\n    x[0].append(9)\n\ndef add(d, s):\n    d['a'] = 1\n    s.add(2)"
    tests = "x = [[2], [1]]\nsort(x)\nassert x == [[1, 9], [2]]\n"
    tests += "d = {}\ns = {1}\nadd(d, s)\nassert (d, s) == ({'a': 1}, {1, 2})"
    assert score(reward, block(sorts), {"tests": tests}) == 1.0
    assert score(reward, block(sorts.replace("9", "8")), {"tests": tests}) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        f"import atexit\natexit.register(print, 'bye')\n{RIGHT}",
        f"import threading\nthreading.Thread(target=print, args=('from a thread',)).start()\n{RIGHT}",
        f"print('loaded')\n{RIGHT}",
        f"class Point:\n    def __eq__(self, other): return self.x == other.x\n{RIGHT}",
        f"{RIGHT}\nif __name__ == '__main__':\n    print(double(int(input())))",
    ],
)
def test_right_programs_may_print_and_define_what_they_like(reward, program):
    assert score(reward, program, FUNCTIONS["a list"]) == 1.0


@pytest.mark.slow
def test_values_of_the_programs_own_types_are_compared_by_them(reward):
    point = (
        "class Point:\n    def __init__(self, x): self.x = x\n    def __eq__(self, other): return self.x == other.x\n"
    )
    fields = {"tests": "assert Point(1) == Point(1)\nassert not Point(1) == Point(2)\nassert [Point(1)] == [Point(1)]"}
    assert score(reward, point, fields) == 1.0
    assert score(reward, point.replace("self.x == other.x", "True"), fields) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prints", "wanted", "value"),
    [
        ("print('a \\nb')", "a\nb", 1.0),
        ("print('a\\nb\\n\\n')", "a\r\nb\r\n", 1.0),
        ("print('a\\u2028b')", "a\u2028b", 1.0),
        ("print('a\\u2028b')", "a\nb", 0.0),
        ("print('a\\x0cb')", "a\nb", 0.0),
        ("print('\\na')", "a", 0.0),
        ("print('a')", "a\nb", 0.0),
        ("import atexit\natexit.register(print, 'b')\nprint('a')", "a\nb", 1.0),
        ("print('a')\nraise SystemExit(3)", "a", 0.0),
        ("print('a')\nraise SystemExit", "a", 1.0),
    ],
)
def test_outputs_are_compared_by_lines(reward, prints, wanted, value):
    assert score(reward, block(f"input\n{prints}"), {"inputs": [""], "outputs": [wanted]}) == value


@pytest.mark.slow
@pytest.mark.parametrize(("on_limit", "score"), [("mask", None), ("zero", 0.0)])
def test_an_endless_program_is_over_the_limit_and_not_wrong(on_limit, score):
    config = RewardConfig(functions=["code"], timeout_s=1.5, max_failure_ratio=1, on_limit=on_limit)
    with closing(load_rewards(config)) as rewards:
        done = rewards.score([Sample("p", "while True: pass", None, {"tests": "assert double(1) == 2"})])
    assert done.total == [score]
    assert done.over_limit == {"code": 1}


@pytest.mark.slow
def test_a_row_is_tried_with_an_empty_program_once(reward, monkeypatch):
    asked = []
    real = reward.pool.map
    monkeypatch.setattr(reward.pool, "map", lambda payloads: asked.extend(payloads) or real(payloads))
    fields = {"tests": "assert double(7) == 14"}
    for completion in (RIGHT, RIGHT, WRONG):
        score(reward, completion, fields)
    assert [bool(payload["program"]) for payload in asked] == [False, True, True, True]
