"""Keyed requests in somebody else's vLLM server on Model Runner V2: drafted and sampled on the device.

vLLM imports `KeyedWorker` in every process that holds a part of the model, and `KeyedScheduler` in the one that plans
the steps. The server's owner may still set `worker_extension_cls`. vLLM's own sampler applies a request's sampling
params, so any are served.
"""

from __future__ import annotations

from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname

from specrl.rollout.drafting.budget import Budget
from specrl.rollout.drafting.drafting import Drafting
from specrl.rollout.engines.vllm.contract import check
from specrl.rollout.engines.vllm.device import DeviceTexts
from specrl.rollout.engines.vllm.device_scheduler import DraftLengths, DraftScheduler
from specrl.rollout.engines.vllm.sampler import install, propose_as_planned
from specrl.rollout.engines.vllm.served import ENGINE_ARGS, logits_budget
from specrl.rollout.engines.vllm.wire import KEY, PLAIN, TEXTS, extra_args_of
from specrl.rollout.types import RolloutError

_WORKER = "cpu_worker.CPUWorker" if current_platform.is_cpu() else "gpu_worker.Worker"


class KeyedWorker(resolve_obj_by_qualname(f"vllm.v1.worker.{_WORKER}")):  # type: ignore[misc]  # of a GPU or a CPU
    """vLLM's worker, whose model runner samples with keys and drafts from the requests' texts."""

    def load_model(self, **options) -> None:
        super().load_model(**options)
        refuse_other_settings(self.vllm_config)
        check("v2")
        install(self.model_runner)
        DeviceTexts(self.model_runner)  # before vLLM measures its memory
        propose_as_planned(self.model_runner)


class KeyedScheduler(DraftScheduler):
    """Only keyed requests with texts have drafts, as long as the acceptance of earlier ones justifies."""

    drafts: DraftLengths

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        config = self.vllm_config
        refuse_other_settings(config)
        self.drafts = DraftLengths(
            source="texts",
            drafting=Drafting(Budget(padded=False)),
            draft_tokens=config.num_speculative_tokens,
            budget=logits_budget(config),
        )

    def add_request(self, request) -> None:
        extra = extra_args_of(request)
        if KEY in extra:
            if not self.drafts.requests:  # the server was idle: weights may have changed
                self.drafts.drafting.budget.next_rollout()
                self.drafts.begin()
            # grammars need the tokens of drafts on the host
            may_draft = bool(extra.get(TEXTS)) and not extra.get(PLAIN) and not request.use_structured_output
            self.drafts.admit(request.request_id, may_draft)
        super().add_request(request)

    def update_from_output(self, scheduler_output, model_runner_output):
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for ended in self.drafts.requests.keys() - self.requests.keys():
            del self.drafts.requests[ended]
        return outputs


def refuse_other_settings(config) -> None:
    """Raises RolloutError where vLLM's configuration of a server cannot serve keyed requests."""
    speculative, scheduler = config.speculative_config, config.scheduler_config
    wrong = {
        "VLLM_USE_V2_MODEL_RUNNER=0": not config.use_v2_model_runner,
        "async_scheduling=False": not scheduler.async_scheduling,
        f"speculative method {speculative and speculative.method}": (
            not speculative or speculative.method != "ngram_gpu"
        ),
        f"scheduler_cls={scheduler.scheduler_cls}": scheduler.scheduler_cls != ENGINE_ARGS["v2"]["scheduler_cls"],
        "pipeline parallelism": config.parallel_config.pipeline_parallel_size > 1,
    }
    if any(wrong.values()):
        raise RolloutError(
            f"this vLLM server runs with {', '.join(name for name in wrong if wrong[name])}, by which "
            "specrl.rollout.engines.vllm.device_served cannot serve keyed requests; start it with ENGINE_ARGS['v2'] of "
            "specrl.rollout.engines.vllm.served, or with its ENGINE_ARGS['v1']"
        )
