"""The driver's loops: a response is one request, and each of its steps verifies a draft.

`HostFlow` serves drafters of the host on either model runner. `DeviceFlow` leaves drafts, samples and their acceptance
to the device, on Model Runner V2 with asynchronous scheduling: drafts come from texts that each request brings
(device.py) or from a speculator of vLLM's own, also where several GPUs hold the model together. The host sees a step's
samples one step later; it only counts per row and step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Protocol

from vllm import LLM
from vllm import SamplingParams as VLLMSamplingParams
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind

from specrl.rollout.drafting.draft import DrafterFault, ask
from specrl.rollout.drafting.drafting import Drafting
from specrl.rollout.drafting.suffix import SuffixDrafter
from specrl.rollout.engines.response import refuse_unusable
from specrl.rollout.engines.vllm.batch import BUG, LogprobBuffer, StepBatch, VLLMRow
from specrl.rollout.engines.vllm.device import MOST_TEXTS
from specrl.rollout.engines.vllm.flow import Flow, Step
from specrl.rollout.engines.vllm.logits import LogitsBudget
from specrl.rollout.engines.vllm.scheduler import DraftLengths
from specrl.rollout.engines.vllm.wire import KEY, TEXTS, pack_text
from specrl.rollout.types import EngineStats, Request, RolloutError
from specrl.rollout.verify import Accepted, exact


class Adapter(Protocol):
    """What differs between vLLM's model runners."""

    flow: Flow

    def install(self, runner: Any) -> None:
        """Makes vLLM's model runner sample and draft by the flow."""

    def sampling_params(self, row: VLLMRow) -> dict[str, Any]:
        """The row's sampling params as this model runner needs them, in arguments of vLLM's SamplingParams."""


@dataclass(kw_only=True)
class HostFlow:
    """Generates each response with one request."""

    llm: LLM
    adapter: Adapter

    def __post_init__(self):
        self.llm.collective_rpc("specrl_install_adapter", args=(self.adapter,))

    def run(self, rows: Sequence[VLLMRow], stop: Callable[[], bool], weight_version: int) -> EngineStats:
        """Finishes every row, unless `stop` says before a step that this is enough."""
        flow, engine = self.adapter.flow, self.llm.llm_engine
        flow.weight_version = weight_version
        flow.stats = EngineStats()
        flow.step = Step()
        flow.logprobs = LogprobBuffer(rows) if flow.rule is exact else None
        outputs: dict[int, CompletionOutput] = {}
        try:
            for i, row in enumerate(rows):
                if flow.drafting.verifies_once:
                    row.old_text = flow.drafting.text(row)  # type: ignore[attr-defined]  # the lenient one has it
                flow.rows[submit(self.llm, str(i), row, **self.adapter.sampling_params(row))] = row
            while engine.has_unfinished_requests() and not stop():
                flow.step = flow.step.next()
                began = time.perf_counter()
                outputs |= step(self.llm)
                self._count(flow, time.perf_counter() - began)
        finally:
            engine.abort_request(list(flow.rows), internal=True)  # those that have not ended
            flow.rows = {}
            flow.batch = StepBatch([])
            flow.logprobs = None
        for i, row in enumerate(rows):
            if row.finish is not None or not stop():
                check_same(i, row, outputs.get(i))
        return flow.stats

    @staticmethod
    def _count(flow: Flow, seconds: float) -> None:
        step = flow.step
        seconds -= step.draft_s
        flow.stats.draft_s += step.draft_s
        flow.stats.count_pass(step.tokens, seconds, step.drafted > 0, step.decoding)
        if step.decoding:
            flow.observe(seconds)


@dataclass(kw_only=True)
class DeviceFlow:
    """Generates each response with one request.

    Args:
        llm: vLLM, with `DraftScheduler` and the keyed sampler.
        source: what proposes: `texts`, `model` (rollout.drafter), or vLLM's name of a speculator.
        drafting: its budget decides how much.
        draft_tokens: most draft tokens of a row in one step.
        budget: draft tokens of all rows in one step; those that draft share it.
    """

    llm: LLM
    source: str
    drafting: Drafting
    draft_tokens: int
    budget: LogitsBudget
    _lengths: DraftLengths = field(init=False)

    def __post_init__(self):
        self.llm.collective_rpc("specrl_install_device", args=(self.source == "texts",))
        core: Any = self.llm.llm_engine.engine_core  # in process
        self._scheduler = core.engine_core.scheduler
        self._lengths = self._scheduler.draft_lengths = DraftLengths(
            source=self.source, drafting=self.drafting, draft_tokens=self.draft_tokens, budget=self.budget
        )

    def run(self, rows: Sequence[VLLMRow], stop: Callable[[], bool], weight_version: int) -> EngineStats:
        """Finishes every row, unless `stop` says before a step that this is enough."""
        stats = self._lengths.stats = EngineStats()
        engine = self.llm.llm_engine
        outputs: dict[int, CompletionOutput] = {}
        self.budget.renew()
        names = []
        try:
            for i, row in enumerate(rows):
                names.append(self._submit(str(i), row))
            self._lengths.began = time.perf_counter()
            while engine.has_unfinished_requests() and not stop():
                outputs |= step(self.llm)
            for i, (name, row) in enumerate(zip(names, rows, strict=True)):
                if output := outputs.get(i):
                    _fill(row, output, self._lengths.requests[name].emitted, weight_version)
                    check_same(i, row, output)
                elif stop():
                    row.tokens = list(self._scheduler.requests[name].output_token_ids)
                else:
                    raise RolloutError(f"vLLM left row {i} of {len(rows)} unfinished; {BUG}")
        finally:
            engine.abort_request(names, internal=True)  # those that have not ended
            self._lengths.requests.clear()
        return stats

    def _submit(self, name: str, row: VLLMRow) -> str:
        """Hands a request to vLLM; returns vLLM's own id of it."""
        texts: list[str] = []
        if row.drafting and self.source == "texts":
            try:
                texts = texts_of(row.request)
            except DrafterFault as fault:
                row.give_up(fault)
        name = submit(
            self.llm,
            name,
            row,
            temperature=row.sampling.temperature,
            top_k=row.sampling.top_k,
            top_p=row.sampling.top_p,
            extra_args={KEY: row.request.key, TEXTS: texts},
            logprobs=0,
            flat_logprobs=True,
        )
        self._lengths.admit(name, bool(texts) or (row.drafting and self.source != "texts"))
        return name


def _fill(row: VLLMRow, output: Any, emitted: Sequence[int], weight_version: int) -> None:
    """Fills a row with its response. Args: emitted: tokens of each step."""
    tokens, logprobs = list(output.token_ids), list(output.logprobs.logprobs)
    refuse_unusable((logprob == logprob for logprob in logprobs), weight_version)
    for start, end in pairwise([0, *accumulate(emitted)]):
        part = logprobs[start:end]
        row.emit(Accepted(tokens[start:end], part, part, end - start - 1), row.sampling.eos_ids)


def texts_of(request: Request) -> list[str]:
    """The texts that a request's drafter uses, as on the wire; the sample's own comes first.

    Raises:
        DrafterFault: the drafter fails.
    """
    drafter = request.drafter
    if drafter is None:
        return []
    texts = [tuple(ask(drafter, (), request.max_new_tokens, 1 << 31).tokens)]
    if isinstance(drafter, SuffixDrafter):
        texts += map(tuple, drafter.texts.texts[: drafter.texts.stored])
    return [pack_text(text) for text in list(dict.fromkeys(texts))[:MOST_TEXTS] if text]


def submit(llm: LLM, name: str, row: VLLMRow, **params: Any) -> str:
    """Hands a row to vLLM as a request; returns vLLM's own id of it. Args: params: of vLLM's SamplingParams."""
    sampling_params = VLLMSamplingParams(
        max_tokens=row.request.max_new_tokens,
        stop_token_ids=list(row.sampling.eos_ids),
        ignore_eos=True,  # the model's own; the run's are above
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # nobody else uses this object
        **params,
    )
    return llm.llm_engine.add_request(name, {"prompt_token_ids": list(row.request.prompt)}, sampling_params)


def step(llm: LLM) -> dict[int, CompletionOutput]:
    """The outputs of the rows that end in vLLM's next step."""
    outputs: list[RequestOutput] = llm.llm_engine.step()  # type: ignore[assignment]  # no request is for pooling
    return {int(output.request_id): output.outputs[0] for output in outputs}


def check_same(i: int, row: VLLMRow, output: CompletionOutput | None) -> None:
    """Raises RolloutError unless row `i` is what vLLM returned for it; None: vLLM returned nothing."""
    theirs = None if output is None else (list(output.token_ids), output.finish_reason)
    ours = (row.tokens, row.finish)
    if theirs != ours:
        raise RolloutError(f"vLLM and specrl disagree about row {i}: {theirs}, {ours}; {BUG}")
