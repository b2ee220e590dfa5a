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
