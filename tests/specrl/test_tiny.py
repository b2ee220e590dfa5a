"""The embedded policy as it is shipped, and its recipe."""

from itertools import chain

import pytest
import torch

from benchmarks.tiny_policy import build_tokenizer, collate
from specrl.run.tasks import arithmetic
from specrl.tiny import load_tiny


@pytest.fixture(scope="module")
def tiny():
    return load_tiny()


def test_the_shipped_policy_samples_from_its_own_distribution(tiny):
    model, tokenizer = tiny
    assert model.dtype == torch.float32
    assert not model.training
    assert model.config.vocab_size == len(tokenizer)
    for config in (tokenizer, model.config, model.generation_config):
        assert (config.pad_token_id, config.eos_token_id) == (0, 1)
    sampling = model.generation_config
    assert (sampling.do_sample, sampling.temperature, sampling.top_k, sampling.top_p) == (True, 1.0, 0, 1.0)


def test_the_tokenizer_is_lossless_and_splits_between_prompt_and_solution(tiny):
    tokenizer = tiny[1]
    texts = list(chain.from_iterable((p.prompt, p.solution) for p in arithmetic("train", 2000)))
    ids = tokenizer(texts).input_ids
    assert tokenizer.batch_decode(ids) == texts
    assert tokenizer.unk_token_id not in set(chain.from_iterable(ids))
    assert tokenizer(texts[0] + texts[1]).input_ids == ids[0] + ids[1]


@pytest.mark.slow
def test_its_accuracy_can_rise_and_fall(tiny):
    model, tokenizer = tiny
    problems = arithmetic("test", 48, seed=5)
    inputs = tokenizer([p.prompt for p in problems], return_tensors="pt", padding=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sequences = model.generate(**inputs, max_new_tokens=320)
    tokens = sequences[:, inputs.input_ids.shape[1] :]
    texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    right = [text.rpartition("#### ")[2] == p.answer for text, p in zip(texts, problems, strict=True)]
    assert 0.25 <= sum(right) / len(right) <= 0.65
    assert (tokens == tokenizer.eos_token_id).any(1).float().mean() >= 0.95


# The recipe -----------------------------------------------------------------------------------------------------------


def test_the_loss_covers_the_answer_and_its_end_only():
    tokenizer, problem = build_tokenizer(), arithmetic("train", 1)[0]
    ids, labels = collate(tokenizer, [problem, arithmetic("train", 1, level="hard")[0]])
    assert tokenizer.decode(labels[0][labels[0] >= 0]) == problem.solution + tokenizer.eos_token
    assert tokenizer.decode(ids[0]).startswith(problem.prompt + problem.solution + tokenizer.eos_token)
