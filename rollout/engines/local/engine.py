"""The transformers engine: plain and speculative decoding of ragged batches with the trainer's own model.

A row's life: its prompt is prefilled (once per distinct prompt), then every pass carries its last token and a draft of
the next ones, draws a token at each of those positions, keeps what the rule lets stand and goes on behind it. A row
without a draft simply carries one token. Rows leave as they finish.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from copy import copy

import torch
from torch import Tensor

from rollout.drafting.draft import Draft
from rollout.drafting.drafting import Drafting
from rollout.engines.base import Limits, Probe, Sampling, out_of_memory
from rollout.engines.local.ragged import RaggedModel
from rollout.engines.local.reader import Reader
from rollout.engines.response import Response, check_request, refuse_unusable
from rollout.types import AheadText, Completion, EngineStats, Request, RolloutError
from rollout.verify import Rule, exact

MAX_CUTS = 3
"""How often rows that do not fit the memory together are cut in two."""
_OF_DRAFTS = ("drafted", "accepted", "sources", "paused", "paused_acceptance", "paused_needed")


class LocalModel:
    """The trainer's model behind the Engine seam: its weights, and what it makes of a text.

    Args:
        model: a decoder-only causal LM of transformers that uses its attention interface, or a peft model around one.
        sampling: the law that tokens are drawn from.
        own_weights: the model is not the trainer's, so updates carry tensors.
    """

    def __init__(self, model: torch.nn.Module, sampling: Sampling, limits: Limits | None = None, own_weights=False):
        if any(adapter.is_prompt_learning for adapter in getattr(model, "peft_config", {}).values()):
            raise RolloutError("adapters that learn a prompt are not in the model's own layers; use LoRA instead")
        self.model = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.policy = RaggedModel(self.model, sampling, limits)
        self.sampling, self.limits = sampling, self.policy.limits
        self.vocab, self.context, self.limit = self.policy.vocab, self.policy.context, self.policy.limit
        self.tie_margin = self.limits.tie_margin if self.policy.dtype == torch.float32 else 0.0
        self.weight_version, self.own_weights = 0, own_weights

    @property
    def device(self) -> torch.device:
        return self.policy.device

    def update_weights(
        self, weights: Iterable[tuple[str, Tensor]] | None, version: int, probe: Probe | None = None
    ) -> None:
        """See Engine.update_weights. A model that is shared with the trainer only records the version."""
        if version < self.weight_version:
            raise RolloutError(f"weight version {version} is older than the engine's {self.weight_version}")
        if weights is not None:
            self._load(weights)
        if probe is not None:
            probe.check(self.score(probe.tokens), version)
        self.weight_version = version

    def score(self, tokens: Sequence[int]) -> list[float]:
        """See Engine.score."""
        with self.policy.inference():
            logits = self.policy.lm_head(self.policy.forward(tokens, self.policy.alone(len(tokens)))).float()
            targets = torch.tensor(tokens[1:], device=self.device)[:, None]
            return logits[:-1].log_softmax(-1).gather(-1, targets)[:, 0].tolist()

    def reset_cache(self) -> None:
        """Nothing to forget: KV lives only inside `generate`."""

    def close(self) -> None:
        """Nothing to free: the model belongs to the trainer."""

    def _load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        state = self.model.state_dict()
        with torch.no_grad():
            for name, tensor in weights:
                if name not in state:
                    raise RolloutError(f"the update names the weight {name!r}, which the engine's model does not have")
                if tensor.shape != state[name].shape:  # copy_ would broadcast a smaller one
                    shapes = f"{tuple(tensor.shape)}, the engine's model has {tuple(state[name].shape)}"
                    raise RolloutError(f"the update gives the weight {name!r} the shape {shapes}")
                state[name].copy_(tensor)


class TransformersEngine(LocalModel):
    """Generates with any decoder-only causal LM of transformers that uses its attention interface.

    No KV outlives a `generate` call, so nothing stale can be served.

    Args:
        model, sampling, limits, own_weights: see LocalModel; draws closer than `limits.tie_margin` are decided by a
            canonical pass in float32 only.
        rule: decides what stands of a draft.
        drafting: proposes drafts; by default from the requests' own drafters.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        sampling: Sampling,
        rule: Rule = exact,
        drafting: Drafting | None = None,
        limits: Limits | None = None,
        own_weights: bool = False,
    ):
        super().__init__(model, sampling, limits, own_weights)
        self.rule, self.drafting = rule, drafting or Drafting()
        self.drafting.attach(self.policy)

    def generate(self, requests: Sequence[Request]) -> tuple[list[Completion], EngineStats]:
        """See Engine.generate. Prompts need at least one token and must fit the model's context with the response."""
        rows, stats = self._rows(requests), EngineStats()
        self.drafting.begin(requests)
        self._run(rows, stats)
        self.drafting.end(rows, stats)
        return [row.completion(self.weight_version) for row in rows], stats

    def ahead(self, requests: Sequence[Request], stop: Callable[[], bool]) -> list[AheadText]:
        """What there is of each response when `stop`, asked before each pass, says so, or all have ended.

        Nothing is learnt of these texts, as they come again.
        """
        rows = self._rows(requests)
        with self.policy.until(stop):
            self._run(rows, EngineStats())
        return [AheadText(row.tokens, row.finish) for row in rows]

    def _rows(self, requests: Sequence[Request]) -> list[Response]:
        for request in requests:
            check_request(request, self.vocab, self.context, self.limit)
        return [Response(request, drafting=not request.plain) for request in requests]

    def _run(self, rows: list[Response], stats: EngineStats) -> None:
        size = self.limits.rows_per_batch
        with ExitStack() as stack:
            for inference in (self.policy.inference, self.drafting.inference):
                stack.enter_context(inference())
            for i in range(0, len(rows), size):
                self._fit(rows[i : i + size], stats)

    def _fit(self, rows: list[Response], stats: EngineStats, cuts: int = 0) -> None:
        """Finishes rows together; where memory runs out, in halves. Which rows share a pass changes no token.

        What is thrown away is paid for, in passes, tokens and seconds; of its drafts nothing is left to be counted.
        """
        before = {name: copy(getattr(stats, name)) for name in _OF_DRAFTS}
        try:
            return self._decode(rows, stats)
        except Exception as error:
            if not out_of_memory(error):
                raise
            reason = str(error)  # the error itself would keep what fills the memory
        if cuts == MAX_CUTS or len(rows) == 1:
            raise RolloutError(
                f"out of memory with {len(rows)} rows, cut {cuts} times: {reason}. Use a lower rollout.rows_per_batch "
                f"(now {self.limits.rows_per_batch}), tokens_per_pass ({self.limits.tokens_per_pass}) or max_new_tokens"
            )
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        for name, value in before.items():
            setattr(stats, name, value)
        for row in rows:
            row.restart()
        half = (len(rows) + 1) // 2
        for part in (rows[:half], rows[half:]):
            self._fit(part, stats, cuts + 1)

    def _decode(self, rows: list[Response], stats: EngineStats) -> None:
        """The rows' life behind their prompts: draft, one pass, what stands, emit, until all have ended."""
        policy = self._open(rows, stats)
        while rows:
            began = time.perf_counter()
            drafts = self.drafting.propose(rows, stats)
            stats.draft_s += time.perf_counter() - began
            going = {i: [row.last, *drafts[i].tokens] for i, row in enumerate(rows) if row.finish is None}
            for part in policy.parts(going):
                self._step(policy, part, rows, drafts, stats)
            alive = [i for i, row in enumerate(rows) if row.finish is None]
            if len(alive) <= 3 * len(rows) // 4:  # amortised: the survivors are copied a few times in all
                policy.select(alive)
                self.drafting.select(alive)
                rows = [rows[i] for i in alive]
        stats.ties += policy.ties

    def _open(self, rows: list[Response], stats: EngineStats) -> Reader:
        """The policy with the KV of every row's prompt."""
        began = time.perf_counter()
        requests = [row.request for row in rows]
        policy = Reader(self.policy, [r.prompt for r in requests], [r.key for r in requests], self.tie_margin)
        policy.prefill()
        stats.forward_tokens += policy.forward_tokens
        self.drafting.open(rows)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        stats.prefill_s += time.perf_counter() - began
        return policy

    def _step(
        self, policy: Reader, part: dict[int, list[int]], rows: list[Response], drafts: list[Draft], stats: EngineStats
    ) -> None:
        """One pass over some rows."""
        began, tokens = time.perf_counter(), sum(map(len, part.values()))
        drawn = policy.read(part)
        refuse_unusable((d.usable for d in drawn.values()), self.weight_version)
        for i, of_row in drawn.items():
            row, draft = rows[i], drafts[i]
            stood = self.rule(row.request.key, draft, of_row)
            emitted = row.emit(stood, self.sampling.eos_ids)
            policy.rollback(i, len(row.tokens) - 1)
            stats.count(draft.source, len(draft.tokens), min(stood.drafted, emitted))
            self.drafting.learn(row, draft, stood)
        spent = time.perf_counter() - began
        self.drafting.observe_pass(tokens, spent, len(part), policy.width)
        stats.passes += 1
        stats.forward_tokens += tokens
        if tokens > len(part):
            stats.verify_s += spent
        else:
            stats.decode_s += spent
