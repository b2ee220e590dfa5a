"""The recipe of the embedded policy."""

import re

import pytest
import torch

from benchmarks.tiny_policy import Recipe, blur, build_model, build_tokenizer, collate, make
from specrl.config.load import USAGE_ERROR, run
from specrl.run.tasks import arithmetic


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


def test_loss_covers_the_answer_and_its_end_only(tokenizer):
    problem = arithmetic("train", 1)[0]
    ids, labels = collate(tokenizer, [problem, arithmetic("train", 1, level="hard")[0]])
    assert tokenizer.decode(labels[0][labels[0] >= 0]) == problem.solution + tokenizer.eos_token
    assert tokenizer.decode(ids[0]).startswith(problem.prompt + problem.solution + tokenizer.eos_token)


def test_blur_moves_matrices_only_and_repeats(tokenizer):
    before, first, second = (build_model(tokenizer, seed=0) for _ in range(3))
    blur(first, 0.1, seed=1)
    blur(second, 0.1, seed=1)
    for old, new, again in zip(before.parameters(), first.parameters(), second.parameters(), strict=True):
        assert torch.equal(new, again)
        assert torch.equal(old, new) == (old.dim() == 1)


def test_recipe_writes_the_same_file_twice(tmp_path):
    for name in ("one", "two"):
        make(Recipe(out=str(tmp_path / name), steps=3, batch=4))
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two
    assert not list(tmp_path.rglob("*.bin"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["out=a", "stesp=5"], "stesp.*steps"),
        (["out=a", "steps=many"], "steps"),
        (["out=a", "batch=0"], "batch=0 must be at least 1. Try batch=1"),
        (["steps=5"], "out is missing"),
    ],
)
def test_wrong_arguments_say_what_is_right(words, message, capsys):
    assert run(make, words, Recipe) == USAGE_ERROR
    assert re.search(message, capsys.readouterr().err)
