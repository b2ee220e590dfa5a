"""What the figures of the house count, on a small one whose sizes and circles are known."""

import pytest

from benchmarks.house import circles, figures, sources

ENGINE = (
    '''"""Words
of two lines."""

from typing import TYPE_CHECKING

# a remark
if TYPE_CHECKING:
    from specrl.rollout.rows import Row


class Engine:
    """One line."""

    def __init__(self, a, b, *, c=1):
        self.a = a


def long():
'''
    + "    x = 1\n" * 50
)


@pytest.fixture
def house(tmp_path):
    files = {
        "rollout/engine.py": ENGINE,
        "rollout/rows.py": "from specrl.rollout.engine import Engine\n",
        "reward/base.py": "import specrl.bench.__main__\n",
        "specrl/bench/__main__.py": "def f():\n    from specrl.reward import base\n",
        "trainers/plain.py": "x = 1\n" * 301,
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return sources(tmp_path)


def test_lines_are_counted_by_part(house):
    lines = figures(house, {"rollout/rows.py"})["lines"]
    assert lines["rollout"] == {"files": 2, "lines": 69, "code": 58}, "neither blank, docstring nor remark"
    assert lines["config=grpo_math"] == {"files": 1, "lines": 1, "code": 1}
    assert (lines["bench"]["lines"], lines["vllm"]["lines"], lines["all"]["files"]) == (2, 0, 5)


def test_what_is_too_large_is_named(house):
    found = figures(house, set())
    assert found["files over 300 lines"] == {"trainers/plain.py": 301}
    assert found["functions over 50 lines"] == {"rollout/engine.py:long": 51}
    assert found["widest constructor"] == ("rollout/engine.py:Engine", 3)


def test_circles_through_functions_are_found_and_those_of_types_told_apart(house):
    assert circles(house) == [["specrl.bench.__main__", "specrl.reward.base"]]
    assert circles(house, types=True) == [
        ["specrl.bench.__main__", "specrl.reward.base"],
        ["specrl.rollout.engine", "specrl.rollout.rows"],
    ]
    assert circles([file for file in house if file.path != "reward/base.py"]) == [], "control: nothing leads back"
