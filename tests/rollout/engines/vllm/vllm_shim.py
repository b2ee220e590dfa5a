"""A pytest plugin that runs all logic of vLLM's Model Runner V2 on a CPU, slowly, with Triton's interpreter.

Load it with `-p tests.rollout.engines.vllm.vllm_shim`, before anything imports vLLM.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # several workers on one node; vLLM reads it once per process

import multiprocessing

import triton.backends

from tests.interpreter import quicken, trust_sums


class _Driver:
    @staticmethod
    def is_active():
        return True


class _Backend:
    driver, compiler = _Driver, None


triton.backends.backends["cpu"] = _Backend  # vLLM considers Triton available if a driver is active

if multiprocessing.parent_process():  # an engine core: its workers are forked, as on a GPU, and import nothing again
    started = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: started("fork" if method == "spawn" else method)

quicken()
trust_sums()
