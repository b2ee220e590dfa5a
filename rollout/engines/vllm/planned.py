"""Model Runner V2 where vLLM's scheduler carries the host's drafts, whatever processes hold the model.

The scheduler runs in the driver's process and sends the draft tokens of a step to all workers together with its plan.
Every worker samples with the requests' keys, so all of them accept the same tokens, and the scheduler gets these back.
Drafters and their budget therefore need no worker in their process, and work for any tensor parallelism. A draft model
of vLLM's proposes on the device, and each row verifies the text's draft or the model's, whichever promises more tokens.
What the workers sampled after rejected tokens comes back with the model's proposals.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
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
from specrl.rollout.engines.vllm.planned_worker import MODEL_TOKENS, WorkerDrafts
from specrl.rollout.engines.vllm.wire import keyed_args
from specrl.rollout.verify import Accepted, accept_exact


class PlannedScheduler(Scheduler):
    """vLLM's scheduler, whose steps verify the drafts of `adapter` once it is set."""

    adapter: PlannedAdapter | None = None

    def schedule(self, *args, **options) -> SchedulerOutput:
        plan = super().schedule(*args, **options)
        if self.adapter is not None and self.adapter.with_model:
            plan.num_spec_tokens_to_schedule = self.adapter.model_proposes(plan)
        return plan

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput):
        if self.adapter is not None:
            self.adapter.accept(scheduler_output, model_runner_output)
        return super().update_from_output(scheduler_output, model_runner_output)

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        if self.adapter is not None:
            assert isinstance(draft_token_ids, WorkerDrafts)
            draft_token_ids = self.adapter.propose(draft_token_ids)
        super().update_draft_token_ids(draft_token_ids)


@dataclass(kw_only=True)
class PlannedAdapter:
    """Drafts for the scheduler, and what the workers accepted of them.

    Args:
        drafter_share: weights that a pass of vLLM's draft model reads, as a share of those that a pass of the policy
            reads; 0: no draft model.
    """

    flow: Flow
    drafter_share: float
    model_tokens: int = 1
    """What the draft model proposes for each row in the next step, if no row begins in it."""

    def install(self, llm: LLM) -> None:
        """Makes vLLM's scheduler and workers verify the drafts of the flow."""
        llm.collective_rpc("specrl_install_planned", args=(self.with_model, self.flow.drafting.redraws))
        core: Any = llm.llm_engine.engine_core  # in process
        core.engine_core.scheduler.adapter = self

    @property
    def with_model(self) -> bool:
        return self.drafter_share > 0

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
        accepted = Accepted(tokens, logprobs, logprobs, min(len(tokens) - 1, len(draft.tokens)))
        flow.step.emitted += flow.drafting.advance(row, draft, accepted, row.sampling.eos_ids, flow.stats)
        if self.with_model:
            self._learn_model(row, tokens)

    def _learn_model(self, row: VLLMRow, tokens: Sequence[int]) -> None:
        """Observes how much of the model's last proposal was right, also where the text's draft was verified."""
        proposed = row.by_model[: len(tokens)]
        if not proposed:
            return
        accepted = accept_exact(tokens, proposed)
        self.flow.drafting.budget.observe_draft(_bucket(row), len(proposed), accepted)
        state: State = "agreeing" if accepted == len(proposed) else "diverged" if accepted else "lost"
        row.model_state = state

    def propose(self, by_workers: WorkerDrafts) -> DraftTokenIds:
        """The drafts of the next step, those of unknown requests included, which have none.

        Args: by_workers: of the requests of the last step; without a draft model its proposals are placeholders.
        """
        began = time.perf_counter()
        found = [self.flow.rows.get(name) for name in by_workers.req_ids]
        rows = [row if row and row.tokens and row.finish is None else None for row in found]
        for name, row in zip(by_workers.req_ids, rows, strict=True):
            if row and row.draft.source not in ("", "model"):  # none after vLLM's padding or the model's few tokens
                row.redraws = by_workers.redraws.get(name, ())
        drafts = self.flow.propose(rows)
        if self.with_model:
            drafts = self._with_model(rows, drafts, by_workers.draft_token_ids)
        self.flow.step.draft_s = time.perf_counter() - began
        return DraftTokenIds(by_workers.req_ids, drafts)

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
            offers.append(self._offer(row, len(drafts[i]), most))
            length = min(most, len(row.by_model))
            gain = budget.gain(bucket, length, plan.needed)
            if length and gain > budget.gain(row.bucket, len(drafts[i]), plan.needed):
                row.draft = Draft(row.by_model[:length], "model")
                drafts[i] = row.by_model[:length]
        self.model_tokens = self._worth_proposing(offers, sum(map(len, drafts)))
        return drafts

    def model_proposes(self, plan: SchedulerOutput) -> int:
        """Tokens that the draft model proposes for each row at the end of this step.

        None where no row drafts: plain rows, which speed is compared with, do not pay for the model.
        """
        rows = [self.flow.rows.get(name) for name in plan.num_scheduled_tokens]
        drafting = [row for row in rows if row and row.drafting]
        if not drafting:
            return 0
        beginning = [row for row in drafting if not row.tokens]
        for row in beginning:
            self.flow.drafting.guess(row, min(self.flow.draft_tokens, row.remaining - 1))
        offers = [self._offer(row, len(row.guess.tokens), MODEL_TOKENS) for row in beginning]
        most = min(MODEL_TOKENS, self.flow.draft_tokens)
        return min(most, max(self.model_tokens, self._worth_proposing(offers, 0)))

    def _offer(self, row: VLLMRow, by_text: int, most: int) -> tuple[float, float, int]:
        """See `worth_proposing`. Args: by_text: draft tokens from the row's texts; most: of the model's tokens."""
        budget = self.flow.drafting.budget
        return emitted(budget.acceptance(row.bucket), by_text), budget.acceptance(_bucket(row)), most

    def _worth_proposing(self, offers: Sequence[tuple[float, float, int]], drafted: int) -> int:
        """See `worth_proposing`. Args: drafted: draft tokens in the step after which the model proposes."""
        budget = self.flow.drafting.budget
        if budget.window and any(most for _, _, most in offers):
            return MODEL_TOKENS
        reading = budget.cost()[0]
        fixed, token_s = budget.cost(len(offers))
        return worth_proposing(offers, self.drafter_share * reading / (fixed + token_s * (len(offers) + drafted)))


def worth_proposing(offers: Sequence[tuple[float, float, int]], price: float) -> int:
    """Tokens that a draft model should propose for all rows, 1 to MODEL_TOKENS: with them a token of a row, on the mean
    of the rows, takes the least time. The first one is free, as the model has to read what was emitted.

    Args:
        offers: of each row the tokens that it is expected to emit in a step without the model's draft, the acceptance
            probability of that draft, and most tokens of it.
        price: of a pass of the model, in steps.
    """
    if not offers:
        return 1

    by_text, chances, most = np.array(offers).T[:, :, None]
    counts = np.arange(1, MODEL_TOKENS + 1)
    by_model = 1 + np.where(counts <= most, chances**counts, 0.0).cumsum(1)
    steps = (1 / np.maximum(by_text, by_model)).sum(0)
    return int(counts[(steps * (1 + price * (counts - 1))).argmin()])


def _bucket(row: VLLMRow) -> AcceptanceBucket:
    return row.model_state, "model"
