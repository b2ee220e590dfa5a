"""The README's picture shows what the files of the figures hold."""

import json

from PIL import Image

from benchmarks import picture


def drawn():
    return json.loads(Image.open(picture.PATH).text[picture.KEY])


def test_it_shows_what_the_files_hold():
    assert drawn() == picture.bars(), "python -m benchmarks.figures draws it"


def test_planted_fault_another_figure_is_seen(monkeypatch):
    monkeypatch.setattr(picture, "rival", lambda name: "9.99x")
    assert drawn() != picture.bars()


def test_it_is_a_png_with_a_bar_above_and_a_bar_below_the_baseline(tmp_path):
    picture.draw(tmp_path / "speed.png")
    assert Image.open(tmp_path / "speed.png").format == "PNG"
    assert min(picture.bars().values()) < 1 < max(picture.bars().values())
