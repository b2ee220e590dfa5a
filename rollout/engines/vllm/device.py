"""Model Runner V2 with asynchronous scheduling: drafts, draws and what stands of them stay on the device.

Drafts come from texts that each request brings (texts.py) or from a speculator of vLLM's own, also where several GPUs
hold the model together. The host sees what was drawn a step later; per row and step it only counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from vllm import LLM
from vllm import SamplingParams as VLLMSamplingParams
from vllm.sampling_params import RequestOutputKind

from specrl.rollout.drafting.draft import DrafterFault, ask
from specrl.rollout.drafting.suffix import SuffixDrafter
from specrl.rollout.engines.response import refuse_unusable
from specrl.rollout.engines.vllm.room import LogitsBudget
from specrl.rollout.engines.vllm.rows import BUG, Rules, VLLMRow
from specrl.rollout.engines.vllm.scheduler import DraftLengths
from specrl.rollout.engines.vllm.texts import MOST_TEXTS
from specrl.rollout.engines.vllm.wire import KEY, TEXTS, pack_text
from specrl.rollout.types import EngineStats, Request, RolloutError
from specrl.rollout.verify import Accepted


@dataclass(kw_only=True)
class DeviceDrafts(Rules):
    """Generates each response with one request.

    Args:
        llm: vLLM, with `DraftScheduler` and the keyed sampler.
        source: what proposes: `texts`, `model` (rollout.drafter), or vLLM's name of a speculator.
        draft_tokens: most draft tokens of a row in one step.
        room: draft tokens of all rows in one step; those that draft share it.
    """

    llm: LLM
    source: str
    draft_tokens: int
    room: LogitsBudget
    _lengths: DraftLengths = field(init=False)

    def __post_init__(self):
        self.llm.collective_rpc("specrl_install_device", args=(self.source == "texts",))
        self._scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        self._lengths = self._scheduler.watcher = DraftLengths(
            source=self.source,
            drafting=self.drafting,
            draft_tokens=self.draft_tokens,
            room=self.room,
        )

    def run(self, rows: Sequence[VLLMRow], stop: Callable[[], bool]) -> EngineStats:
        """Finishes every row, unless `stop` says before a step that this is enough."""
        self.stats = self._lengths.stats = EngineStats()
        engine, outputs = self.llm.llm_engine, {}
        self.room.renew()
        names = []
        try:
            for i, row in enumerate(rows):
                names.append(self._submit(str(i), row))
            self._lengths.began = time.perf_counter()
            while engine.has_unfinished_requests() and not stop():
                outputs |= {output.request_id: output.outputs[0] for output in engine.step()}
            for i, (name, row) in enumerate(zip(names, rows, strict=True)):
                if str(i) in outputs:
                    self._finish(row, outputs[str(i)], self._lengths.seen[name].emitted)
                elif stop():
                    row.tokens = list(self._scheduler.requests[name].output_token_ids)
                else:
                    raise RolloutError(f"vLLM left row {i} of {len(rows)} unfinished; {BUG}")
        finally:
            engine.abort_request(names, internal=True)  # those that have not ended
            self._lengths.seen.clear()
        return self.stats

    def _submit(self, name: str, row: VLLMRow) -> str:
        """Hands a request to vLLM; returns vLLM's own id of it."""
        law, request = row.sampling, row.request
        texts = self._texts(row) if row.drafting and self.source == "texts" else []
        params = VLLMSamplingParams(
            temperature=law.temperature,
            top_k=law.top_k,
            top_p=law.top_p,
            extra_args={KEY: request.key, TEXTS: texts},
            max_tokens=request.max_new_tokens,
            stop_token_ids=list(law.eos_ids),
            ignore_eos=True,  # the model's own; the run's are above
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,  # it is this request's alone
        )
        name = self.llm.llm_engine.add_request(name, {"prompt_token_ids": list(request.prompt)}, params)
        self._lengths.admit(name, bool(texts) or (row.drafting and self.source != "texts"))
        return name

    @staticmethod
    def _texts(row: VLLMRow) -> list[str]:
        try:
            return texts_of(row.request)
        except DrafterFault as fault:
            row.give_up(fault)
            return []

    def _finish(self, row: VLLMRow, done, emitted: Sequence[int]) -> None:
        """Fills a row with its response, step by step as it was drawn."""
        tokens, logprobs = list(done.token_ids), list(done.logprobs.logprobs)
        refuse_unusable((logprob == logprob for logprob in logprobs), self.weight_version)
        ends = list(accumulate(emitted))
        for first, end in pairwise([0, *ends]):
            their = logprobs[first:end]
            row.emit(Accepted(tokens[first:end], their, their, end - first - 1), row.sampling.eos_ids)
        theirs, ours = (tokens, done.finish_reason), (row.tokens, row.finish)
        if theirs != ours:
            raise RolloutError(f"vLLM and specrl disagree about a row: {theirs}, {ours}; {BUG}")


def texts_of(request: Request) -> list[str]:
    """The texts that a request's drafter goes by, its own first, as on the wire.

    Raises:
        DrafterFault: it fails.
    """
    drafter = request.drafter
    if drafter is None:
        return []
    texts = [tuple(ask(drafter, (), request.max_new_tokens, 1 << 31).tokens)]
    if isinstance(drafter, SuffixDrafter):
        texts += map(tuple, drafter.texts.texts[: drafter.texts.stored])
    return [pack_text(text) for text in list(dict.fromkeys(texts))[:MOST_TEXTS] if text]
