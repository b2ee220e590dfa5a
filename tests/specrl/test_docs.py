"""The documentation against the code: keys, options, links, files and tests that exist, examples that run."""

import ast
import json
import re
import subprocess
import sys
from functools import cache

import pytest

from specrl.config import options
from specrl.config.schema import Config
from tests import runs
from tests.blocks import PAGES, ROOT, Block, blocks, indented, missing_names, source, unclassified

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
    patterns = [re.compile(re.escape(key).replace("NAME", r"[^/]+").replace("turnN", r"turn\d+")) for key in known]
    return sorted(key for key in written if not any(pattern.fullmatch(key) for pattern in patterns))


def unwritten(known, code):
    """Documented keys of this package that no string of the code has; NAME is `{name}` there, turnN `turn{i}`."""
    keys = (key for key in known if key.startswith(METRIC_PREFIXES))
    return sorted(key for key in keys if f'"{key}"'.replace("NAME", "{name}").replace("turnN", "turn{i}") not in code)


def test_every_documented_metric_is_in_the_code():
    assert unwritten(documented(read(ROOT / "docs" / "metrics.md")), "\n".join(product())) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"rollout__replay": 0.5, "rollout__measure_every": 2, "trainer__eval_prompts": 4, "trainer__beta": 0.01},
        {"rollout__drafter": "made here", "trainer__drafter__train": "true", "trainer__epochs": 1},
        {"rollout__acceptance": "lenient", "trainer__epochs": 2, "trainer__updates_per_rollout": 2},
        {"config": "ppo_math", "trainer__epochs": 2, "trainer__beta": 0.01},
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


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


# Blocks ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_block_of_a_page_is_classified_and_names_what_exists(page):
    """Which of them run, and how, is in tests/blocks.py and tests/integration/test_examples.py."""
    found = blocks(page, read(page))
    assert unclassified(found) == []
    assert indented(read(page)) == []
    scripts = [source(block) for block in found if block.language in ("python", "diff")]
    assert [name for script in scripts for name in missing_names(script)] == []


def test_planted_faults_in_blocks_are_found():
    page = ROOT / "docs" / "vllm.md"

    def wrong(language, text):
        return unclassified([Block(page, 1, language, text)])

    assert wrong("sh", "python -m specrl.train config=grpo_math  # a comment\npip install .\n") == []
    assert wrong("sh", "docker run specrl\n") == ["docker run specrl"]
    assert wrong("", "docker run specrl\n") == ["docker run specrl"]
    assert wrong("text", "a ──► b\n") == []
    assert wrong("text", "python -m specrl.train config=grpo_math\n") == ["python -m specrl.train config=grpo_math"]
    assert wrong("yaml", "rollout: 1\n") == ["line 1: yaml"]
    assert wrong("python", "x = 1\n") == ["line 1: python"], "this page's code is run by no test"
    assert indented("a\n\n    ls\n\n```python\nif x:\n\n    y\n```\n") == ["ls"]
    assert blocks(page, "- a\n   ```sh\n   ls\n   ```\n") == [Block(page, 2, "sh", "ls\n")]
    assert missing_names("from specrl import reusing, Nothing\nfrom specrl.session import ReuseSession") == [
        "specrl.Nothing"
    ]


# Promises and faults --------------------------------------------------------------------------------------------------


@cache
def existing_tests():
    """Names of all tests, and of all files of tests."""
    files = [*(ROOT / "tests").rglob("*.py")]
    tests = {name for file in files for name in re.findall(r"^def (test_\w+)\(", read(file), re.MULTILINE)}
    return tests | {file.name for file in files}


def entries(page):
    """The items of a page's lists that begin with bold text, such as a promise or a fault."""
    return re.findall(r"^- \*\*.*$", read(ROOT / "docs" / page), re.MULTILINE)


def untested(entries):
    """Tests that entries name and that do not exist, and entries that end without naming one."""
    found = []
    for entry in entries:
        named = re.findall(r"`(?:tests/[\w/]+/)?(test_\w+(?:\.py)?)`", entry)
        found += [name for name in named if name not in existing_tests()]
        found += [] if named and entry.endswith("`") else [entry]
    return found


def test_every_promise_has_its_tests_and_its_planted_faults():
    promises = entries("promises.md")
    assert len(promises) > 20
    assert untested(promises) == []
    assert [promise for promise in promises if "**. Planted: " not in promise] == []


def test_every_fault_has_its_tests():
    faults = entries("faults.md")
    assert len(faults) > 35
    assert untested(faults) == []


def test_planted_entries_without_tests_are_found():
    entry = "- **a**: b. `{}`"
    assert untested([entry.format("test_every_fault_has_its_tests"), "- **a** `tests/specrl/test_docs.py`"]) == []
    assert untested([entry.format("test_every_fault_has_its_test")]) == ["test_every_fault_has_its_test"]
    assert untested([entry.format("tests/specrl/test_dogs.py")]) == ["test_dogs.py"]
    assert untested(["- **`test_docs.py`**: none."]) == ["- **`test_docs.py`**: none."]
