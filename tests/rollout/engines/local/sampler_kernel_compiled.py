"""Compiles the sampling kernels for an H100 without one. test_sampler.py runs this file in a separate process."""

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from specrl.rollout.engines.local import sampler_kernel

SIGNATURE = {
    **{"floors": "*fp32", "floats": "*fp32", "tokens": "*i32", "packed": "*i32"},
    **{"keys": "*i64", "positions": "*i64", "targets": "*i64", "names": "*i32"},
    **{"vocab": "i32", "blocks": "i32", "by": "fp32"},
}


def compiled(kernel, logits, **constants):
    types = {"logits": logits, **SIGNATURE}
    source = ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in constants else types[name] for name in kernel.arg_names},
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
    )
    options = {"enable_fp_fusion": False, "num_warps": 16 if kernel is sampler_kernel.search else 8}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm


@pytest.mark.parametrize("logits", ["*fp32", "*bf16"])
@pytest.mark.parametrize("scaled", [True, False])
def test_they_compile(logits, scaled):
    law = {"SCALED": scaled, "BLOCK": sampler_kernel.BLOCK}
    search = compiled(sampler_kernel.search, logits, TOP_K=50, TOP_P=0.3, **law)["ptx"]
    part = compiled(sampler_kernel.part, logits, NOISE=True, CUT=True, NAMED=True, **law)["ptx"]
    assert compiled(sampler_kernel.part, logits, NOISE=False, CUT=False, NAMED=False, **law)["cubin"]
    for one in ({"WIDTH": 1, "blocks": 1}, {"WIDTH": 64}):  # Triton treats a 1 as a constant
        assert compiled(sampler_kernel.combine, logits, SCALED=scaled, CUT=True, NAMED=scaled, **one)["cubin"]
    assert "0d3FD3333333333333" in search, "top_p in float64, as in noise.py"
    for ptx in (search, part):
        assert ("div.rn.f32" in ptx) == scaled
        assert "div.full" not in ptx
        assert "fma.rn.f32" not in ptx, "products are rounded before sums"
        assert ".local" not in ptx
