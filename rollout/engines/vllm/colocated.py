"""An LLM for trainers that run vLLM in their own process: it serves keyed requests and counts what it accepts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

from torch import Tensor
from vllm import LLM, RequestOutput
from vllm import SamplingParams as VLLMSamplingParams
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.metrics.reader import Counter, Histogram

from specrl.rollout.engines.filling import TRIED, chosen_fill, joining
from specrl.rollout.engines.vllm.engine import one_thread, pass_seconds
from specrl.rollout.engines.vllm.planned import PlannedDrafts
from specrl.rollout.engines.vllm.served import engine_args
from specrl.rollout.engines.vllm.wire import KeyedRequest, acceptance_counts
from specrl.rollout.engines.vllm.worker import refresh_tied_head
from specrl.rollout.types import RolloutError

CPU_BLOCK = 32
"""Tokens of a block of the KV cache; a CPU's default of 128 would cache little."""
AHEAD = "ahead "
"""What the request id of a row of the next batch begins with, before its key."""


class KeyedLLM(LLM):
    """vLLM's LLM, started with the classes that serve keyed requests.

    Args:
        fill: `rollout.fill`.
        options: as those of LLM.
    """

    rows: Sequence[tuple[KeyedRequest, int]] | None = None
    """Key, drafts and cap of each prompt of the next `generate`; None: its sampling params are those of vLLM."""
    fill = 0
    others_at_work = staticmethod(lambda: False)
    """See FillsPasses, also for `fill`."""

    def __init__(self, fill: int | str = 0, **options: Any):
        on_cpu = current_platform.is_cpu()
        platform: dict[str, Any] = {"block_size": CPU_BLOCK, "enforce_eager": True} if on_cpu else {}
        platform |= deepcopy(engine_args())
        platform["scheduling_policy"] = "priority"  # rows of the next batch are preempted first
        most = fill if isinstance(fill, int) else 0 if on_cpu else TRIED[-1]
        options["max_num_seqs"] = max(options.get("max_num_seqs") or 0, most) or None
        self._beside: dict[int, tuple[KeyedRequest, int, list[int]]] = {}  # rows of the next batch, by key
        self._texts: dict[int, list[int]] = {}  # theirs, as far as they came
        self._ended: set[int] = set()  # those that are whole
        super().__init__(**platform | options, disable_log_stats=False)
        self.fill = chosen_fill(fill, partial(pass_seconds, self), on_cpu)

    def generate(self, prompts: Any, sampling_params: Any = None, **options: Any) -> list:
        """As LLM.generate; with `rows`, every prompt has the sampling params and a key of its own."""
        if self.rows is None:
            return super().generate(prompts, sampling_params, **options)
        params = [self._with_key(sampling_params, keyed, cap) for keyed, cap in self.rows]
        with one_thread():
            if not self._beside:
                return super().generate(prompts, params, **options)
            self.enqueue(prompts, params, **options)
            return self._run(len(params), sampling_params)

    def begin(self, rows: Sequence[tuple[KeyedRequest, int, list[int]]]) -> None:
        """Rows of the next batch, which join the passes of the next `generate`. Args: rows: see KeyedClient.begin."""
        self._beside = {row[0].key: row for row in rows}

    def stop(self) -> dict[int, tuple[list[int], bool]]:
        """See KeyedClient.stop: the rows have been aborted when the last one of the batch ended."""
        texts = {key: (self._texts.get(key, []), key not in self._ended) for key in self._beside}
        self._beside, self._texts, self._ended = {}, {}, set()
        return texts

    def _run(self, own: int, params: VLLMSamplingParams) -> list[RequestOutput]:
        """vLLM's loop until the `own` requests have ended, beside rows of the next batch."""
        engine: Any = self.llm_engine
        scheduler = engine.engine_core.engine_core.scheduler  # in this process
        if isinstance(scheduler.drafts, PlannedDrafts):
            scheduler.drafts.fill = self.fill
        waiting = deque(self._beside.values())
        names: list[str] = []  # vLLM's own ids of rows of the next batch
        ended: list[RequestOutput] = []
        try:
            while len(ended) < own or (engine.has_unfinished_requests() and self.others_at_work()):
                for output in engine.step():
                    name = output.request_id
                    if not name.startswith(AHEAD):
                        ended += [output] if output.finished else []
                        continue
                    key = int(name.removeprefix(AHEAD))
                    self._texts.setdefault(key, []).extend(output.outputs[0].token_ids)
                    self._ended |= {key} if output.finished else set()
                for _ in range(joining(engine.get_num_unfinished_requests(), len(waiting), self.fill)):
                    keyed, cap, prompt = waiting.popleft()
                    theirs = self._with_key(params, keyed, cap)
                    theirs.output_kind = RequestOutputKind.DELTA
                    theirs.detokenize = False
                    request = {"prompt_token_ids": prompt}
                    names.append(engine.add_request(f"{AHEAD}{keyed.key}", request, theirs, priority=1))
        finally:
            engine.abort_request(names, internal=True)  # those that have not ended
        return sorted(ended, key=lambda output: int(output.request_id))

    def _with_key(self, params: VLLMSamplingParams, keyed: KeyedRequest, cap: int) -> VLLMSamplingParams:
        params = params.clone()
        params.max_tokens = cap
        params.extra_args = keyed.extra_args()
        return params

    def reset_prefix_cache(self, *args: Any, **options: Any) -> bool:
        """As LLM.reset_prefix_cache, which is refused while requests run.

        Raises:
            RolloutError: it was, so KV of older weights would be used.
        """
        if not super().reset_prefix_cache(*args, **options):
            raise RolloutError("vLLM still runs requests and kept KV of older weights; start the run again")
        return True

    def limits(self) -> tuple[int, int]:
        """Size of the vocabulary, and most tokens of a prompt and its response."""
        model = self.llm_engine.vllm_config.model_config
        return model.get_vocab_size(), model.max_model_len

    def counters(self) -> tuple[int, int, int]:
        """See acceptance_counts."""
        values: dict[str, int] = {}
        for metric in self.get_metrics():
            if isinstance(metric, Counter):
                values[metric.name] = metric.value
            elif isinstance(metric, Histogram):
                values[metric.name] = metric.count
        return acceptance_counts(values)

    @property
    def reloads_layers(self) -> bool:
        """Whether weights have to be loaded by `reload`.

        A CPU build packs linear layers, and vLLM cannot load a single weight into a packed one.
        """
        return current_platform.is_cpu()

    def reload(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Loads all weights, by their Hugging Face names, and forgets KV of older ones."""
        executor: Any = self.llm_engine.model_executor
        runner = executor.driver_worker.model_runner
        initialize_layerwise_reload(runner.model)
        runner.model.load_weights(weights)
        finalize_layerwise_reload(runner.model, runner.model_config)
        refresh_tied_head(runner.model)
        self.reset_prefix_cache()
