"""The driver's loops: a response is one request, and each of its steps verifies a draft.

`HostFlow` serves drafters of the host on either model runner. `DeviceFlow` leaves drafts, samples and their acceptance
to the device, on Model Runner V2 with asynchronous scheduling: drafts come from texts that each request brings
(device.py) or from a speculator of vLLM's own, also where several GPUs hold the model together. The host sees a step's
samples one step later; it only counts per row and step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from vllm import LLM
from vllm import SamplingParams as VLLMSamplingParams
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind

from specrl.rollout.drafting.draft import ask
from specrl.rollout.drafting.suffix import SuffixDrafter
from specrl.rollout.engines.response import refuse_unusable
from specrl.rollout.engines.vllm.batch import BUG, LogprobBuffer, StepBatch, VLLMRow
from specrl.rollout.engines.vllm.device import MOST_TEXTS
from specrl.rollout.engines.vllm.flow import Step
from specrl.rollout.engines.vllm.planned import PlannedAdapter
from specrl.rollout.engines.vllm.scheduler import DraftLengths
from specrl.rollout.engines.vllm.v1 import V1Adapter
from specrl.rollout.engines.vllm.wire import TEXTS, keyed_args, pack_text
from specrl.rollout.types import EngineStats, Request, RolloutError
from specrl.rollout.verify import Accepted, exact


@dataclass(kw_only=True)
class HostFlow:
    """Generates each response with one request."""

    llm: LLM
    adapter: V1Adapter | PlannedAdapter

    def __post_init__(self):
        self.adapter.install(self.llm)

    def run(self, rows: Sequence[VLLMRow], stop: Callable[[], bool], weight_version: int) -> EngineStats:
        """Finishes every row, unless `stop` says before a step that this is enough."""
        flow = self.adapter.flow
        engine = self.llm.llm_engine
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
                flow.observe(time.perf_counter() - began - flow.step.draft_s)
        finally:
            engine.abort_request(list(flow.rows), internal=True)  # those that have not ended
            flow.rows = {}
            flow.batch = StepBatch([])
            flow.logprobs = None
        for i, row in enumerate(rows):
            if row.finish is not None or not stop():
                check_same(i, row, outputs.get(i))
        return flow.stats


@dataclass(kw_only=True)
class DeviceFlow:
    """Generates each response with one request.

    Args:
        llm: vLLM, with `DraftScheduler` and the keyed sampler.
        lengths: decides how much each row drafts. Its source is `texts`, `model` (rollout.drafter), or vLLM's name of a
            speculator.
    """

    llm: LLM
    lengths: DraftLengths

    def __post_init__(self) -> None:
        self.llm.collective_rpc("specrl_install_device", args=(self.lengths.source == "texts",))
        core: Any = self.llm.llm_engine.engine_core  # in process
        self._scheduler = core.engine_core.scheduler
        self._scheduler.draft_lengths = self.lengths

    def run(self, rows: Sequence[VLLMRow], stop: Callable[[], bool], weight_version: int) -> EngineStats:
        """Finishes every row, unless `stop` says before a step that this is enough."""
        stats = self.lengths.stats = EngineStats()
        engine = self.llm.llm_engine
        outputs: dict[int, CompletionOutput] = {}
        self.lengths.budget.renew()
        names = []
        try:
            for i, row in enumerate(rows):
                names.append(self._submit(str(i), row))
            self.lengths.began = time.perf_counter()
            while engine.has_unfinished_requests() and not stop():
                outputs |= step(self.llm)
            for i, (name, row) in enumerate(zip(names, rows, strict=True)):
                if output := outputs.get(i):
                    _fill(row, output, self.lengths.requests[name].emitted, weight_version)
                    check_same(i, row, output)
                elif stop():
                    row.tokens = list(self._scheduler.requests[name].output_token_ids)
                else:
                    check_same(i, row, None)
        finally:
            engine.abort_request(names, internal=True)  # those that have not ended
            self.lengths.requests.clear()
        return stats

    def _submit(self, name: str, row: VLLMRow) -> str:
        """Hands a request to vLLM; returns vLLM's own id of it."""
        texts: list[str] = []
        from_texts = self.lengths.source == "texts"
        if row.drafting and from_texts:
            texts = texts_of(row.request)
        name = submit(
            self.llm,
            name,
            row,
            temperature=row.sampling.temperature,
            top_k=row.sampling.top_k,
            top_p=row.sampling.top_p,
            extra_args=keyed_args(row.request) | {TEXTS: texts},
            logprobs=0,
            flat_logprobs=True,
        )
        self.lengths.admit(name, bool(texts) if from_texts else row.drafting)
        return name


def _fill(row: VLLMRow, output: Any, emitted: Sequence[int], weight_version: int) -> None:
    """Fills a row with its response. Args: emitted: tokens of each step."""
    tokens, logprobs = list(output.token_ids), list(output.logprobs.logprobs)
    refuse_unusable((logprob == logprob for logprob in logprobs), weight_version)
    for start, end in pairwise([0, *accumulate(emitted)]):
        part = logprobs[start:end]
        row.emit(Accepted(tokens[start:end], part, part, end - start - 1), row.sampling.eos_ids)


def texts_of(request: Request) -> list[str]:
    """The texts that a request's drafter uses, as on the wire; the sample's own comes first."""
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
        stop_token_ids=[*row.sampling.eos_ids, *row.request.stop_ids],
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
