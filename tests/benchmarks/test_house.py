"""The figures of the house, on a small one whose sizes and circles are known."""

import pytest

from benchmarks.house import ROOT, circles, figures, sources

CEILING = 18_590
"""Lines of code of the product; the aim is 15,000. A commit that raises it says in its message what the lines buy."""

ENGINE = (
    '''"""Words
of two lines."""

from typing import TYPE_CHECKING

# a comment
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
FILES = {
    "rollout/engine.py": ENGINE,
    "rollout/rows.py": "from specrl.rollout.engine import Engine\n",
    "reward/base.py": "import specrl.bench.__main__\n",
    "specrl/bench/__main__.py": "def f():\n    from specrl.reward import base\n",
    "trainers/plain.py": "x_law = 1\n" * 301,
    "benchmarks/a.py": "x = 1\n",
    "benchmarks/research/b.py": "x = 1\n",
    "tests/test_a.py": "x = 1\ny = 2\n",
    "README.md": "One two three.\n",
}


@pytest.fixture
def house(tmp_path):
    for path, text in FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def test_figures_of_a_known_house(house):
    found = figures(house, path={"rollout/rows.py"})
    assert found["product"] == {"files": 5, "code": 57 + 1 + 1 + 2 + 301, "lines": 68 + 1 + 1 + 2 + 301}
    assert found["path of config=grpo_math"] == {"files": 1, "code": 1, "lines": 1}
    assert (found["benchmarks outside research"]["lines"], found["tests"]["lines"]) == (1, 2)
    assert (found["words of pages"], found["classes that only one other file names"]) == (3, 1)
    assert found["private words"]["product"] == {"law": 301}
    assert found["files over 300 lines"] == {"trainers/plain.py": 301}
    assert found["functions over 50 lines"] == {"rollout/engine.py:long": 51}


def test_circles_through_functions_and_types(house):
    files = sources(house)
    circle = ["specrl.bench.__main__", "specrl.reward.base"]
    assert circles(files) == [circle]
    assert circles(files, types=True) == [circle, ["specrl.rollout.engine", "specrl.rollout.rows"]]
    assert circles([file for file in files if file.path != "reward/base.py"]) == [], "control: nothing leads back"


def test_the_product_stays_under_its_ceiling():
    assert sum(file.code for file in sources(ROOT)) <= CEILING
