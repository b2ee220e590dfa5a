"""The driver's loop where the host drafts: a response is one request, and drafts ride in it.

How a step is drawn is the model runner's matter: v1.py, native.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm import LLM
from vllm import SamplingParams as VLLMSamplingParams
from vllm.sampling_params import RequestOutputKind

from specrl.rollout.engines.vllm.rows import BUG, LogprobBuffer, VLLMRow
from specrl.rollout.engines.vllm.step import Step, StepBatch, StepRules
from specrl.rollout.types import EngineStats, RolloutError
from specrl.rollout.verify import exact


@dataclass(kw_only=True)
class OneRequest(StepRules):
    """Generates each response with one request."""

    llm: LLM

    def __post_init__(self):
        self.llm.collective_rpc("specrl_install_flow", args=(self,))

    def install(self, runner) -> None:
        """Puts itself into the model runner; the worker extension calls it."""
        raise NotImplementedError

    def law(self, row: VLLMRow) -> dict:
        """The law as vLLM shall know it, in arguments of VLLMSamplingParams."""
        raise NotImplementedError

    def run(self, rows: Sequence[VLLMRow], stop: Callable[[], bool]) -> EngineStats:
        """Finishes every row, unless `stop` says before a step that this is enough."""
        self.stats, engine, outputs = EngineStats(), self.llm.llm_engine, {}
        self._step = Step()
        self.told = LogprobBuffer(rows) if self.rule is exact else None
        try:
            for i, row in enumerate(rows):
                if self.drafting.whole:
                    row.text = self.drafting.text(row)
                self.rows[self._submit(str(i), row)] = row
            while engine.has_unfinished_requests() and not stop():
                self._step, began = self._step.next(), time.perf_counter()
                outputs |= {int(output.request_id): output.outputs[0] for output in engine.step()}
                self._charge(time.perf_counter() - began)
        finally:
            engine.abort_request(list(self.rows), internal=True)  # those that have not ended
            self.rows, self.lineup, self.told = {}, StepBatch([]), None
        for i, row in enumerate(rows):
            if row.finish is None and stop():
                continue
            theirs = (list(outputs[i].token_ids), outputs[i].finish_reason) if i in outputs else None
            if theirs != (row.tokens, row.finish):
                raise RolloutError(
                    f"vLLM and specrl disagree about row {i}: {theirs}, {(row.tokens, row.finish)}; {BUG}"
                )
        return self.stats

    def _submit(self, name: str, row: VLLMRow) -> str:
        """Hands a request to vLLM; returns vLLM's own id of it."""
        params = VLLMSamplingParams(
            **self.law(row),
            max_tokens=row.request.max_new_tokens,
            stop_token_ids=list(row.sampling.eos_ids),
            ignore_eos=True,  # the model's own; the run's are above
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,  # it is this request's alone
        )
        return self.llm.llm_engine.add_request(name, {"prompt_token_ids": list(row.request.prompt)}, params)

    def _charge(self, seconds: float) -> None:
        step = self._step
        self.stats.draft_s += step.draft_s
        self.stats.count_pass(step.tokens, seconds - step.draft_s, step.drafted > 0, step.decoding)
        if step.decoding:
            self.observe(seconds - step.draft_s)
