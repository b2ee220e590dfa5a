"""What a config needs that is not there yet: one line with the command that makes it, before anything is loaded."""

import pytest

from specrl.config import load as cli
from specrl.config.load import USAGE_ERROR, known_configs
from specrl.run import preflight
from specrl.run.policy import TINY_PATH
from tests.runs import ROOT

DRAFT = "outputs/draft does not exist. Make it first: python -m specrl.drafter out=outputs/draft ("


@pytest.fixture
def start(tmp_path, monkeypatch, capsys):
    """start(words) -> exit code and what is said when these words begin a run in a fresh clone."""
    monkeypatch.chdir(tmp_path)

    def attempt(*words):
        return cli.run(lambda config: 0, words), capsys.readouterr().err

    return attempt


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("config=arbitrage_math", f"rollout.drafter={DRAFT}"),
        ("config=arbitrage_math output_dir=elsewhere", f"rollout.drafter={DRAFT}"),
        ("config=judge_math", "python -m specrl.drafter out=outputs/weak ("),
        (
            f"config=arbitrage_math rollout.drafter={TINY_PATH} rollout.acceptance=routed",
            "rollout.routed.path=outputs/router does not exist. Make it first, with this run's config: python -m "
            "specrl.train_router out=outputs/router (",
        ),
        (
            f"config=judge_math rollout.drafter={TINY_PATH} rollout.acceptance=judged",
            "python -m specrl.train_judge out=outputs/judge (",
        ),
        ("config=grpo_math rollout.drafter=./draft", "rollout.drafter=./draft does not exist."),
    ],
)
def test_the_command_that_makes_it_is_named(start, words, said):
    code, error = start(*words.split())
    assert code == USAGE_ERROR
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "configs").glob("*.yaml")))
def test_a_packaged_config_starts_or_names_its_command(start, monkeypatch, name):
    """Those that need a model of another command name it; the others need nothing but packages."""
    monkeypatch.setattr(preflight, "find_spec", lambda package: package)
    code, error = start(f"config={name}")
    wanted = {"arbitrage_math": "specrl.drafter", "judge_math": "specrl.drafter"}.get(name, "")
    assert name in known_configs()
    assert (code, wanted in error) == (USAGE_ERROR if wanted else 0, True)


@pytest.mark.parametrize(
    ("words", "package", "said"),
    [
        (
            "config=ppo_gsm8k",
            "vllm",
            "rollout.engine=vllm needs vLLM. Install it with: pip install 'specrl[vllm]'",
        ),
        ("config=grpo_gsm8k", "vllm", "rollout.engine=vllm needs vLLM. Install it with: pip install 'specrl[vllm]'"),
        ("config=ray_grpo_math", "ray", "cluster.num_workers=2 needs Ray. Install it with: pip install 'specrl[ray]'"),
        (
            "config=grpo_math",
            "trl",
            "training needs TRL, accelerate and datasets. Install it with: pip install 'specrl[trl]'",
        ),
        (
            "config=grpo_math",
            "math_verify",
            "reward.functions=[math] needs math-verify. Install it with: pip install 'specrl[math]'",
        ),
        ("config=ppo_math lora.rank=8", "peft", "lora.rank=8 needs peft. Install it with: pip install 'specrl[peft]'"),
    ],
)
def test_a_missing_package_is_named(start, monkeypatch, words, package, said):
    monkeypatch.setattr(preflight, "find_spec", lambda name: None if name == package else name)
    assert start(*words.split()) == (USAGE_ERROR, f"error: {said}\n")
    monkeypatch.setattr(preflight, "find_spec", lambda name: name)
    assert start(*words.split()) == (0, ""), "the control: it is there"


def test_what_is_there_is_not_asked_for(start, tmp_path):
    for folder in ("outputs/draft", "outputs/router"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.json").write_text("{}")
    assert start("config=arbitrage_math", "rollout.acceptance=routed") == (0, "")
    assert start("config=grpo_math", "rollout.drafter=Qwen/Qwen3-0.6B") == (0, ""), "the name of a model on a hub"


def test_a_new_head_needs_no_command(start):
    code, error = start("config=grpo_math", "rollout.drafter=heads", "trainer.drafter.train=true")
    assert (code, "rollout.drafter=heads does not exist" in error) == (USAGE_ERROR, True), "the control: a directory"
    assert start("config=grpo_math", "rollout.drafter=head", "trainer.drafter.train=true") == (0, "")
