"""Which models the transformers engine accepts: those whose results it reproduces, whatever the weights and dtype."""

import gc
import random
import weakref

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    Phi3Config,
    Qwen2MoeConfig,
    RecurrentGemmaConfig,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.engines.local import probe
from specrl.rollout.engines.local.engine import TransformersEngine
from specrl.rollout.engines.local.probe import check_kind
from specrl.rollout.types import Request, RolloutError
from tests.engines import local
from tests.rollout.golden import FAMILIES, Script, reference

VOCAB = 61
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "pad_token_id": None,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [3.0] * 4,
    "original_max_position_embeddings": 16,
}


def made(config, scale: float = 1.0):
    """A model with initial weights whose matrices are multiplied by `scale`."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(scale)
    return model


def engine_of(model, **settings) -> TransformersEngine:
    return local(model, SamplingParams(frozenset()), window=5, **settings)


def gemma2(**caps):
    none = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    return Gemma2Config(**SHAPE, head_dim=8, query_pre_attn_scalar=8, **none | caps)


def recurrent():
    shape = {k: v for k, v in SHAPE.items() if k != "max_position_embeddings"}
    return RecurrentGemmaConfig(**shape | {"num_hidden_layers": 3}, lru_width=32)


REFUSED = {
    "attention cap": (lambda: gemma2(attn_logit_softcapping=50.0), "attn_logit_softcapping", "softcap"),
    "final cap": (lambda: gemma2(final_logit_softcapping=30.0), "final_logit_softcapping", "output layer"),
    "sinks": (lambda: GptOssConfig(**SHAPE, head_dim=8, num_local_experts=4), "sinks", "s_aux"),
    "state": (recurrent, "state", ""),
    "own attention": (
        lambda: BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4),
        *("", "0 of its layers"),
    ),
}
"""Name -> configuration, what `check_kind` says of it, and what the numbers say; empty if nothing."""


@pytest.mark.parametrize("name", [name for name, (_, kind, _) in REFUSED.items() if kind])
def test_what_a_configuration_says_is_refused_without_weights(name):
    config, kind, _ = REFUSED[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config())
    with pytest.raises(RolloutError, match=kind):
        check_kind(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name, (*_, numbers) in REFUSED.items() if numbers])
def test_untrained_models_that_compute_something_else_are_refused(name, dtype, monkeypatch):
    """Their weights are so small that the results hardly differ. The numbers show it without `check_kind`, too."""
    config, _, reason = REFUSED[name]
    monkeypatch.setattr(probe, "check_kind", lambda model: None)
    model = made(config()).to(dtype)
    with pytest.raises(
        RolloutError, match=f"{type(model).__name__} does not work with the transformers engine.*{reason}"
    ):
        engine_of(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("family", FAMILIES)
def test_probe_families_are_taken_in_every_type(build_model, family, dtype):
    engine = engine_of(build_model(family).to(dtype))
    assert engine.context == 256
    assert engine.policy.limit == ""


def test_the_control_without_caps_is_taken():
    check_kind(made(gemma2()))
    assert engine_of(made(gemma2())).context == 96


def test_what_a_row_hands_to_its_neighbour_is_seen(build_model):
    """Each token mixes in a little of the previous token, as a convolution does; when packed, maybe another row's."""

    def shift(module, args, out):
        return out + 0.3 * torch.nn.functional.pad(args[0], (0, 0, 1, -1))

    model = build_model("llama", scale=1.0)
    model.model.layers[0].mlp.register_forward_hook(shift)
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(RolloutError, match="logits"):
            engine_of(model.to(dtype))


def test_a_layer_that_runs_twice_is_refused(build_model):
    """Its second run would overwrite the KV of its first one."""
    model = build_model("llama", scale=1.0)
    engine_of(model)
    model.model.layers[1] = model.model.layers[0]
    with pytest.raises(RolloutError, match="twice"):
        engine_of(model)


@pytest.fixture(params=["phi3", "llama"])
def longrope(request):
    if request.param == "llama":
        return made(LlamaConfig(**SHAPE, rope_parameters=LONGROPE), 10.0)
    return made(Phi3Config(**SHAPE, original_max_position_embeddings=16, rope_parameters=LONGROPE), 10.0)


def test_a_rope_that_depends_on_the_longest_row_is_used_up_to_its_original_length(longrope):
    model, rng = longrope.eval(), random.Random(0)
    engine = engine_of(model)
    assert engine.context == 16
    lengths = (4, 8, 12)
    requests = [Request([rng.randrange(2, VOCAB) for _ in range(n)], n, 16 - n) for n in lengths]
    plain = [c.tokens for c in engine.generate(requests)[0]]
    assert plain == [tokens for tokens, _, _ in reference(model, requests, SamplingParams(frozenset()))]
    for r, text in zip(requests, plain, strict=True):
        r.drafter = Script([*text[:3], 0, *text[4:]])
    assert [c.tokens for c in engine.generate(requests)[0]] == plain
    with pytest.raises(RolloutError, match=r"context of 16; .*rotary embedding changes.*max_new_tokens=12"):
        engine.generate([Request([5] * 4, 1, 13)])
    with pytest.raises(RolloutError, match=r"prompt of 16 tokens.*context of 16; .*rotary"):
        engine.generate([Request([5] * 16, 1, 1)])


def test_control_beyond_that_length_rows_change_each_other(longrope):
    """Why the limit exists: a second, longer row changes the first one's text."""
    engine = engine_of(longrope.eval())
    engine.context = 96
    short, longer = Request([5, 6, 7, 8], 1, 12), Request([9] * 14, 2, 20)
    alone, together = engine.generate([short])[0][0].tokens, engine.generate([short, longer])[0][0].tokens
    assert alone != together


@pytest.mark.parametrize("rope", [{"rope_type": "dynamic", "factor": 2.0}, {"rope_type": "yarn", "factor": 6.0}])
def test_ropes_that_do_not_change_within_the_context_keep_all_of_it(rope):
    rope |= {"rope_theta": 1e4, "original_max_position_embeddings": 16}
    assert engine_of(made(LlamaConfig(**SHAPE, rope_parameters=rope))).context == 96


def test_a_rope_that_changes_at_an_unknown_length_is_used_up_to_it(monkeypatch):
    forward = LlamaRotaryEmbedding.forward

    def changing(self, x, position_ids):
        return forward(self, x, position_ids * (2 if position_ids.max() > 40 else 1))

    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", changing)
    assert engine_of(made(LlamaConfig(**SHAPE))).context == 41


def test_a_window_that_the_attention_is_not_told_of_limits_the_context():
    shape = SHAPE | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    shape |= {"shared_expert_intermediate_size": 16, "max_window_layers": 1}
    engine = engine_of(made(Qwen2MoeConfig(**shape, use_sliding_window=True, sliding_window=20)))
    assert engine.context == 20
    with pytest.raises(RolloutError, match=r"context of 20; beyond it this model hides early tokens"):
        engine.generate([Request([5] * 4, 1, 17)])
    assert engine_of(made(Qwen2MoeConfig(**shape))).context == 96


def test_a_resized_vocabulary_is_noticed(build_model):
    for tied in (False, True):
        model = build_model("llama")
        model.config.tie_word_embeddings = tied
        model.tie_weights()
        engine = engine_of(model)
        assert engine.generate([Request([5, 6], 1, 3)])[0]
        model.resize_token_embeddings(70)
        with pytest.raises(RolloutError, match=r"another output layer.*61 tokens, now 70.*build the engine again"):
            engine.generate([Request([5, 6], 1, 3)])
        assert engine_of(model).vocab == 70


def test_the_engine_keeps_no_model_alive(build_model):
    model = build_model("mistral")
    engine, gone = engine_of(model), weakref.ref(model)
    del engine, model
    gc.collect()
    assert gone() is None
