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

from specrl.rollout.drafting.draft import Draft
from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.engines.local.draw import packed_draw
from specrl.rollout.engines.vllm.requests import OneRequest
from specrl.rollout.engines.vllm.rows import VLLMRow
from specrl.rollout.engines.vllm.step import StepRules, VerifyInputs, keep_hidden, padded
from specrl.rollout.verify import exact


@dataclass(kw_only=True)
class V1Rules(StepRules):
    """Draws and drafts in V1's step.

    Args:
        scores_per_chunk: positions drawn at a time; bounds the memory of the noise.
        draw: see `packed_draw`.
    """

    scores_per_chunk: int
    draw: Callable[..., Tensor] = packed_draw

    def of(self, runner, names: Sequence[str]) -> list[VLLMRow | None]:
        """The rows of vLLM's requests; None for those that this package does not draw."""
        return [*map(self.rows.get, names)]

    def sample(self, runner, logits: Tensor, metadata) -> SamplerOutput:
        """Decides every row's next tokens from logits [drafts + rows, V], a row's positions together and in order."""
        ids = runner.input_batch.req_ids
        rows, unfinished = self.of(runner, ids), runner.discard_request_mask.np[: len(ids)].tolist()
        if True in unfinished:  # this step computed a part of their prompts
            rows = [None if part else row for part, row in zip(unfinished, rows, strict=True)]
        counts, tokens = [0] * len(ids), np.empty(0, np.int32)
        if metadata:
            counts, tokens = metadata.num_draft_tokens, metadata.draft_token_ids.cpu().numpy()
        fed = self.fed(rows, np.array(counts), tokens)
        self._step.tokens = int(runner.query_start_loc.np[len(ids)])
        drafts = self.tested(fed)
        tokens, sizes = self.decide(fed, drafts, self._drawn(logits, fed, drafts))
        sampled = padded(tokens, fed.firsts, sizes, max(counts) + 1)
        return SamplerOutput(sampled_token_ids=torch.from_numpy(sampled).to(logits.device), logprobs_tensors=None)

    def propose(self, sampled: list[list[int]], *_, **__) -> list[list[int]]:
        """The draft that rides in each row's next step."""
        began = time.perf_counter()
        rows = zip(self.lineup.rows, sampled, strict=True)
        drafts = self.ask([row if row and new and row.finish is None else None for row, new in rows])
        self._step.draft_s = time.perf_counter() - began
        return drafts

    def _drawn(self, logits: Tensor, fed: VerifyInputs, drafts: Sequence[Draft]) -> np.ndarray:
        """What `packed_draw` tells of the rows' positions, int32 [4, N]; 0 elsewhere. Noise exists chunk by chunk."""
        if self.rule is not exact:
            fed.columns[3] = self.targets(fed, drafts)[fed.drawn]
        given, laws, found = torch.from_numpy(fed.columns[1:]).to(logits.device), fed.lineup.laws, []
        if fed.whole and len(laws) == 1 and given.shape[1] <= self.scores_per_chunk:  # most steps: nothing is cut out
            return self.draw(logits, *given.unbind(), *laws[0].terms).cpu().numpy()
        for law, part in by_law(laws, fed.sizes[fed.sizes > 0], self.scores_per_chunk):
            chunk = logits[part if fed.whole else torch.from_numpy(fed.drawn[part]).to(logits.device)]
            found.append((part, self.draw(chunk, *given[:, part].unbind(), *law.terms)))
        told, places = np.zeros((4, len(logits)), np.int32), np.arange(len(logits))[fed.drawn]
        for part, drawn in found:
            told[:, places[part]] = drawn.cpu().numpy()
        return told


@dataclass(kw_only=True)
class V1Requests(OneRequest, V1Rules):
    """One request a response, on V1."""

    def install(self, runner) -> None:
        runner._sample = MethodType(self.sample, runner)
        runner.drafter.propose = self.propose
        lift_limit(runner)
        keep_hidden(runner, self)

    def law(self, row: VLLMRow) -> dict:
        return {"temperature": 0.0}  # `sample` decides, and a greedy request carries the least state


class RequestDrafter:
    """What V1's `speculative_config.model` names; who installs itself takes over `propose`."""

    def __init__(self, vllm_config):
        pass

    def load_model(self, *_) -> None:
        """There is none."""

    def propose(self, sampled: list[list[int]], *_, **__) -> list[list[int]]:
        """Nothing."""
        return [[] for _ in sampled]


def by_law(
    laws: Sequence[SamplingParams], sizes: np.ndarray, most: int
) -> Iterator[tuple[SamplingParams, slice | np.ndarray]]:
    """The places of each law, at most `most` at a time. Args: sizes: int64, those of laws[0], ...; one law has all."""
    if len(laws) == 1:
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
