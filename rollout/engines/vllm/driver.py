"""The driver's loop: a response is one request, and each of its steps verifies a draft.

With `PlannedDrafts` the scheduler carries the host's drafts, on either model runner. With `DraftLengths` drafts,
samples and their acceptance are left to the device, on Model Runner V2 with asynchronous scheduling: drafts come from
texts that each request brings (device.py) or from a speculator of vLLM's own. The host sees a step's samples one step
later; it only counts per row and step.
"""

from __future__ import annotations

from collections import deque
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
from specrl.rollout.engines.filling import joining
from specrl.rollout.engines.response import refuse_unusable
from specrl.rollout.engines.vllm.device import MOST_TEXTS
from specrl.rollout.engines.vllm.device_scheduler import DraftLengths
from specrl.rollout.engines.vllm.planned import PlannedDrafts
from specrl.rollout.engines.vllm.row import BUG, VLLMRow
from specrl.rollout.engines.vllm.wire import TEXTS, keyed_args, pack_text
from specrl.rollout.types import EngineStats, Request, RolloutError
from specrl.rollout.verify import Accepted


@dataclass(kw_only=True)
class Flow:
    """Generates each response with one request.

    Args:
        llm: vLLM, whose scheduler and workers serve `drafts`.
        logprobs: vLLM returns log-probs; else a worker in this process hands them over.
    """

    llm: LLM
    drafts: PlannedDrafts | DraftLengths
    logprobs: bool = True

    def __post_init__(self) -> None:
        core: Any = self.llm.llm_engine.engine_core  # in process
        self._scheduler = core.engine_core.scheduler
        self._scheduler.drafts = self.drafts

    def run(
        self,
        rows: Sequence[VLLMRow],
        stop: Callable[[], bool],
        weight_version: int,
        ahead: Sequence[VLLMRow] = (),
        fill: int = 0,
        others_at_work: Callable[[], bool] = lambda: False,
    ) -> EngineStats:
        """Finishes every row, unless `stop` says before a step that this is enough.

        Args:
            ahead: rows of the next batch, which join where no row waits and fewer than `fill` are at work, and which
                are aborted when the others have ended. vLLM preempts them first.
            others_at_work: see FillsPasses.
        """
        engine = self.llm.llm_engine
        outputs: dict[int, CompletionOutput] = {}
        names: list[str] = []
        beside = deque(ahead)
        self.drafts.begin(weight_version)
        if isinstance(self.drafts, PlannedDrafts):
            self.drafts.fill = fill
        try:
            for i, row in enumerate(rows):
                names.append(self._submit(str(i), row))
            while not stop():
                if all(i in outputs for i in range(len(rows))) and not (len(names) > len(outputs) and others_at_work()):
                    break
                outputs |= step(self.llm)
                if beside and not self._scheduler.waiting:
                    for _ in range(joining(len(names) - len(outputs), len(beside), fill)):
                        names.append(self._submit(str(len(names)), beside.popleft()))
            for i, (name, row) in enumerate(zip(names, rows, strict=False)):
                if isinstance(self.drafts, DraftLengths):
                    output = outputs.get(i)
                    if output:
                        _fill(row, output, self.drafts.requests[name].emitted, weight_version)
                    else:
                        row.tokens = list(self._scheduler.requests[name].output_token_ids)
                if i in outputs or not stop():
                    check_same(i, row, outputs.get(i))
        finally:
            engine.abort_request(names, internal=True)  # those that have not ended
            self.drafts.forget()
        return self.drafts.stats

    def _submit(self, name: str, row: VLLMRow) -> str:
        """Hands a row to vLLM as a request; returns vLLM's own id of it."""
        texts: list[str] = []
        if isinstance(self.drafts, DraftLengths) and self.drafts.source == "texts" and row.drafting:
            texts = texts_of(row.request)
        sampling_params = VLLMSamplingParams(
            temperature=row.sampling.temperature,
            top_k=row.sampling.top_k,
            top_p=row.sampling.top_p,
            extra_args=keyed_args(row.request) | {TEXTS: texts},
            logprobs=0 if self.logprobs else None,
            flat_logprobs=True,
            max_tokens=row.request.max_new_tokens,
            stop_token_ids=[*row.sampling.eos_ids, *row.request.stop_ids],
            ignore_eos=True,  # the model's own; the run's are above
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,  # nobody else uses this object
        )
        prompt: Any = {"prompt_token_ids": list(row.request.prompt)}
        name = self.llm.llm_engine.add_request(name, prompt, sampling_params, priority=int(row.ahead))
        if isinstance(self.drafts, PlannedDrafts):
            self.drafts.admit(name, row)
        else:
            self.drafts.admit(name, bool(texts) if self.drafts.source == "texts" else row.drafting)
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
