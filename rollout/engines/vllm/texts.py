"""Texts propose on the device: what vLLM's speculator returns each step, without the host knowing what was drawn."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from specrl.rollout.engines.vllm.wire import TEXTS, unpack_text

MOST_TEXTS = 3
"""Texts that a request may bring; more of one prompt rarely help."""
SUFFIX = 4
"""Tokens that are compared to find a place; longer matches are not told apart."""


class DeviceTexts:
    """Drafts from the texts that came with each request.

    A text that equals the response so far is followed. Else the place is taken whose last tokens agree with the
    response's over the most of SUFFIX positions, and of those the one nearest to the response's own length: so a text
    is followed further after a mismatch, as if one token had been replaced. Texts and responses stay on the device.

    Args: runner: vLLM's model runner with the keyed sampler, whose speculator's `propose` this takes over.
    """

    def __init__(self, runner):
        self._states, self._width = runner.req_states, runner.num_speculative_steps
        self._starts = runner.sampler.slots.starts
        shape = (runner.max_num_reqs, MOST_TEXTS, runner.max_model_len)
        self.texts = torch.full(shape, -1, dtype=torch.int32, device=runner.device)
        self._longest = np.zeros(shape[0], np.int64)  # tokens of each request's longest text
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

    def propose(self, input_batch, *_, dummy_run: bool = False, **__) -> Tensor:
        """Token ids int64 [R, K]. Where there is no guess any id does: it stands only if it is drawn."""
        if dummy_run:
            return torch.zeros(input_batch.num_reqs, self._width, dtype=torch.int64, device=self.texts.device)
        slots = input_batch.idx_mapping.long()
        begin, end = (x[slots].long()[:, None, None] for x in (self._starts, self._states.total_len.gpu))
        most = max(self._longest[input_batch.idx_mapping_np].max(), self._width)
        texts = self.texts[:, :, :most][slots]
        ids = continue_texts(texts, self._states.all_token_ids.gpu[slots], begin, end, self._width)
        return ids.clamp(min=0)


def continue_texts(texts: Tensor, tokens: Tensor, begin: Tensor, end: Tensor, width: int) -> Tensor:
    """The `width` tokens that follow, in one of each row's texts, what is most like the response so far.

    Args: texts int32 [R, M, L], -1 behind their ends, L at least `width`; tokens int32 [R, C]: prompt and response;
        begin, end int64 [R, 1, 1]: where the response begins, and where it ends so far.

    Returns: int64 [R, width], -1 where the text has ended.
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
    return ids.long()
