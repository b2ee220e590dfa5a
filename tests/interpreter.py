"""Triton's interpreter, made quick enough for tests. Imported before any kernel runs, with TRITON_INTERPRET=1."""

from functools import cache
from types import SimpleNamespace

import triton.language as tl
from triton.runtime import interpreter


def quicken() -> None:
    """Takes out what the interpreter does again and again: once is enough where nothing is compiled.

    At every call of a kernel, and of each function in it, it gives Triton's language its meaning anew; and it lists all
    types whenever it looks one up.
    """
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda fn: SimpleNamespace(restore=lambda: None)
    of_scalar = cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda dtype: of_scalar(tl.uint64 if dtype.scalar.is_ptr() else dtype.scalar)


def trust_sums() -> None:
    """Integers are not looked at for overflow, as on a GPU: for kernels that are not ours."""
    object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)
