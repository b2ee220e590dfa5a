"""Keyed requests in somebody else's vLLM server on Model Runner V1: its scheduler drafts, planned_v1.py verifies."""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request as VLLMRequest

from specrl.rollout.drafting.budget import Budget
from specrl.rollout.drafting.drafting import Drafting
from specrl.rollout.drafting.suffix import PromptTexts
from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.engines.vllm.planned import PlannedDrafts, PlannedScheduler
from specrl.rollout.engines.vllm.planned_v1 import KeyedDrafter
from specrl.rollout.engines.vllm.row import VLLMRow
from specrl.rollout.engines.vllm.served import ENGINE_ARGS, logits_budget
from specrl.rollout.engines.vllm.wire import KeyedRequest, extra_args_of
from specrl.rollout.types import Request, RolloutError


class ServedDrafter(KeyedDrafter):
    """What `ENGINE_ARGS["v1"]` names.

    Raises:
        RolloutError: the server runs with another scheduler.
    """

    def __init__(self, vllm_config: VllmConfig):
        super().__init__(vllm_config)
        scheduler_cls = vllm_config.scheduler_config.scheduler_cls
        if scheduler_cls != ENGINE_ARGS["v1"]["scheduler_cls"]:
            raise RolloutError(
                f"this vLLM server runs with scheduler_cls={scheduler_cls}, by which a request that cannot be served "
                "would end it; start it with ENGINE_ARGS['v1'] of rollout.engines.vllm.served"
            )


class ServedScheduler(PlannedScheduler):
    """Opens a row for every keyed request, and forgets it with the request.

    Requests of a lower priority (a number above 0) are rows of the next batch, whose drafts come last. It ends a
    request alone, with finish reason `error`, where a worker had no token for it. Its import brings served.py into the
    engine's core.
    """

    drafts: PlannedDrafts

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        config = self.vllm_config
        self.drafts = PlannedDrafts(
            drafting=Drafting(Budget(padded=False)),
            draft_tokens=config.num_speculative_tokens,
            budget=logits_budget(config),
        )
        self.drafts.drafting.vocab = config.model_config.get_vocab_size()
        self._groups: WeakValueDictionary[str, PromptTexts] = WeakValueDictionary()

    def add_request(self, request: VLLMRequest) -> None:
        keyed = KeyedRequest.read(extra_args_of(request))
        if keyed is not None:
            if not self.drafts.rows:  # the server was idle: weights may have changed
                self.drafts.drafting.budget.next_rollout()
                self.drafts.begin()
            self.drafts.rows[request.request_id] = self._open(request, keyed)
        super().add_request(request)

    def _open(self, request: VLLMRequest, keyed: KeyedRequest) -> VLLMRow:
        params = request.sampling_params
        prompt = request.prompt_token_ids
        assert params is not None  # of a keyed request, see `admit`
        assert prompt is not None
        n = keyed.prompt_tokens
        cap = min(len(prompt) + request.max_tokens, self.max_model_len) - n
        drafter = None if keyed.plain else keyed.drafter(self._groups, prompt[:n])
        asked = Request(prompt[:n], keyed.key, cap, drafter, plain=keyed.plain)
        eos_ids = frozenset({*(params.stop_token_ids or ()), params.eos_token_id} - {None})
        sampling = SamplingParams(eos_ids, params.temperature, max(params.top_k, 0), params.top_p)
        tokens = [*prompt[n:], *request.output_token_ids]
        ahead = request.priority > 0
        return VLLMRow(asked, tokens=tokens, drafting=not keyed.plain, ahead=ahead, sampling=sampling)

    def make_spec_decoding_stats(self, spec_decoding_stats: Any, *args: Any, **counts: Any) -> Any:
        if self.requests[counts["request_id"]].priority > 0:  # of the next batch: vLLM's counters are of this one
            return spec_decoding_stats
        return super().make_spec_decoding_stats(spec_decoding_stats, *args, **counts)

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput):
        sampled = model_runner_output.sampled_token_ids
        for name, i in model_runner_output.req_id_to_index.items() if sampled else ():
            request = self.requests.get(name)
            complete = request is not None and request.num_computed_tokens >= request.num_tokens  # its prompt is read
            if complete and sampled[i] in ([], [-1]):
                sampled[i] = []
                self.grammar_compile_error_reqs.add(name)  # vLLM ends these with an error
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for ended in self.drafts.rows.keys() - self.requests.keys():
            del self.drafts.rows[ended]
        return outputs
