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


INDEPENDENT = ("test_scripts.py", "test_research.py", "test_examples.py", "test_precision.py", "test_options.py")
"""Files whose tests share nothing that takes long to make, so that they run in any process."""
LONGEST_FIRST = (
    *("test_vllm_v2.py", "test_workers.py", "test_ray.py", "test_vllm.py", "test_two_processes.py"),
    *("test_identity.py", "test_ppo.py", "test_grpo.py", "test_scripts.py"),
)


def pytest_collection_modifyitems(items):
    """The longest files come first, and files whose tests are independent last, so that processes end together."""
    names = (*LONGEST_FIRST, "", *INDEPENDENT)
    items.sort(key=lambda item: names.index(item.path.name if item.path.name in names else ""))


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config, log):
    """A file's tests share a process, so that what a module starts is started once; those of INDEPENDENT need none.

    The groups of `--dist loadgroup` have no effect with pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            path = nodeid.partition("::")[0]
            return nodeid if path.endswith(INDEPENDENT) else path

    return ByFile(config, log)
