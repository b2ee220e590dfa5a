"""What a run cannot do is said before torch is imported, and by `dry_run=true`: one line, exit code 2."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from specrl.config import load as cli
from specrl.config.options import ConfigError
from specrl.config.schema import Config
from specrl.drafter import DrafterOptions
from specrl.evaluate import EvaluateConfig
from specrl.run import preflight
from specrl.train_judge import TrainJudgeConfig
from specrl.train_router import TrainRouterConfig
from tests.runs import policy, words

ROOT = Path(__file__).parents[3]
CASES = {
    "broken JSON": ({"data": "{d}/torn.jsonl"}, "{d}/torn.jsonl, line 2: not JSON ("),
    "long prompts": (
        {"data": "{d}/long.jsonl", "dataset__max_prompt_tokens": 4000},
        "24 of 24 prompts have more than 228 tokens (the model's context less rollout.max_new_tokens); the longest ",
    ),
    "no such device": ({"device": "gpu"}, "device=gpu is not known. Use auto, cpu, cuda or cuda:N."),
    "missing model": ({"model": "{d}/no"}, "model={d}/no cannot be loaded: there is no such directory. Give `tiny`, "),
    "no tokenizer": ({"model": "{d}/notok"}, "model={d}/notok has no tokenizer that can be loaded: none of its files"),
    "unknown module": (
        {"reward__functions": "[my_nothing:score]"},
        "reward 'my_nothing:score': module 'my_nothing' cannot be imported: ",
    ),
    "missing drafter": (
        {"rollout__drafter": "outputs/draft", "output_dir": "outputs"},
        "rollout.drafter=outputs/draft does not exist. Make it first: python -m specrl.drafter out=outputs/draft (",
    ),
    "too many prompts": (
        {"data": "{d}/train.jsonl", "trainer__prompts_per_step": 999},
        "trainer.prompts_per_step=999 but data={d}/train.jsonl has 24 training prompts. Try trainer.prompts_per",
    ),
    "tokenizer": ({"tokenizer": "{d}/no"}, "tokenizer={d}/no cannot be loaded: there is no such directory. Leave `tok"),
    "signature": (
        {"reward__functions": "[bad_rewards:broken]"},
        "reward 'broken' must take (prompt, completion, answer, **fields): too many positional arguments",
    ),
    "cache": ({"rollout__cache__start_from": "{d}/no"}, "rollout.cache.start_from={d}/no does not exist."),
    "judge": (
        {"rollout__acceptance": "judged", "rollout__trained": "{d}/no"},
        "rollout.trained={d}/no does not exist. Make it first, with this run's config: python -m ",
    ),
    "no draft model": ({"rollout__drafter": "{d}"}, "rollout.drafter={d} cannot be loaded: the directory has no conf"),
}
CASES |= {
    "no token for a prompt": (
        {"rollout__max_new_tokens": 1000},
        "rollout.max_new_tokens=1000 leaves no token for a prompt: model={p} has a context of 256 tokens. Try "
        "rollout.max_new_tokens=128.",
    ),
    "no EOS": (
        {"model": "{d}/noend"},
        "model={d}/noend names no EOS token, nor does its tokenizer: every response would go on to "
        "rollout.max_new_tokens=28. Set eos_token_id in",
    ),
    "soft caps": (
        {"model": "{d}/capped"},
        "model={d}/capped cannot be sampled with rollout.engine=transformers: it has final_logit_softcapping=30.0, wh",
    ),
    "unknown layers": (
        {"lora__rank": 2, "lora__targets": "[qproj]"},
        "lora.targets=[qproj]: the model has no layer 'qproj'. Its linear layers: q_proj, ",
    ),
}
LATER = {"soft caps", "long prompts", "no token for a prompt", "no EOS", "unknown layers", "no such device"}
"""Needs torch, the tokenizer or the model, so a run finds it after the imports."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    rows = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(24)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "long.jsonl").write_text("\n".join(json.dumps(row | {"question": "one " * 300}) for row in rows))
    (tmp_path / "torn.jsonl").write_text('{"question": "a"}\n{"quest')
    (tmp_path / "bad_rewards.py").write_text("def broken(completion, **_):\n    return 1.0\n")
    (tmp_path / "notok").mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(policy() / name, tmp_path / "notok" / name)
    shutil.copytree(policy(), tmp_path / "noend")
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        kept = json.loads((tmp_path / "noend" / name).read_text()) | {"eos_token_id": None, "eos_token": None}
        (tmp_path / "noend" / name).write_text(json.dumps(kept))
    shutil.copytree(policy(), tmp_path / "capped")
    shape = json.loads((tmp_path / "capped" / "config.json").read_text())
    (tmp_path / "capped" / "config.json").write_text(json.dumps(shape | {"final_logit_softcapping": 30.0}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


def command_line(options, folder):
    filled = {key: str(value).replace("{d}", str(folder)) for key, value in options.items()}
    return words(folder, **({"dataset__train_size": 0} if "data" in options else {}) | filled)


@pytest.fixture
def refusal(capsys):
    """refusal(argv) -> the one error line of a command that must not start."""

    def attempt(argv):
        code = cli.run(lambda config: preflight.check(config) and 0, argv)
        said = capsys.readouterr()
        assert (code, said.out, said.err[:7], said.err.count("\n")) == (2, "", "error: ", 1), said
        return said.err.removeprefix("error: ")

    return attempt


@pytest.mark.parametrize("name", CASES)
def test_a_dry_run_finds_it_and_so_does_a_run_before_it_begins(name, folder, refusal):
    options, message = CASES[name]
    for more in (["dry_run=true"], *([[]] if name not in LATER else [])):
        error = refusal([*command_line(options, folder), *more])
        assert error.startswith(message.replace("{d}", str(folder)).replace("{p}", str(policy())))


def test_a_run_looks_before_it_imports_torch_and_makes_its_directory(folder):
    code = (
        "import sys, specrl.train; from specrl.config.load import run; code = run(specrl.train.main, sys.argv[1:]);"
        "print(code, sorted({'torch', 'transformers', 'trl', 'datasets', 'numpy'} & set(sys.modules)))"
    )
    argv = command_line({"data": "{d}/torn.jsonl", "reward__functions": "[math]"}, folder)
    done = subprocess.run(
        [sys.executable, "-c", code, *argv], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "2 []\n"
    assert "torn.jsonl, line 2: not JSON" in done.stderr
    assert not (folder / "run").exists()


def test_a_dry_run_says_how_many_rows_there_are_and_how_long_they_are(folder):
    options = {"data": "{d}/train.jsonl", "dataset__train_split": "train[:20]", "trainer__epochs": 2}
    text = cli.load([*command_line(options, folder), "dry_run=true"])
    assert "5 steps per epoch; 10 steps." in text
    assert "# 20 train prompts.\n# The longest prompt has 9 tokens.\n" in text


def rows_with(answers, folder):
    """A dry run on rows with these answers, which the math reward reads. Returns what it prints."""
    path = folder / "answers.jsonl"
    path.write_text("".join(json.dumps({"question": f"{n}?", "answer": a}) + "\n" for n, a in enumerate(answers)))
    options = {"data": str(path), "dataset__train_size": 0, "reward__functions": "[math]"}
    return cli.load([*command_line(options, folder), "dry_run=true"])


SENTENCE = "Ben pays 3 dollars in all"


@pytest.mark.slow  # a worker of math-verify
def test_a_dry_run_scores_rows_and_refuses_data_of_which_too_many_cannot_be(folder):
    assert "The reward math can score all 20 rows that were checked." in rows_with(["1"] * 20, folder)
    text = " ".join(rows_with(["1"] * 39 + [SENTENCE], folder).split())
    assert "cannot score 1 of the 40 rows that were checked. The first is" in text
    assert "answers.jsonl, line 40: the reference answer 'Ben pays" in text
    with pytest.raises(ConfigError, match=r"cannot score 2 of the 20 rows.*dataset\.answer_column"):
        rows_with(["1"] * 18 + [SENTENCE] * 2, folder)


@pytest.mark.slow
def test_a_dry_run_checks_rows_of_every_form(folder):
    """Four rows of 3,000, between those that are evenly spaced: more than 5 % of the rows, but not of the data."""
    answers = ["1"] * 3000
    answers[1501:1505] = [SENTENCE, f"So {SENTENCE}", f"3: {SENTENCE}", f"({SENTENCE})"]
    assert "cannot score 4 of the 68 rows" in " ".join(rows_with(answers, folder).split())


def test_a_dry_run_downloads_nothing_and_says_so(folder):
    text = cli.load(["config=grpo_gsm8k", "dry_run=true"])
    assert text.endswith("# Not checked, because it is on the hub: model=Qwen/Qwen2.5-1.5B-Instruct, data=gsm8k.")


@pytest.mark.parametrize(
    ("schema", "options", "splits"),
    [
        (EvaluateConfig, {"split": "train"}, ["train"]),
        (TrainRouterConfig, {}, ["train"]),
        (TrainJudgeConfig, {}, ["train", "test"]),
        (TrainJudgeConfig, {"cache": "x"}, ["train"]),
        (Config, {}, ["train"]),
        (Config, {"trainer__eval_prompts": 4}, ["train", "test"]),
    ],
)
def test_only_what_a_command_reads_is_looked_at(schema, options, splits, folder):
    text = cli.load([*words(folder, **options), "dry_run=true"], schema, training=schema is Config)
    said = [line for line in text.splitlines() if re.fullmatch(r"# [\d trainest,]+ prompts\.", line)]
    assert [re.findall(r"train|test", line) for line in said] == [[*splits]] * bool(splits)


def test_what_is_there_is_accepted(folder):
    shutil.copytree(policy(), folder / "outputs" / "draft")
    for drafter in ("outputs/draft", str(policy())):
        assert len(preflight.check(cli.load(words(folder, rollout__drafter=drafter)))["train"]) == 12
    drafter = cli.load(words(folder, reward__functions="[my_nothing:score]"), DrafterOptions, training=False)
    assert len(preflight.check(drafter, training=False)["train"]) == 12
