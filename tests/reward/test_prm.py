"""Process rewards: Monte-Carlo values against hand-computed ones, and classifiers read at the right token."""

import copy

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, Qwen3Config

from benchmarks.tiny_policy import build_tokenizer
from specrl.reward.base import RewardError
from specrl.reward.prm import Prefix, TransformersPRM, monte_carlo


def ends_in(samples):
    """1 for a text that ends in the answer, None for one that holds "?"."""
    return [None if "?" in s.completion else float(s.completion.endswith(s.answer)) for s in samples]


def test_a_value_is_the_share_of_continuations_that_succeed():
    following = {"a": ["7", "8", "7", "7"], "b": ["8", "8", "8", "8"]}
    prefixes = [Prefix("q", "a", "7"), Prefix("q", "b", "7")]
    assert monte_carlo(prefixes, lambda prefixes: [following[p.completion] for p in prefixes], ends_in) == [0.75, 0.0]


def test_a_finished_response_is_scored_as_it_is():
    def never(prefixes):
        raise AssertionError("there is nothing to continue")

    prefixes = [Prefix("q", "a7", "7", finished=True), Prefix("q", "8", "7", finished=True)]
    assert monte_carlo(prefixes, never, ends_in) == [1.0, 0.0]


def test_what_cannot_be_scored_is_left_out_and_never_zero():
    prefixes = [Prefix("q", "a", "7"), Prefix("q", "b", "7")]
    assert monte_carlo(prefixes, lambda prefixes: [["7", "?"], ["?", "?"]], ends_in) == [1.0, None]


def test_texts_stay_with_their_prefix():
    mixed = [Prefix("q", "7", "7"), Prefix("q", "9", "9", finished=True), Prefix("q", "8", "7")]
    assert monte_carlo(mixed, lambda prefixes: [[p.completion] * 2 for p in prefixes], ends_in) == [1.0, 1.0, 0.0]


@pytest.fixture(scope="module", params=["sequence", "token", "one output"])
def saved(request, tmp_path_factory):
    """A random classifier on disk with its reading of a text, by transformers' own forward pass."""
    tokenizer = build_tokenizer()
    labels = 1 if request.param == "one output" else 2
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, pad_token_id=0, num_labels=labels,
    )  # fmt: skip
    kind = AutoModelForTokenClassification if request.param == "token" else AutoModelForSequenceClassification
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind.from_config(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(15)
    folder = tmp_path_factory.mktemp("prm")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

    def read(text):
        with torch.no_grad():
            logits = model(torch.tensor([tokenizer(text).input_ids])).logits
        logits = (logits[0, -1] if request.param == "token" else logits[0]).float()
        return (logits.sigmoid()[0] if labels == 1 else logits.softmax(-1)[1]).item()

    return folder, read


def test_a_classifier_is_read_at_the_end_of_the_step(saved):
    folder, read = saved
    prm = TransformersPRM(str(folder), rows_per_pass=2)
    step, last = "He buys 5: 20 + 5 = 25\n", "#### 25"
    prefixes = [Prefix("Tom has 20 apples.", text) for text in (step, step + last, step)]
    values = prm(prefixes)
    assert values == pytest.approx([read(p.prompt + p.completion) for p in prefixes], abs=1e-5)
    assert values[0] != pytest.approx(values[1], abs=1e-3), "the last step matters"
    assert all(0 <= value <= 1 for value in values)


def test_what_is_no_process_reward_model_is_refused(saved, tmp_path):
    with pytest.raises(RewardError, match="cannot be loaded"):
        TransformersPRM(str(tmp_path))
    config = Qwen3Config.from_pretrained(saved[0])
    many = copy.deepcopy(config)
    many.num_labels = 3
    AutoModelForSequenceClassification.from_config(many).save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(RewardError, match="has 3 classes; use one with 1 or 2"):
        TransformersPRM(str(tmp_path))
