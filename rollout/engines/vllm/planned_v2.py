"""What a worker of Model Runner V2 does where vLLM's scheduler carries the host's drafts; see planned.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds

from specrl.rollout.engines.vllm.sampler import RolloutVerifier, install, propose_as_planned, share_noise

MODEL_TOKENS = 8
"""Most tokens of a draft model in one step: each costs a pass of the model for all rows, whether it is used or not."""


def install_planned(runner: Any, with_model: bool) -> None:
    """Gives a worker's model runner the keyed sampler, and the drafts that come with the plan of each step.

    Args: with_model: its draft model proposes.
    """
    install(runner, RolloutVerifier)
    update = runner.update_requests

    def update_requests(scheduler_output: SchedulerOutput) -> None:
        update(scheduler_output)
        take_drafts(runner.req_states, scheduler_output.scheduled_spec_decode_tokens)

    runner.update_requests = update_requests
    if with_model:
        propose_with_model(runner)
    else:
        shape = runner.max_num_reqs, runner.num_speculative_steps
        nothing = torch.zeros(shape, dtype=torch.int64, device=runner.device)
        runner.speculator.propose = lambda input_batch, *_, **__: nothing[: input_batch.num_reqs]


def take_drafts(states: Any, drafts: dict[str, list[int]]) -> None:
    """Writes the drafts of a step where vLLM reads them; its padding, -1, becomes any token."""
    if not drafts:
        return
    width = max(map(len, drafts.values()))
    tokens = np.zeros((len(drafts), width), np.int64)
    for row, draft in zip(tokens, drafts.values(), strict=True):
        row[: len(draft)] = draft
    index = torch.tensor([states.req_id_to_index[name] for name in drafts], device=states.draft_tokens.device)
    known = torch.from_numpy(tokens.clip(0)).to(states.draft_tokens)
    states.draft_tokens[index, :width] = known


def propose_with_model(runner: Any) -> None:
    """Lets vLLM's draft model propose as many tokens as the plan asks for, which the scheduler gets."""
    share_noise(runner)
    propose_as_planned(runner)
    propose = runner.speculator.propose
    latest: list[Tensor] = []

    def propose_and_keep(input_batch, *arguments, num_speculative_tokens: int | None = None, **options) -> Tensor:
        drafts = propose(input_batch, *arguments, num_speculative_tokens=num_speculative_tokens, **options)
        latest[:] = [drafts[:, :num_speculative_tokens]]
        return drafts

    def take_draft_token_ids() -> DraftTokenIds:
        return DraftTokenIds(runner.draft_tokens_handler.req_ids, latest[0].tolist())

    runner.speculator.propose = propose_and_keep
    runner.take_draft_token_ids = take_draft_token_ids
