"""The documentation against the code: keys, options, links, files and tests that exist, examples that run."""

import ast
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from specrl.config import options
from specrl.config.schema import Config
from tests import runs

ROOT = Path(__file__).parents[2]
PAGES = [
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md", "benchmarks/research/README.md")
    ),
    *sorted((ROOT / "docs").glob("*.md")),
]
METRIC_PREFIXES = ("spec/", "timing_s/", "drafter/", "judge/", "cache/", "reward/")
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:home|root|tmp|work|Users|mnt|data)/\w")


def read(page):
    return page.read_text(encoding="utf-8")


@cache
def product():
    packages = ("specrl", "trainers", "rollout", "reward")
    return [read(file) for package in packages for file in sorted((ROOT / package).rglob("*.py"))]


# Metrics --------------------------------------------------------------------------------------------------------------


def documented(text):
    """The keys in the first column of the tables; NAME stands for any reward or source."""
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return {key for cell in cells for key in re.findall(r"`([^`]+)`", cell)}


def undocumented(written, known):
    """Written keys that match no documented key."""
    patterns = [re.compile(re.escape(key).replace("NAME", r"[^/]+")) for key in known]
    return sorted(key for key in written if not any(pattern.fullmatch(key) for pattern in patterns))


def unwritten(known, code):
    """Documented keys of this package that no string of the code has; NAME is `{name}` there."""
    keys = (key for key in known if key.startswith(METRIC_PREFIXES))
    return sorted(key for key in keys if f'"{key}"'.replace("NAME", "{name}") not in code)


def test_every_documented_metric_is_in_the_code():
    assert unwritten(documented(read(ROOT / "docs" / "metrics.md")), "\n".join(product())) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"rollout__replay": 0.5, "rollout__measure_every": 2, "trainer__eval_prompts": 4, "trainer__beta": 0.01},
        {"rollout__drafter": "made here", "trainer__drafter__train": "true", "trainer__epochs": 1},
        {"rollout__acceptance": "lenient", "trainer__epochs": 2, "trainer__updates_per_rollout": 2},
        {"config": "ppo_math", "trainer__epochs": 2, "trainer__beta": 0.01, "trainer__kl_target": 0.01},
    ],
    ids=["exact", "co-training", "lenient", "ppo"],
)
def test_every_metric_that_a_run_writes_is_documented(settings, tmp_path):
    if "rollout__drafter" in settings:
        settings = settings | {"rollout__drafter": runs.drafter(tmp_path / "drafter")}
    runs.run(tmp_path, **settings)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    written = {key for line in lines for key in json.loads(line)}
    assert len(written) > 40
    assert undocumented(written, documented(read(ROOT / "docs" / "metrics.md"))) == []


def test_planted_faults_in_metrics_are_found():
    known = documented(
        "| key | formula |\n|---|---|\n| `spec/a`, `spec/b` | of `spec/c` |\n| `rewards/NAME/mean` | x |"
    )
    assert known == {"spec/a", "spec/b", "rewards/NAME/mean"}
    assert undocumented({"spec/a", "spec/c", "rewards/math/mean", "rewards/mean"}, known) == ["rewards/mean", "spec/c"]
    assert unwritten(known, 'metrics["spec/a"] = f"{spec/b}"') == ["spec/b"]
    assert unwritten({"spec/x_NAME", "spec/y_NAME"}, 'metrics[f"spec/x_{name}"]') == ["spec/y_NAME"]


# Pages ----------------------------------------------------------------------------------------------------------------


def broken_links(page, text):
    """Relative links to files that do not exist."""
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text)]
    return [link for link in links if not link.startswith("http") and not (page.parent / link).exists()]


def missing_files(text):
    """Named source files and folders that do not exist; of a test the bare name of its file will do."""
    named = re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py)`", text)
    named += re.findall(r"`((?:specrl|trainers|rollout|reward|benchmarks|tests)/(?:[a-z_]+/)*)`", text)
    missing = [name for name in named if not (ROOT / name).exists()]
    return missing + [name for name in re.findall(r"`(test_\w+\.py)`", text) if name not in existing_tests()]


def misquoted(text):
    """Files from which a code block claims to be, and is not."""
    quoted = re.findall(r"^```python\n# ((?:\w+/)+\w+\.py)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [file for file, code in quoted if not (ROOT / file).is_file() or code not in dedented(read(ROOT / file))]


def dedented(code):
    """The code as it is, and without its first one, two and three levels of indentation."""
    return "\n".join([code, *(re.sub(rf"^ {{{width}}}", "", code, flags=re.MULTILINE) for width in (4, 8, 12))])


def unknown_options(text):
    """Options that code spans outside code blocks name, and that do not exist."""
    known = {*options.options(Config), *options.sections(Config)}
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    names = [word.partition("=")[0].removesuffix(".*") for span in spans for word in span.split()]
    sections = "rollout|trainer|reward|report|dataset|lora|cluster"
    named = [name for name in names if re.fullmatch(rf"({sections})\.(?!md|json|png)[a-z_.]+", name)]
    return [name for name in named if name not in known]


def unsaid(text, strings):
    """Messages in the first column of the tables that no string of the code has; `...` stands for what varies."""
    rows = [cell for cell in re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE) if " " in cell]
    return [cell for cell in rows if not all(part.strip() in strings for part in cell.split("..."))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_pages_name_what_exists(page):
    text = read(page)
    assert broken_links(page, text) == []
    assert missing_files(text) == []
    assert misquoted(text) == []
    assert unknown_options(text) == []
    assert MACHINE_PATH.findall(text) == []


def test_the_messages_that_troubleshooting_explains_exist():
    constants = (node for code in product() for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant))
    strings = "\n".join(node.value for node in constants if isinstance(node.value, str))
    assert unsaid(read(ROOT / "docs" / "troubleshooting.md"), strings) == []
    planted = "| `the disk is hungry` | why |\n| `out of memory with ... rows, cut` | why |"
    assert unsaid(planted, "out of memory with 3 rows, cut in two") == ["the disk is hungry"]


def test_planted_faults_in_pages_are_found():
    page = ROOT / "docs" / "index.md"
    assert broken_links(page, "[a](guarantees.md#x) [b](nowhere.md) [c](https://x.y/z.md)") == ["nowhere.md"]
    assert missing_files("`rollout/noise.py` `rollout/nose.py` `rollout/cash/`") == ["rollout/nose.py", "rollout/cash/"]
    assert missing_files("`test_docs.py` `test_dogs.py`") == ["test_dogs.py"]
    assert misquoted("```python\n# tests/specrl/test_docs.py\nfrom tests import runs\n```") == []
    assert misquoted("```python\n# tests/specrl/test_docs.py\nfrom tests import walks\n```") == [
        "tests/specrl/test_docs.py"
    ]
    assert unknown_options("`rollout.replay=0.5 rollout.reply=1` or `rollout.cache.*`") == ["rollout.reply"]
    assert MACHINE_PATH.search("cd /home/me/x")
    assert not MACHINE_PATH.search("https://host/data/x and outputs/tmp/x")


def test_the_site_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_examples_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    page = ROOT / "docs" / "extending.md"
    text = read(page)
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert len(blocks) >= 6
    names = {"__name__": "example"}
    for block in blocks:
        if named := re.match(r"# (\w+\.py)\n", block[1]):
            (tmp_path / named[1]).write_text(block[1])
        lines_before = text.count("\n", 0, block.start(1))
        exec(compile("\n" * lines_before + block[1], str(page), "exec"), names)
    assert names["naive"].tokens == names["plain"].tokens


# Promises and faults --------------------------------------------------------------------------------------------------


@cache
def existing_tests():
    """Names of all tests, and of all files of tests."""
    files = [*(ROOT / "tests").rglob("*.py")]
    tests = {name for file in files for name in re.findall(r"^def (test_\w+)\(", read(file), re.MULTILINE)}
    return tests | {file.name for file in files}


def untested(rows):
    """Tests that the last cells of table rows name and that do not exist, and rows that name none."""
    found = []
    for row in rows:
        named = re.findall(r"`(?:tests/[\w/]+/)?(test_\w+(?:\.py)?)`", row.rstrip("| ").rpartition("|")[2])
        found += [name for name in named if name not in existing_tests()] or ([] if named else [row])
    return found


def test_every_promise_has_its_tests_and_its_planted_faults():
    table = read(ROOT / "docs" / "promises.md").partition("## How each promise is tested")[2]
    rows = [line for line in table.splitlines() if line.startswith("|")][2:]
    assert rows
    assert untested(rows) == []
    assert [row for row in rows if len(row.split("|")) != 5] == [], "promise, planted faults, tests"


def test_every_fault_has_its_tests():
    rows = re.findall(r"^\| \d+ \|.*$", read(ROOT / "docs" / "faults.md"), re.MULTILINE)
    assert rows
    assert untested(rows) == []


def test_planted_rows_without_tests_are_found():
    row = "| 1 | a | b | `tests/specrl/test_docs.py`: `{}` |"
    assert untested([row.format("test_the_examples_run"), "| 2 | a | b | `test_the_examples_run` |"]) == []
    assert untested([row.format("test_the_example")]) == ["test_the_example"]
    assert untested(["| 1 | a | b | `tests/specrl/test_dogs.py` |"]) == ["test_dogs.py"]
    assert untested(["| 1 | `test_docs.py` | b | none |"]) == ["| 1 | `test_docs.py` | b | none |"]
