"""Processor time of the hooks in vLLM's step, without vLLM.

    python -m benchmarks.research.vllm_host rows=[64,256,512] out=FILE

Rolls out the known texts of benchmarks/research/host.py: each step workers verify every row's draft, `accept` gets
what they accepted, and `propose` names the next drafts (rollout/engines/vllm/planned.py). The model takes no time, and
the draw only reads the texts. Reports thread time in microseconds a row, of steps in which nearly all rows take part,
on Model Runner V1 with its worker in this process (planned_v1.py). `v2_us_a_row` is the host's part on V2, whose
workers accept on the device, and `device_us_a_row` that of drafts on the device (device_scheduler.py): the calls of
vLLM's scheduler between steps.
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
from vllm.v1.outputs import DraftTokenIds, LogprobsLists

from benchmarks.research import host
from specrl.config import load as cli
from specrl.rollout.drafting.drafting import Drafting
from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.engines.vllm import planned_v1
from specrl.rollout.engines.vllm.device_scheduler import DraftLengths, set_lengths
from specrl.rollout.engines.vllm.logits import LogitsBudget
from specrl.rollout.engines.vllm.planned import PlannedDrafts
from specrl.rollout.engines.vllm.row import VLLMRow
from specrl.rollout.engines.vllm.wire import keyed_args
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
        drafting = Drafting(host.Unhurried(padded=False))
        drafting.attach(host.Policy())
        drafting.begin(requests)
        drafting.propose = self.clock.timed("asking", drafting.propose)
        self.drafts = PlannedDrafts(
            drafting=drafting, draft_tokens=DRAFT_TOKENS, budget=LogitsBudget(ROOM), rows=dict(rows)
        )
        self.steps: list[tuple[int, dict[str, float]]] = []
        """Rows of each step, and its seconds by part."""

    def on_v1(self) -> None:
        """The worker is in this process, and hands over what it accepted."""
        config = SimpleNamespace(model_config=SimpleNamespace(get_vocab_size=lambda: 1))
        worker = planned_v1.KeyedDrafter(config)
        worker.serve(self.drafts, ROOM, None)
        planned_v1.packed_sample = self.clock.timed("draw", self.draw)  # the texts are known: no logits are sampled
        sample = self.clock.timed("worker", worker.sample)

        def verified(names: list[str], plan: dict[str, list[int]]) -> tuple[list[list[int]], None]:
            runner, metadata, logits = batch(names, self.drafts.rows, [plan.get(name, []) for name in names])
            sampled = sample(runner, logits, metadata).sampled_token_ids.tolist()
            return [[token for token in row if token >= 0] for row in sampled], None

        self._run(verified)

    def on_v2(self) -> None:
        """Workers send the tokens that they accepted, with log-probs."""
        numbers = {name: i for i, name in enumerate(self.drafts.rows)}

        def verified(names: list[str], plan: dict[str, list[int]]) -> tuple[list[list[int]], LogprobsLists]:
            sampled = []
            for name in names:
                draft, first = plan.get(name, []), len(self.drafts.rows[name].tokens)
                tokens = self.texts[numbers[name], first : first + len(draft) + 1].tolist()
                sampled.append(tokens[: accept_exact(tokens, draft) + 1])
            return sampled, logprobs_of(sampled)

        self._run(verified)

    def _run(self, verified) -> None:
        """Args: verified: what workers sample and accept in a step."""
        accept, propose = (
            self.clock.timed("accept", self.drafts.accept),
            self.clock.timed("propose", self.drafts.propose),
        )
        rows, plan = self.drafts.rows, {}
        observe = self.drafts.drafting.budget.observe_pass
        while names := [name for name, row in rows.items() if row.finish is None]:
            self.clock.seconds = {}
            tokens = len(names) + sum(map(len, plan.values()))
            sampled, logprobs = verified(names, plan)
            accept(
                SimpleNamespace(total_num_scheduled_tokens=tokens, scheduled_spec_decode_tokens=plan),
                SimpleNamespace(req_ids=names, sampled_token_ids=sampled, logprobs=logprobs),
            )

            def counted(tokens: int, seconds: float, rows: int, names=names, **counts) -> None:
                observe(tokens, host.cost(len(names), tokens), rows, **counts)  # the seconds of a model

            self.drafts.drafting.budget.observe_pass = counted
            drafts = propose(DraftTokenIds(names, [[] for _ in names])).draft_token_ids
            plan = {name: draft for name, draft in zip(names, drafts, strict=True) if draft}
            self.steps.append((len(names), self.clock.seconds))
        if [row.tokens for row in rows.values()] != self.truths:
            raise RuntimeError("the rows have other texts than were sampled")

    def draw(self, logits: Tensor, keys: Tensor, positions: Tensor, targets: Tensor, *law: float) -> Tensor:
        """As packed_sample: keys are the numbers of the rows."""
        filled = torch.full((len(keys),), 0.5).view(torch.int32)
        return torch.stack([self.texts[keys, positions].int(), *[filled] * 3])


def logprobs_of(sampled: Sequence[Sequence[int]]) -> LogprobsLists:
    """Log-probs of 0 for these tokens."""
    starts = [0, *accumulate(map(len, sampled))]
    zeros = np.zeros((starts[-1], 1), np.float32)
    return LogprobsLists(zeros.astype(np.int32), zeros, zeros[:, 0], starts)


def batch(
    names: Sequence[str], rows: dict[str, VLLMRow], drafts: Sequence[Sequence[int]]
) -> tuple[SimpleNamespace, SimpleNamespace, Tensor]:
    """The runner's state in a step, the metadata of its drafts, and logits of a vocabulary of one."""
    counts = list(map(len, drafts))
    ids = torch.tensor([token for draft in drafts for token in draft], dtype=torch.int32)
    requests = {}
    for name in names:
        row = rows[name]
        params = SimpleNamespace(extra_args=keyed_args(row.request), temperature=1.0, top_k=0, top_p=1.0, min_tokens=0)
        requests[name] = SimpleNamespace(sampling_params=params, num_tokens=len(row.request.prompt) + len(row.tokens))
    runner = SimpleNamespace(
        input_batch=SimpleNamespace(req_ids=list(names), sampling_metadata=SimpleNamespace(max_num_logprobs=None)),
        requests=requests,
        discard_request_mask=SimpleNamespace(np=np.zeros(len(names), dtype=bool)),
    )
    metadata = SimpleNamespace(num_draft_tokens=counts, draft_token_ids=ids) if len(ids) else None
    return runner, metadata, torch.zeros(len(ids) + len(names), 1)


def line(rows: int, config: VLLMHostConfig) -> dict:
    """The fastest rollout: microseconds a row of a step while nearly all rows go on."""
    texts = host.HostConfig(rows=rows, tokens=config.tokens, agreement=config.agreement)
    made = host.work(texts)
    runs = {}
    for name in ("on_v1", "on_v2"):
        repeats = [_once(texts, made, name) for _ in range(config.repeats)]
        runs[name] = min(repeats, key=lambda found: found["us_a_row"]["all"])
    return {**runs["on_v1"], "v2_us_a_row": runs["on_v2"]["us_a_row"]}


def _once(config: host.HostConfig, made: host.Work, way: str) -> dict:
    rollout = Rollout(config, made)
    getattr(rollout, way)()
    full = [(rows, seconds) for rows, seconds in rollout.steps if rows > 0.9 * config.rows]

    def us(*parts: str, less: Sequence[str] = ()) -> float:
        """Median microseconds a row of some parts, without others that are within them."""
        got = [sum(s.get(p, 0.0) for p in parts) - sum(s.get(p, 0.0) for p in less) for _, s in full]
        return round(1e6 * statistics.median(g / rows for g, (rows, _) in zip(got, full, strict=True)), 2)

    stats, row_steps = rollout.drafts.stats, sum(rows for rows, _ in rollout.steps)
    return {
        "rows": config.rows,
        "us_a_row": {
            "all": us("worker", "accept", "propose", less=["draw"]),
            "without_asking": us("worker", "accept", "propose", less=["draw", "asking"]),
            "worker": us("worker", less=["draw"]),
            "accept": us("accept"),
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
