"""Phase 8: the production engine. vLLM with its own speculation and with specrl's drafts, weights, and sleep.

Each engine has a process of its own. All of them have the rows of the first line of phase 5, with fresh noise.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from benchmarks.gpu import model as models
from benchmarks.gpu.rollouts import Rollouts
from benchmarks.gpu.run import Absent, Step, installed
from benchmarks.gpu.timing import Context
from benchmarks.process import Process
from benchmarks.vllm_baseline import NGRAM
from specrl.rollout.engines.local.head import Head

MEMORY = 0.45
"""Share of the GPU that an engine takes, as by default beside a trainer."""
HEAD_TOKENS = 4
"""Tokens that vLLM's own speculation lets a head draft in each step."""
DEPTHS = (1, 2)
"""Steps ahead for which the head is trained."""
STOCK = ("plain", "ngram", "head")


def steps(context: Context) -> Iterator[Step]:
    if not installed("vllm"):
        yield Step("vllm", absent)
        return
    with ExitStack() as stack:
        bench = Engines(context, stack)
        yield Step("policy", bench.prepare)
        for method in STOCK:
            yield Step(f"stock vllm/{method}", partial(bench.stock, method))
        yield Step("host drafts/plain", partial(bench.line, "host", plain=True))
        yield Step("host drafts/texts", partial(bench.line, "host", texts=True))
        for route in ("process", "memory"):
            yield Step(f"weights/{route}", partial(bench.update, route))
        yield Step("sleep", bench.nap)
        yield Step("device drafts/texts", partial(bench.line, "device", texts=True))
        yield Step("head/head", partial(bench.line, "head"))
        yield Step("head/head and texts", partial(bench.line, "head", texts=True))


def absent() -> None:
    raise Absent("vllm is not installed")


class Engines:
    """The policy and a head on disk, the older policy's texts, and one engine at a time. Args: stack: closes it."""

    def __init__(self, context: Context, stack: ExitStack):
        self.context, self._stack = context, stack
        self.rows, self.longest = context.sizes.rollouts[0]
        self.prompts = models.prompts(context.sizes)[: self.rows]
        self.lengths = models.caps(self.rows, self.longest)
        self.old: list[list[int]] = []
        self.folder = stack.enter_context(tempfile.TemporaryDirectory())
        self._kind = ""
        self._open = stack.enter_context(ExitStack())
        self._process: Process | None = None

    def prepare(self) -> dict:
        """Writes the policy, a head that was trained on the older policy's texts, and these texts."""
        bench = Rollouts(self.context)
        result = bench.prepare()
        bench.write_old(self.rows, self.longest)
        self.old = bench.old[self.longest]
        bench.model.save_pretrained(f"{self.folder}/policy")
        head = Head.of(bench.model)
        loss = train(head, bench.model, self.prompts, self.old, self.context.sizes.head_steps)
        head.save_pretrained(f"{self.folder}/head")
        del bench, head
        if self.context.cuda:
            torch.cuda.empty_cache()
        return result | {"head_loss": round(loss, 3)}

    def stock(self, method: str) -> dict:
        """vLLM as it comes, with one of its methods of speculation; it counts its own steps."""
        self.context.needs_cuda("vLLM's defaults")
        settings: dict[str, Any] = {"model": f"{self.folder}/policy", "gpu_memory_utilization": MEMORY}
        settings |= {"skip_tokenizer_init": True, "generation_config": "vllm", "disable_log_stats": False}
        if method == "ngram":
            settings["speculative_config"] = {"method": "ngram_gpu", **NGRAM}
        elif method == "head":
            head = {"method": "eagle", "model": f"{self.folder}/head", "num_speculative_tokens": HEAD_TOKENS}
            settings["speculative_config"] = head
        self._close()
        process = Process("benchmarks.vllm_baseline", settings=settings)
        try:
            pairs = zip(self.prompts, self.lengths, strict=True)
            rows = [{"prompt": prompt, "max_tokens": length} for prompt, length in pairs]
            sampling_params = {"temperature": 1.0, "ignore_eos": True}
            process.ask(rows=rows, sampling_params=sampling_params)
            done = process.ask(rows=rows, sampling_params=sampling_params)
        finally:
            process.close()
        tokens = sum(map(len, done["tokens"]))
        counts = {"passes": done["steps"], "accepted": done["accepted"]}
        return {"tokens": tokens, "seconds": done["seconds"], "seconds_a_token": done["seconds"] / tokens} | counts

    def line(self, kind: str, *, texts: bool = False, plain: bool = False) -> dict:
        """A rollout by specrl's engine. Args: texts: draft from the older policy's; plain: without any draft."""
        old = self.old if texts else None
        return self._engine(kind).ask(do="rollout", prompts=self.prompts, lengths=self.lengths, old=old, plain=plain)

    def update(self, route: str) -> dict:
        if not installed("accelerate"):
            raise Absent("not installed: accelerate")
        return self._engine("host").ask(do="update", route=route)

    def nap(self) -> dict:
        self.context.needs_cuda("sleep")
        return self._engine("asleep").ask(do="nap")

    def _engine(self, kind: str) -> Process:
        """The engine of a kind, which replaces the one before."""
        if kind != "host":
            self.context.needs_cuda({"device": "drafts on the device", "head": "a head beside texts"}.get(kind, kind))
        if kind != self._kind or self._process is None:
            self._close()
            vllm = {"memory_utilization": MEMORY, "sleep": kind == "asleep"}
            vllm |= {"speculator": "device"} if kind == "device" else {}
            drafter = f"{self.folder}/head" if kind == "head" else ""
            shape = {"folder": f"{self.folder}/policy", "rows": self.rows, "longest": self.longest}
            self._process = Process("benchmarks.gpu.engine_process", **shape, drafter=drafter, vllm=vllm)
            self._kind = kind
            self._open.callback(self._process.close)
        return self._process

    def _close(self) -> None:
        self._open.close()
        self._process = None


def train(head: Head, policy: Any, prompts: list[list[int]], texts: list[list[int]], steps: int) -> float:
    """Distils the policy's tokens into a head, a text at a time; returns the mean loss of a token in the last step."""
    policy.requires_grad_(False)
    optimizer = torch.optim.Adam(head.parameters(), 1e-3)
    loss = torch.zeros(())
    for step in range(steps):
        row = step % len(texts)
        ids = torch.tensor([[*prompts[row], *texts[row]]], device=policy.device)
        state = policy.base_model(ids, use_cache=False).last_hidden_state
        losses = []
        for depth in DEPTHS:
            state = head(ids[:, depth:-1], state[:, : ids.shape[1] - 1 - depth]).last_hidden_state
            losses.append(cross_entropy(head.get_output_embeddings()(state)[0].float(), ids[0, depth + 1 :]))
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()
