"""Model Runner V1: a response is one request, drafts ride in it, and this package's own noise draws its tokens.

`sample` decides about a step in the place of vLLM's sampler, then vLLM asks `propose` for the next drafts. vLLM's
worker lives in the driver's process, so rows, drafters and budget are plain shared objects.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import MethodType

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import SamplerOutput

from rollout.drafting.draft import Draft
from rollout.engines.base import Sampling
from rollout.engines.local.draw import packed_draw
from rollout.engines.vllm.requests import OneRequest
from rollout.engines.vllm.rows import VLLMRow
from rollout.engines.vllm.step import Fed, StepRules, keep_hidden, padded, ranges


@dataclass(kw_only=True)
class V1Rules(StepRules):
    """Draws and drafts in V1's step; whose rows they are is a subclass's matter.

    Args:
        scores_per_chunk: positions drawn at a time; bounds the memory of the noise.
        draw: see `packed_draw`.
    """

    scores_per_chunk: int
    draw: Callable[..., Tensor] = packed_draw

    def of(self, runner, names: Sequence[str]) -> list[VLLMRow | None]:
        """The rows of vLLM's requests; None for those that this package does not draw."""
        raise NotImplementedError

    def sample(self, runner, logits: Tensor, metadata) -> SamplerOutput:
        """Decides every row's next tokens from logits [drafts + rows, V], a row's positions together and in order."""
        ids = runner.input_batch.req_ids
        unfinished = runner.discard_request_mask.np[: len(ids)].tolist()  # this step computed a part of their prompts
        rows = [None if part else row for part, row in zip(unfinished, self.of(runner, ids), strict=True)]
        counts, tokens = np.zeros(len(ids), np.int64), np.empty(0, np.int64)
        if metadata:
            counts, tokens = np.array(metadata.num_draft_tokens), metadata.draft_token_ids.cpu().numpy()
        fed = Fed(rows, counts, tokens)
        self._step.tokens = int(runner.query_start_loc.np[len(ids)])
        drafts = self.tested(rows, fed)
        tokens, sizes = self.decide(rows, fed, drafts, self._drawn(logits, rows, fed, drafts))
        sampled = padded(tokens, fed.firsts, sizes, int(counts.max()) + 1)
        return SamplerOutput(sampled_token_ids=torch.from_numpy(sampled).to(logits.device), logprobs_tensors=None)

    def propose(self, runner, sampled: list[list[int]], *_, **__) -> list[list[int]]:
        """The draft that rides in each row's next step."""
        began = time.perf_counter()
        rows = zip(self.of(runner, runner.input_batch.req_ids), sampled, strict=True)
        drafts = self.ask([row if row and new and row.finish is None else None for row, new in rows])
        self._step.draft_s = time.perf_counter() - began
        return drafts

    def _drawn(self, logits: Tensor, rows: Sequence[VLLMRow | None], fed: Fed, drafts: Sequence[Draft]) -> np.ndarray:
        """What `packed_draw` tells of the rows' positions, int32 [4, N]; 0 elsewhere. Noise exists chunk by chunk."""
        if not (ours := [row for row in rows if row]):
            return np.zeros((4, len(logits)), np.int32)
        sizes, index = fed.sizes, np.arange(len(logits))
        if not (whole := int(sizes.sum()) == len(logits)):
            index, sizes = ranges(fed.firsts, sizes), sizes[sizes > 0]
        keys, at = [row.request.key for row in ours], np.array([len(row.tokens) for row in ours])
        columns = np.empty((4, len(index)), np.int64)
        columns[0] = index
        columns[1:3] = np.array((keys, at - sizes.cumsum() + sizes)).repeat(sizes, 1)
        columns[2] += np.arange(len(index))
        columns[3] = self.targets(fed, drafts)[index]
        found = []
        for law, part in by_law([row.sampling for row in ours], sizes, self.scores_per_chunk):
            places, *given = torch.from_numpy(columns[:, part]).to(logits.device).unbind()
            chunk = logits[part] if whole else logits[places]
            found.append((part, self.draw(chunk, *given, float(law.temperature), law.top_k, float(law.top_p))))
        if whole and len(found) == 1:
            return found[0][1].cpu().numpy()
        told = np.zeros((4, len(logits)), np.int32)
        for part, drawn in found:
            told[:, index[part]] = drawn.cpu().numpy()
        return told


@dataclass(kw_only=True)
class V1Requests(OneRequest, V1Rules):
    """One request a response, on V1."""

    def install(self, runner) -> None:
        runner._sample = MethodType(self.sample, runner)
        runner.drafter.propose = MethodType(self.propose, runner)
        lift_limit(runner)
        keep_hidden(runner, self)

    def of(self, runner, names: Sequence[str]) -> list[VLLMRow | None]:
        return [*map(self._rows.get, names)]

    def law(self, row: VLLMRow) -> dict:
        return {"temperature": 0.0}  # `sample` decides, and a greedy request carries the least state


def by_law(laws: Sequence[Sampling], sizes: np.ndarray, most: int) -> Iterator[tuple[Sampling, slice | np.ndarray]]:
    """The places of each law, at most `most` at a time. Args: sizes: int64, places that laws[0], laws[1], ... have."""
    if all(law is laws[0] for law in laws):  # as those of one rollout are
        yield from ((laws[0], slice(i, i + most)) for i in range(0, int(sizes.sum()), most))
        return
    for law in dict.fromkeys(laws):
        places = np.flatnonzero(np.repeat([other == law for other in laws], sizes))
        yield from ((law, places[i : i + most]) for i in range(0, len(places), most))


def lift_limit(runner) -> None:
    """Lets rows draft up to the end of the context.

    Drafts end before the row's cap, so they always fit. vLLM's own check would answer a row near the end of the context
    with made-up drafts for the whole batch.
    """
    runner.effective_drafter_max_model_len = runner.max_model_len + runner.num_spec_tokens
