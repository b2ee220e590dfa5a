"""Phase 3: plain decoding by the engine and by what a user would run instead, model.generate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from benchmarks.gpu import model as models
from benchmarks.gpu.run import Step
from benchmarks.gpu.timing import Context, wall
from specrl.rollout.config import RolloutConfig
from specrl.rollout.engines.local.engine import TransformersEngine


def steps(context: Context) -> Iterator[Step]:
    sizes = context.sizes
    model = models.build(sizes.policy, context.device, torch.bfloat16)
    prompts = models.prompts(sizes)
    (rows, tokens), *more = sizes.generate_rows
    engine = TransformersEngine(model, models.SAMPLING, limits=RolloutConfig(rows_per_batch=rows))
    engine_run = partial(by_engine, engine, prompts[:rows])
    dynamic = partial(by_generate, model, prompts[:rows])
    yield Step(f"engine/{rows} rows", partial(timed, context, engine_run, rows, tokens))
    yield Step(f"generate/{rows} rows", partial(timed, context, dynamic, rows, tokens))
    for count, longest in more:
        run = partial(by_generate, model, prompts[:count])
        yield Step(f"generate/{count} rows", partial(timed, context, run, count, longest))
    for name, run in (("engine", engine_run), ("generate", dynamic)):
        for allowed in (True, False):
            measure = partial(timed, context, run, rows, sizes.cudnn_tokens)
            yield Step(f"cudnn_{'on' if allowed else 'off'}/{name}", partial(with_cudnn, context, allowed, measure))
    static = partial(by_generate, model, prompts[:rows], cache="static")
    measure = partial(timed, context, static, rows, tokens, warm=tokens)
    yield Step(f"generate_static/{rows} rows", measure, needs=sizes.compile_s)
    for allowed in (True, False):
        shorter = partial(timed, context, static, rows, sizes.cudnn_tokens, warm=sizes.cudnn_tokens)
        run = partial(with_cudnn, context, allowed, shorter)
        yield Step(f"cudnn_{'on' if allowed else 'off'}/generate_static", run, needs=sizes.compile_s)


def by_engine(engine: TransformersEngine, prompts: list[list[int]], tokens: int) -> None:
    engine.generate(models.plain(prompts, [tokens] * len(prompts), visit=0))


def by_generate(model: nn.Module, prompts: list[list[int]], tokens: int, cache: str | None = None) -> None:
    """model.generate at temperature 1. Args: cache: of transformers' implementations; None takes its default."""
    ids = torch.tensor(prompts, device=model.device)
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, cache_implementation=cache, **sampling
    )
    if out.shape[1] != ids.shape[1] + tokens:
        raise RuntimeError(f"generate gave {out.shape[1] - ids.shape[1]} tokens instead of {tokens}")


def timed(context: Context, run, rows: int, tokens: int, warm: int = 8) -> dict:
    """Seconds of `tokens` tokens for each row, after a warm-up of `warm` tokens that may compile."""
    first = wall(partial(run, min(warm, tokens)), context.device)
    seconds = wall(partial(run, tokens), context.device)
    result = {"tokens": tokens, "seconds": round(seconds, 3), "warm_up_s": round(first, 3)}
    return result | {"seconds_a_token": seconds / rows / tokens, "ms_a_step": round(1e3 * seconds / tokens, 3)}


def with_cudnn(context: Context, allowed: bool, measure) -> dict:
    """The measurement with cuDNN's attention allowed or not, around whatever the measured code decides itself."""
    context.needs_cuda("cuDNN's attention")
    with cudnn(allowed):
        return measure()


@contextmanager
def cudnn(allowed: bool) -> Iterator[None]:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(allowed)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
