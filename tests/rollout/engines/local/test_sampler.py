"""From hidden states to samples: the packed result, chunks, the precision of the output layer, and operators of a pass.

The kernels run on Triton's interpreter in a separate process (sampler_kernel_cases.py).
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.engines.local import sampler as module
from specrl.rollout.engines.local.sampler import Sampler, TrimmedSampler, rows_per_chunk, unpack
from specrl.rollout.noise import keyed_sample

ROOT = Path(__file__).parents[4]
TRITON = Path(sys.prefix) / "triton"
needs_triton = pytest.mark.skipif(not TRITON.is_dir(), reason="needs Triton's interpreter: make interpreter")
LAWS = [(0.0, 0, 1.0), (1.0, 0, 1.0), (0.7, 5, 1.0), (1.3, 0, 0.8), (1.0, 7, 0.5)]
VOCAB, HIDDEN = 4100, 16


def run_apart(cases, **environment):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{TRITON}{os.pathsep}{ROOT}", **environment}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/rollout/engines/local/{cases}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " skipped" not in done.stdout


@pytest.mark.long
@needs_triton
def test_the_cases_on_tritons_interpreter():
    """The interpreter must be enabled before Triton is imported."""
    run_apart("sampler_kernel_cases.py", TRITON_INTERPRET="1")


@pytest.mark.long
@needs_triton
def test_the_kernels_compile_for_a_gpu():
    run_apart("sampler_kernel_compiled.py")


def head(bias=False, kind=torch.float32):
    torch.manual_seed(0)
    return nn.Linear(HIDDEN, VOCAB, bias=bias, dtype=kind)


def fake_head(layer=nn.Linear, bias=False, kind=torch.bfloat16):
    """An output layer on a fake GPU, within FakeTensorMode."""
    made = layer(HIDDEN, VOCAB, bias=bias, device="meta")
    made.weight = nn.Parameter(torch.empty(VOCAB, HIDDEN, dtype=kind, device="cuda"))
    made.bias = nn.Parameter(torch.empty(VOCAB, dtype=kind, device="cuda")) if bias else None
    return made


def fake_asked(n, kind=torch.bfloat16):
    columns = (torch.empty(n, dtype=torch.int64, device="cuda") for _ in range(3))
    return torch.empty(n, HIDDEN, dtype=kind, device="cuda"), *columns


def asked(n, kind=torch.float32):
    g = torch.Generator().manual_seed(n)
    hidden = (torch.randn(n, HIDDEN, generator=g) * 4).to(kind)
    keys, positions = (torch.randint(0, 2**40, (n,), generator=g) for _ in range(2))
    return hidden, keys, positions, torch.randint(0, VOCAB, (n,), generator=g)


class Listen(TorchDispatchMode):
    """Records the names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.seen.append(op.name())
        return op(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(module, "LOGITS_MB", 1)


# On a CPU: bitwise equality -------------------------------------------------------------------------------------------


# Operators ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_on_cuda_a_chunk_is_a_product_and_a_draw(law, monkeypatch):
    """No sort or noise of the vocabulary's size outside the kernel, no synchronisation, and float32 logits."""
    monkeypatch.setattr(module, "free_bytes", lambda device: 0)
    with FakeTensorMode():
        draw = Sampler(fake_head(), SamplingParams(frozenset(), *law))
        given = fake_asked(100)
        assert draw.rows == 2**20 // (VOCAB * 4) == 63
        with torch.inference_mode(), Listen() as ran:
            packed = draw(*given)
            logits = draw.logits(given[0])
        with Listen() as other:
            given[1].sort()
            given[1].cpu()
    assert (packed.shape, packed.dtype, packed.device.type) == ((4, 100), torch.int32, "cuda")
    assert logits.dtype == torch.float32
    assert draw.rounds == ""
    assert ran.seen.count("specrl::keyed_sample") == 2, "two chunks"
    assert ran.seen.count("aten::mm.dtype") == 3
    views = {"aten::split.Tensor", "aten::t", "aten::numpy_T", "aten::to.dtype", "prim::device"}
    assert set(ran.seen) - views == {"specrl::keyed_sample", "aten::mm.dtype", "aten::cat"}
    assert {"aten::sort", "aten::_to_copy"} <= set(other.seen), "control: such operators are seen"


# The output layer -----------------------------------------------------------------------------------------------------


class Adapted(nn.Linear):
    def forward(self, hidden):
        return super().forward(hidden) + 1


def hooked():
    layer = fake_head()
    layer.register_forward_hook(lambda *_: None)
    return layer


def patched():
    layer = fake_head()
    layer.forward = lambda hidden: nn.Linear.forward(layer, hidden)
    return layer


def adapted():
    return fake_head(Adapted)


@pytest.mark.parametrize("layer", [hooked, patched, adapted])
def test_a_layer_that_does_more_is_called(layer, monkeypatch):
    """LoRA on the output layer must be applied; the product with its weight would omit it."""
    monkeypatch.setattr(module, "free_bytes", lambda device: 0)
    with FakeTensorMode(), torch.inference_mode():
        draw = Sampler(layer(), SamplingParams(frozenset()))
        assert draw.logits(fake_asked(3)[0]).dtype == torch.bfloat16
        assert type(draw.lm_head).__name__ in draw.rounds


def test_a_bias_counts_and_float32_stays_the_layers_own(monkeypatch):
    monkeypatch.setattr(module, "free_bytes", lambda device: 0)
    ran = {}
    for kind in (torch.float32, torch.bfloat16):
        with FakeTensorMode(), torch.inference_mode(), Listen() as listen:
            draw = Sampler(fake_head(bias=True, kind=kind), SamplingParams(frozenset()))
            assert draw.logits(fake_asked(3, kind)[0]).dtype == torch.float32
        ran[kind] = set(listen.seen) & {"aten::linear", "aten::mm.dtype", "aten::add_.Tensor"}
    assert ran == {torch.float32: {"aten::linear"}, torch.bfloat16: {"aten::mm.dtype", "aten::add_.Tensor"}}


def test_a_cpu_says_why_it_rounds():
    draw = Sampler(head(kind=torch.bfloat16), SamplingParams(frozenset()))
    assert "on CUDA only, not on cpu" in draw.rounds
    assert draw.logits(asked(3, kind=torch.bfloat16)[0]).dtype == torch.bfloat16
    whole = Sampler(head(), SamplingParams(frozenset()))
    assert whole.rounds == ""
    with torch.autocast("cpu", torch.bfloat16):
        assert "bfloat16" in whole.rounds, "what it is computed in counts, not the weights' type"


# A subset of the ids --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_a_trimmed_draw_is_the_whole_one_without_the_other_ids(law, bias):
    layer, given, ids = head(bias), asked(40), np.arange(7, VOCAB, 13)
    trimmed = TrimmedSampler(layer, SamplingParams(frozenset(), *law), len(ids))
    with torch.inference_mode():
        for _ in range(2):
            trimmed.take(ids)
            logits = layer(given[0])
            logits[:, np.setdiff1d(np.arange(VOCAB), ids)] = -torch.inf
            want = keyed_sample(logits, *given[1:3], temperature=law[0], top_k=law[1], top_p=law[2])
            draws, logprobs, _, _ = unpack(trimmed(*given))
            assert draws == want[0].tolist()
            assert logprobs == pytest.approx(want[1].tolist(), abs=1e-5)
            layer.weight.copy_(layer.weight.flip(0))  # an update, which the next `take` uses
        stale, ids = draws, ids[::-1].copy()
        assert unpack(trimmed(*given))[0] == stale, "control: nothing is followed before"


# Chunks ---------------------------------------------------------------------------------------------------------------


def test_chunks_take_what_they_may(monkeypatch):
    draw = Sampler(head(), SamplingParams(frozenset()))
    assert draw.bytes == 15 * VOCAB * 16 <= 2**20
    monkeypatch.undo()
    assert rows_per_chunk(151936) == 110
    assert rows_per_chunk(151936, free=0) == 441, "four bytes a logit, as nothing else is stored"
    assert rows_per_chunk(151936, free=64 * 2**30) == 7067
    assert rows_per_chunk(151936, free=64 * 2**30) * 151936 * 4 <= 4 * 2**30
    assert rows_per_chunk(10**9) == rows_per_chunk(10**9, free=0) == 1
