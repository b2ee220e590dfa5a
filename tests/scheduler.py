"""In which order and in which process tests run: hooks of pytest and pytest-xdist, which conftest.py has."""

import pytest

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
