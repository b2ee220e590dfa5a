"""Drafts on the device, from texts: the host need not know which tokens were sampled."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from specrl.rollout.engines.vllm.wire import TEXTS, extra_args_of, unpack_text

MOST_TEXTS = 3
"""Texts that a request may bring; more of one prompt rarely help."""
SUFFIX = 4
"""Tokens that are compared to find a match; longer matches rank the same."""


class DeviceTexts:
    """Drafts from the texts that came with each request. Texts and responses stay on the device.

    A text that equals the response so far is followed. Otherwise the match is the position whose preceding tokens
    agree with the response's last ones over the most of SUFFIX positions, and among equals the one nearest to the
    response's length: so a text is followed further after a mismatch, as if one token had been replaced.

    Args: runner: vLLM's model runner with the keyed sampler, whose speculator's `propose` this replaces.
    """

    def __init__(self, runner):
        self._states = runner.req_states
        self._width = runner.num_speculative_steps
        self._vocab = runner.vocab_size
        self._requests = runner.sampler.requests
        shape = (runner.max_num_reqs, MOST_TEXTS, runner.max_model_len)
        self.texts = torch.full(shape, -1, dtype=torch.int32, device=runner.device)
        self._longest = np.zeros(shape[0], np.int64)  # tokens of each request's longest text
        self._requests.listeners.append(self._add_request)
        runner.speculator.propose = self.propose

    def _add_request(self, req_index: int, new_req_data) -> None:
        self.texts[req_index] = -1
        self._longest[req_index] = 0
        for i, text in enumerate(extra_args_of(new_req_data).get(TEXTS, ())[:MOST_TEXTS]):
            ids = unpack_text(text)[: self.texts.shape[2]]
            known = np.where(ids < self._vocab, ids, -1)  # the model has no embedding of others
            self.texts[req_index, i, : len(ids)] = torch.from_numpy(known).to(self.texts.device)
            self._longest[req_index] = max(self._longest[req_index], len(ids))

    def propose(self, input_batch, *_, dummy_run: bool = False, **__) -> Tensor:
        """Token ids int64 [R, K]. Where there is no guess any id does: it is accepted only if it is sampled."""
        if dummy_run:
            return torch.zeros(input_batch.num_reqs, self._width, dtype=torch.int64, device=self.texts.device)
        index = input_batch.idx_mapping.long()
        begin = self._requests.starts[index].long()[:, None, None]
        end = self._states.total_len.gpu[index].long()[:, None, None]
        longest = max(self._longest[input_batch.idx_mapping_np].max(), self._width)
        texts = self.texts[:, :, :longest][index]
        ids = continue_texts(texts, self._states.all_token_ids.gpu[index], begin, end, self._width)
        return ids.clamp(min=0)


def continue_texts(texts: Tensor, tokens: Tensor, begin: Tensor, end: Tensor, width: int) -> Tensor:
    """The `width` tokens that follow the best match for the response so far in one of each row's texts.

    Args:
        texts: int32 [R, M, L], -1 after their ends, L at least `width`.
        tokens: int32 [R, C], prompt and response.
        begin: int64 [R, 1, 1], where the response begins.
        end: int64 [R, 1, 1], where it ends so far.
        width: tokens of a draft.

    Returns:
        int64 [R, width], -1 where the text has ended.
    """
    rows, _, longest = texts.shape
    at = torch.arange(longest, device=texts.device)
    done = end - begin
    response = tokens.gather(1, (begin[:, 0] + at).clamp(max=tokens.shape[1] - 1))[:, None]
    equal = ((texts == response) | (at >= done)).all(2, keepdim=True)
    matched = torch.zeros_like(texts)
    run = torch.ones_like(texts, dtype=torch.bool)
    for back in range(1, SUFFIX + 1):  # the tokens before `at` are the response's last ones
        last = tokens.gather(1, (end[:, 0] - back).clamp(min=0))[:, :, None]
        run = run & (texts.roll(back, 2) == last) & (at >= back) & (done >= back)
        matched = matched + run
    matched = matched + (SUFFIX + 1) * (equal & (at == done))
    score = (2 * longest * matched - (at - done).abs()).masked_fill(texts < 0, -3 * longest)
    best = score.flatten(1).argmax(1)
    text, first = best // longest, best % longest
    ids = texts[torch.arange(rows, device=texts.device), text]
    ids = torch.cat([ids, ids.new_full((rows, width), -1)], 1).gather(1, first[:, None] + at[:width])
    return ids.long()
