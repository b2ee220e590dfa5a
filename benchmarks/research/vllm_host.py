"""Processor time of the hooks in vLLM's step, without vLLM.

    python -m benchmarks.research.vllm_host rows=[64,256,512] out=FILE

Rolls out the known texts of benchmarks/research/host.py as Model Runner V1 would: each step `sample` verifies every
row's draft and `propose` names the next ones. The model takes no time, and the draw only reads the texts. Reports
thread time in microseconds a row, of steps in which nearly all rows take part. `planned_us_a_row` is the same where
the drafts enter at vLLM's scheduler (rollout/engines/vllm/planned.py): workers sample and accept, and the host gets
what they accepted. `device_us_a_row` is the host's part of drafts on the device
(rollout/engines/vllm/scheduler.py): the calls of vLLM's scheduler between steps.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsLists

from benchmarks.research import host
from specrl.config import load as cli
from specrl.rollout.drafting.contexts import ContextTable
from specrl.rollout.drafting.drafting import Drafting
from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.engines.vllm import v1
from specrl.rollout.engines.vllm.batch import LogprobBuffer, VLLMRow
from specrl.rollout.engines.vllm.flow import Flow
from specrl.rollout.engines.vllm.logits import LogitsBudget
from specrl.rollout.engines.vllm.planned import PlannedAdapter
from specrl.rollout.engines.vllm.planned_worker import WorkerDrafts
from specrl.rollout.engines.vllm.scheduler import DraftLengths, set_lengths
from specrl.rollout.sections import doc
from specrl.rollout.verify import accept_exact

LAW = SamplingParams(host.EOS_IDS)
DRAFT_TOKENS = 32
ROOM = 1 << 20
"""Draft tokens that a step has room for: no bound."""


@dataclass
class VLLMHostConfig:
    rows: list[int] = doc([64, 512], "rows of a batch, in groups of 8; each is a line")
    tokens: int = doc(1500, "mean length of a response")
    agreement: float = doc(0.97, "share of a text's tokens that are those of the sample_index's old text")
    repeats: int = doc(3, "rollouts a line; the fastest counts")
    out: str = doc("", "write the lines to this JSON file")


class Clock:
    """Thread seconds by part of the step that is on."""

    def __init__(self):
        self.seconds: dict[str, float] = {}

    def timed(self, part: str, function):
        """The function, its time added to the part."""

        def call(*args, **terms):
            began = time.thread_time()
            found = function(*args, **terms)
            self.seconds[part] = self.seconds.get(part, 0.0) + time.thread_time() - began
            return found

        return call


class Rollout:
    """One rollout of known texts."""

    def __init__(self, config: host.HostConfig, made: host.Work):
        self.clock, self.truths = Clock(), made.truths
        requests = [row.request for row in host.requested(config, made)]
        rows = {f"request-{i}": VLLMRow(request, sampling=LAW) for i, request in enumerate(requests)}
        width = max(map(len, made.truths)) + DRAFT_TOKENS + 1
        self.texts = torch.tensor([[*text, *[host.EOS] * (width - len(text))] for text in made.truths])
        drafting = Drafting(host.Unhurried(padded=False), ContextTable())
        drafting.attach(host.Policy())
        drafting.contexts.learn(made.others)
        drafting.begin(requests)
        drafting.propose = self.clock.timed("asking", drafting.propose)
        self.flow = Flow(
            drafting=drafting,
            draft_tokens=DRAFT_TOKENS,
            budget=LogitsBudget(ROOM),
            rows=rows,
            logprobs=LogprobBuffer([*rows.values()]),
        )
        self.adapter = v1.V1Adapter(flow=self.flow, chunk=ROOM)
        v1.packed_sample = self.clock.timed("draw", self.draw)  # the texts are known, so no logits are sampled
        self.steps: list[tuple[int, dict[str, float]]] = []
        """Rows of each step, and its seconds by part."""

    def run(self) -> None:
        rows, drafting, clock = self.flow.rows, self.flow.drafting, self.clock
        sample, propose = clock.timed("sample", self.adapter.sample), clock.timed("propose", self.adapter.propose)
        drafts, asking = dict.fromkeys(rows, ()), None
        while names := [name for name, row in rows.items() if row.finish is None]:
            clock.seconds = {}
            runner, metadata, logits = batch(names, [drafts[name] for name in names])
            sampled = sample(runner, logits, metadata).sampled_token_ids.tolist()
            given = propose([[token for token in row if token >= 0] for row in sampled])
            drafts = dict(zip(names, given, strict=True))
            tokens, stood = len(logits), sum(token >= 0 for row in sampled for token in row)
            drafting.budget.observe_pass(
                tokens, host.cost(len(names), tokens), len(names), emitted=stood, asking=asking
            )
            asking = drafting.asking
            self.steps.append((len(names), clock.seconds))
        if [row.tokens for row in rows.values()] != self.truths:
            raise RuntimeError("the hooks gave other texts than were drawn")

    def run_planned(self) -> None:
        """The same drafts by way of vLLM's scheduler."""
        adapter, clock = PlannedAdapter(flow=self.flow, drafter_share=0.0), self.clock
        accept, propose = clock.timed("sample", adapter.accept), clock.timed("propose", adapter.propose)
        rows, drafting = self.flow.rows, self.flow.drafting
        numbers = {name: i for i, name in enumerate(rows)}
        plan = {}
        asking = None
        while names := [name for name, row in rows.items() if row.finish is None]:
            clock.seconds = {}
            sampled = [self._accepted(numbers[name], rows[name], plan.get(name, ())) for name in names]
            tokens, emitted = sum(1 + len(plan.get(name, ())) for name in names), sum(map(len, sampled))
            accept(
                SimpleNamespace(total_num_scheduled_tokens=tokens, scheduled_spec_decode_tokens=plan),
                SimpleNamespace(req_ids=names, sampled_token_ids=sampled, logprobs=logprobs_of(sampled)),
            )
            proposed = propose(WorkerDrafts(names, [], {}))
            plan = {name: draft for name, draft in zip(names, proposed.draft_token_ids, strict=True) if draft}
            drafting.budget.observe_pass(
                tokens, host.cost(len(names), tokens), len(names), emitted=emitted, asking=asking
            )
            asking = drafting.asking
            self.steps.append((len(names), clock.seconds))
        if [row.tokens for row in rows.values()] != self.truths:
            raise RuntimeError("the adapter gave other texts than were sampled")

    def _accepted(self, number: int, row: VLLMRow, draft: Sequence[int]) -> list[int]:
        """What a worker samples for a row and accepts."""
        first = len(row.tokens)
        sampled = self.texts[number, first : first + len(draft) + 1].tolist()
        return sampled[: accept_exact(sampled, draft) + 1]

    def draw(self, logits: Tensor, keys: Tensor, positions: Tensor, targets: Tensor, *law: float) -> Tensor:
        """As packed_sample: keys are the numbers of the rows."""
        filled = torch.full((len(keys),), 0.5).view(torch.int32)
        return torch.stack([self.texts[keys, positions].int(), *[filled] * 3])


def logprobs_of(sampled: Sequence[Sequence[int]]) -> LogprobsLists:
    """Log-probs of 0 for these tokens."""
    starts = [0, *accumulate(map(len, sampled))]
    zeros = np.zeros((starts[-1], 1), np.float32)
    return LogprobsLists(zeros.astype(np.int32), zeros, zeros[:, 0], starts)


def batch(names: Sequence[str], drafts: Sequence[Sequence[int]]) -> tuple[SimpleNamespace, SimpleNamespace, Tensor]:
    """The runner's state in a step, the metadata of its drafts, and logits of a vocabulary of one."""
    counts = list(map(len, drafts))
    fed = torch.tensor([token for draft in drafts for token in draft], dtype=torch.int32)
    runner = SimpleNamespace(
        input_batch=SimpleNamespace(req_ids=list(names)),
        discard_request_mask=SimpleNamespace(np=np.zeros(len(names), dtype=bool)),
        query_start_loc=SimpleNamespace(np=np.cumsum([0, *(count + 1 for count in counts)], dtype=np.int32)),
    )
    metadata = SimpleNamespace(num_draft_tokens=counts, draft_token_ids=fed) if len(fed) else None
    return runner, metadata, torch.zeros(len(fed) + len(names), 1)


def line(rows: int, config: VLLMHostConfig) -> dict:
    """The fastest rollout: microseconds a row of a step while nearly all rows go on."""
    texts = host.HostConfig(rows=rows, tokens=config.tokens, agreement=config.agreement)
    made = host.work(texts)
    runs = {}
    for name in ("run", "run_planned"):
        repeats = [_once(texts, made, name) for _ in range(config.repeats)]
        runs[name] = min(repeats, key=lambda found: found["us_a_row"]["all"])
    return {**runs["run"], "planned_us_a_row": runs["run_planned"]["us_a_row"]}


def _once(config: host.HostConfig, made: host.Work, way: str) -> dict:
    rollout = Rollout(config, made)
    getattr(rollout, way)()
    full = [(rows, seconds) for rows, seconds in rollout.steps if rows > 0.9 * config.rows]

    def us(*parts: str, less: Sequence[str] = ()) -> float:
        """Median microseconds a row of some parts, without others that are within them."""
        got = [sum(s.get(p, 0.0) for p in parts) - sum(s.get(p, 0.0) for p in less) for _, s in full]
        return round(1e6 * statistics.median(g / rows for g, (rows, _) in zip(got, full, strict=True)), 2)

    stats, row_steps = rollout.flow.stats, sum(rows for rows, _ in rollout.steps)
    return {
        "rows": config.rows,
        "us_a_row": {
            "all": us("sample", "propose", less=["draw"]),
            "without_asking": us("sample", "propose", less=["draw", "asking"]),
            "sample": us("sample", less=["draw"]),
            "propose": us("propose", less=["asking"]),
            "asking": us("asking"),
        },
        "steps": len(rollout.steps),
        "full_steps": len(full),
        "draft_tokens": round(stats.drafted / row_steps, 2),
        "emitted_tokens": round(sum(map(len, made.truths)) / row_steps, 2),
    }


class Requests(dict):
    """What vLLM's scheduler holds of requests, by name."""

    def __init__(self, names: Sequence[str]):
        state = {"max_tokens": 1 << 20, "num_output_tokens": 9, "num_output_placeholders": 1}
        super().__init__({name: SimpleNamespace(request_id=name, **state) for name in names})


def on_device(rows: int, steps: int = 200) -> float:
    """Microseconds a row and step, the median of `steps`: all drafts of 8 tokens stand but for one in ten rows."""
    drafting = Drafting(host.Unhurried(padded=False))
    drafting.attach(host.Policy())
    flow = DraftLengths(source="texts", drafting=drafting, draft_tokens=DRAFT_TOKENS, budget=LogitsBudget(ROOM))
    names = [f"request-{i}" for i in range(rows)]
    for name in names:
        flow.admit(name, drafts=True)
    requests, spent = Requests(names), []
    for _ in range(steps):
        began = time.thread_time()
        set_lengths(requests.values(), flow.lengths(names))
        for i, name in enumerate(names):
            accepted = 8 if i % 10 else 3
            flow.observe_draft(name, 8, accepted)
            flow.observe_tokens(name, accepted + 1)
        flow.observe_step(9 * rows)
        spent.append(time.thread_time() - began)
    return round(1e6 * statistics.median(spent) / rows, 2)


def main(config: VLLMHostConfig) -> int:
    lines = [{**line(rows, config), "device_us_a_row": on_device(rows)} for rows in config.rows]
    print(json.dumps(lines, indent=2))
    if config.out:
        Path(config.out).write_text(json.dumps({"options": asdict(config), "lines": lines}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(cli.run(main, schema=VLLMHostConfig))
