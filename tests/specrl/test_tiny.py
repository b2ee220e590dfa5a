import re
from itertools import chain

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specrl.config.load import USAGE_ERROR, run
from specrl.run.tasks import arithmetic
from specrl.tiny import TINY_PATH, Recipe, blur, build_model, collate, load_tiny, make


@pytest.fixture(scope="module")
def tiny():
    return load_tiny()


def test_loads_with_the_auto_classes():
    model = AutoModelForCausalLM.from_pretrained(TINY_PATH, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(TINY_PATH, local_files_only=True)
    assert model.config.model_type == "qwen3"
    assert model.config.vocab_size == len(tokenizer)
    assert 1_000_000 <= sum(p.numel() for p in model.parameters()) <= 2_000_000


def test_load_tiny_gives_float32_and_ids_that_agree(tiny):
    model, tokenizer = tiny
    assert model.dtype == torch.float32
    assert not model.training
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert (model.generation_config.pad_token_id, model.generation_config.eos_token_id) == (0, 1)
    assert (model.config.pad_token_id, model.config.eos_token_id) == (0, 1)
    assert tokenizer.padding_side == "left"
    assert 80 <= len(tokenizer) <= 128


def test_plain_generate_samples_from_the_policy_itself(tiny):
    config = tiny[0].generation_config
    assert (config.do_sample, config.temperature, config.top_k, config.top_p) == (True, 1.0, 0, 1.0)


def test_tokenizer_is_lossless_without_unknowns(tiny):
    tokenizer = tiny[1]
    texts = list(chain.from_iterable((p.prompt, p.solution) for p in arithmetic("train", 2000)))
    ids = tokenizer(texts).input_ids
    assert tokenizer.batch_decode(ids) == texts
    assert tokenizer.unk_token_id not in set(chain.from_iterable(ids))


def test_prompt_and_solution_join_at_a_token_boundary(tiny):
    tokenizer = tiny[1]
    for problem in arithmetic("train", 50):
        halves = tokenizer(problem.prompt).input_ids + tokenizer(problem.solution).input_ids
        assert tokenizer(problem.prompt + problem.solution).input_ids == halves


def test_lengths_have_a_long_tail(tiny):
    tokenizer = tiny[1]
    problems = arithmetic("train", 2000)
    prompts = sorted(map(len, tokenizer([p.prompt for p in problems]).input_ids))
    answers = sorted(map(len, tokenizer([p.solution for p in problems]).input_ids))
    assert prompts[0] >= 25
    assert prompts[len(prompts) * 9 // 10] <= 66
    assert prompts[-1] <= 100
    assert answers[0] >= 40
    assert 85 <= sum(answers) / len(answers) <= 115
    assert 180 <= answers[-1] <= 256


@pytest.mark.slow
def test_sampled_accuracy_leaves_room_to_learn(tiny):
    model, tokenizer = tiny
    problems = arithmetic("test", 48, seed=5)
    inputs = tokenizer([p.prompt for p in problems], return_tensors="pt", padding=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        out = model.generate(**inputs, max_new_tokens=320, output_logits=True, return_dict_in_generate=True)
    tokens = out.sequences[:, inputs.input_ids.shape[1] :]
    ended = tokens == tokenizer.eos_token_id
    chances = torch.stack(out.logits, 1).softmax(-1).gather(-1, tokens[..., None])[..., 0]
    texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    right = [text.rpartition("#### ")[2] == p.answer for text, p in zip(texts, problems, strict=True)]
    assert 0.25 <= sum(right) / len(right) <= 0.65
    assert chances[ended.cumsum(1) - ended.long() == 0].mean() >= 0.93
    assert ended.any(1).float().mean() >= 0.95


def test_loss_covers_the_answer_and_its_end_only(tiny):
    tokenizer = tiny[1]
    problem = arithmetic("train", 1)[0]
    ids, labels = collate(tokenizer, [problem, arithmetic("train", 1, level="hard")[0]])
    assert tokenizer.decode(labels[0][labels[0] >= 0]) == problem.solution + tokenizer.eos_token
    assert tokenizer.decode(ids[0]).startswith(problem.prompt + problem.solution + tokenizer.eos_token)


def test_blur_moves_matrices_only_and_repeats(tiny):
    before, first, second = (build_model(tiny[1], seed=0) for _ in range(3))
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
