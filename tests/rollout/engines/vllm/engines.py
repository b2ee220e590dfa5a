"""Policies that vLLM's CPU kernels support, and engines that run them."""

import importlib.util
import os
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM

from specrl.rollout.build import build_engine
from specrl.rollout.config import RolloutConfig
from specrl.rollout.engines.base import EngineSpec, Probe, SamplingParams
from specrl.rollout.engines.local.engine import TransformersEngine
from specrl.trainers.weights import PolicyWeights
from tests.models import random_model
from tests.rollout.golden import EOS_IDS, differing, requests_of

RUNNER = "v2" if os.environ.get("TRITON_INTERPRET") else "v1"
"""Of vLLM's model runners; test_vllm_v2.py runs the tests of most files on the other one."""
on_v1 = pytest.mark.skipif(RUNNER == "v2", reason="does not depend on the model runner, or is of V1 only")
needs_vllm = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: pip install 'specrl[vllm]'"),
]
CONTEXT = 128
"""Tokens: an engine scores a text of as many when it starts."""
TEXT = tuple(2 + i * 7 % 50 for i in range(60))
MANY_BLOCKS = [([3 + i, *(4 + j % 50 for j in range(90))], 8) for i in range(18)]
"""Of KV: three a row for its prompt, four with its response; a MB holds 64."""


def policy(family: str, seed: int = 0):
    """A random model of sizes that vLLM's CPU kernels support. qwen3 ties its embeddings, llama has an output layer."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": CONTEXT,
    }
    return random_model(family, seed, 12.0, tie_word_embeddings=family == "qwen3", **sizes).eval()


def moved(model, seed: int, scale: float = 0.05):
    """A copy of the model with perturbed weights."""
    new = AutoModelForCausalLM.from_config(model.config).eval()
    generator = torch.Generator().manual_seed(seed)
    state = {
        name: t + scale * t.std() * torch.randn(t.shape, generator=generator) if t.dim() > 1 else t.clone()
        for name, t in model.state_dict().items()
    }
    if model.config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    new.load_state_dict(state)
    return new


def probe_of(model, tolerance: float = 1e-4) -> Probe:
    return Probe(TEXT, tuple(TransformersEngine(model, SamplingParams(EOS_IDS)).score(TEXT)), tolerance)


def spec_of(path, *, kv_mb=16, draft_tokens=8, **settings) -> EngineSpec:
    config = RolloutConfig(engine="vllm", max_new_tokens=30, **settings)
    config.kv_cache_mb, config.draft_tokens = kv_mb, draft_tokens
    config.vllm.runner = RUNNER
    return EngineSpec(model=str(path), eos_ids=EOS_IDS, rollout=config)


def start(spec):
    """A vLLM engine without vLLM's full garbage collections, each of which takes 0.5 s in a large test process."""
    with mock.patch("gc.collect"):
        return build_engine(spec)


def close(engine) -> None:
    with mock.patch("gc.collect"):
        engine.close()


def restore(engine, model) -> None:
    """Gives an engine the weights of `model` by new tensors, whatever a test left."""
    engine.updates.join("", {})
    engine.updates.route = "process"
    engine.update_weights(model.state_dict().items(), engine.weight_version + 1, probe_of(model))


def adjusted(engine, *, eos_ids=EOS_IDS, distribution=(1.0, 0, 1.0), window=6):
    """The engine with these sampling params and draft lengths, which need no other engine."""
    engine.sampling = SamplingParams(eos_ids, *distribution)
    engine.drafting.budget.window = window
    return engine


def exactly(done) -> list:
    return [(c.tokens, c.logprobs, c.finish) for c in done]


def assert_generates_as(engine, model, cases) -> None:
    """The engine's responses are those of `model`."""
    want, _ = TransformersEngine(model, SamplingParams(EOS_IDS)).generate(requests_of(cases))
    assert differing(engine.generate(requests_of(cases))[0], want, 1e-4) == []


class Recorded(PolicyWeights):
    """Keeps what it yields, so that no other tensor can reuse its address."""

    def __init__(self, policy, dtype=None):
        super().__init__(policy, dtype)
        self.walks = []

    def __iter__(self):
        self.walks.append({})
        for name, tensor in super().__iter__():
            self.walks[-1][name] = tensor
            yield name, tensor


class Incomplete(PolicyWeights):
    """Declares one weight less than the model has."""

    def metadata(self):
        return super().metadata()[:-1]
