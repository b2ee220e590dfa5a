"""benchmarks/research/systems.md: verdicts name what is built, or figures whose script is here or in a named commit."""

import json
import re

import pytest

from specrl.config import options
from specrl.config.schema import Config
from specrl.rollout.sections import SOURCES
from tests.blocks import ROOT

RESEARCH = ROOT / "benchmarks" / "research"
PAGE = RESEARCH / "systems.md"
VERDICTS = "here", "measured", "not built", "open", "not exact"
REASON = 6  # words of a reason at least


def verdicts(text):
    """(system, verdict) of the tables' rows."""
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
    return [(system.strip(), verdict.strip()) for system, verdict in rows if system.strip() != "system"]


def faults(system, verdict):
    """What is wrong with a verdict."""
    kinds = re.findall(r"\*\*([^*]+)\*\*", verdict)
    if not kinds or not set(kinds) <= set(VERDICTS):
        yield f"{system}: its verdict is none of {', '.join(VERDICTS)}"
    spans = re.findall(r"`([^`]+)`", verdict)
    yield from (f"{system}: there is no {span}" for span in spans if not exists(span))
    links = re.findall(r"\]\(([^)]+)\)", verdict)
    yield from (f"{system}: {link} has no script" for link in links if is_figure(link) and not scripts(link))
    if "here" in kinds and not spans and not links:
        yield f"{system}: names nothing that is here"
    if {"measured", "open"} & {*kinds} and not any(map(is_figure, links)):
        yield f"{system}: has no figures"
    if "open" in kinds and "To measure" not in verdict:
        yield f"{system}: does not say what is to be measured"
    if kinds[:1] in (["not built"], ["not exact"]) and len(verdict.split()) < REASON:
        yield f"{system}: has no reason"


def is_figure(link):
    """Whether a link leads to a results file or to the research page."""
    return link.startswith(("results/", "README.md"))


def exists(span):
    """Whether a code span names a source of drafts, a file, a command with its options, a module or an option."""
    if span in SOURCES or ("/" in span and (ROOT / span).exists()):
        return True
    if span.startswith("python -m "):
        module, *words = span.removeprefix("python -m ").split()
        return is_module(module) and all(f"    {word.partition('=')[0]}:" in source(module) for word in words)
    if is_module(span):
        return True
    return span.partition("=")[0] in {*options.options(Config), *options.sections(Config)}


def is_module(name):
    path = ROOT / name.replace(".", "/")
    return "." in name and (path.with_suffix(".py").is_file() or (path / "__main__.py").is_file())


def source(module):
    return (ROOT / module.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8")


def scripts(link):
    """The scripts of a results file, or of a section of the research page, that are there or in a commit it names."""
    file, _, anchor = link.partition("#")
    if not (PAGE.parent / file).exists():
        return []
    if file.endswith(".json"):
        known = json.loads((PAGE.parent / file).read_text(encoding="utf-8"))
        command = known.get("command", "") if isinstance(known, dict) else ""
        commands = command + section(lambda text: f"results/{file.rpartition('/')[2]}" in text)
    else:
        commands = section(lambda text: not anchor or text.partition("\n")[0].lower().replace(" ", "-") == anchor)
    named = re.findall(r"python (?:-m )?((?:benchmarks|specrl)[\w./]+)", commands)
    is_kept = re.search(r"last in [0-9a-f]{7,}", commands)
    return [name for name in named if is_kept or is_module(name) or (ROOT / name).is_file()]


def section(wanted):
    """The first section of the research page that is wanted, heading first."""
    parts = re.split(r"^## ", (RESEARCH / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    return next((part for part in parts[1:] if wanted(part)), "")


def test_every_verdict_names_what_exists():
    found = verdicts(PAGE.read_text(encoding="utf-8"))
    assert len(found) > 45
    assert [fault for row in found for fault in faults(*row)] == []


def test_every_results_file_has_its_script():
    files = sorted((RESEARCH / "results").glob("*.json"))
    assert [file.name for file in files if not scripts(f"results/{file.name}")] == []


@pytest.mark.parametrize(
    "verdict",
    [
        "**here**: it is built",
        "**here**: source `contests`",
        "**here**: `rollout/drafting/engrams.py`",
        "**here**: `rollout.drafters=DIR`",
        "**here**: `python -m specrl.drafter sort=head`",
        "**measured**: 1.2x",
        "**measured**: 1.2x ([file](results/counts-nothing.json))",
        "**measured**: 1.2x ([trees](README.md#no-such-section))",
        "**open**: nobody knows ([file](results/selfspec-sparse.json))",
        "**not built**: no",
        "**promising**: source `contexts`",
    ],
)
def test_a_planted_fault_is_found(verdict):
    assert [*faults("a system", verdict)]


def test_a_results_file_without_its_script_is_found(tmp_path, monkeypatch):
    (tmp_path / "results").mkdir()
    monkeypatch.setattr(f"{__name__}.PAGE", tmp_path / PAGE.name)
    for script, found in (("host rows=1", 1), ("tallies rows=1", 0)):
        (tmp_path / "results" / "made.json").write_text(
            json.dumps({"command": f"python -m benchmarks.research.{script}"})
        )
        assert len(scripts("results/made.json")) == found
