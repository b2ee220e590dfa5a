"""Fixtures of vLLM's tests: engines start slowly, so tests share them and restore what they change."""

import os
from unittest import mock

import pytest
import torch

from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.engines.local.engine import TransformersEngine
from tests.rollout.engines.vllm.engines import adjusted, close, exactly, policy, restore, spec_of, start
from tests.rollout.engines.vllm.servers import Served, arguments, logprobs, start_served, tokens
from tests.rollout.golden import EOS_IDS, prompts_and_caps, requests_of


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """saved(family): a model and its directory."""
    made = {}

    def get(family: str):
        if family not in made:
            model, path = policy(family), tmp_path_factory.mktemp(family)
            model.save_pretrained(path)
            made[family] = model, path
        return made[family]

    return get


@pytest.fixture(scope="session")
def engines(saved):
    """engines(family, **settings): a vLLM engine of these settings with the weights of that family's model."""
    made = {}

    def get(family: str, **settings):
        name = repr((family, settings))
        if name not in made:
            made[name] = start(spec_of(saved(family)[1], **settings))
        return made[name]

    yield get
    for engine in reversed(made.values()):  # vLLM's first engine in a process owns the process group
        close(engine)


@pytest.fixture(scope="session")
def engine_of(engines):
    """engine_of(family, eos_ids=, distribution=, window=, **settings): see `engines` and `adjusted`."""

    def get(family: str = "qwen3", eos_ids=EOS_IDS, distribution=(1.0, 0, 1.0), window=6, **settings):
        engine = engines(family, **settings)
        return adjusted(engine, eos_ids=eos_ids, distribution=distribution, window=window)

    return get


@pytest.fixture
def updated(saved, engine_of):
    """updated(family): an engine whose weights the test changes, and its model. To be named before `monkeypatch`."""
    used = []

    def get(family: str = "qwen3", **settings):
        model, _ = saved(family)
        used.append((engine_of(family, **settings), model))
        return used[-1]

    yield get
    for engine, model in used:
        restore(engine, model)


@pytest.fixture(scope="session")
def golden(saved):
    """golden(family, distribution): 26 requests without drafts and the transformers engine's responses."""
    made = {}

    def get(family: str = "qwen3", distribution=(1.0, 0, 1.0)):
        if (family, distribution) not in made:
            cases = prompts_and_caps(26)
            engine = TransformersEngine(saved(family)[0], SamplingParams(EOS_IDS, *distribution))
            completions, stats = engine.generate(requests_of(cases))
            assert stats.ties == 0, "a near tie would make the comparison depend on rounding; choose another seed"
            made[family, distribution] = cases, exactly(completions)
        return made[family, distribution]

    return get


@pytest.fixture(scope="session")
def some(golden):
    """some(distribution): the first 7 rows of `golden`, one for each kind of draft."""
    return lambda **options: tuple(part[:7] for part in golden(**options))


@pytest.fixture
def memory_files(monkeypatch):
    """Descriptors of the files in memory that carried weights in this test."""
    made, create = [], os.memfd_create
    monkeypatch.setattr(os, "memfd_create", lambda name: made.append(create(name)) or made[-1])
    return made


@pytest.fixture
def link(updated, monkeypatch):
    """(link, model): see Link. The model is that of the vLLM engine."""
    from tests.rollout.engines.vllm.links import Link

    engine, model = updated()
    connected = Link(engine, monkeypatch)
    yield connected, model
    connected.delivery.unlink()


@pytest.fixture
def loads(monkeypatch):
    """The tensors that vLLM's model received, by name, as one dict per call."""
    from vllm.model_executor.models.llama import LlamaForCausalLM
    from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

    received = []
    for kind in (Qwen3ForCausalLM, LlamaForCausalLM):

        def load_weights(self, weights, load=kind.load_weights):
            received.append({})

            def recorded():
                for name, tensor in weights:
                    received[-1][name] = tensor
                    yield name, tensor

            return load(self, recorded())

        monkeypatch.setattr(kind, "load_weights", load_weights)
    return received


@pytest.fixture(scope="session")
def served(saved):
    """A server on this model runner."""
    from specrl.rollout.engines.vllm.engine import shut_down

    borrowed = torch.distributed.is_initialized()
    model, path = saved("qwen3")
    llm = start_served(path, arguments())
    yield Served(llm, model)
    with mock.patch("gc.collect"):
        shut_down(llm, borrowed)


@pytest.fixture(scope="session")
def requests():
    return requests_of(prompts_and_caps(26))


@pytest.fixture(scope="session")
def plain(served, requests):
    """The tokens, log-probs and number of steps without texts."""
    outputs = served.ask(requests)
    return tokens(outputs), [logprobs(output) for output in outputs], served.steps
