"""Keyed requests in somebody else's vLLM server on Model Runner V2: drafted and drawn on the device.

vLLM imports `KeyedWorker` in every process that holds a part of the model, and `KeyedScheduler` in the one that plans
the steps, when a server is started with `ENGINE_ARGS["v2"]` of served.py. Nothing of the server's owner is replaced:
`worker_extension_cls` stays free. The law of a request is applied by vLLM's own sampler, so any is served.
"""

from __future__ import annotations

import time

from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname

from specrl.rollout.config import RolloutConfig
from specrl.rollout.drafting.budget import Budget
from specrl.rollout.drafting.drafting import Drafting
from specrl.rollout.engines.vllm.admission import SCHEDULERS
from specrl.rollout.engines.vllm.contract import check
from specrl.rollout.engines.vllm.room import OF_CPU_SERVER, OF_SERVER, LogitsBudget, draft_room
from specrl.rollout.engines.vllm.sampler import install
from specrl.rollout.engines.vllm.scheduler import DraftLengths, DraftScheduler
from specrl.rollout.engines.vllm.texts import DeviceTexts
from specrl.rollout.engines.vllm.wire import KEY, TEXTS
from specrl.rollout.types import RolloutError

_VLLMS = "cpu_worker.CPUWorker" if current_platform.is_cpu() else "gpu_worker.Worker"


class KeyedWorker(resolve_obj_by_qualname(f"vllm.v1.worker.{_VLLMS}")):
    """vLLM's worker, whose model runner draws with keys and proposes from the requests' texts."""

    def load_model(self, **options) -> None:
        super().load_model(**options)
        refuse_other_settings(self.vllm_config)
        check("v2")
        install(self.model_runner)
        DeviceTexts(self.model_runner)  # before vLLM measures its memory


class KeyedScheduler(DraftScheduler):
    """Keyed requests carry drafts as far as those before stood; others none."""

    watcher: DraftLengths

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        config = self.vllm_config
        refuse_other_settings(config)
        self.watcher = DraftLengths(
            source="texts",
            drafting=Drafting(Budget(padded=False)),
            draft_tokens=config.num_speculative_tokens,
            room=_room(config),
        )

    def add_request(self, request) -> None:
        given = (request.sampling_params and request.sampling_params.extra_args) or {}
        if KEY in given:
            if not self.watcher.seen:  # the server was idle: weights may have changed
                self.watcher.drafting.budget.next_rollout()
                self.watcher.began = time.perf_counter()
            # grammars need the tokens of drafts on the host
            self.watcher.admit(request.request_id, bool(given.get(TEXTS)) and not request.use_structured_output)
        super().add_request(request)

    def update_from_output(self, scheduler_output, model_runner_output):
        done = super().update_from_output(scheduler_output, model_runner_output)
        for gone in self.watcher.seen.keys() - self.requests.keys():
            del self.watcher.seen[gone]
        return done


def refuse_other_settings(config) -> None:
    """Raises RolloutError where a server was started otherwise than keyed requests need it. Args: of vLLM."""
    drafts = config.speculative_config
    wrong = {
        "VLLM_USE_V2_MODEL_RUNNER=0": not config.use_v2_model_runner,
        "async_scheduling=False": not config.scheduler_config.async_scheduling,
        f"speculative method {drafts and drafts.method}": not drafts or drafts.method != "ngram_gpu",
        f"scheduler_cls={config.scheduler_config.scheduler_cls}": (
            config.scheduler_config.scheduler_cls != SCHEDULERS["v2"]
        ),
        "pipeline parallelism": config.parallel_config.pipeline_parallel_size > 1,
    }
    if any(wrong.values()):
        raise RolloutError(
            f"this vLLM server runs with {', '.join(name for name in wrong if wrong[name])}, by which "
            "specrl.rollout.engines.vllm.served_v2 cannot serve keyed requests; start it with ENGINE_ARGS['v2'] of "
            "specrl.rollout.engines.vllm.served, or with its ENGINE_ARGS['v1']"
        )


def _room(config) -> LogitsBudget:
    """Room for the logits of drafts in what vLLM was told to leave free: its workers may be in other processes."""
    vocab, free, remedies = config.model_config.get_vocab_size(), None, OF_CPU_SERVER
    if not current_platform.is_cpu():
        remedies = OF_SERVER
        free = int(current_platform.get_device_total_memory() * (1 - config.cache_config.gpu_memory_utilization))
    room = draft_room(vocab, RolloutConfig().logits_mb, free=free, width=config.model_config.dtype.itemsize)
    return LogitsBudget(room, step=config.scheduler_config.max_num_batched_tokens, remedies=remedies)
