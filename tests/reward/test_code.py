"""The code reward: forms of tests, which program of a response counts, and programs that misbehave or cheat."""

import json
from contextlib import closing

import pytest

from specrl.reward import sandbox
from specrl.reward.base import Sample
from specrl.reward.code import CodeReward, make_runner
from specrl.reward.config import RewardConfig
from specrl.reward.loading import load_rewards
from specrl.reward.set import RewardSet
from specrl.reward.unit_tests import UnitTests, extract_program

RIGHT = (
    "def double(x):\n    return 2 * x if x.__class__ is int else {1: 2 * x[1]}\n\n"
    "class Solver:\n    def double(self, x):\n        return double(x)"
)
WRONG = RIGHT.replace("2 * x", "3 * x")
READS = "print(2 * int(input()))"
ASSERTS = ["assert double(2) == 4", "assert double(0) == 0"]
PAIRS = {"inputs": ["2\n", "5\n"], "outputs": ["4\n", "10"]}
CALLS = {"inputs": [[2], [5]], "outputs": [4, 10], "fn_name": "double"}
CLASS = (
    "import unittest\nfrom solution import double\nclass TestIt(unittest.TestCase):\n"
    "    def test_it(self):\n        self.assertEqual(double(2), 4)\n"
)
USES = "from solution import double\n"
NOTHING = "that defines their functions to do nothing"
FUNCTIONS = {
    "a list": {"test_list": ASSERTS},
    "text": {"tests": "\n".join(ASSERTS)},
    "JSON text of a list": {"tests": json.dumps(ASSERTS)},
    "Python text of a list": {"tests": str(ASSERTS)},
    "with code before": {"test_list": ["assert twice(2) == 4"], "test_setup_code": "twice = double"},
    "check": {"test": "def check(candidate):\n    assert candidate(3) == 6\n", "entry_point": "double"},
    "test functions": {"tests": "from solution import *\ndef test_it():\n    assert double(3) == 6\n"},
    "test class": {"tests": "class TestIt:\n    def test_it(self):\n        assert double(3) == 6\n"},
    "unittest": {"tests": CLASS},
    "calls": CALLS,
    "calls with arguments by line": {"inputs": ["2", "5\n"], "outputs": ["4", "10"], "fn_name": "double"},
    "calls of CodeContests": {"tests": [{"input": [2], "output": 4}], "fn_name": "double"},
    "calls of LiveCodeBench": {
        "public_test_cases": json.dumps([{"input": "2", "output": "4", "testtype": "functional"}]),
        "metadata": json.dumps({"func_name": "double"}),
    },
    "check of an expression": {"test": "def check(f):\n    assert f(3) == 6\n", "entry_point": "Solver().double"},
    "another module's name": {"tests": "from your_module import double as d\nassert d(3) == 6\n"},
    "calls of an entry point": {
        "input_output": [{"input": "x = 2", "output": "4"}],
        "entry_point": "Solver().double",
    },
    "calls with numbers as keys": {"inputs": [[{"1": 2}]], "outputs": [{"1": 4}], "fn_name": "double"},
}
PROGRAMS = {
    "pairs": PAIRS,
    "pairs of lists of lines": {"inputs": [["2"], ["5"]], "outputs": [["4"], ["10"]]},
    "input_output": {"input_output": json.dumps(PAIRS)},
    "objects": {"tests": [{"input": "2\n", "output": "4\n", "type": "stdin_stdout"}]},
    "lists of inputs and outputs": {"public_tests": {"input": ["2\n"], "output": ["4\n"]}},
    "cases in an object": {
        "verification_info": json.dumps(
            {"language": "python", "test_cases": [{"input": "2\n", "output": "4\n", "type": "stdin_stdout"}]}
        )
    },
    "JSON texts": {"tests": [json.dumps({"input": "2\n", "output": "4\n"})]},
    "a ground truth": {"reward_model": {"style": "rule", "ground_truth": json.dumps(PAIRS)}},
    "pairs as lists": {"tests": [["2\n", "4\n"]]},
    "an empty column before": {
        "private_tests": {"input": [], "output": []},
        "public_tests": {"input": [2], "output": [4]},
    },
    "pairs beside an entry point": {"entry_point": "main", "tests": [{"input": "2", "output": "4", "type": "stdin"}]},
}
UNKNOWN = {
    "no column": ({"level": "easy"}, "no unit tests in the columns level"),
    "prose": ({"tests": "see the statement"}, "cannot be run"),
    "calls that nothing checks": ({"tests": "double(2)"}, "nothing in them can fail"),
    "check without its candidate": ({"tests": "def check(f):\n    assert f(1) == 2"}, "entry_point"),
    "arguments without a function": ({"inputs": [{"a": 1}], "outputs": [2]}, "fn_name"),
    "a fixture": ({"tests": "def test_it(tmp_path):\n    assert double(2) == 4\n"}, "needs pytest"),
    "a function without a name": (
        {"tests": [{"input": "1", "output": "2", "testtype": "functional"}]},
        "call a function, and nothing names it",
    ),
    "a module that is not here": ({"tests": "import nowhere\nassert double(2) == 4"}, "No module named 'nowhere'"),
    "a function of the tests": ({"tests": "assert double(lambda: 2) == 4\nassert 0"}, "pass a function"),
    "a class derived from the program's": (
        {"tests": "class Mine(Solver): pass\nassert Mine().double(2) == 4"},
        "derive a class",
    ),
    "an empty program passes": ({"tests": "def run():\n    assert double(2) == 4\n"}, "an empty program passes"),
    "nothing calls it": ({"tests": f"{USES}def run():\n    assert double(2) == 4\n"}, NOTHING),
    "skipped": ({"tests": CLASS.replace("class", "@unittest.skip('')\nclass")}, NOTHING),
    "failures are caught": ({"tests": f"{USES}try:\n    assert double(2) == 4\nexcept Exception: pass\n"}, NOTHING),
    "what is printed": (
        {"tests": "from contextlib import redirect_stdout\nwith redirect_stdout(out):\n    assert double(2)"},
        "acts on the process",
    ),
    "a patch": ({"tests": "@patch('builtins.input')\ndef test_it(): assert double(2)"}, "acts on the process"),
    "a package": ({"tests": "from .solution import double\nassert double(2) == 4"}, "from a package"),
    "deep JSON": ({"tests": "[" * 100_000}, "cannot be run"),
}


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
    rewards = RewardSet([reward])
    assert rewards.score([Sample("p", block(RIGHT), None, fields)]).total == [None]
    assert message in rewards.first_failure


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wanted", "returns", "value"),
    [
        (0.3, "0.1 + 0.2", 1.0),
        (1, "1.0", 1.0),
        (1, "True", 0.0),
        ([1, 2], "(1, 2)", 1.0),
        ([1, 2], "[2, 1]", 0.0),
        ("1", "1", 0.0),
    ],
)
def test_returned_values_are_compared_as_json(reward, wanted, returns, value):
    fields = {"inputs": [[1]], "outputs": [wanted], "fn_name": "f"}
    assert score(reward, block(f"def f(x):\n    return {returns}"), fields) == value
    method = f"class Solution:\n    def f(self, x):\n        return {returns}"
    assert score(reward, block(method), fields) == value


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
        (block(READS) + "\nRun it:\n" + block("python a.py", "bash"), READ, READS),
        (block(READS, "Python title='a.py'"), READ, READS),
        (block(READS, "py").replace("```", "~~~~"), READ, READS),
        (block(READS).replace("\n", "\r\n"), READ, READS),
        ("1. So:\n\n   ```python3\n   " + READS + "\n   ```", READ, READS),
        (f"```python\n{READS}", READ, READS),
        (f"```python\n{READS}\n``` And so on.", READ, READS),
        (f"- So:\n\n          ```python\n          {READS}\n          ```", READ, READS),
        (f"```python\n    {READS}\n```", READ, READS),
        (f"<answer>```python\n{READS}\n```</answer>", READ, READS),
        (f"The program: ```python\n{READS}\n```", READ, READS),
        (f"{READS}\n```\nIt doubles.\n{block('print(4)')}", READ, READS),
        ("\n".join([block("x: int", "text"), block(READS, "python3.11"), block("print(4)", "c++")]), READ, READS),
        (block(RIGHT) + "\nUse it:\n" + block(f"{USES}print(double(3))"), ASKS, RIGHT),
    ],
)
def test_the_program_of_a_response(text, tests, program):
    assert extract_program(text, tests).strip() == program


def test_a_prompt_may_open_the_block():
    text = f"double = 2 .__mul__\n```\nFor example\n{block(RIGHT)}"
    assert extract_program(text, ASKS, "Write it.\n```python\n") == "double = 2 .__mul__"
    assert extract_program(block(RIGHT), ASKS, "Write it.\n```python\n").strip() == RIGHT


@pytest.mark.slow
def test_thoughts_have_no_program(reward):
    thought = f"<think>\n{block(RIGHT)}\n"
    assert score(reward, thought, FUNCTIONS["a list"]) == 0.0
    assert score(reward, thought + "</think>\n" + block(WRONG), FUNCTIONS["a list"]) == 0.0
    assert score(reward, f"<think>\n{block(WRONG)}\n</think>\n" + block(RIGHT), FUNCTIONS["a list"]) == 1.0


ALWAYS = "class Always:\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n"
MAIN = "import sys\nmain = sys.modules['__main__']\n"
CHEATS = {
    "exits at once": "import os\nos._exit(0)",
    "exits when it is called": "import sys\ndef double(x): sys.exit(0)",
    "kills itself": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "is no Python": "def double(x:",
    "takes memory": "double = bytearray(10**10)",
    "prints without end": "print('x' * 10**8)\ndef double(x): return 2 * x",
    "writes without end": "open('f', 'wb').write(b'x' * 10**8)\ndef double(x): return 2 * x",
    "equals everything": f"{ALWAYS}def double(x): return Always()",
    "hooks exceptions": "import os, sys\nsys.excepthook = lambda *_: os._exit(0)\ndef double(x): return 0",
    "replaces assertion errors": "import builtins\nbuiltins.AssertionError = OSError\ndef double(x): return 0",
    "mock.ANY": "from unittest.mock import ANY\ndef double(x): return ANY",
    "is less than everything": "class L:\n    def __sub__(self, other): return self\n"
    "    def __abs__(self): return self\n    def __lt__(self, other): return True\ndef double(x): return L()",
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
    "returns what does not travel": "def double(x): return (2 * x for _ in '1')",
    "misses a module": "def double(x):\n    import nowhere\n    return 2 * x",
    "answers that tests are unsupported": "class Unsupported(BaseException): pass\n"
    "def double(x): raise Unsupported('no')",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("form", ["a list", "unittest", "calls"])
def test_programs_that_misbehave_or_cheat_score_0(reward, form):
    found = reward([Sample("p", program, None, FUNCTIONS[form]) for program in [*CHEATS.values(), RIGHT]])
    assert dict(zip(CHEATS, found, strict=False)) == dict.fromkeys(CHEATS, 0.0)
    assert found[-1] == 1.0, "the worker goes on"


NUMBERS = {
    "differ from nothing": "class A:\n    __sub__ = __rsub__ = __abs__ = lambda *_: 0\ndef double(x): return A()",
    "are less than everything": CHEATS["is less than everything"],
    "are closed": "class A:\n    __sub__ = __rsub__ = lambda s, _: s\n    __abs__ = __bool__ = lambda _: False\n"
    "def double(x): return A()",
    "derive from int": "class A(int):\n    __sub__ = __rsub__ = __mod__ = lambda *_: 0\n"
    "    __truediv__ = __contains__ = lambda *_: True\ndef double(x): return A(1)",
    "remember": "class A:\n    def __sub__(self, other):\n        self.seen = other\n        return 0\n"
    "last = A()\ndef double(x): return getattr(last, 'seen', last)",
    "contain everything": "class A:\n    __contains__ = lambda *_: True\n    __iter__ = lambda _: iter([9])\n"
    "def double(x): return A()",
}
AGAINST = {
    "a tolerance": "assert abs(double(2) - 4) < 1e-6",
    "a tolerance of unittest": "import unittest\nclass T(unittest.TestCase):\n"
    "    def test(self): self.assertAlmostEqual(double(2), 4)",
    "a difference": "assert double(2) - 4 == 0",
    "no difference": "assert not double(2) - 4",
    "a remainder": "assert double(2) % 4 == 0",
    "members": "assert 4 in [*range(double(2)), double(2)] and double(2) in {4}",
    "twice": "assert 4 - double(2) == 0\nassert double(2) == 4",
}


@pytest.mark.slow
@pytest.mark.parametrize("how", AGAINST)
def test_a_program_does_not_compute_with_what_it_should_return(reward, how):
    fields = {"tests": AGAINST[how]}
    assert score(reward, RIGHT, fields) == 1.0
    assert {name: score(reward, cheat, fields) for name, cheat in NUMBERS.items()} == dict.fromkeys(NUMBERS, 0.0)


@pytest.mark.slow
def test_what_a_function_returns_is_looked_through(reward):
    fields = {"tests": "assert 4 in double(2) and 5 not in double(2)"}
    assert score(reward, "def double(x): return [2 * x]", fields) == 1.0
    own = "class A:\n    __iter__ = lambda _: iter([4])\ndef double(x): return A()"
    assert score(reward, own, fields) == 1.0
    assert score(reward, NUMBERS["contain everything"], {"tests": "assert 4 in double(2)"}) == 0.0


@pytest.mark.slow
def test_what_a_program_changes_in_place_is_changed(reward):
    sorts = "def sort(x):\n    x.sort()\n    x[0].append(9)\n\ndef add(d, s):\n    d['a'] = d.pop('b')\n    s ^= {1, 2}"
    tests = "x = [[2], [1]]\nsort(x)\nassert x == [[1, 9], [2]]\n"
    tests += "d = {'b': 1}\ns = {1}\nadd(d, s)\nassert (d, s) == ({'a': 1}, {2})"
    assert score(reward, block(sorts), {"tests": tests}) == 1.0
    assert score(reward, block(sorts.replace("9", "8")), {"tests": tests}) == 0.0


@pytest.mark.slow
def test_right_programs_may_print_and_define_what_they_like(reward):
    for program in (
        f"import threading\nthreading.Thread(target=print, args=('from a thread',)).start()\n{RIGHT}",
        f"class Point:\n    def __eq__(self, other): return self.x == other.x\n{RIGHT}",
        f"{RIGHT}\nif __name__ == '__main__':\n    print(double(int(input())))",
    ):
        assert score(reward, program, FUNCTIONS["a list"]) == 1.0


OWN_CLASSES = {
    "a named tuple": (
        "P = namedtuple('P', 'x y')\ndef make(): return P(1, RIGHT)",
        "make().y == 2 and make() == (1, 2)",
    ),
    "a list of its own": (
        "class Stack(list):\n    def put(self, x): self.append(x + RIGHT)",
        "(s := Stack(), s.put(1))[0] == [3] and s[0] == 3 and len(s) == 1",
    ),
    "a cache": (
        "class Cache(OrderedDict):\n    def put(self, key, value): self[key] = value * RIGHT",
        "(c := Cache(), c.put('a', 2))[0]['a'] == 4 and c == {'a': 4}",
    ),
    "constants": (
        "import enum\nclass C(enum.IntEnum):\n    A = RIGHT\ndef make(): return C.A",
        "make() is C.A and C.A == 2 and C.A + 1 == 3 and 7 % C.A == 1 and [0, 0, 1][C.A] and float(C.A) == 2.0",
    ),
    "operators between its objects": (
        "class V:\n    def __init__(self, x): self.x = x\n    def __add__(self, o): return V(self.x + o.x)\n"
        "    def __abs__(self): return self.x * RIGHT\n    def __contains__(self, x): return x == self.x * RIGHT",
        "abs(V(1) + V(2)) == 6 and 6 in V(3) and 5 not in V(3) and isinstance(V(1), V) and not isinstance(1, V)",
    ),
    "objects that are ordered and hashed": (
        "@total_ordering\nclass V:\n    def __init__(self, x): self.x = x\n"
        "    def __eq__(self, o): return self.x == o.x\n    def __lt__(self, o): return self.x < RIGHT * o.x\n"
        "    def __hash__(self): return hash(self.x)",
        "V(3) < V(2) and {V(1): 2}[V(1)] == 2 and sorted([V(9), V(1)])[0].x == 1",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", OWN_CLASSES)
def test_classes_of_the_program_behave_as_they_are_written(reward, form):
    program, test = OWN_CLASSES[form]
    assert score(reward, block(program.replace("RIGHT", "2")), {"tests": f"assert {test}"}) == 1.0
    assert score(reward, block(program.replace("RIGHT", "0")), {"tests": f"assert {test}"}) == 0.0


@pytest.mark.slow
def test_tests_that_change_an_attribute_say_nothing_about_the_program(reward):
    program = "class Stack:\n    def __init__(self): self.items = []"
    outcome = score(reward, block(program), {"tests": "s = Stack()\ns.items.append(1)\nassert s.items == [1]"})
    assert isinstance(outcome, ValueError)
    assert "change a container" in str(outcome)


@pytest.mark.slow
def test_all_pairs_of_a_row_take_one_sandbox_and_a_process_each(monkeypatch):
    started = []
    real = sandbox.subprocess.Popen
    monkeypatch.setattr(
        sandbox.subprocess, "Popen", lambda *args, **options: started.append(1) or real(*args, **options)
    )
    leaves = "import os\nif os.fork() == 0:\n    os.setsid()\n    import time\n    time.sleep(60)\nseen = []\n"
    leaves += "seen.append(int(input()))\nprint(2 * seen[0], len(seen))"
    pairs = [[str(number), f"{2 * number} 1"] for number in range(40)]
    handler = make_runner(30.0, 512)
    assert handler({"program": leaves, "pairs": pairs}) is True
    assert handler({"program": leaves, "pairs": [*pairs, ["1", "3 1"]]}) is False
    assert len(started) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prints", "wanted", "value"),
    [
        ("print('a \\nb')", "a\nb", 1.0),
        ("print('a\\nb\\n\\n')", "a\r\nb\r\n", 1.0),
        ("print('a\\u2028b')", "a\nb", 0.0),
        ("print('a')", "a\nb", 0.0),
        ("import atexit\natexit.register(print, 'b')\nprint('a')", "a\nb", 1.0),
        ("print('a')\nraise SystemExit(3)", "a", 0.0),
    ],
)
def test_outputs_are_compared_by_lines(reward, prints, wanted, value):
    assert score(reward, block(f"input\n{prints}"), {"inputs": [""], "outputs": [wanted]}) == value


@pytest.mark.slow
@pytest.mark.parametrize(("on_limit", "score"), [("mask", None), ("zero", 0.0)])
def test_an_endless_program_is_over_the_limit_and_not_wrong(on_limit, score):
    config = RewardConfig(functions=["code"], timeout_s=1.5, on_limit=on_limit)
    with closing(load_rewards(config)) as rewards:
        done = rewards.score([Sample("p", "while True: pass", None, {"tests": "assert double(1) == 2"})])
    assert done.total == [score]
    assert done.over_limit == {"code": 1}
