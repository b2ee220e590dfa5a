"""What all tests share: threads, tiny models, and the order in which files run."""

import os
from functools import cache

os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # as specrl.config.run does; read when torch is imported
# One thread here and in processes that tests start: sums of floats depend on the number of threads, and runs are
# compared bit for bit. Read when torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"  # no test needs the hub, here as in CI; read when huggingface_hub is imported

import pytest
import torch

from tests.models import VOCAB, random_model
from tests.scheduler import pytest_collection_modifyitems, pytest_xdist_make_scheduler  # noqa: F401


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

    def build(family="llama", seed=0, *, vocab=VOCAB, scale=15.0):
        return random_model(family, seed, scale, vocab_size=vocab)

    return build


@pytest.fixture(scope="session")
def tiny():
    """tiny(family): one shared model of each family; tests must not change its weights."""
    return cache(random_model)
