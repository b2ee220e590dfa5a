"""Model Runner V1, in each worker: keyed requests are sampled with this package's noise, and drafts verified with it.

vLLM loads `KeyedDrafter` by name and asks it for drafts, which come from the scheduler instead (planned.py). Where the
worker is in the trainer's process, the rollout's acceptance rule decides; elsewhere it is the exact one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from specrl.rollout.drafting.draft import Draft
from specrl.rollout.engines.local.sampler import packed_sample, rows_per_chunk
from specrl.rollout.engines.response import refuse_unusable
from specrl.rollout.engines.vllm.planned import PlannedDrafts
from specrl.rollout.engines.vllm.row import BUG
from specrl.rollout.engines.vllm.wire import KEY, PROMPT_TOKENS, extra_args_of
from specrl.rollout.noise import process_logits
from specrl.rollout.types import RolloutError
from specrl.rollout.verify import Accepted, TargetSamples, exact

log = logging.getLogger(__name__)


@dataclass(slots=True)
class KeyedState:
    """What a worker knows of a keyed request."""

    key: int
    start: int
    """Tokens before its response."""
    terms: tuple[float, int, float]
    """Temperature, top-k and top-p."""


@dataclass(slots=True)
class Verified:
    """A request that is sampled in a step."""

    index: int
    """In the step's batch."""
    name: str
    state: KeyedState
    position: int
    """Response position of its first sample."""
    first: int
    """Index of its first logits [V]; those after its draft tokens follow."""
    size: int
    """Positions that are sampled: one more than vLLM verifies draft tokens."""
    draft: Draft


class KeyedDrafter:
    """What V1's `speculative_config.model` names: it samples."""

    drafts: PlannedDrafts | None = None
    """Of a rollout in this process; None in a server."""

    def __init__(self, vllm_config: VllmConfig):
        self.chunk = rows_per_chunk(vllm_config.model_config.get_vocab_size())
        """Positions sampled at a time; bounds the memory of the noise."""
        self._states: dict[str, KeyedState | None] = {}
        self._hidden: Tensor | None = None
        """Final hidden states of a step's logits, in their order, if the rule reads them."""

    def load_model(self, *_: Any) -> None:
        """There is none."""

    def serve(self, drafts: PlannedDrafts, chunk: int, model: Any) -> None:
        """The rule of `drafts` decides from now on. Args: model: vLLM's, in this process."""
        self.drafts = drafts
        self.chunk = chunk
        if not drafts.drafting.reads_states:
            return
        compute = model.compute_logits

        def compute_logits(hidden_states: Tensor, *args: Any, **options: Any) -> Tensor | None:
            self._hidden = hidden_states
            return compute(hidden_states, *args, **options)

        model.compute_logits = compute_logits

    def propose(self, sampled_token_ids: list[list[int]], *_: Any, **__: Any) -> list[list[int]]:
        """No drafts: those of the next step come with its plan."""
        return [[] for _ in sampled_token_ids]

    def sample(self, runner: Any, logits: Tensor, metadata: Any) -> SamplerOutput:
        """The next tokens of all requests of a step, those without a key sampled by vLLM's own sampler.

        Args: logits: [drafts + requests, V], those of a request together and in order.
        """
        names = runner.input_batch.req_ids
        counts = metadata.num_draft_tokens if metadata else [0] * len(names)
        verified = self._verified(runner, counts, metadata.draft_token_ids.tolist() if metadata else [])
        allowed = _without_early_end(runner, logits, verified)
        sampled = np.full((len(names), max(counts) + 1), -1, np.int32)
        sampled[:, 0] = 0  # of prompts that are not read yet, which vLLM drops
        for row, accepted in self._accept(allowed, verified):
            sampled[row.index, 0] = -1  # none where the logits are unusable, see ServedScheduler
            sampled[row.index, : len(accepted.tokens)] = accepted.tokens
        output = SamplerOutput(sampled_token_ids=torch.from_numpy(sampled).to(logits.device), logprobs_tensors=None)
        if (most := runner.input_batch.sampling_metadata.max_num_logprobs) is not None:
            output.logprobs_tensors = self._logprobs(runner, allowed, counts, output.sampled_token_ids, most)
        if others := [i for i, name in enumerate(names) if self._states[name] is None]:
            # last, as vLLM changes the logits in place
            _copy_rows(sample_by_vllm(runner, logits, metadata), output, others)
        return output

    def _verified(self, runner: Any, counts: Sequence[int], tokens: Sequence[int]) -> list[Verified]:
        """The keyed requests of a step whose prompts are read. Args: tokens: drafts of all; -1 is padding."""
        names = runner.input_batch.req_ids
        unfinished = runner.discard_request_mask.np[: len(names)].tolist()
        for ended in self._states.keys() - runner.requests.keys():
            del self._states[ended]
        verified = []
        first = 0
        for i, (name, count, part) in enumerate(zip(names, counts, unfinished, strict=True)):
            request = runner.requests[name]
            if name not in self._states:
                self._states[name] = _state_of(request)
            state = self._states[name]
            source = ""
            if state is not None and self.drafts is not None:
                row = self.drafts.rows[name]
                state.terms = row.sampling.terms  # vLLM raises temperatures below 0.01
                source = row.draft.source
            if state is not None and not part:
                draft = tokens[first - i : first - i + count]
                if draft and draft[-1] < 0:
                    draft = [token for token in draft if token >= 0]
                position = request.num_tokens - state.start
                verified.append(Verified(i, name, state, position, first, len(draft) + 1, Draft(draft, source)))
            first += count + 1
        return verified

    def _accept(self, logits: Tensor, verified: Sequence[Verified]) -> Iterator[tuple[Verified, Accepted]]:
        """What each request emits; nothing where its logits are NaN or infinite.

        Raises:
            RolloutError: such logits of a rollout in this process.
        """
        rule = exact if self.drafts is None else self.drafts.rule
        if rule is not exact:
            self._take_drafts(verified)
        tokens, *floats = self._sampled(logits, verified, targets=rule is not exact)
        logprobs, target_logprobs, gaps = (column.view(np.float32) for column in floats)
        usable = ~np.isnan(gaps)
        if self.drafts is not None:
            refuse_unusable(usable.tolist(), self.drafts.weight_version)
        columns = [tokens.tolist(), logprobs.tolist(), target_logprobs.tolist()]
        start = 0
        for row in verified:
            part = slice(start, start + row.size)
            start = part.stop
            states = None if self._hidden is None else (self._hidden, row.first)
            sampled, its, targets = (column[part] for column in columns)
            samples = TargetSamples(row.position, sampled, its, targets, states=states)
            accepted = rule(row.state.key, row.draft, samples)
            if self.drafts is not None:
                self.drafts.decided[row.name] = row.draft, accepted
            elif not usable[part][: len(accepted.tokens)].all():
                accepted = Accepted((), (), (), 0)
                log.warning(
                    "a keyed request ends with an error, as its logits are NaN or infinite (request %s); check the "
                    "last update of the weights",
                    row.name,
                )
            yield row, accepted

    def _take_drafts(self, verified: Sequence[Verified]) -> None:
        """Completes the drafts by what a rule reads of them, such as log-probs, and the next token of a text.

        Raises:
            RolloutError: vLLM verifies other tokens than were proposed.
        """
        assert self.drafts is not None
        for row in verified:
            tokens = row.draft.tokens
            proposed = self.drafts.rows[row.name]
            if self.drafts.drafting.verifies_once:
                row.draft = proposed.rest_of_text(row.size)
            else:
                row.draft = proposed.draft.first(row.size - 1)
            if [*row.draft.tokens[: row.size - 1]] != tokens:
                raise RolloutError(f"vLLM verifies the draft tokens {tokens} of {row.draft}, as proposed; {BUG}")

    def _sampled(self, logits: Tensor, verified: Sequence[Verified], targets: bool) -> np.ndarray:
        """What `packed_sample` returns for the M positions of these requests, int32 [4, M].

        Args: targets: log-probs of the draft tokens are needed.
        """
        if not verified:
            return np.zeros((4, 0), np.int32)
        sizes = np.array([row.size for row in verified])
        ends = sizes.cumsum()
        index = np.arange(ends[-1]) - (ends - sizes).repeat(sizes)  # of a position among its request's
        if len(index) < len(logits):
            among_all = index + np.array([row.first for row in verified]).repeat(sizes)
            logits = logits[torch.from_numpy(among_all).to(logits.device)]
        positions = index + np.array([row.position for row in verified]).repeat(sizes)
        wanted = np.zeros(len(index), np.int64)
        if targets:
            for row, end in zip(verified, ends.tolist(), strict=True):
                wanted[end - row.size :][: len(row.draft.tokens)] = row.draft.tokens
        keys = np.array([row.state.key for row in verified]).repeat(sizes)
        columns = torch.from_numpy(np.stack([keys, positions, wanted])).to(logits.device)
        packed = np.empty((4, len(index)), np.int32)
        parts = [
            (part, packed_sample(logits[part], *columns[:, part].unbind(), *terms))
            for terms, part in by_terms([row.state.terms for row in verified], sizes, self.chunk)
        ]
        for part, sampled in parts:  # copied when all of them are launched
            packed[:, part] = sampled.cpu().numpy()
        return packed

    def _logprobs(
        self, runner: Any, logits: Tensor, counts: Sequence[int], tokens: Tensor, most: int
    ) -> LogprobsTensors:
        """What vLLM reports with tokens [R, width]: log-probs of each and of the `most` likeliest, in its mode."""
        width = tokens.shape[1]
        starts = torch.tensor([0, *(count + 1 for count in counts[:-1])]).cumsum(0)
        index = (starts[:, None] + torch.arange(width)).flatten()
        index = index.clamp(max=len(logits) - 1).to(logits.device)  # vLLM drops positions past a row's end
        states = [self._states[name] for name in runner.input_batch.req_ids]
        all_terms = [state.terms if state else (1.0, 0, 1.0) for state in states]
        tokens = tokens.flatten().clamp(min=0).long()
        positions = torch.arange(len(index))
        sampler = runner.sampler
        parts = []
        order = []
        for terms, part in by_terms(all_terms, np.full(len(counts), width), self.chunk):
            order.append(positions[part])
            values = logits[index[part]].float()
            if sampler.logprobs_mode.startswith("processed"):
                values = process_logits(values, *terms)
            if sampler.logprobs_mode.endswith("logprobs"):
                values = values.log_softmax(-1)
            parts.append(sampler.gather_logprobs(values, most, tokens[part])[:3])
        inverse = torch.cat(order).argsort().to(logits.device)
        ids, logprobs, ranks = (torch.cat(column)[inverse] for column in zip(*parts, strict=True))
        return LogprobsTensors(ids, logprobs, ranks)


def _state_of(request: Any) -> KeyedState | None:
    """Of one of vLLM's requests; None for one without a key."""
    params = request.sampling_params
    extra = extra_args_of(request)
    if KEY not in extra:
        return None
    return KeyedState(extra[KEY], extra[PROMPT_TOKENS], (params.temperature, max(params.top_k, 0), params.top_p))


def by_terms(
    terms: Sequence[tuple[float, int, float]], sizes: np.ndarray, most: int
) -> Iterator[tuple[tuple[float, int, float], slice | np.ndarray]]:
    """The positions of requests that share temperature, top-k and top-p, at most `most` at a time.

    Args: sizes: int64 [R], positions of each request.
    """
    if len({*terms}) == 1:  # most steps: nothing is cut out
        yield from ((terms[0], slice(i, i + most)) for i in range(0, int(sizes.sum()), most))
        return
    for part in dict.fromkeys(terms):
        positions = np.flatnonzero(np.repeat([other == part for other in terms], sizes))
        yield from ((part, positions[i : i + most]) for i in range(0, len(positions), most))


def _without_early_end(runner: Any, logits: Tensor, verified: Sequence[Verified]) -> Tensor:
    """The logits without the ids that would end a response before its `min_tokens`."""
    masked: list[tuple[int, int]] = []
    for row in verified:
        params = runner.requests[row.name].sampling_params
        early = min(row.size, params.min_tokens - row.position)
        masked += [(row.first + i, token) for i in range(early) for token in params.all_stop_token_ids]
    if not masked:
        return logits
    index = tuple(torch.tensor(masked, device=logits.device).T)
    return logits.index_put(index, logits.new_tensor(-torch.inf))


def _copy_rows(source: SamplerOutput, target: SamplerOutput, rows: list[int]) -> None:
    """Copies these rows of what vLLM sampled."""
    tokens = target.sampled_token_ids
    width = tokens.shape[1]
    tokens[rows] = source.sampled_token_ids[rows].to(tokens.dtype)
    if source.logprobs_tensors is not None and target.logprobs_tensors is not None:
        positions = [row * width + i for row in rows for i in range(width)]
        for ours, theirs in zip(target.logprobs_tensors[:3], source.logprobs_tensors[:3], strict=True):
            ours[positions] = theirs[positions]


sample_by_vllm = GPUModelRunner._sample


@wraps(sample_by_vllm)
def _sample(runner: Any, logits: Tensor, metadata: Any) -> SamplerOutput:
    """Runners whose drafter samples call it; all others do as before."""
    drafter = getattr(runner, "drafter", None)
    if not isinstance(drafter, KeyedDrafter):
        return sample_by_vllm(runner, logits, metadata)
    # Drafts end before the row's cap, so they always fit. vLLM's own check would answer a row near the end of the
    # context with made-up drafts for the whole batch.
    runner.effective_drafter_max_model_len = runner.max_model_len + runner.num_spec_tokens
    return drafter.sample(runner, logits, metadata)


GPUModelRunner._sample = _sample  # type: ignore[method-assign,assignment]  # replaces vLLM's own
