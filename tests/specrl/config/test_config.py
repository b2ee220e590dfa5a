"""The configuration: loading, checking, explaining, saving."""

import ast
import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from specrl.config import help, options
from specrl.config import load as config
from specrl.config.load import load
from specrl.config.options import ConfigError
from specrl.config.rules import DRAFTS, LENGTH, MAY_CHANGE, differences
from specrl.config.schema import Config
from specrl.reward.base import RewardError
from specrl.rollout.checks import values
from specrl.rollout.types import CacheError

ROOT = Path(__file__).parents[3]
SHIPPED = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
BASE = ("config=grpo_math",)


@pytest.fixture(autouse=True)
def empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def error_of(*argv, **settings):
    with pytest.raises(ConfigError) as caught:
        load([*argv], **settings)
    assert "Traceback" not in str(caught.value)
    return str(caught.value)


def write(name, text):
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return f"config={path}"


# --- loading


def test_command_line_beats_file_beats_default():
    path = write("a.yaml", "dataset: {train_size: 96, test_size: 8}\nrollout: {group_size: 4, top_k: 5}\n")
    loaded = load([path, "rollout.group_size=2"])
    assert (loaded.rollout.group_size, loaded.rollout.top_k, loaded.rollout.top_p) == (2, 5, 1.0)
    assert loaded.name == "a"


def test_lookup_prefers_a_local_config_and_takes_paths():
    write("configs/grpo_math.yaml", "seed: 5\ndataset: {train_size: 8, test_size: 8}\n")
    assert load(["config=grpo_math"]).seed == 5
    assert load(["config=configs/grpo_math.yaml"]).seed == 5
    assert load([f"config={ROOT / 'configs' / 'grpo_math.yaml'}"]).seed == 0


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("resume=no", "resume", "no"),
        ("rollout.acceptance=off", "rollout.acceptance", "off"),
        ("revision=0123456", "revision", "0123456"),
        ("name=1e3", "name", "1e3"),
        ("model=a=b", "model", "a=b"),
        ("trainer.learning_rate=1e-6", "trainer.learning_rate", 1e-6),
        ("trainer.mask_truncated=true", "trainer.mask_truncated", True),
        ("reward.functions=[format]", "reward.functions", ["format"]),
        ("reward.weights=[1e-1]", "reward.weights", [0.1]),
        ("report.trackers=[]", "report.trackers", []),
    ],
)
def test_the_option_decides_what_a_text_means(word, key, value):
    by_hand = values(load([*BASE, word]))[key]
    tree = value if isinstance(value, list) else word.partition("=")[2]
    path = write("t.yaml", f"dataset: {{train_size: 96, test_size: 8}}\n{key}: {tree}\n")
    from_file = values(load([path]))[key]
    assert by_hand == from_file == value
    assert type(by_hand) is type(value)


# --- what goes wrong on the command line


WRONG_WORDS = [
    # words, what the message names, what it suggests
    ("", "No config given", f"config=NAME. Known: {', '.join(SHIPPED)}."),
    ("config=grpo_maths", "'grpo_maths'", "Did you mean 'grpo_math'?"),
    ("config=grpo_mat.yaml", "grpo_mat.yaml", "Did you mean 'grpo_math'?"),
    ("config=grpo_math seed=1 seed=2", "seed is given twice", "Keep one"),
    ("config=grpo_math --seed=3", "no dashes", "write seed=3 instead of --seed=3"),
    ("grpo_math", "'grpo_math' is not key=value", "config=grpo_math"),
    ("config=grpo_math rollout.group_sise=4", "'rollout.group_sise'", "Did you mean 'rollout.group_size'?"),
    ("config=grpo_math group_size=4", "'group_size'", "Did you mean 'rollout.group_size'?"),
    ("config=grpo_math trainer.lr=1", "'trainer.lr'", "Did you mean 'trainer.learning_rate'?"),
    ("config=grpo_math zzz=4", "'zzz'", "dataset, lora, rollout, trainer, reward, cluster, report; help=SECTION"),
    ("config=grpo_math rollout=4", "'rollout' is a section", "help=rollout"),
    ("config=grpo_math rollout.group_size=abc", "rollout.group_size=abc", "a whole number"),
    ("config=grpo_math rollout.replay=half", "rollout.replay=half", "a number"),
    ("config=grpo_math trainer.clip=auto0", "trainer.clip=auto0", "a number or auto. Did you mean 'auto'?"),
    ("config=grpo_math trust_remote_code=maybe", "trust_remote_code=maybe", "true or false"),
    ("config=grpo_math rollout.acceptance=exat", "rollout.acceptance=exat", "Did you mean 'exact'?"),
    ("config=grpo_math report.trackers=wandb", "report.trackers=wandb", "Try report.trackers=[wandb]."),
    ("config=grpo_math reward.weights=[x]", "reward.weights=[x]", "a list"),
    ("config=grpo_math reward.weights=[1", "reward.weights", "line 1"),
    ("help=rolout", "'rolout'", "Did you mean 'rollout'?"),
]


@pytest.mark.parametrize(("words", "named", "suggested"), WRONG_WORDS)
def test_command_line_errors_are_one_line_with_a_suggestion(words, named, suggested):
    text = error_of(*words.split())
    assert "\n" not in text
    assert named in text
    assert suggested in text.partition(named)[2]


@pytest.mark.parametrize("name", ["base.yml", "base", "bse.yaml", "mine/base.yml"])
def test_a_similar_file_is_suggested(name):
    write("base.yaml", "seed: 1\n")
    write("mine/base.yaml", "seed: 1\n")
    near = "mine/base.yaml" if "/" in name else "base.yaml"
    assert f" Did you mean '{near}'?" in error_of(f"config={name}")


# --- what goes wrong in a file


WRONG_FILES = [
    # text of the file, what the message says besides its name
    ("seed: 1\nrollout: [1\n", "line 3"),
    ("seed: !!python/object/apply:os.system ['touch owned']\n", "seed=[touch owned]: expected a whole number"),
    ("rollout: " + "{a: " * 3000 + "1" + "}" * 3000, "recursion"),
    ("[1]: 2\n", "line 1: found unhashable key"),
    ("- seed\n", "'key: value', not [seed]"),
    ("rollout: 3\n", "below rollout, as in 'key: value', not 3"),
    ("rolout: {top_k: 3}\n", "Unknown option 'rolout'. Did you mean 'rollout'?"),
    ("seed: x\n", "seed=x: expected a whole number"),
]


@pytest.mark.parametrize(("text", "message"), WRONG_FILES)
def test_file_errors_name_the_file(text, message, empty_directory):
    error = error_of(write("bad.yaml", text))
    assert error.startswith("bad.yaml")
    assert message in error
    assert "\n" not in error
    assert not (empty_directory / "owned").exists()


def test_a_path_that_is_no_file_is_named(empty_directory):
    (empty_directory / "folder").mkdir()
    os.mkfifo(empty_directory / "pipe.yaml")
    (empty_directory / "link.yaml").symlink_to("nowhere")
    for name in ("folder", "pipe.yaml", "link.yaml", "/dev/zero"):
        assert error_of(f"config={name}").startswith(f"No file {name}. Known:")


def test_a_file_that_is_not_text(empty_directory):
    (empty_directory / "a.yaml").write_bytes(b"\xff\xfe\x00")
    assert error_of("config=a.yaml") == "Cannot read a.yaml: it is not UTF-8 text."


# --- help, list, dry run


def test_list_shows_names_and_first_comment_lines():
    write("configs/mine.yaml", "seed: 1\n")
    lines = load(["config=list"]).splitlines()
    assert [line.split()[0] for line in lines] == sorted([*SHIPPED, "mine"])
    assert "GRPO on GSM8K" in lines[SHIPPED.index("grpo_gsm8k")]


def test_help_on_a_section_shows_key_default_type_and_doc():
    text = load(["help=rollout"])
    assert "rollout.acceptance = exact    (exact | off | lenient | judged | routed)\n    which draft tokens" in text
    assert "rollout.cache.max_mb = " in text
    assert "trainer." not in text.replace("the trainer", "")
    assert load(["help=rollout.group_size"]).startswith("rollout.group_size = 8    (int)\n")


def test_help_lists_every_section():
    listed = re.findall(r"^help=([a-z_.]+) ", load(["help=true"]).partition("sections:")[2], re.MULTILINE)
    assert listed == list(options.sections(Config))
    assert {"rollout.cache", "trainer.drafter"} < set(listed)
    assert all(options.sections(Config).values())
    assert [option.key for option in options.options(Config).values() if len(option.help) < 10] == []


def test_dry_run_prints_a_loadable_config_and_the_sizes(capsys):
    assert config.run(lambda c: 1 / 0, [*BASE, "dry_run=true"]) == 0
    text = capsys.readouterr().out
    config_text = write("again.yaml", text)
    assert dataclasses.asdict(load([config_text])) == dataclasses.asdict(load([*BASE]))
    assert (
        "# 4 prompts x 8 responses = 32 rows per step, at most 6,400 new tokens.\n# 16 steps per epoch; 128 steps.\n"
        in text
    )


# --- saved configs


def test_a_saved_config_comes_back_equal():
    loaded = load([*BASE, r"dataset.system_prompt=a \\\${b} #: 'x' é", "revision=0123", "reward.weights=[0.1]"])
    path = config.save(loaded)
    assert path == Path("outputs/grpo_math/config.yaml") == config.run_dir(loaded) / "config.yaml"
    assert config.load_saved(path) == config.load_saved(path.parent) == loaded
    assert load([f"config={path}"]) == load([f"config={path.parent}"]) == loaded
    assert [file.name for file in path.parent.iterdir()] == ["config.yaml"]


def kwargs_of(*settings) -> dict:
    return load([*BASE, *settings]).dataset.chat_template_kwargs


def test_a_mapping_is_given_as_yaml_or_json_and_replaces_that_of_the_file(tmp_path):
    for text in ("{enable_thinking: false, style: 'a, b'}", '{"enable_thinking": false, "style": "a, b"}'):
        assert kwargs_of(f"dataset.chat_template_kwargs={text}") == {"enable_thinking": "false", "style": "a, b"}
    assert kwargs_of() == kwargs_of("dataset.chat_template_kwargs={}") == {}
    path = tmp_path / "mine.yaml"
    path.write_text("dataset:\n  train_size: 9\n  test_size: 9\n  chat_template_kwargs:\n    depth: 5\n    no: off\n")
    assert load([f"config={path}"]).dataset.chat_template_kwargs == {"depth": "5", "no": "off"}
    loaded = load([f"config={path}", "dataset.chat_template_kwargs={style: x}", "output_dir=o"])
    assert loaded.dataset.chat_template_kwargs == {"style": "x"}, "one layer or the other, not both"
    assert config.load_saved(config.save(loaded)) == loaded


@pytest.mark.parametrize("value", ["false", "[a]", "{a}", "{a: [b]}", "{a: {b: c}}", "{a:b}"])
def test_values_that_are_no_mapping_are_refused(value):
    assert "Try 'dataset.chat_template_kwargs={name: value}'" in error_of(
        *BASE, f"dataset.chat_template_kwargs={value}"
    )


def test_other_drafts_matter_only_if_their_text_may_be_accepted():
    routed = ["rollout.acceptance=routed", "rollout.drafter=x"]
    for change in ("rollout.drafter=y", "rollout.sources=[prefix]"):
        for words, matters in ((routed, True), ([], False)):
            kept = [word for word in words if word.split("=")[0] != change.split("=")[0]]
            old, new = load([*BASE, *words]), load([*BASE, *kept, change])
            assert [change.matters for change in differences(old, new)] == [matters]


JUDGED = "rollout.acceptance=judged rollout.trained=x "


@pytest.mark.parametrize(
    ("words", "change", "matters"),
    [
        *(
            ("", change, True)
            for change in (
                *("reward.functions=[format]", "reward.on_limit=zero", "seed=1", "model=m", "data=gsm8k"),
                *("dataset.train_size=99", "lora.rank=4", "rollout.replay=0.5", "rollout.temperature=0.5"),
                *("trainer.beta=0.5", "trainer.prompts_per_step=3", "rollout.acceptance=lenient", JUDGED.strip()),
                "trainer.lr_schedule=cosine trainer.epochs=9",
            )
        ),
        *(
            ("", change, False)
            for change in (
                *("reward.timeout_s=9", "reward.workers=2", "reward.memory_mb=4096"),
                *("cluster.num_workers=2 cluster.task_timeout_s=9", "rollout.draft_tokens=8", "resume=auto"),
                *("rollout.acceptance=off", "rollout.cache.log=true"),
            )
        ),
        ("trainer.lr_schedule=constant ", "trainer.epochs=9", False),
        (JUDGED, "rollout.draft_tokens=8", True),
    ],
)
def test_whether_a_change_matters_to_a_resume(words, change, matters):
    old = load([*BASE, *words.split()])
    new = load([*BASE, *words.split(), *change.split()])
    assert {difference.matters for difference in differences(old, new)} == {matters}
    assert differences(old, old) == []


def test_a_difference_is_shown_with_both_values():
    (change,) = differences(load([*BASE]), load([*BASE, "rollout.temperature=0.7"]))
    assert str(change) == "rollout.temperature: 1.0 -> 0.7"


# --- the wrapper of the entry points


def raises(error):
    def main(_):
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ConfigError("one\ntwo"), 2, "error: one\nerror: two\n"),
        (CacheError("the cache"), 3, "error: the cache\n"),
        (RewardError("the reward"), 3, "error: the reward\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
    ],
)
def test_run_prints_typed_errors_without_traceback(error, code, text, capsys):
    assert config.run(raises(error), BASE) == code
    assert capsys.readouterr().err == text


def test_run_lets_bugs_keep_their_traceback():
    with pytest.raises(ZeroDivisionError):
        config.run(raises(ZeroDivisionError()), BASE)


def test_help_into_a_closed_pipe_is_silent():
    code = "import sys, time; from specrl.config.load import run; time.sleep(1); sys.exit(run(print, ['help=rollout']))"
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, **pipe) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


@dataclasses.dataclass
class Small:
    run: str = ""
    size: int = 3


@dataclasses.dataclass
class Evaluation(Config):
    k: int = 1


def test_other_entry_points_bring_their_own_options():
    assert load(["size=4"], schema=Small).size == 4
    assert error_of("sise=4", schema=Small) == "Unknown option 'sise'. Did you mean 'size'?"
    assert error_of("config=a", schema=Small).startswith("config=a has no meaning here.")
    assert load([*BASE, "k=8"], schema=Evaluation).k == 8


# --- the surface


def unread(keys):
    """Options whose name no code reads, but the rules beside them."""

    def nodes(tree):
        for node in ast.iter_child_nodes(tree):
            if not (isinstance(node, ast.FunctionDef) and node.name.endswith("problems")):
                yield node
                yield from nodes(node)

    files = [file for package in ("rollout", "reward", "trainers", "specrl") for file in (ROOT / package).rglob("*.py")]
    every_node = [node for file in files for node in nodes(ast.parse(file.read_text()))]
    read = {getattr(node, "attr", None) for node in every_node}
    read |= {node.value for node in every_node if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return [key for key in keys if key.rpartition(".")[2] not in read]


@pytest.mark.slow
def test_every_option_is_read_somewhere():
    assert unread(options.options(Config)) == []
    assert unread(["rollout.group_size", "rollout.refit_every"]) == ["rollout.refit_every"]


def test_what_a_resume_may_change_are_options():
    assert {*MAY_CHANGE, *DRAFTS, *LENGTH} <= {*options.options(Config), *options.sections(Config)}


def test_the_reference_page_is_up_to_date():
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == help.updated_page(page, Config), (
        "docs/configuration.md is out of date. Run: python -m specrl.config.help"
    )


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from specrl.config.load import load; load(['help=true']); load(['config=grpo_math']);"
        "heavy = {'torch', 'transformers', 'trl', 'numpy', 'datasets', 'ray', 'vllm', 'pyarrow', 'rich'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "[]\n"
