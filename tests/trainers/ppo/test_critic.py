"""The critic: scored positions, independence of padding, gradients, and what it leaves alone."""

from collections import Counter

import pytest
import torch
from torch.nn.functional import linear
from trl.trainer.utils import add_fused_lm_head

from specrl.trainers.ppo.critic import Critic
from specrl.trainers.weights import PolicyWeights

PROMPTS = [[5, 6, 7, 8], [9, 10], [11]]
RESPONSES = [[12, 13], [14, 15, 16, 1], [17]]


def build(model, separate=False):
    """The critic of a policy, with a head that is not 0."""
    critic = Critic(model, separate)
    torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(0))
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    critic.attach(model)
    return critic


def batch(pad_id=0):
    """Input ids, prompts padded on the left and responses on the right, and their attention mask [3, 8]."""
    ids, mask = torch.full((3, 8), pad_id), torch.zeros(3, 8, dtype=torch.long)
    for i, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        part = slice(4 - len(prompt), 4 + len(response))
        ids[i, part], mask[i, part] = torch.tensor([*prompt, *response]), 1
    return ids, mask


def scored(model, ids, mask):
    return model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), fused_lm_head=True)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("separate", [False, True])
def test_values_are_those_of_each_row_alone(build_model, family, separate):
    model = build_model(family)
    trunk = build_model(family, seed=1).base_model if separate else model.base_model
    critic = build(model, separate)
    if separate:
        critic.trunk.load_state_dict(trunk.state_dict())
    values = scored(model, *batch()).value[:, -4:]
    for i, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        states = trunk(torch.tensor([[*prompt, *response]])).last_hidden_state[0]
        want, late = critic.head(states[len(prompt) - 1 : -1])[:, 0], critic.head(states[len(prompt) :])[:, 0]
        assert torch.allclose(values[i, : len(response)], want, atol=1e-4)
        assert not torch.allclose(values[i, : len(response)], late, atol=1e-2), "control: one token too late"


def test_the_padding_token_does_not_matter(build_model):
    model = build_model("llama")
    build(model)
    ids, mask = batch(33)
    inside = mask[:, 4:].bool()
    zero, other = (scored(model, *batch(pad_id)).value[:, -4:][inside] for pad_id in (0, 33))
    assert torch.equal(zero, other)
    control = scored(model, ids, torch.ones_like(mask)).value[:, -4:]  # as if padding were text
    assert not torch.allclose(zero, control[inside], atol=1e-3)


def test_a_new_critic_knows_nothing_and_teaches_the_policy_nothing(build_model):
    model = build_model("llama")
    critic = build(model)
    torch.nn.init.zeros_(critic.head.weight)
    values = scored(model, *batch()).value
    assert values.abs().max() == 0
    (values - 1).square().sum().backward()
    assert critic.head.weight.grad.abs().max() > 0
    assert all(p.grad is None or p.grad.abs().max() == 0 for p in model.base_model.parameters())


def test_a_separate_critic_leaves_the_policy_alone(build_model):
    model = build_model("llama")
    critic = build(model, separate=True)
    scored(model, *batch()).value.sum().backward()
    assert all(p.grad is None for p in model.base_model.parameters())
    assert all(p.grad is not None for p in critic.parameters())


@pytest.mark.parametrize("separate", [False, True])
def test_values_are_float32_under_autocast(build_model, separate):
    model, states = build_model("llama"), []
    critic = build(model, separate)
    critic.head.register_forward_pre_hook(lambda _, given: states.append(given[0]))
    with torch.autocast("cpu", torch.bfloat16):
        values = scored(model, *batch()).value
        rounded = linear(states[0], critic.head.weight, critic.head.bias)[..., 0]  # planted fault: autocast stays on
    want = linear(states[0], critic.head.weight, critic.head.bias)[..., 0]
    assert values.dtype == torch.float32
    assert torch.equal(values, want)
    assert not torch.equal(rounded.float(), want)


def test_rollouts_ask_for_no_values_and_engines_get_no_critic(build_model):
    model, calls = build_model("llama"), Counter()
    names = [meta.name for meta in PolicyWeights(model).metadata()]
    build(model, separate=True).register_forward_hook(lambda *_: calls.update(["values"]))
    ids, mask = batch()
    assert model(input_ids=ids, attention_mask=mask).logits.shape[:2] == ids.shape
    assert not calls
    scored(model, ids, mask)
    assert calls["values"] == 1, "control"
    assert [meta.name for meta in PolicyWeights(model).metadata()] == names
