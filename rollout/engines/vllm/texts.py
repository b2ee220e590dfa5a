"""Texts propose on the device: what vLLM's speculator returns each step, without the host knowing what was drawn."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramGPUSpeculator

from rollout.engines.vllm.wire import TEXTS, unpack_text

MOST_TEXTS = 3
"""Texts that a request may bring; more of one prompt rarely help."""
SUFFIX = 4
"""Tokens that are compared to find a place; longer matches are not told apart."""
_FADE = 0.99  # what is left of a step's weight after the next one

NgramGPUSpeculator.enable_adaptive_verification = property(
    lambda self: self.speculative_config.enable_adaptive_verification
)
"""Model runners ask their speculator; this is the one whose place texts take."""


class DeviceTexts:
    """Drafts from the texts that came with each request.

    A text that equals the response so far is followed. Else the place is taken whose last tokens agree with the
    response's over the most of SUFFIX positions, and of those the one nearest to the response's own length: so a text
    is followed further after a mismatch, as if one token had been replaced. Texts and responses stay on the device.

    Where vLLM verifies adaptively it is told how likely each token is to stand, if those before it do: by what became
    of drafts that fitted as well, the verified part of them.

    Args: runner: vLLM's model runner with the keyed sampler, whose speculator's `propose` this takes over.
    """

    def __init__(self, runner):
        self._states, self._width = runner.req_states, runner.num_speculative_steps
        self._starts = runner.sampler.slots.starts
        shape = (runner.max_num_reqs, MOST_TEXTS, runner.max_model_len)
        self.texts = torch.full(shape, -1, dtype=torch.int32, device=runner.device)
        self._longest = np.zeros(shape[0], np.int64)  # tokens of each request's longest text
        self._adaptive = runner.speculator.enable_adaptive_verification
        self._fits = torch.zeros(shape[0], dtype=torch.int64, device=runner.device)
        """How well the draft of each slot fits: tokens that agree before it, or SUFFIX + 1 where all do."""
        levels = torch.arange(SUFFIX + 2, device=runner.device)
        self._seen = torch.stack([2 * levels + 1.0, torch.full_like(levels, 3.0)], 1)
        """Float [SUFFIX + 2, 2], by level: draft tokens that stood, and drafts that ended earlier; some to begin with,
        soon outweighed."""
        self._speculator = runner.speculator
        add = runner.model_state.add_request

        def add_request(slot: int, request) -> None:
            add(slot, request)
            params = request.sampling_params
            self.texts[slot], self._longest[slot] = -1, 0
            for i, text in enumerate(((params and params.extra_args) or {}).get(TEXTS, ())[:MOST_TEXTS]):
                ids = unpack_text(text)[: shape[2]]
                known = np.where(ids < runner.vocab_size, ids, -1)  # the model has no embedding of others
                self.texts[slot, i, : len(ids)] = torch.from_numpy(known).to(runner.device)
                self._longest[slot] = max(self._longest[slot], len(ids))

        runner.model_state.add_request, runner.speculator.propose = add_request, self.propose

    def propose(self, input_batch, *given, dummy_run: bool = False, **_) -> Tensor:
        """Token ids int64 [R, K]. Where there is no guess any id does: it stands only if it is drawn."""
        if dummy_run:
            return torch.zeros(input_batch.num_reqs, self._width, dtype=torch.int64, device=self.texts.device)
        slots = input_batch.idx_mapping.long()
        begin, end = (x[slots].long()[:, None, None] for x in (self._starts, self._states.total_len.gpu))
        most = max(self._longest[input_batch.idx_mapping_np].max(), self._width)
        texts = self.texts[:, :, :most][slots]
        ids, fits = continue_texts(texts, self._states.all_token_ids.gpu[slots], begin, end, self._width)
        if self._adaptive:
            self._tell(slots, fits, ids, *given[4:6])
        return ids.clamp(min=0)

    def _tell(self, slots: Tensor, fits: Tensor, ids: Tensor, sampled: Tensor, rejected: Tensor) -> None:
        """Tells how likely tokens are to stand. Args: sampled, rejected: int [R], of the step that is done: its tokens,
        and those of its draft that were verified and did not stand."""
        stood = torch.stack([(sampled - 1).clamp(min=0), rejected > 0], 1).to(self._seen.dtype)
        self._seen.mul_(_FADE).index_add_(0, self._fits[slots], stood)
        self._fits[slots] = fits
        chances = self._seen[:, 0] / self._seen.sum(1)
        self._speculator.draft_token_confidence_probs = chances[fits][:, None] * (ids >= 0)


def continue_texts(texts: Tensor, tokens: Tensor, begin: Tensor, end: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` tokens that follow, in one of each row's texts, what is most like the response so far.

    Args: texts int32 [R, M, L], -1 behind their ends, L at least `width`; tokens int32 [R, C]: prompt and response;
        begin, end int64 [R, 1, 1]: where the response begins, and where it ends so far.

    Returns: int64 [R, width], -1 where the text has ended; int64 [R], how many of the last SUFFIX tokens before it are
        the response's, SUFFIX + 1 if all of the text is.
    """
    rows, _, most = texts.shape
    at, done = torch.arange(most, device=texts.device), end - begin
    response = tokens.gather(1, (begin[:, 0] + at).clamp(max=tokens.shape[1] - 1))[:, None]
    equal = ((texts == response) | (at >= done)).all(2, keepdim=True)
    like, run = torch.zeros_like(texts), torch.ones_like(texts, dtype=torch.bool)
    for back in range(1, SUFFIX + 1):  # what stands before `at` ends as the response does
        last = tokens.gather(1, (end[:, 0] - back).clamp(min=0))[:, :, None]
        run = run & (texts.roll(back, 2) == last) & (at >= back) & (done >= back)
        like = like + run
    like = like + (SUFFIX + 1) * (equal & (at == done))
    score = (2 * most * like - (at - done).abs()).masked_fill(texts < 0, -3 * most)
    place = score.flatten(1).argmax(1)
    text, first = place // most, place % most
    ids = texts[torch.arange(rows, device=texts.device), text]
    ids = torch.cat([ids, ids.new_full((rows, width), -1)], 1).gather(1, first[:, None] + at[:width])
    fits = like.flatten(1).gather(1, place[:, None])[:, 0].clamp(max=SUFFIX + 1)
    return ids.long(), fits.long()
