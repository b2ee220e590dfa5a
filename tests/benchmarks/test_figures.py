"""Figures are rendered between their marks as their files hold them; what is missing is named."""

import json
import re

import pytest
from PIL import Image

from benchmarks import pages, picture
from benchmarks.figures import FIGURES, Figure, measure
from specrl.config.options import ConfigError


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    return tmp_path


def test_a_command_that_fails_makes_no_figure():
    with pytest.raises(ConfigError, match=r"specrl.train config=nowhere failed with code 2"):
        measure(Figure(("specrl.train config=nowhere",), lambda out, printed: {}), "abc1234")


def test_only_the_text_between_the_marks_is_written(results):
    lines = ["rows", "Step 1/128", "Step 128/128 | 1.3 s", "reward: 0.5 -> 0.9", "note: x"]
    (results / "train.json").write_text(json.dumps({"commit": "abc1234", "result": {"printed": lines}}))
    page = "before\n<!-- figure: console -->\nstale 9.99x\n<!-- /figure -->\nafter\n"
    block = "```\nStep 128/128 | 1.3 s\nreward: 0.5 -> 0.9\n```\n([abc1234](benchmarks/results/train.json))"
    assert pages.rendered(page) == f"before\n<!-- figure: console -->\n{block}\n<!-- /figure -->\nafter\n"
    assert pages.rendered(pages.rendered(page)) == pages.rendered(page)


def test_a_missing_figure_names_its_command_and_an_unknown_block_the_known_ones(results):
    with pytest.raises(ConfigError, match=r"measure=\[train\]"):
        pages.rendered("<!-- figure: console -->\n<!-- /figure -->")
    with pytest.raises(ConfigError, match=r"'konsole'.*console"):
        pages.rendered("<!-- figure: konsole -->\n<!-- /figure -->")


@pytest.mark.parametrize("name", pages.PAGES)
def test_a_page_shows_what_its_files_hold(name):
    text = (pages.ROOT / name).read_text(encoding="utf-8")
    assert "<!-- figure:" in text
    assert pages.rendered(text) == text, "python -m benchmarks.figures renders the pages"


def test_every_file_is_a_figure():
    files = {path.stem: json.loads(path.read_text()) for path in pages.RESULTS.glob("*.json")}
    assert {name for name in files if not name.endswith("-cpu")} == set(FIGURES)  # others name their commit
    for name, figure in FIGURES.items():
        assert len(files[name]["commands"]) == len(figure.commands), name


def test_all_figures_of_readme_are_of_one_commit():
    text = (pages.ROOT / "README.md").read_text(encoding="utf-8")
    names = set(re.findall(r"benchmarks/results/([\w-]+)\.json", text))
    assert len(names) == 12
    assert len({pages.load(name)["commit"] for name in names}) == 1


# Pictures -------------------------------------------------------------------------------------------------------------


PICTURES = pytest.mark.parametrize(
    ("path", "values", "faulty"),
    [
        (picture.PATH, "bars", ("rival", lambda name: "9.99x")),
        (picture.KINDS_PATH, "lines", ("load", lambda name: {"result": {"lines": []}})),
    ],
)


def differs(path, values) -> bool:
    kept = json.loads(Image.open(path).text[picture.KEY])
    return kept != json.loads(json.dumps(getattr(picture, values)()))


@PICTURES
def test_it_shows_what_the_files_hold(path, values, faulty):
    assert not differs(path, values), "python -m benchmarks.figures draws it"


@PICTURES
def test_planted_fault_another_figure_is_seen(path, values, faulty, monkeypatch):
    monkeypatch.setattr(picture, *faulty)
    assert differs(path, values)
