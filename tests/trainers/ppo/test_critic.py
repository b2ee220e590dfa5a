"""Policy and critic: scored positions, independence of padding, and gradients."""

import copy
from collections import Counter

import pytest
import torch

from specrl.rollout.types import Completion, Row
from specrl.trainers.config import CriticConfig, TrainerConfig
from specrl.trainers.ppo.critic import ActorCritic, build_models
from specrl.trainers.ppo.experience import Responses

ROWS = [Row("a", (5, 6, 7, 8)), Row("b", (9, 10)), Row("c", (11,))]


def completion(*tokens):
    n = len(tokens)
    return Completion(list(tokens), [-0.5] * n, [-0.5] * n, [False] * n, "stop", 0, n)


DONE = [completion(12, 13), completion(14, 15, 16, 1), completion()]


def responses(pad_id=0):
    return Responses.of(ROWS, DONE, [True, True, False], pad_id, torch.device("cpu"))


def build(model, separate=False, valued=True, temperature=0.7):
    trunk = copy.deepcopy(model.base_model) if separate else None
    both = ActorCritic(model, temperature=temperature, has_critic=valued, trunk=trunk).eval()
    if valued:
        torch.nn.init.normal_(both.value.weight, generator=torch.Generator().manual_seed(0))
    return both


def test_rows_as_tensors():
    batch = responses()
    assert batch.ids.tolist() == [
        [5, 6, 7, 8, 12, 13, 0, 0],
        [0, 0, 9, 10, 14, 15, 16, 1],
        [0, 0, 0, 11, 0, 0, 0, 0],
    ]
    assert batch.attention.tolist() == [[1] * 6 + [0] * 2, [0] * 2 + [1] * 6, [0] * 3 + [1] + [0] * 4]
    assert batch.mask.tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]
    assert batch.rollout_logprobs.tolist() == [[-0.5, -0.5, 0, 0], [-0.5] * 4, [0] * 4]
    pieces = list(batch.split(2))
    assert [len(piece.ids) for piece in pieces] == [2, 1]
    assert batch.select(slice(1, None, 2)).ids.tolist() == [batch.ids[1].tolist()]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("separate", [False, True])
def test_scores_are_those_of_each_row_alone(build_model, family, separate):
    model = build_model(family)
    both, batch = build(model, separate), responses()
    outputs = both(batch.ids, batch.attention, batch.length)
    for i in (0, 1):
        text = torch.tensor([[*ROWS[i].prompt, *DONE[i].tokens]])
        first, n = len(ROWS[i].prompt) - 1, len(DONE[i].tokens)
        distribution = (model(text).logits[0, first:-1] / 0.7).log_softmax(-1)
        hidden = model.base_model(text).last_hidden_state[0, first:-1]
        want = distribution.gather(-1, text[0, first + 1 :, None])[:, 0]
        assert torch.allclose(outputs.logp[i, :n], want, atol=1e-4)
        assert torch.allclose(outputs.entropy[i, :n], -(distribution.exp() * distribution).sum(-1), atol=1e-4)
        assert torch.allclose(outputs.values[i, :n], both.value(hidden)[:, 0], atol=1e-4)
    late = both.value(model.base_model(text).last_hidden_state[0, first + 1 :])[:, 0]  # control: one token too late
    assert not torch.allclose(outputs.values[1], late, atol=1e-2)


def test_the_padding_token_does_not_matter(build_model):
    both, mask = build(build_model("llama")), responses().mask.bool()
    zero, other = (both(batch.ids, batch.attention, 4) for batch in (responses(0), responses(33)))
    assert torch.equal(zero.logp[mask], other.logp[mask])
    assert torch.equal(zero.values[mask], other.values[mask])
    seen = responses(33)
    control = both(seen.ids, torch.ones_like(seen.attention), 4)  # as if padding were text
    assert not torch.allclose(zero.logp[mask], control.logp[mask], atol=1e-3)


def test_a_new_critic_knows_nothing_and_teaches_the_trunk_nothing(build_model):
    model, batch = build_model("llama"), responses()
    both = ActorCritic(model, temperature=1.0, has_critic=True)
    values = both(batch.ids, batch.attention, batch.length).values
    assert values.abs().max() == 0
    (values - 1).square().sum().backward()
    assert both.value.weight.grad.abs().max() > 0
    assert all(p.grad is None or p.grad.abs().max() == 0 for p in model.parameters())


def test_a_separate_critic_leaves_the_policy_alone(build_model):
    model, batch = build_model("llama"), responses()
    both = build(model, separate=True)
    both(batch.ids, batch.attention, batch.length).values.sum().backward()
    assert all(p.grad is None for p in model.parameters())
    assert all(p.grad is not None for p in both.trunk.parameters())
    assert build(model, valued=False)(batch.ids, batch.attention, batch.length).values is None


@pytest.mark.parametrize("separate", [False, True])
def test_values_are_float32_under_autocast(build_model, separate):
    both, batch, states = build(build_model("llama"), separate), responses(), []
    both.value.register_forward_pre_hook(lambda _, given: states.append(given[0]))
    with torch.autocast("cpu", torch.bfloat16):
        outputs = both(batch.ids, batch.attention, batch.length)
        rounded = both.value(states[0]).view_as(outputs.values)  # planted fault: autocast stays on
    want = torch.nn.functional.linear(states[0], both.value.weight, both.value.bias).view_as(outputs.values)
    assert outputs.values.dtype == torch.float32
    assert torch.equal(outputs.values, want)
    assert not torch.equal(rounded.float(), want)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_checkpointing_is_the_policys_and_the_critics(build_model, checkpointing):
    """Layers that keep no activations are recomputed in the backward pass."""
    options = TrainerConfig(critic=CriticConfig(model="separate"), gradient_checkpointing=checkpointing)
    trained = build_models(build_model("llama"), options, 1.0, None).trained.train()
    calls, batch = Counter(), responses()
    for name, trunk in (("policy", trained.policy.base_model), ("critic", trained.trunk)):
        trunk.layers[0].mlp.register_forward_pre_hook(lambda module, given, name=name: calls.update([name]))
    outputs = trained(batch.ids, batch.attention, batch.length)
    (outputs.logp.sum() + outputs.values.sum()).backward()
    assert calls == dict.fromkeys(("policy", "critic"), 2 if checkpointing else 1)


def test_entropy_has_a_gradient_only_when_it_is_wanted(build_model):
    model, batch = build_model("llama"), responses()
    for wanted in (False, True):
        both = ActorCritic(model, temperature=1.0, entropy_gradient=wanted)
        assert both(batch.ids, batch.attention, batch.length).entropy.requires_grad == wanted
