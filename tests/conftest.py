"""Tiny random models, built in memory: a law that is neither flat nor degenerate, and no downloads."""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # as specrl.config.run does; read when torch is imported
# Sums of floats differ in their last bits between numbers of threads, and runs in this process are compared bit for bit
# with runs in processes that tests start. Read when torch is imported, here and there.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"  # no test needs the hub, here as in CI; read when huggingface_hub is imported

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

VOCAB = 61


def _shape(vocab, **more):
    return {
        "vocab_size": vocab,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "pad_token_id": None,
        **more,
    }


def _config(family: str, vocab: int):
    if family == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
        return GPT2Config(vocab_size=vocab, bos_token_id=0, eos_token_id=1, **sizes)
    return {
        "qwen3": lambda: Qwen3Config(**_shape(vocab, head_dim=8)),
        "qwen2": lambda: Qwen2Config(**_shape(vocab)),
        "llama": lambda: LlamaConfig(**_shape(vocab)),
        "mistral": lambda: MistralConfig(**_shape(vocab, sliding_window=6)),
    }[family]()


def _build(family: str = "llama", seed: int = 0, *, vocab: int = VOCAB, scale: float = 15.0):
    """A model with random weights, its matrices multiplied by `scale`, in training mode as a trainer holds it."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(_config(family, vocab))
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(scale)
    return model.train()


@pytest.fixture(autouse=True)
def autograd():
    """Fails the test that leaves autograd off in this process: every later one that needs a gradient would fail."""
    yield
    enabled = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    torch.set_grad_enabled(True)
    assert enabled, "this test left autograd disabled"


@pytest.fixture(scope="session")
def build_model():
    """build_model(family, seed, vocab=61, scale=15.0): a new model of llama, mistral, qwen2, qwen3 or gpt2."""
    return _build


@pytest.fixture(scope="session")
def tiny(build_model):
    """tiny(family): one shared model of each family; tests must not change its weights."""
    built = {}

    def get(family: str):
        if family not in built:
            built[family] = build_model(family)
        return built[family]

    return get


APART = ("test_scripts.py", "test_research.py", "test_examples.py", "test_precision.py", "test_options.py")
"""Files whose tests share nothing that takes time to make."""
LONGEST_FIRST = (
    *("test_vllm_v2.py", "test_workers.py", "test_ray.py", "test_vllm.py", "test_two_processes.py"),
    *("test_identity.py", "test_ppo.py", "test_grpo.py", "test_scripts.py"),
)


def pytest_collection_modifyitems(items):
    """Gives a file's tests to one process, so that what a module starts is started once, and the longest files first.

    `--dist loadgroup` sends the rest to whichever process is free, tests of files in APART one by one. The last of them
    are short, so that both processes end at about the same time.
    """
    for item in items:
        if item.path.name not in APART:
            item.add_marker(pytest.mark.xdist_group(item.path.relative_to(item.config.rootpath).as_posix()))
    names = (*LONGEST_FIRST, "", *APART)
    items.sort(key=lambda item: names.index(item.path.name if item.path.name in names else ""))
