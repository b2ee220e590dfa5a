"""Phase 5: rollouts, plain and with drafts from an older policy's texts, and generate's seconds a token."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from unittest.mock import patch

import torch

import specrl.rollout.engines.local.engine as local
from benchmarks.gpu import model as models
from benchmarks.gpu.compare import differences
from benchmarks.gpu.run import Step
from benchmarks.gpu.timing import Context, synchronize
from benchmarks.gpu.watch import Watched, profiled
from specrl.rollout.config import RolloutConfig
from specrl.rollout.types import Completion, EngineStats, Request

MODES = ("off", "replay 0", "replay 1")
"""Plain decoding with fresh noise; drafts with the same noise; drafts with the noise of the old texts."""
SKIP, PROFILED = 4, 4  # passes


def steps(context: Context) -> Iterator[Step]:
    bench = Rollouts(context)
    yield Step("policy", bench.prepare)
    if bench.policies is None:
        return
    for rows, longest in context.sizes.rollouts:
        name = f"{rows} rows x {longest}"
        yield Step(f"{name}/old_text_s", partial(bench.write_old, rows, longest))
        for mode in MODES[: 2 if longest > context.sizes.rollouts[0][1] else 3]:
            yield Step(f"{name}/{mode}", partial(bench.line, mode, rows, longest))
            yield Step(f"{name}/{mode} profile", partial(bench.profile, mode, rows, longest))
        if rows >= local.OVERLAP:
            yield Step(f"{name}/replay 0, one cohort", partial(bench.one_cohort, rows, longest))


class Rollouts:
    """The policy, the older one's texts, and rollouts of as many rows as asked for."""

    def __init__(self, context: Context):
        self.context, self.prompts = context, models.prompts(context.sizes)
        self.model = models.build(context.sizes.policy, context.device, torch.bfloat16)
        self.policies: models.Policies | None = None
        self.old: dict[int, list[list[int]]] = {}
        self.plain: dict[tuple[int, int], list[Completion]] = {}

    def prepare(self) -> dict:
        self.policies = models.policies(self.model, self.engine(16), self.context.sizes)
        names = ("entropy", "accepted_unchanged", "accepted", "drift")
        return {name: round(getattr(self.policies, name), 4) for name in names}

    def engine(self, rows: int) -> local.TransformersEngine:
        """A new one, whose budget has seen nothing."""
        limits = RolloutConfig(rows_per_batch=rows)
        return local.TransformersEngine(self.model, models.SAMPLING, drafting=Watched(), limits=limits)

    def write_old(self, rows: int, longest: int) -> float:
        """Seconds in which the older policy wrote what is not there yet of the rows' old texts."""
        old, began = self.old.setdefault(longest, []), time.perf_counter()
        left = slice(len(old), rows)
        if len(old) < rows:
            with self.policies.older():
                lengths = models.caps(rows, longest)
                asked = models.plain(self.prompts[:rows], lengths, visit=0)[left]
                old += [c.tokens for c in self.engine(len(asked)).generate(asked)[0]]
        return round(time.perf_counter() - began, 1)

    def requests(self, mode: str, rows: int, longest: int) -> list[Request]:
        lengths, visit = models.caps(rows, longest), int(mode != "replay 1")
        asked = models.plain(self.prompts[:rows], lengths, visit)
        return asked if mode == "off" else models.drafted(asked, self.old[longest][:rows])

    def line(self, mode: str, rows: int, longest: int) -> dict:
        """One rollout and what it took."""
        engine, requests = self.engine(rows), self.requests(mode, rows, longest)
        cuda = self.context.cuda
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        synchronize(self.context.device)
        began = time.perf_counter()
        done, stats = engine.generate(requests)
        seconds = time.perf_counter() - began
        result = figures(done, stats, seconds) | {"limits": {"rows_per_batch": engine.limits.rows_per_batch}}
        result["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2) if cuda else None
        for rival in ("generate", "vllm"):
            seconds_a_token = self.context.figure(rival, rival, f"{rows} rows", "seconds_a_token")
            result[f"{rival}_seconds_a_token"] = seconds_a_token
        if mode == "off":
            self.plain[rows, longest] = done
        elif mode == "replay 0" and (rows, longest) in self.plain:
            result["against_off"] = differences(self.plain[rows, longest], done)
        return result

    def one_cohort(self, rows: int, longest: int) -> dict:
        """The host waits for every pass: what two cohorts are worth."""
        with patch.object(local, "OVERLAP", rows + 1):
            return self.line("replay 0", rows, longest)

    def profile(self, mode: str, rows: int, longest: int) -> dict:
        """A few passes near the start of the rollout: how long the device worked in them."""
        requests = self.requests(mode, rows, longest)
        return profiled(self.context, self.engine(rows), requests, SKIP, PROFILED)


def figures(done: Sequence[Completion], stats: EngineStats, seconds: float) -> dict:
    tokens = sum(len(c.tokens) for c in done)
    parts = {name: round(value, 3) for name, value in asdict(stats).items() if name.endswith("_s") and value}
    result = {"rows": len(done), "tokens": tokens, "seconds": round(seconds, 3), "tokens_a_second": tokens / seconds}
    result |= {"seconds_a_token": seconds / tokens, "passes": stats.passes, "longest": max(len(c.tokens) for c in done)}
    result |= {"reused": sum(sum(c.reused) for c in done) / tokens, "drafted": stats.drafted, "parts": parts}
    result["accepted_of"] = {name: round(ok / all_, 3) for name, (all_, ok) in stats.sources.items() if all_}
    return result | {"rest_s": round(seconds - sum(parts.values()), 3)}
