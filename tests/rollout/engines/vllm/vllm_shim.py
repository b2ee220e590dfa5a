"""A pytest plugin that lets vLLM's Model Runner V2 run on a CPU, through Triton's interpreter: slow, but all its logic.

Load it with `-p tests.rollout.engines.vllm.vllm_shim`, before anything imports vLLM.
"""

import os
from functools import cache
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # several workers on one node; vLLM reads it once a process

import triton.backends
import triton.language as tl
from triton.runtime import interpreter


class _Driver:
    @staticmethod
    def is_active():
        return True


class _Backend:
    driver, compiler = _Driver, None


triton.backends.backends["cpu"] = _Backend  # vLLM takes Triton for present when a driver is active

# The interpreter gives Triton's language its meaning anew at every call of a kernel and of each function in it: once is
# enough where nothing is compiled. It checks every sum of integers for overflow, and lists all types at each use of one.
interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()
object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)
_of_scalar = cache(interpreter._get_np_dtype)
interpreter._get_np_dtype = lambda dtype: _of_scalar(tl.uint64 if dtype.scalar.is_ptr() else dtype.scalar)
