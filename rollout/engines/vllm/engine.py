"""The vLLM engine, for production: an Engine with its own copy of the weights.

A response is one request. This package's noise samples its tokens, so they are those of the transformers engine,
whether drafts come from the host (on Model Runner V1 of CPU builds, and on V2) or from the device (on V2).
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

# Read when vLLM is imported. One process, because drafters are live objects; eager, because a CPU compiles for seconds.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
if not torch.cuda.is_available():
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")

from vllm import LLM
from vllm import SamplingParams as VLLMSamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.platforms import current_platform

from specrl.rollout.drafting.drafting import Drafting
from specrl.rollout.drafting.frequent import FREQUENT_IDS
from specrl.rollout.engines.base import Engine, EngineSpec, Probe, SamplingParams
from specrl.rollout.engines.filling import FillsPasses, chosen_fill
from specrl.rollout.engines.local.sampler import rows_per_chunk
from specrl.rollout.engines.response import check_request
from specrl.rollout.engines.vllm.contract import check as check_names
from specrl.rollout.engines.vllm.device_scheduler import DraftLengths
from specrl.rollout.engines.vllm.draft_ids import DraftIds
from specrl.rollout.engines.vllm.driver import Flow
from specrl.rollout.engines.vllm.logits import logits_budget
from specrl.rollout.engines.vllm.planned import PlannedDrafts
from specrl.rollout.engines.vllm.planned_model import ModelDrafts
from specrl.rollout.engines.vllm.row import VLLMRow
from specrl.rollout.engines.vllm.settings import choose_runner, draft_tokens, executor, settings, speculation
from specrl.rollout.engines.vllm.weights import Updates, described, drafter_share
from specrl.rollout.engines.vllm.worker import TRANSFER
from specrl.rollout.engines.weights import WeightCheck
from specrl.rollout.types import AheadText, Completion, EngineStats, Request, RolloutError
from specrl.rollout.verify import AcceptanceRule


class VLLMEngine(FillsPasses):
    """Generates with vLLM in this process. Of several processes that train each has an engine of its own, whose steps
    need no other's; they start together.

    Args:
        spec: the model and every `rollout.*` setting.
        sampling: the run's sampling params.
        rule: decides which draft tokens are accepted.
        drafting: proposes drafts.

    Raises:
        RolloutError: vLLM does not start with these settings; the message says what would work.
    """

    own_weights = True

    def __init__(self, spec: EngineSpec, sampling: SamplingParams, rule: AcceptanceRule, drafting: Drafting):
        config = spec.rollout
        if config.vllm.compile == "on" and os.environ.get("TORCH_COMPILE_DISABLE") == "1":
            raise RolloutError(
                "rollout.vllm.compile=on has no effect with TORCH_COMPILE_DISABLE=1, which specrl sets on a CPU. Set "
                "TORCH_COMPILE_DISABLE=0 in the environment, or take rollout.vllm.compile=auto"
            )
        super().__init__()
        self.spec = spec
        self.sampling = sampling
        self.rule = rule
        self.drafting = drafting
        self.runner = choose_runner(spec, sampling)
        check_names(self.runner)
        self._borrowed_group = torch.distributed.is_initialized()
        models, self._llm = self._start()
        self.vocab = self.drafting.vocab = self._llm.model_config.get_vocab_size()
        self.drafting.budget.padded = False
        self.context = self._llm.llm_engine.vllm_config.model_config.max_model_len
        if self.context <= config.max_new_tokens:
            self.close()
            raise RolloutError(
                f"vLLM's KV cache holds a row of {self.context} tokens, too few for a prompt and "
                f"rollout.max_new_tokens={config.max_new_tokens}; raise rollout.kv_cache_mb or lower the cap"
            )
        self._flow = self._build_flow(drafter_share(spec, *models))
        draft_ids = FREQUENT_IDS if config.drafter else 0
        self._draft_ids = DraftIds(self._llm, draft_ids, self.vocab, sampling.eos_ids)
        self._users = 0
        sleeps = config.vllm.sleep and not current_platform.is_cpu()
        self.updates = Updates(self._llm, WeightCheck(*models), config.vllm.tensor_parallel, sleeps, self._prove)
        self._calibrate()

    @property
    def weight_version(self) -> int:
        return self.updates.version

    def generate(self, requests: Sequence[Request]) -> tuple[list[Completion], EngineStats]:
        """See Engine.generate. Prompts need at least one token and must fit the engine's context with the response."""
        rows = self._rows(requests)
        ahead = self._rows(self.take_announced(), ahead=True)
        self.drafting.begin(requests)
        stats = self._run(rows, lambda: False, ahead)
        self.drafting.end(rows, stats)
        self.keep(ahead)
        self._draft_ids.learn(rows)
        return [row.completion(self.weight_version) for row in rows], stats

    def ahead(self, requests: Sequence[Request], stop: Callable[[], bool]) -> list[AheadText]:
        """The responses so far when `stop`, asked before each step, says so, or when all have ended."""
        rows = self._rows(requests)
        self._run(rows, stop)
        return [AheadText(row.tokens, row.finish) for row in rows]

    def _rows(self, requests: Sequence[Request], ahead: bool = False) -> list[VLLMRow]:
        if self.updates.fault:
            raise RolloutError(f"{self.updates.fault}; send the weights again before generating")
        for request in requests:
            check_request(request, self.vocab, self.context)
        return [
            VLLMRow(request, drafting=not request.plain, ahead=ahead, sampling=self.sampling) for request in requests
        ]

    def _run(self, rows: Sequence[VLLMRow], stop: Callable[[], bool], ahead: Sequence[VLLMRow] = ()) -> EngineStats:
        with self._awake():  # vLLM froze the heap when it started, see gc_frozen
            self._draft_ids.choose(rows)
            try:
                return self._flow.run(rows, stop, self.weight_version, ahead, self.fill, self.others_at_work)
            except BaseException:
                self.reset_cache()  # a step that failed has left blocks listed as computed
                raise

    def update_weights(
        self, weights: Iterable[tuple[str, Tensor]] | None, version: int, probe: Probe | None = None
    ) -> None:
        """See Engine.update_weights.

        After a failure the engine refuses to generate until an update succeeds. It may walk a Source again until the
        next update (see Updates).
        """
        self.updates.update(weights, version, probe)

    def _prove(self, version: int, probe: Probe | None) -> None:
        self.reset_cache()
        if probe is not None:
            probe.check(scored(self._llm, probe.tokens), version)

    def score(self, tokens: Sequence[int]) -> list[float]:
        """See Engine.score. At most one token less than the context."""
        if not 0 < len(tokens) < self.context:
            raise RolloutError(f"this engine scores 1 to {self.context - 1} tokens, not {len(tokens)}")
        with self._awake():
            return scored(self._llm, tokens)

    def reset_cache(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise RolloutError("vLLM still runs requests and kept KV of older weights; this engine must be replaced")

    def close(self) -> None:
        if llm := self.__dict__.pop("_llm", None):
            shut_down(llm, self._borrowed_group)

    # Start --------------------------------------------------------------------------------------------------------

    def _start(self) -> tuple[tuple[PreTrainedModel, PreTrainedModel | None], LLM]:
        """The models on the meta device, and vLLM."""
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(self.runner == "v2"))
        arguments: dict[str, Any] = settings(self.spec) | speculation(self.spec, self.runner)
        arguments |= executor(self.spec.rollout.vllm.tensor_parallel)
        arguments["worker_extension_cls"] = "specrl.rollout.engines.vllm.worker.WorkerExtension"
        arguments["weight_transfer_config"] = {"backend": TRANSFER}
        try:
            with _unchanged_process():
                return described(self.spec), LLM(**arguments)
        except (ImportError, ValueError, RuntimeError, OSError, AssertionError) as error:
            raise self._refused(error) from error

    def _refused(self, error: Exception) -> RolloutError:
        why = " ".join(str(error).split()).rstrip(".")
        return RolloutError(
            f"vLLM did not start with {self.spec.model}: {why}. Where vLLM has no kernels for this model, such as for "
            "the size of its attention heads, try rollout.engine=transformers"
        )

    def _build_flow(self, drafter_share: float) -> Flow:
        config = self.spec.rollout
        dtype = getattr(torch, self.spec.dtype)
        budget = logits_budget(self.vocab, dtype, config.tokens_per_pass)
        if config.vllm.on_device:
            speculator = config.vllm.speculator.partition("=")[0]
            source = "model" if config.drafter else {"device": "texts"}.get(speculator, speculator)
            self._llm.collective_rpc("specrl_install_device", args=(source == "texts",))
            lengths = DraftLengths(
                source=source, drafting=self.drafting, draft_tokens=draft_tokens(config), budget=budget
            )
            return Flow(llm=self._llm, drafts=lengths)
        shared: dict[str, Any] = {
            "drafting": self.drafting,
            "draft_tokens": draft_tokens(config),
            "budget": budget,
        }
        model = ModelDrafts(share=drafter_share, **shared) if drafter_share else None
        drafts = PlannedDrafts(rule=self.rule, model=model, **shared)
        if self.runner == "v1":
            self._llm.collective_rpc("specrl_install_v1", args=(drafts, rows_per_chunk(self.vocab)))
        else:
            self._llm.collective_rpc("specrl_install_v2", args=(model is not None,))
        return Flow(llm=self._llm, drafts=drafts, logprobs=self.runner == "v2")

    def _calibrate(self) -> None:
        """Times passes of few and of many tokens, for the budget and `fill`."""
        seconds = partial(pass_seconds, self._llm)
        sizes = 2, min(256, self.context - 1)
        try:
            measured = [(n, seconds(n)) for n in sizes]
            if not self.spec.rollout.vllm.on_device:
                self.fill = chosen_fill(self.spec.rollout.fill, seconds, current_platform.is_cpu())
        except (ValueError, RuntimeError, AssertionError) as error:  # found by the first passes, not by the start
            self.close()
            raise self._refused(error) from error
        self.drafting.budget.calibrate(measured)

    def session(self, requests: Sequence[Request], beside: Engine | None = None) -> AbstractContextManager[None]:
        """See HoldsSessions: vLLM stays awake, and its prefix cache holds the KV, in memory that is reserved."""
        return self._awake()

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """The GPU holds the model until the outermost of such blocks ends, however it does."""
        self.updates.wake()
        self._users += 1
        try:
            with one_thread():
                yield
        finally:
            self._users -= 1
            if not self._users:
                self.updates.sleep()


def shut_down(llm: LLM, borrowed_group: bool) -> None:
    """Ends an engine, and torch's process group only if it is the engine's own: vLLM would destroy any."""
    core: Any = llm.llm_engine.engine_core
    if borrowed_group:
        core._finalizer.detach()
        core.engine_core.model_executor.shutdown()
    else:
        core.shutdown()


def scored(llm: LLM, tokens: Sequence[int]) -> list[float]:
    """As Engine.score, of an engine that is awake."""
    params = VLLMSamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False)
    with one_thread():
        (output,) = llm.generate({"prompt_token_ids": list(tokens)}, params, use_tqdm=False)
    scores = output.prompt_logprobs
    assert isinstance(scores, FlatLogprobs)  # as asked for
    return [scores.logprobs[first] for first in scores.start_indices[1:]]


def pass_seconds(llm: LLM, tokens: int) -> float:
    """Seconds of a pass of so many tokens, at least two and at most what the engine holds: the best of three, after a
    warm-up."""
    prompt = [0] * min(max(tokens, 2), llm.llm_engine.vllm_config.model_config.max_model_len - 1)

    def once() -> float:
        began = time.perf_counter()
        scored(llm, prompt)
        return time.perf_counter() - began

    return min(once() for _ in range(4))


@contextmanager
def one_thread() -> Iterator[None]:
    """A CPU computes on one thread: more would round the same logits differently."""
    threads = torch.get_num_threads()
    if current_platform.is_cpu():
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _unchanged_process() -> Iterator[None]:
    """Undoes what vLLM's start does to the trainer's process: it seeds all generators, disables a torch function."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    set_num_threads = torch.set_num_threads
    try:
        # of this process's GPU: asking another one for its state would open a context there
        with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_num_threads = set_num_threads
