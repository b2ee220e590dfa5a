"""Model Runner V2 where vLLM's scheduler carries the host's drafts, whatever processes hold the model.

The scheduler runs in the driver's process and sends the draft tokens of a step to all workers together with its plan.
Every worker samples with the requests' keys, so all of them accept the same tokens, and the scheduler gets these back.
Drafters and their budget therefore need no worker in their process, and work for any tensor parallelism. A draft model
of vLLM's proposes on the device, and each row verifies the text's draft or the model's, whichever promises more tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm import LLM
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

from specrl.rollout.drafting.budget import AcceptanceBucket, State
from specrl.rollout.drafting.cost import emitted
from specrl.rollout.drafting.draft import EMPTY, Draft
from specrl.rollout.engines.response import refuse_unusable
from specrl.rollout.engines.vllm.batch import VLLMRow
from specrl.rollout.engines.vllm.flow import Flow
from specrl.rollout.engines.vllm.sampler import install, share_noise
from specrl.rollout.engines.vllm.wire import keyed_args
from specrl.rollout.verify import Accepted, accept_exact

MODEL_TOKENS = 8
"""Most tokens of a draft model in one step: each costs a pass of the model for all rows, whether it is used or not."""
MODEL_PASS = 0.06
"""Such a pass as a share of a step that verifies no draft: 0.95 of 15.6 ms for a head of a 7B policy with 150 rows, by
the cost formula of benchmarks/research/budget.py. No GPU has measured it."""


class PlannedScheduler(Scheduler):
    """vLLM's scheduler, whose steps verify the drafts of `adapter` once it is set."""

    adapter: PlannedAdapter | None = None

    def schedule(self, *args, **options) -> SchedulerOutput:
        plan = super().schedule(*args, **options)
        if self.adapter is not None and self.adapter.with_model:
            plan.num_spec_tokens_to_schedule = self.adapter.model_tokens
        return plan

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput):
        if self.adapter is not None:
            self.adapter.accept(scheduler_output, model_runner_output)
        return super().update_from_output(scheduler_output, model_runner_output)

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        if self.adapter is not None:
            draft_token_ids = self.adapter.propose(draft_token_ids)
        super().update_draft_token_ids(draft_token_ids)


@dataclass(kw_only=True)
class PlannedAdapter:
    """Drafts for the scheduler, and what the workers accepted of them.

    Args: with_model: vLLM's draft model proposes too.
    """

    flow: Flow
    with_model: bool
    model_tokens: int = MODEL_TOKENS
    """What the draft model proposes for each row in the next step."""

    def install(self, llm: LLM) -> None:
        """Makes vLLM's scheduler and workers verify the drafts of the flow."""
        llm.collective_rpc("specrl_install_planned", args=(self.with_model,))
        core: Any = llm.llm_engine.engine_core  # in process
        core.engine_core.scheduler.adapter = self

    def sampling_params(self, row: VLLMRow) -> dict[str, Any]:
        """See V1Adapter.sampling_params."""
        params = row.sampling
        return {
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "extra_args": keyed_args(row.request),
            "logprobs": 0,
            "flat_logprobs": True,
        }

    def accept(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """Each row emits what the workers sampled for it.

        Args: plan: of the step, with the draft tokens that were verified.
        """
        flow = self.flow
        flow.step.tokens = plan.total_num_scheduled_tokens
        if output.logprobs is None:  # no request of a rollout takes part
            return
        logprobs = output.logprobs.logprobs[:, 0].tolist()
        starts = output.logprobs.cu_num_generated_tokens or range(len(output.req_ids))
        for name, tokens, start in zip(output.req_ids, output.sampled_token_ids, starts, strict=False):
            row = flow.rows.get(name)
            if row is None or not tokens:  # scored, or a part of its prompt
                continue
            verified = plan.scheduled_spec_decode_tokens.get(name, ())
            draft = row.draft.first(len(verified)) if row.tokens and verified else EMPTY
            self._emit(row, draft, tokens, logprobs[start : start + len(tokens)])

    def _emit(self, row: VLLMRow, draft: Draft, tokens: list[int], logprobs: list[float]) -> None:
        flow = self.flow
        refuse_unusable((logprob == logprob for logprob in logprobs), flow.weight_version)
        flow.step.rows += 1
        flow.step.drafted += len(draft.tokens)
        flow.step.decoding |= bool(draft.tokens or row.tokens)
        drafted = min(len(tokens) - 1, len(draft.tokens))
        flow.drafting.learn(row, draft, tokens, drafted)
        if self.with_model:
            self._learn_model(row, tokens)
        count = row.emit(Accepted(tokens, logprobs, logprobs, drafted), row.sampling.eos_ids)
        flow.stats.count(draft.source, len(draft.tokens), min(drafted, count))
        flow.step.emitted += count

    def _learn_model(self, row: VLLMRow, tokens: Sequence[int]) -> None:
        """Observes how much of the model's last proposal was right, also where the text's draft was verified."""
        proposed = row.by_model[: len(tokens)]
        if not proposed:
            return
        accepted = accept_exact(tokens, proposed)
        self.flow.drafting.budget.observe_draft(_bucket(row), len(proposed), accepted)
        state: State = "agreeing" if accepted == len(proposed) else "diverged" if accepted else "lost"
        row.model_state = state

    def propose(self, by_vllm: DraftTokenIds) -> DraftTokenIds:
        """The drafts of the next step, those of unknown requests included, which have none.

        Args: by_vllm: what vLLM's speculator proposed for each request of the last step; placeholders without one.
        """
        began = time.perf_counter()
        found = [self.flow.rows.get(name) for name in by_vllm.req_ids]
        rows = [row if row and row.tokens and row.finish is None else None for row in found]
        drafts = self.flow.propose(rows)
        if self.with_model:
            drafts = self._with_model(rows, drafts, by_vllm.draft_token_ids)
        self.flow.step.draft_s = time.perf_counter() - began
        return DraftTokenIds(by_vllm.req_ids, drafts)

    def _with_model(
        self, rows: Sequence[VLLMRow | None], drafts: list[list[int]], proposed: Sequence[Sequence[int]]
    ) -> list[list[int]]:
        """Replaces the drafts of rows to which the model promises more accepted tokens than their texts do."""
        budget = self.flow.drafting.budget
        active = [row for row in rows if row]
        plan = budget.plan([_bucket(row) if row.drafting else None for row in active])
        longest = self.flow.budget.share(len(active), len(active), MODEL_TOKENS)
        offers = [(1.0, 0.0, 0)] * sum(not row.drafting for row in active)
        for i, (row, tokens) in enumerate(zip(rows, proposed, strict=True)):
            if row is None or not row.drafting:
                continue
            bucket = _bucket(row)
            row.by_model = [*tokens[: max(0, min(MODEL_TOKENS, row.remaining - 1))]]
            most = min(plan.lengths[bucket], longest)
            by_text = emitted(budget.acceptance(row.bucket), len(drafts[i]))
            offers.append((by_text, budget.acceptance(bucket), most))
            length = min(most, len(row.by_model))
            gain = budget.gain(bucket, length, plan.needed)
            if length and gain > budget.gain(row.bucket, len(drafts[i]), plan.needed):
                row.draft = Draft(row.by_model[:length], "model")
                drafts[i] = row.by_model[:length]
        fixed, token_s = budget.cost(len(active))
        price = MODEL_PASS * fixed / (fixed + token_s * (len(active) + sum(map(len, drafts))))
        always = budget.window and any(row.drafting for row in active)
        self.model_tokens = MODEL_TOKENS if always else worth_proposing(offers, price)
        return drafts


def worth_proposing(offers: Sequence[tuple[float, float, int]], price: float) -> int:
    """Tokens that a draft model should propose for all rows, 1 to MODEL_TOKENS: with them a token of a row, on the mean
    of the rows, takes the least time. The first one is free, as the model has to read what was emitted.

    Args:
        offers: of each row the tokens that it is expected to emit in a step without the model's draft, the acceptance
            probability of that draft, and most tokens of it. No rows: all tokens.
        price: of a pass of the model, in steps.
    """
    if not offers:
        return MODEL_TOKENS

    by_text, chances, most = np.array(offers).T[:, :, None]
    counts = np.arange(1, MODEL_TOKENS + 1)
    by_model = 1 + np.where(counts <= most, chances**counts, 0.0).cumsum(1)
    steps = (1 / np.maximum(by_text, by_model)).sum(0)
    return int(counts[(steps * (1 + price * (counts - 1))).argmin()])


def _bucket(row: VLLMRow) -> AcceptanceBucket:
    return row.model_state, "model"


def install_planned(runner: Any, with_model: bool) -> None:
    """Gives a worker's model runner the keyed sampler, and the drafts that come with the plan of each step."""
    install(runner)
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
    """Lets vLLM's draft model propose up to MODEL_TOKENS tokens, which the scheduler gets."""
    share_noise(runner)
    propose = runner.speculator.propose
    most = min(MODEL_TOKENS, runner.num_speculative_steps)
    latest: list[Tensor] = []

    def propose_some(input_batch, *arguments, dummy_run: bool = False, **options) -> Tensor:
        count = options["num_speculative_tokens"] = min(most, options.get("num_speculative_tokens") or most)
        drafts = propose(input_batch, *arguments, dummy_run=dummy_run, **options)
        latest[:] = [drafts[:, :count]]
        return drafts

    def take_draft_token_ids() -> DraftTokenIds:
        return DraftTokenIds(runner.draft_tokens_handler.req_ids, latest[0].tolist())

    runner.speculator.propose = propose_some
    runner.take_draft_token_ids = take_draft_token_ids
