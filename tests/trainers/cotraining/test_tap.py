"""Hidden states of an update's forward pass, for the requested texts and any padding."""

import pytest
import torch

from specrl.trainers.cotraining.texts import Tap, Text, read

TEXTS = [Text((3, 4, 5), (9, 11, 1)), Text((8,), (2, 7)), Text((6, 30), tuple(range(2, 14)))]


def padded(texts, left, right):
    """ids and mask [B, T], with at least that much padding."""
    longest = max(map(len, texts))
    ids, mask = [], []
    for text in texts:
        before, after = (left, right + longest - len(text)) if left == 0 else (left + longest - len(text), right)
        ids.append([0] * before + [*text.prompt, *text.response] + [0] * after)
        mask.append([0] * before + [1] * len(text) + [0] * after)
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def tap_of(model, parts=None):
    tap = Tap(model.train())
    tap.want(dict(zip(TEXTS, parts or TEXTS, strict=True)))
    return tap


@pytest.mark.parametrize(("left", "right"), [(0, 3), (2, 3)])
def test_states_are_the_policys_at_each_token_but_the_last(build_model, left, right):
    model = build_model("llama")
    tap = tap_of(model)
    model(**padded(TEXTS[:2], left, right))
    model(**padded(TEXTS[2:], left, right))  # a different micro-batch
    reads, expected = tap.take(), read(model, TEXTS)
    assert [r.text for r in reads] == TEXTS
    assert tap.take() == []
    for ours, theirs in zip(reads, expected, strict=True):
        assert ours.states.shape == (len(ours.text) - 1, model.config.hidden_size)
        assert torch.allclose(ours.states, theirs.states, atol=1e-5)
        assert not torch.allclose(ours.states, theirs.states.roll(1, 0), atol=1e-3)  # control
        assert not ours.states.requires_grad


def test_other_texts_and_other_forwards_are_ignored(build_model):
    model = build_model("llama")
    tap = tap_of(model)
    model(**padded([Text((3, 4, 5), (9, 11, 2)), Text((3, 4), (9, 11, 1))], 0, 0))
    with torch.no_grad():
        model(**padded(TEXTS, 0, 0))
    model.eval()
    model(**padded(TEXTS, 0, 0))
    assert tap.take() == []
    model.train()
    model(input_ids=torch.tensor([[*TEXTS[1].prompt, *TEXTS[1].response]]))
    assert [r.text for r in tap.take()] == [TEXTS[1]], "a row without a mask"
    model(inputs_embeds=torch.zeros(1, 4, model.config.hidden_size))
    assert tap.take() == []


def test_gradient_checkpointing_is_read_once_and_trains_the_same(build_model):
    plain, saving = build_model("llama"), build_model("llama")
    saving.gradient_checkpointing_enable()
    tap = tap_of(saving)
    for model in (plain.train(), saving):
        model(**padded(TEXTS, 2, 1)).logits.square().mean().backward()
    assert len(tap.take()) == 3
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), saving.parameters(), strict=True))
