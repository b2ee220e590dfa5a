"""The transformers engine and its model: weights, adapters, versions, and models and requests that it rejects."""

import copy

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from specrl.rollout.engines.base import Probe
from specrl.rollout.types import RolloutError
from tests.rollout.golden import (
    VOCAB,
    differing,
    drafts_of_every_quality,
    engine_of,
    prompts_and_caps,
    reference,
    requests_of,
)

# The model and its weights --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(build_model, training):
    model = build_model("qwen3").train(training)
    model.model.layers[0].mlp.train(not training)
    modes = [module.training for module in model.modules()]
    model.set_attn_implementation("eager")
    engine = engine_of(model)
    before = copy.deepcopy(model.state_dict())
    for use in (lambda: engine.generate(requests_of([([3, 4], 5)])), lambda: engine.score([3, 4, 5])):
        use()
        assert [module.training for module in model.modules()] == modes
        assert model.config._attn_implementation == "eager"
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert model(input_ids=torch.tensor([[3, 4]])).logits.requires_grad


def test_nan_weights_are_an_error_and_the_model_is_left_as_it_was(build_model):
    model = build_model("llama")
    implementation = model.config._attn_implementation
    engine = engine_of(model)
    engine.update_weights(None, 4)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = torch.nan
    with pytest.raises(RolloutError, match=r"NaN.*weight version 4.*learning rate"):
        engine.generate(requests_of([([3, 4], 5)]))
    assert model.training
    assert model.config._attn_implementation == implementation


def test_weight_changes_take_effect_at_once_and_versions_are_stamped(build_model):
    model, other = build_model("qwen2", 0), build_model("qwen2", 5)
    cases = prompts_and_caps(8)
    engine = engine_of(model)
    first, _ = engine.generate(requests_of(cases))
    assert {c.version for c in first} == {0}
    engine.update_weights(other.state_dict().items(), 3)
    assert engine.weight_version == 3
    second, _ = engine.generate(requests_of(cases))
    assert {c.version for c in second} == {3}
    assert differing(second, reference(other, requests_of(cases))) == []
    assert differing(second, first), "other weights, other texts"
    with torch.no_grad():  # shared with the trainer, which changes it in place
        for p in model.parameters():
            p.mul_(1.1)
    engine.update_weights(None, 4)
    third, _ = engine.generate(requests_of(cases))
    assert differing(third, reference(model, requests_of(cases))) == []
    assert {c.version for c in third} == {4}


def test_an_older_version_or_an_unknown_weight_is_refused(build_model):
    engine = engine_of(build_model("llama"))
    engine.update_weights(None, 5)
    engine.update_weights(None, 5)
    with pytest.raises(RolloutError, match=r"4 is older than the engine's 5"):
        engine.update_weights(None, 4)
    with pytest.raises(RolloutError, match=r"'model\.layers\.9\.weight'"):
        engine.update_weights([("model.layers.9.weight", torch.zeros(1))], 6)
    for shape in ((1,), (3, 3)):  # the first would be broadcast
        with pytest.raises(RolloutError, match=r"up_proj.*\(48, 32\)"):
            engine.update_weights([("model.layers.0.mlp.up_proj.weight", torch.zeros(shape))], 6)
    assert engine.weight_version == 5


SOUND = Probe((3, 9, 20, 33), (0.0, 0.0, 0.0), 1e9)
WRONG = Probe((3, 9, 20, 33), (-99.0, -99.0, -99.0), 1e-5)


@pytest.mark.parametrize(
    ("fault", "said"),
    [("one of many", "lacks 20 of the model's weights"), ("none", "bring them"), ("probe", "does not run the weights")],
)
def test_after_a_failed_update_only_a_whole_sound_one_helps(build_model, fault, said):
    """As on vLLM: a text of a half-loaded model would be rewarded and learned from."""
    model, other = build_model("llama", 0), build_model("llama", 1)
    engine = engine_of(model, own_weights=True)
    before, cases = model.state_dict()["model.norm.weight"].clone(), prompts_and_caps(6)
    weights = {
        "one of many": [("model.norm.weight", torch.full_like(before, 7.0))],
        "none": None,
        "probe": other.state_dict().items(),
    }[fault]
    with pytest.raises(RolloutError, match=said):
        engine.update_weights(weights, 5, WRONG if fault == "probe" else SOUND)
    assert engine.weight_version == 0
    with pytest.raises(RolloutError, match="the update to weight version 5 failed; send the weights again"):
        engine.generate(requests_of(cases))
    if fault == "one of many":
        assert torch.equal(model.state_dict()["model.norm.weight"], before), "nothing was loaded"
    engine.update_weights(iter(other.state_dict().items()), 6, SOUND)
    done, _ = engine.generate(requests_of(cases))
    assert {c.version for c in done} == {6}
    assert differing(done, reference(other, requests_of(cases))) == []


def test_weights_that_can_be_walked_only_once_are_checked_as_they_come(build_model):
    engine = engine_of(build_model("llama"), own_weights=True)
    with pytest.raises(RolloutError, match=r"lacks 1 of the model's weights, such as 'lm_head\.weight'"):
        engine.update_weights(iter(list(build_model("llama", 5).state_dict().items())[:-1]), 1)
    with pytest.raises(RolloutError, match="send the weights again"):
        engine.ahead(requests_of([([3, 4], 5)]), stop=lambda: False)


def test_a_lora_policy_equals_its_merged_model(build_model):
    peft = pytest.importorskip("peft")
    cases = prompts_and_caps(12)
    base = build_model("llama")
    without = reference(base, requests_of(cases))
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM", lora_dropout=0.5
    )
    policy = peft.get_peft_model(copy.deepcopy(base), config).train()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in policy.named_parameters():
            if "lora_" in name:
                p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
    merged = copy.deepcopy(policy).merge_and_unload()
    want = reference(merged, requests_of(cases))
    engine = engine_of(policy, window=5)
    for drafters in (None, drafts_of_every_quality([t for t, _, _ in want])):
        assert differing(engine.generate(requests_of(cases, drafters))[0], want, tolerance=1e-4) == []
    assert differing(engine.generate(requests_of(cases))[0], without), "control: the adapter matters"
    assert policy.training


def test_an_adapter_outside_the_layers_is_refused(build_model):
    """The engine runs the layers itself, so a learned prompt would silently be ignored."""
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(RolloutError, match="LoRA"):
        engine_of(peft.get_peft_model(build_model("llama"), config))


class NoTransformer(torch.nn.Module):
    def forward(self, input_ids):
        return input_ids


def encoder_decoder():
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCAB, d_model=32, d_ff=48, num_layers=2, num_heads=4))


@pytest.mark.parametrize("make", [NoTransformer, encoder_decoder])
def test_an_unsupported_model_is_refused_at_construction(make):
    """test_probe.py has those that compute something else."""
    model = make()
    with pytest.raises(RolloutError, match=f"{type(model).__name__}.*transformers"):
        engine_of(model)
    assert model.training, "left as it was"


# Bad requests ---------------------------------------------------------------------------------------------------------


def test_a_prompt_that_does_not_fit_names_the_number_to_use(tiny):
    engine = engine_of(tiny("llama"))
    with pytest.raises(RolloutError, match=r"prompt of 250 tokens.*context of 256.*rollout\.max_new_tokens=6\b"):
        engine.generate(requests_of([([3], 4), ([5] * 250, 10)]))
    (c,), _ = engine.generate(requests_of([([5] * 250, 6)]))
    assert 1 <= len(c.tokens) <= 6
    with pytest.raises(RolloutError, match=r"rollout\.max_new_tokens=6\b"):
        engine.generate(requests_of([([5] * 250, 7)]))  # one token too many
    with pytest.raises(RolloutError, match=r"prompt of 256 tokens.*shorter prompt"):
        engine.generate(requests_of([([5] * 256, 1)]))
