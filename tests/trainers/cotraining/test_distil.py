"""Distillation: the positions a drafter is trained on, the inputs of a head's passes, and the gradients."""

import copy

import pytest
import torch

from specrl.rollout.engines.local.head import Head
from specrl.trainers.cotraining import distil
from specrl.trainers.cotraining.distil import forward_kl
from specrl.trainers.cotraining.texts import Text, chosen, read

ROWS = [((3, 4, 5), (9, 11, 1)), ((8,), (2,)), ((6, 30), tuple(range(2, 25)))]
TEXTS = [Text(prompt, response) for prompt, response in ROWS]


@torch.no_grad()
def full(model, text):
    """The model's (hidden states, logits) for all tokens of a single text."""
    model = copy.deepcopy(model).eval()
    out = model(input_ids=torch.tensor([[*text.prompt, *text.response]]), output_hidden_states=True)
    return model.base_model(torch.tensor([[*text.prompt, *text.response]])).last_hidden_state[0], out.logits[0]


# Positions ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_teacher_is_the_policys_distribution_of_each_response_token(tiny, family):
    model = tiny(family)
    batch = distil.Batch.of(read(model, TEXTS), model)
    got = distil.teacher_logits(model, batch)
    logits = [full(model, text)[1] for text in TEXTS]
    want = [z[len(t.prompt) - 1 : -1] for t, z in zip(TEXTS, logits, strict=True)]
    assert torch.allclose(got, torch.cat(want), atol=1e-4)
    late_by_one = torch.cat([z[len(t.prompt) :] for t, z in zip(TEXTS, logits, strict=True)])
    assert not torch.allclose(got, late_by_one, atol=1e-2)  # control
    assert model.training, "left as it was"
    assert batch.targets.tolist() == [[n, t] for n, text in enumerate(TEXTS) for t in range(len(text.response))]
    itself = next(distil.student_logits(copy.deepcopy(model).eval(), batch, torch.Generator()))
    assert torch.allclose(itself, got, atol=1e-4), "a student that is the policy"


def test_a_head_learns_all_but_the_first_token_of_a_response(tiny):
    """By hand: entry j is computed from token j + 1 and state j, and predicts token j + 2."""
    model = tiny("llama")
    head = Head.of(model)
    batch = distil.Batch.of(read(model, TEXTS), head)
    assert batch.targets.tolist() == [[n, t] for n, text in enumerate(TEXTS) for t in range(1, len(text.response))]
    want = [full(model, t)[1][len(t.prompt) : -1] for t in TEXTS]
    assert torch.allclose(distil.teacher_logits(model, batch), torch.cat(want), atol=1e-4)
    made = []
    for text in (TEXTS[0], TEXTS[2]):  # the other has one response token
        ids, states = torch.tensor([[*text.prompt, *text.response]]), full(model, text)[0][None]
        with torch.no_grad():
            out = head(ids[:, 1:-1], states[:, :-2]).last_hidden_state[0]
        made.append(model.get_output_embeddings()(out[len(text.prompt) - 1 :]))
    first, second, *_ = distil.student_logits(head, batch, torch.Generator().manual_seed(0))
    assert torch.allclose(first, torch.cat(made), atol=1e-4)
    assert not torch.allclose(first, second, atol=1e-2), "the second pass reads other states"


def test_a_heads_later_passes_read_its_own_states(tiny, monkeypatch):
    model = tiny("llama")
    head, seen = Head.of(model), []
    batch = distil.Batch.of(read(model, TEXTS), head)
    forward = head.forward
    monkeypatch.setattr(head, "forward", lambda ids, states: (seen.append(states), forward(ids, states))[1])
    monkeypatch.setattr(distil, "OWN_SHARE", 1.0)
    list(distil.student_logits(head, batch, torch.Generator()))
    predicted = forward(batch.ids[:, 1:], seen[0]).last_hidden_state
    assert torch.equal(seen[0], batch.states[:, :-1])
    assert torch.equal(seen[1][:, 1:], predicted[:, :-1]), "each in the place of the state that it stands for"
    assert torch.equal(seen[1][:, 0], batch.states[:, 0]), "which the first has none for"
    assert not seen[1].requires_grad
    monkeypatch.setattr(distil, "OWN_SHARE", 0.5)
    list(distil.student_logits(head, batch, torch.Generator().manual_seed(0)))
    theirs = (seen[-1] == batch.states[:, :-1]).all(-1)[:, 1:].float().mean()
    assert 0.2 < theirs < 0.8


# Steps ----------------------------------------------------------------------------------------------------------------


def test_a_loss_is_over_the_kept_tokens_at_the_rollouts_temperature():
    torch.manual_seed(0)
    q, p = torch.randn(6, 9), torch.randn(6, 9)
    kept = torch.tensor([True, False, True, True, False, False])
    want = forward_kl(q[kept] / 0.5, p[kept] / 0.5).mean()
    assert distil.loss(q, p, 0.5, kept) == pytest.approx(want.item())
    assert distil.loss(q, p) == pytest.approx(forward_kl(q, p).mean().item())


def test_adaspec_selects_where_the_student_lags_the_reference():
    """Tokens that the reference has not learned either are hopeless, and tokens that both know are useless."""
    p = torch.eye(5) * 6
    student, reference = p.clone(), p.clone()
    student[:3] = 0.0  # far worse on three tokens
    reference[0] = 0.0  # on one of which the reference is equally bad
    assert distil.selected(student, reference, p).tolist() == [False, True, True, False, False]


# Texts ----------------------------------------------------------------------------------------------------------------


def test_chosen_texts_have_the_requested_tokens_and_the_last_is_cut():
    texts = [Text((i, i), tuple(range(8))) for i in range(6)]
    parts = chosen(texts, 24, 99, torch.Generator().manual_seed(1))
    assert [len(part) for part in parts.values()] == [10, 10, 4]
    assert all(part.response == text.response[: len(part) - 2] for text, part in parts.items())
    assert list(parts) != list(chosen(texts, 24, 99, torch.Generator().manual_seed(2)))
    assert len(chosen(texts, 23, 99, torch.Generator())) == 2, "one response token teaches a head nothing"
    assert len(chosen(texts, 10**6, 99, torch.Generator())) == 6
    assert chosen(texts, 0, 99, torch.Generator()) == chosen([], 99, 99, torch.Generator()) == {}
    twice = [texts[0], texts[0]]
    assert chosen(twice, 99, 99, torch.Generator()) == {texts[0]: texts[0]}
