"""TRL's vLLM, in the trainer's process or behind its client, as an Engine: each request carries a key and drafts."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from accelerate.utils import broadcast_object_list, gather_object

from specrl.rollout.drafting.suffix import SuffixDrafter
from specrl.rollout.engines.base import Probe
from specrl.rollout.engines.filling import JOINING
from specrl.rollout.engines.vllm.wire import KeyedRequest
from specrl.rollout.types import AheadText, Completion, EngineStats, FinishReason, Request, RolloutError
from specrl.rollout.workers.ahead import Ahead

if TYPE_CHECKING:
    from trl import GRPOConfig

MOST_TEXTS = 8
"""Earlier responses that are sent with a request."""


class TRLEngine:
    """An Engine on the vLLM that TRL owns. TRL sends its weights, and chooses its sampling params.

    It works ahead (see WorksAhead). A server is idle while TRL scores a batch and updates the weights, and does so
    then: from the end of a `generate` to the beginning of the next, or of an update. The first process sends the rows
    of all. In the trainer's process rows of the next batch join passes of `generate`.

    Args:
        trainer: a GRPOTrainer or RLOOTrainer with use_vllm=True, built inside `keyed_vllm`.
        eos_ids: ids that end a response.
    """

    own_weights = True
    others_at_work = staticmethod(lambda: False)
    """See FillsPasses: of an engine in the trainer's process."""

    def __init__(self, trainer: Any, eos_ids: frozenset[int]):
        self._trainer = trainer
        self._generation = trainer.vllm_generation
        self._eos_ids = eos_ids
        self._calls = 0
        self.weight_version = 0
        self._server = trainer.vllm_mode == "server"
        self._vllm: Any = trainer.vllm_generation.llm if not self._server else None
        if self._server and trainer.accelerator.is_main_process:
            self._vllm = trainer.vllm_generation.vllm_client
        self.not_ahead = "" if self._server or self._vllm.fill else "rollout.fill is 0, so nothing joins passes"
        self.how_ahead = "the vLLM server begins the next batch while this one is scored and trained on"
        if not self._server:
            self.how_ahead = JOINING.format(self._vllm.fill)
        self._ahead = Ahead()
        self._working: Sequence[Request] | None = None  # rows of this process that the server works ahead on
        self._began = 0.0
        limits = [self._vllm.limits()] if self._vllm else []
        self.vocab, self.context = gather_object(limits)[0] if self._server else limits[0]

    def generate(self, requests: Sequence[Request]) -> tuple[list[Completion], EngineStats]:
        """See Engine.generate. Behind a server every process calls it equally often."""
        self._halt()
        keyed = self._keyed(requests)
        caps = [request.max_new_tokens for request in requests]
        rows = list(zip(keyed, caps, strict=True))
        if self._server:
            rows = gather_object(rows)  # TRL sends the prompts of all processes from the first one
        else:
            self._vllm.others_at_work = self.others_at_work
            self._work_ahead()
        before = self._vllm.counters() if self._vllm else None
        if self._vllm:
            self._vllm.rows = rows
        prompts = [list(request.prompt) for request in requests]
        try:
            _, tokens, logprobs, _ = self._generation.generate(prompts=prompts, images=None, num_generations=1)
        finally:
            if self._vllm:
                self._vllm.rows = None
        stats = EngineStats()
        if self._vllm and before is not None:
            steps, drafted, accepted = (now - then for now, then in zip(self._vllm.counters(), before, strict=True))
            stats.passes = steps
            stats.count("texts", drafted, accepted)
        if self._server:
            self._work_ahead()
        else:
            stats.ahead_tokens = self._halt()
            self._ahead.plan([])  # the passes of evaluations and baselines are their own
        values = logprobs or [[] for _ in tokens]  # RLOO asks vLLM for none
        responses = zip(tokens, values, strict=True)
        return [self._completion(list(ids), [entry[0] for entry in row]) for ids, row in responses], stats

    def update_weights(self, weights: Iterable | None, version: int, probe: Probe | None = None) -> None:
        """TRL sends the weights of this step, once."""
        trainer = self._trainer
        if trainer.state.global_step != trainer._last_loaded_step:
            self._halt()
            if not self._server and self._vllm is not None and self._vllm.reloads_layers:
                self._vllm.reload(self._generation._iter_named_params())
            else:
                self._generation.sync_weights()
            trainer._last_loaded_step = trainer.state.global_step
        self.weight_version = version

    def begin(self, requests: Sequence[Request]) -> None:
        """See WorksAhead."""
        self._ahead.plan(requests)

    def stop(self) -> tuple[dict[int, AheadText], float]:
        """See WorksAhead."""
        self._halt()
        return self._ahead.take()

    def _work_ahead(self) -> None:
        """Begins the announced rows; behind a server those of all processes."""
        requests = self._ahead.share(1)
        rows = [
            (keyed, request.max_new_tokens, [*request.prompt])
            for keyed, request in zip(self._keyed(requests), requests, strict=True)
        ]
        if rows := gather_object(rows) if self._server else rows:
            self._working = requests
            self._began = time.perf_counter()
            if self._vllm:
                self._vllm.begin(rows)

    def _halt(self) -> int:
        """Ends the work ahead, and keeps its texts. Returns their tokens.

        Raises:
            RolloutError: the server does not stop, or has failed; it must get no weights, as it would go on with KV of
                the old ones.
        """
        if self._working is None:
            return 0
        stopped = [self._vllm.stop() if self._vllm else None]
        seconds = 0.0  # passes of the batch take no longer
        if self._server:
            broadcast_object_list(stopped, from_process=0)
            seconds = time.perf_counter() - self._began
        texts = [
            AheadText(tokens, None if cut else self._finish(tokens))
            for tokens, cut in ((stopped[0] or {})[request.key] for request in self._working)
        ]
        self._ahead.learn(self._working, texts, seconds)
        self._working = None
        return sum(len(text.tokens) for text in texts)

    def _finish(self, tokens: Sequence[int]) -> FinishReason:
        return "stop" if tokens and tokens[-1] in self._eos_ids else "length"

    def reset_cache(self) -> None:
        """Forgets the KV of earlier prompts, so that what is repeated without drafts does not profit from it."""
        self._halt()  # vLLM keeps it while it serves requests
        if self._vllm:
            self._vllm.reset_prefix_cache()

    def score(self, tokens: Sequence[int]) -> list[float]:
        raise RolloutError("TRL's vLLM scores no text; log-probs come from the trainer's own passes")

    def close(self) -> None:
        """The engine belongs to TRL."""

    def _keyed(self, requests: Sequence[Request]) -> list[KeyedRequest]:
        """The requests on the wire; those that share old texts are a group."""
        self._calls += 1
        process = self._trainer.accelerator.process_index
        groups: dict[int, str] = {}
        keyed = []
        for i, request in enumerate(requests):
            drafter = request.drafter
            stored: list[tuple[int, ...]] = []
            own: tuple[int, ...] = ()
            shared = i
            if isinstance(drafter, SuffixDrafter):
                shared = id(drafter.texts)
                own = tuple(drafter.keyed or drafter.old or ())
                stored = [tuple(text) for text in drafter.texts.texts[: drafter.texts.stored]]
            texts = tuple(dict.fromkeys([*([own] if own else []), *stored]))[:MOST_TEXTS]
            group = groups.setdefault(shared, f"{process}/{self._calls}/{len(groups)}")
            keyed.append(
                KeyedRequest(
                    key=request.key,
                    prompt_tokens=len(request.prompt),
                    group=group,
                    texts=texts,
                    own=0 if own else -1,
                    plain=request.plain,
                )
            )
        return keyed

    def _completion(self, tokens: list[int], logprobs: list[float]) -> Completion:
        return Completion(
            tokens=tokens,
            logprobs=logprobs,
            behaviour_logprobs=logprobs,
            reused=[False] * len(tokens),  # vLLM counts accepted tokens of all rows together
            finish=self._finish(tokens),
            version=self.weight_version,
            passes=0,
        )


def check_server(args: GRPOConfig) -> None:
    """Asks the server of a trainer whether it serves keyed requests, before the trainer loads a model.

    Raises:
        RolloutError: it was started without specrl's classes.
        ConnectionError: it does not answer within `vllm_server_timeout`.
    """
    if args.use_vllm and args.vllm_mode == "server" and args.process_index == 0:
        url = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
        _keyed_client(base_url=url, connection_timeout=args.vllm_server_timeout)


@contextmanager
def keyed_vllm(fill: int | str) -> Iterator[None]:
    """A TRL trainer that is built in a `with` block has a vLLM, or a client of one, that serves keyed requests.

    Args: fill: `rollout.fill`.

    TRL gives its engine fixed arguments (trl/generation/vllm_generation.py), so the classes that it builds are
    replaced while it does.
    """
    import trl.generation.vllm_generation as theirs

    replaced = {"LLM": partial(_keyed_llm, fill=fill), "VLLMClient": _keyed_client}
    originals = {name: getattr(theirs, name) for name in replaced if hasattr(theirs, name)}
    for name in originals:
        setattr(theirs, name, replaced[name])
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(theirs, name, original)


def _keyed_llm(**options: Any) -> Any:
    from specrl.rollout.engines.vllm.colocated import KeyedLLM

    return KeyedLLM(**options)


def _keyed_client(**options: Any) -> Any:
    from specrl.trainers.grpo.client import KeyedClient

    return KeyedClient(**options)
