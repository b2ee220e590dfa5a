"""The pictures of the pages show what the files of the figures hold."""

import json

import pytest
from PIL import Image

from benchmarks import picture

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
