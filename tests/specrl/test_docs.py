"""The documentation against the code: keys, options, links and paths that exist, examples that run."""

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from specrl.config import options
from specrl.config.schema import Config
from tests import runs

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
OURS = ("spec/", "timing_s/", "drafter/", "judge/", "cache/", "reward/")
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:home|root|tmp|work|Users|mnt|data)/\w")


def read(page):
    return page.read_text(encoding="utf-8")


def documented(text):
    """The keys in the first column of the tables; NAME stands for any reward or source."""
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return {key for cell in cells for key in re.findall(r"`([^`]+)`", cell)}


def undocumented(written, known):
    """Written keys that no documented key, NAME filled in, stands for."""
    patterns = [re.compile(re.escape(key).replace("NAME", r"[^/]+")) for key in known]
    return sorted(key for key in written if not any(pattern.fullmatch(key) for pattern in patterns))


def unwritten(known, code):
    """Documented keys of our own that no string of the code names; NAME is `{name}` there."""
    return sorted(key for key in known if key.startswith(OURS) and f'"{key}"'.replace("NAME", "{name}") not in code)


def broken_links(page, text):
    """Relative links to files that are not there."""
    found = re.findall(r"\]\(([^)\s]+)\)", text)
    local = [link.partition("#")[0] for link in found if not link.startswith(("http://", "https://", "#"))]
    return [link for link in local if not (page.parent / link).exists()]


def missing_files(text):
    """Source files and folders named in the text that are not there; of tests the bare name of the file will do."""
    named = re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py)`", text)
    named += re.findall(r"`((?:specrl|trainers|rollout|reward|benchmarks|tests)/(?:[a-z_]+/)*)`", text)
    missing = [name for name in named if not (ROOT / name).exists()]
    return missing + [name for name in re.findall(r"`(test_\w+\.py)`", text) if name not in existing_tests()]


def misquoted(text):
    """Code blocks that say which file they are from, and are not in it."""
    quoted = re.findall(r"^```python\n# ([\w/]+\.py)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    quoted = [(file, code) for file, code in quoted if "/" in file]
    return [file for file, code in quoted if not (ROOT / file).is_file() or code not in indents(read(ROOT / file))]


def indents(code):
    """The code as it is, and without the first one and the first two levels of indentation, one after the other."""
    shorter = [re.sub(rf"^ {{{width}}}", "", code, flags=re.MULTILINE) for width in (4, 8, 12)]
    return "\n".join([code, *shorter])


def unknown_options(text):
    """Options that code spans outside code blocks name, and that do not exist."""
    known = {*options.options(Config), *options.sections(Config)}
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    words = [word.partition("=")[0].removesuffix(".*") for span in spans for word in span.split()]
    sections = "rollout|trainer|reward|report|dataset|lora|cluster"
    named = [word for word in words if re.fullmatch(rf"({sections})\.(?!md|json|png)[a-z_.]+", word)]
    return [name for name in named if name not in known]


def unsaid(text, said):
    """Messages in the first column of the tables that no string of the code says; `...` stands for what varies."""
    rows = [cell for cell in re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE) if " " in cell]
    return [cell for cell in rows if not all(part.strip() in said for part in cell.split("..."))]


def strings(code):
    """All string constants of a module, those of f-strings too, as one text."""
    return "\n".join(n.value for n in ast.walk(ast.parse(code)) if isinstance(n, ast.Constant) and type(n.value) is str)


def navigation(text):
    """The pages that mkdocs.yml lists."""
    return re.findall(r"^  - [^:]+: (\S+\.md)$", text, re.MULTILINE)


def blocks(text):
    """The Python code blocks of a page, each with the line it starts after."""
    found = re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, match.start(1)), match[1]) for match in found]


def sources():
    packages = ("specrl", "trainers", "rollout", "reward")
    return "\n".join(read(file) for package in packages for file in (ROOT / package).rglob("*.py"))


METRICS = read(ROOT / "docs" / "metrics.md")


# --- metrics


def test_every_documented_key_of_ours_exists_in_the_code():
    assert len([key for key in documented(METRICS) if key.startswith(OURS)]) > 30
    assert unwritten(documented(METRICS), sources()) == []


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
def test_every_key_a_run_writes_is_documented(settings, tmp_path):
    if "rollout__drafter" in settings:
        settings = settings | {"rollout__drafter": runs.drafter(tmp_path / "drafter")}
    runs.run(tmp_path, **settings)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    written = {key for line in lines for key in json.loads(line)}
    assert len(written) > 40
    assert undocumented(written, documented(METRICS)) == []


def test_planted_faults_in_keys_are_found():
    known = documented(
        "| key | formula |\n|---|---|\n| `spec/a`, `spec/b` | of `spec/c` |\n| `rewards/NAME/mean` | x |"
    )
    assert known == {"spec/a", "spec/b", "rewards/NAME/mean"}
    assert undocumented({"spec/a", "spec/c", "rewards/math/mean", "rewards/mean"}, known) == ["rewards/mean", "spec/c"]
    assert unwritten(known, 'metrics["spec/a"] = f"{spec/b}"') == ["spec/b"]
    assert unwritten({"spec/x_NAME", "spec/y_NAME"}, 'metrics[f"spec/x_{name}"]') == ["spec/y_NAME"]


# --- pages


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_pages_name_what_exists(page):
    text = read(page)
    assert broken_links(page, text) == []
    assert missing_files(text) == []
    assert misquoted(text) == []
    assert unknown_options(text) == []
    assert MACHINE_PATH.findall(text) == []


def test_planted_faults_in_pages_are_found():
    page = ROOT / "docs" / "index.md"
    assert broken_links(page, "[a](guarantees.md#x) [b](nowhere.md) [c](https://x.y/z.md)") == ["nowhere.md"]
    assert missing_files("`rollout/noise.py` `rollout/nose.py` `rollout/cash/`") == ["rollout/nose.py", "rollout/cash/"]
    assert missing_files("`test_docs.py` `test_dogs.py`") == ["test_dogs.py"]
    quoted = "```python\n# rollout/verify.py\nn = accept_exact(drawn.{}, draft.tokens)\n```"
    assert misquoted(quoted.format("draws")) == []
    assert misquoted(quoted.format("guesses")) == ["rollout/verify.py"]
    assert unknown_options("`rollout.replay=0.5 rollout.reply=1` or `rollout.cache.*`") == ["rollout.reply"]
    assert MACHINE_PATH.search("cd /home/me/x")
    assert not MACHINE_PATH.search("https://host/data/x and outputs/tmp/x")


@pytest.mark.parametrize("wing", ["rollout", "drafting", "engines", "training", "cluster", "lossy"])
def test_a_wing_opens_with_its_picture_and_quotes_its_code(wing):
    page = read(ROOT / "docs" / f"{wing}.md")
    assert page.splitlines()[2].startswith("```"), "the picture comes first"
    assert re.search(r"^```python\n# (rollout|specrl)/", page, re.MULTILINE)


def test_every_page_is_in_the_index():
    index = read(ROOT / "docs" / "index.md")
    pages = [page.name for page in PAGES if page.parent.name == "docs" and page.name != "index.md"]
    assert [name for name in pages if f"({name})" not in index] == []


def test_the_site_has_every_page_once():
    listed = navigation(read(ROOT / "mkdocs.yml"))
    pages = {page.name for page in PAGES if page.parent.name == "docs"}
    assert sorted(listed) == sorted(pages)
    assert navigation("nav:\n  - Overview: README.md\n  - A b: c.md\nx: y.md") == ["README.md", "c.md"]


def test_the_site_opens_with_what_it_is_and_cuts_nothing_off(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    front = read(tmp_path / "index.html")
    shown = ("Exact speculative rollouts", 'src="images/claim.png"', "make train", "make test", "rollout_func=reuse")
    assert [part for part in (*shown, 'href="css/specrl.css"') if part not in front] == []
    assert "white-space: normal" in read(tmp_path / "css" / "specrl.css"), "the theme keeps a table cell on one line"
    pages = [read(page) for page in tmp_path.rglob("index.html")]
    assert len(pages) == len(navigation(read(ROOT / "mkdocs.yml")))
    assert [code for page in pages for code in re.findall(r"<code>([^<]*)</code>", page) if "\\|" in code] == []


def test_the_messages_that_troubleshooting_explains_exist():
    page, said = read(ROOT / "docs" / "troubleshooting.md"), strings(sources())
    assert len(re.findall(r"^\| `[^`]+ [^`]+` \|", page, re.MULTILINE)) > 15
    assert unsaid(page, said) == []
    planted = "| `the disk is hungry` | why |\n| `out of memory with ... rows, cut` | why |"
    assert unsaid(planted, said) == ["the disk is hungry"]


def test_lengths():
    assert 60 <= len(read(ROOT / "README.md").splitlines()) <= 82
    assert len(read(ROOT / "docs" / "guarantees.md").splitlines()) <= 190


def terminal(text):
    """Lines of a page's code blocks without a language that a terminal of 80 columns would wrap."""
    code = re.findall(r"^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [line for block in code if "Step " in block for line in block.splitlines() if len(line) > 80]


def test_what_the_readme_shows_of_a_run_fits_a_terminal():
    assert terminal(read(ROOT / "README.md")) == []
    assert terminal("```\nStep 1/2 | " + "x" * 80 + "\n```") != []


def unlocated(rows):
    """Rows of a table of figures that name no commit."""
    return [row for row in rows if re.search(r"\d\.\d+x", row) and not re.search(r"\b[0-9a-f]{7}\b", row)]


def test_every_figure_of_the_readme_names_its_commit():
    rows = [line for line in read(ROOT / "README.md").splitlines() if line.startswith("|")]
    assert sum("x" in row and "AMD EPYC" in row for row in rows) >= 4
    assert unlocated(rows) == []
    assert unlocated(["| GRPO | 2.51x | 2 cores |", "| GRPO | 2.51x | e1a98e3 |"]) == ["| GRPO | 2.51x | 2 cores |"]


@cache
def names():
    """What the packages define: classes, with their members, functions and names of modules, each with how often."""
    count = Counter()
    for package in ("specrl", "trainers", "rollout", "reward"):
        for file in (ROOT / package).rglob("*.py"):
            body = ast.parse(read(file)).body
            count.update(name for node in body for name in defined(node))
            classes = [node for node in body if isinstance(node, ast.ClassDef)]
            count.update(f"{node.name}.{name}" for node in classes for part in node.body for name in defined(part))
    return count


def defined(node):
    """Names that a statement defines."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def unknown_nouns(text):
    """Rows of the glossary whose second column is no name of the code, or one that means several things there."""
    code = re.findall(r"^\| [A-Z][^|]* \| `([\w.]+)` \|", text, re.MULTILINE)
    return [name for name in code if names()[name] != 1]


def test_the_glossary_names_what_the_code_has_once():
    page = read(ROOT / "docs" / "glossary.md")
    assert 24 <= len(re.findall(r"^\| [A-Z][^|]* \| `", page, re.MULTILINE)) <= 30
    assert unknown_nouns(page) == []
    planted = (
        "| Draft | `Draft` | x |\n| Guess | `Guess` | x |\n| Text | `Text` | two things |\n| Seed | `Row.seed` | x |"
    )
    assert unknown_nouns(planted) == ["Guess", "Text", "Row.seed"]


@cache
def existing_tests():
    """Names of all tests, and of all files of tests."""
    files = [*(ROOT / "tests").rglob("*.py")]
    return {name for file in files for name in re.findall(r"^def (test_\w+)\(", read(file), re.MULTILINE)} | {
        file.name for file in files
    }


def unfounded(rows):
    """Tests that the last cells of table rows name and that do not exist, and rows that name none."""
    found = []
    for row in rows:
        named = re.findall(r"`(?:tests/[\w/]+/)?(test_\w+(?:\.py)?)`", row.rstrip("| ").rpartition("|")[2])
        found += [name for name in named if name not in existing_tests()] + ([] if named else [row])
    return found


def test_every_promise_has_its_tests_and_its_planted_faults():
    table = read(ROOT / "docs" / "guarantees.md").partition("## How each promise is tested")[2]
    rows = [line for line in table.splitlines() if line.startswith("|")][2:]
    assert len(rows) >= 12
    assert unfounded(rows) == []
    assert [row for row in rows if len(row.split("|")) != 5] == [], "promise, planted faults, tests"
    assert unfounded(["| a | b | `test_lengths`, `test_dogs.py` |"]) == ["test_dogs.py"]


def test_every_fault_has_its_tests():
    rows = re.findall(r"^\| \d+ \|.*$", read(ROOT / "docs" / "faults.md"), re.MULTILINE)
    assert len(rows) >= 42
    assert sorted(int(row.split("|")[1]) for row in rows) == list(range(1, len(rows) + 1))
    assert unfounded(rows) == []


def test_planted_faults_in_the_fault_table_are_found():
    row = "| 1 | a | b | `tests/specrl/test_docs.py`: `{}` |"
    assert unfounded([row.format("test_lengths"), "| 2 | a | b | `test_lengths` |"]) == []
    assert unfounded([row.format("test_length")]) == ["test_length"]
    assert unfounded(["| 1 | a | b | `tests/specrl/test_dogs.py` |"]) == ["test_dogs.py"]
    assert unfounded(["| 1 | `test_lengths` | b | none |"]) == ["| 1 | `test_lengths` | b | none |"]


@pytest.mark.slow
def test_the_examples_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    code = blocks(read(ROOT / "docs" / "extending.md"))
    assert len(code) >= 6
    names = {"__name__": "example"}
    for line, block in code:
        if named := re.match(r"# (\w+\.py)\n", block):
            (tmp_path / named[1]).write_text(block)
        exec(compile("\n" * line + block, str(ROOT / "docs" / "extending.md"), "exec"), names)
    assert names["naive"].tokens == names["plain"].tokens
