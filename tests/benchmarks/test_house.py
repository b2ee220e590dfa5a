"""The figures of the house, on a small one whose sizes and circles are known."""

from benchmarks.house import ROOT, circles, sources

CEILING = 18_471
"""Lines of code of the product; the aim is 15,000. A commit that raises it says in its message what the lines buy."""

ENGINE = '''"""Words
of two lines."""

from typing import TYPE_CHECKING

# a comment
if TYPE_CHECKING:
    from specrl.rollout.rows import Row


class Engine:
    """One line."""

    def __init__(self, a):
        self.a = a
'''
FILES = {
    "rollout/engine.py": ENGINE,
    "rollout/rows.py": "from specrl.rollout.engine import Engine\n",
    "reward/base.py": "import specrl.bench.__main__\n",
    "specrl/bench/__main__.py": "def f():\n    from specrl.reward import base\n",
}


def test_lines_and_circles_through_functions_and_types(tmp_path):
    for path, text in FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    files = sources(tmp_path)
    assert {file.path: file.code for file in files}["rollout/engine.py"] == 6
    circle = ["specrl.bench.__main__", "specrl.reward.base"]
    assert circles(files) == [circle]
    assert circles(files, types=True) == [circle, ["specrl.rollout.engine", "specrl.rollout.rows"]]
    assert circles([file for file in files if file.path != "reward/base.py"]) == [], "control: nothing leads back"


def test_the_product_stays_under_its_ceiling():
    assert sum(file.code for file in sources(ROOT)) <= CEILING
