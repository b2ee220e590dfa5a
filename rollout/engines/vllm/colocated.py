"""An LLM for trainers that run vLLM in their own process: it serves keyed requests and counts what it accepts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Any

from torch import Tensor
from vllm import LLM
from vllm import SamplingParams as VLLMSamplingParams
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform
from vllm.v1.metrics.reader import Counter, Histogram

from specrl.rollout.engines.vllm.engine import one_thread
from specrl.rollout.engines.vllm.served import engine_args
from specrl.rollout.engines.vllm.wire import KeyedRequest, acceptance_counts
from specrl.rollout.engines.vllm.worker import refresh_tied_head

CPU_BLOCK = 32
"""Tokens of a block of the KV cache; a CPU's default of 128 would cache little."""


class KeyedLLM(LLM):
    """vLLM's LLM, started with the classes that serve keyed requests.

    Args: options: as those of LLM.
    """

    rows: Sequence[tuple[KeyedRequest, int]] | None = None
    """Key, drafts and cap of each prompt of the next `generate`; None: its sampling params are those of vLLM."""

    def __init__(self, **options: Any):
        platform: dict[str, Any] = {"block_size": CPU_BLOCK, "enforce_eager": True} if current_platform.is_cpu() else {}
        platform |= deepcopy(engine_args())
        super().__init__(**options, **platform, disable_log_stats=False)

    def generate(self, prompts: Any, sampling_params: Any = None, **options: Any) -> list:
        """As LLM.generate; with `rows`, every prompt has the sampling params and a key of its own."""
        if self.rows is None:
            return super().generate(prompts, sampling_params, **options)
        params = [self._with_key(sampling_params, keyed, cap) for keyed, cap in self.rows]
        with one_thread():
            return super().generate(prompts, params, **options)

    def _with_key(self, params: VLLMSamplingParams, keyed: KeyedRequest, cap: int) -> VLLMSamplingParams:
        params = params.clone()
        params.max_tokens = cap
        params.extra_args = keyed.extra_args()
        return params

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
