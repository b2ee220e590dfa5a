from itertools import chain

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specrl.run.policy import TINY_PATH
from specrl.run.tasks import arithmetic
from specrl.tiny import load_tiny


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
