"""Drafts that vLLM's scheduler carries: on Model Runners V1 and V2, in the trainer's process and in servers.

The scheduler sends the draft tokens of a step to all workers together with its plan. Every worker samples with the
requests' keys, so all of them accept the same tokens, and the scheduler gets these back (planned_v1.py, planned_v2.py).
Drafters and their budget therefore need no worker in their process. A draft model of vLLM's proposes on the device, see
planned_model.py.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

from specrl.rollout.drafting.draft import EMPTY, Draft
from specrl.rollout.drafting.drafting import Drafting
from specrl.rollout.engines.response import refuse_unusable
from specrl.rollout.engines.vllm.logits import LogitsBudget
from specrl.rollout.engines.vllm.planned_model import ModelDrafts
from specrl.rollout.engines.vllm.row import VLLMRow
from specrl.rollout.types import EngineStats
from specrl.rollout.verify import AcceptanceRule, Accepted, exact


class PlannedScheduler(Scheduler):
    """vLLM's scheduler, whose steps verify the drafts of `drafts` once it is set."""

    drafts: PlannedDrafts | None = None

    def schedule(self, *args, **options) -> SchedulerOutput:
        plan = super().schedule(*args, **options)
        if self.drafts is not None and self.drafts.model is not None:
            rows = [self.drafts.rows.get(name) for name in plan.num_scheduled_tokens]
            plan.num_spec_tokens_to_schedule = self.drafts.model.proposes(rows)
        return plan

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput):
        if self.drafts is not None:
            self.drafts.accept(scheduler_output, model_runner_output)
        return super().update_from_output(scheduler_output, model_runner_output)

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        if self.drafts is not None:
            draft_token_ids = self.drafts.propose(draft_token_ids)
        super().update_draft_token_ids(draft_token_ids)


@dataclass
class Step:
    """What an engine step did, for the accounting."""

    tokens: int = 0
    rows: int = 0
    """Rows that are sampled."""
    drafted: int = 0
    emitted: int = 0
    """Tokens of all rows."""
    ahead: int = 0
    """Rows of the next batch, which count nowhere else here."""
    ahead_tokens: int = 0
    """Theirs, drafts included."""
    decoding: bool = False
    """A draft is verified, or a row has tokens already."""
    asking: float | None = None
    """Seconds that it took to ask for this step's drafts; None if nobody was asked."""


@dataclass(kw_only=True)
class PlannedDrafts:
    """Drafts for the scheduler, and what the workers accepted of them.

    No draft token follows a row's last position. A rule that verifies a text once decides about its tokens and not
    about samples, so it uses this position for the text's next token, and decides about the first token too.

    Args:
        draft_tokens: most draft tokens of a row in one step.
        budget: draft tokens of all rows in one step; those that have drafts share it.
        rule: another one than the exact one needs the workers in this process.
        model: vLLM's draft model; None: there is none.
        fill: see FillsPasses.
    """

    drafting: Drafting
    draft_tokens: int
    budget: LogitsBudget
    rule: AcceptanceRule = exact
    model: ModelDrafts | None = None
    weight_version: int = 0
    fill: int = 0
    stats: EngineStats = field(default_factory=EngineStats)
    """Of the current rollout."""
    rows: dict[str, VLLMRow] = field(default_factory=dict)
    """By vLLM's request id. Other requests are scored, or sampled by vLLM itself."""
    decided: dict[str, tuple[Draft, Accepted]] = field(default_factory=dict)
    """Of a step, by request, where the worker is in this process: what the rule made of the draft that it verified."""
    step: Step = field(default_factory=Step)
    began: float = 0.0
    """When the step in progress began."""

    def begin(self, weight_version: int = 0) -> None:
        """A rollout begins, or a server's work after a pause."""
        self.weight_version = weight_version
        self.stats = EngineStats()
        self.step = Step()
        self.decided = {}
        self.budget.renew()
        self.began = time.perf_counter()

    def admit(self, name: str, row: VLLMRow) -> None:
        """Request `name` is this row."""
        if self.drafting.verifies_once:
            row.old_text = self.drafting.text(row)  # type: ignore[attr-defined]  # the lenient one has it
        self.rows[name] = row

    def forget(self) -> None:
        """No request is left."""
        self.rows.clear()

    def accept(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """Each row emits what the workers sampled for it.

        Args: plan: of the step, with the draft tokens that were verified.
        """
        self.step.tokens = plan.total_num_scheduled_tokens
        logprobs: list[float] = []
        starts: Sequence[int] = range(len(output.req_ids))
        if output.logprobs is not None:
            logprobs = output.logprobs.logprobs[:, 0].tolist()
            starts = output.logprobs.cu_num_generated_tokens or starts
        for name, tokens, start in zip(output.req_ids, output.sampled_token_ids, starts, strict=False):
            row = self.rows.get(name)
            if row is None or not tokens:  # scored, or a part of its prompt
                continue
            verified = plan.scheduled_spec_decode_tokens.get(name)
            draft = row.draft.first(len(verified)) if verified and verified[0] >= 0 else EMPTY  # -1: vLLM's padding
            self.step.decoding |= bool(draft.tokens or row.tokens)
            if row.ahead:
                self.step.ahead += 1
                self.step.ahead_tokens += 1 + len(draft.tokens)
            else:
                self.step.rows += 1
                self.step.drafted += len(draft.tokens)
            if name in self.decided:
                draft, accepted = self.decided.pop(name)
            else:
                part = logprobs[start : start + len(tokens)]
                refuse_unusable((logprob == logprob for logprob in part), self.weight_version)
                accepted = Accepted(tokens, part, part, min(len(tokens) - 1, len(draft.tokens)))
            emitted = self.drafting.advance(row, draft, accepted, row.sampling.eos_ids, self.stats)
            self.step.emitted += 0 if row.ahead else emitted
            if self.model is not None:
                self.model.learn(row, tokens)

    def propose(self, by_workers: DraftTokenIds) -> DraftTokenIds:
        """The step has ended. The drafts of the next one, those of unknown requests included, which have none.

        Args: by_workers: the requests of the last step, with the draft model's proposals for them.
        """
        names = by_workers.req_ids
        began = time.perf_counter()
        self._observe(began - self.began)
        found = [self.rows.get(name) for name in names]
        rows = [row if row and row.tokens and row.finish is None else None for row in found]
        active = [row for row in rows if row]
        own, beside = ([row for row in active if row.ahead == ahead] for ahead in (False, True))
        self.step = Step()
        if self.drafting.verifies_once:
            drafts = [row.rest_of_text(min(self.draft_tokens, row.remaining - 1)) for row in own]
        else:
            drafts = self.drafting.propose(own, self.stats)
            self.step.asking = self.drafting.asking
        share = self.budget.share(sum(bool(draft.tokens) for draft in drafts), len(active), self.draft_tokens)
        for row, draft in zip(own, drafts, strict=True):
            row.draft = draft.first(share)
        drafted = sum(len(row.draft.tokens) for row in own)
        left = min(self.fill - len(own), self.budget.tokens + len(beside)) - drafted
        for row, draft in zip(beside, self.drafting.fit(beside, left), strict=True):
            row.draft = draft.first(self.draft_tokens)
        if self.model is not None:
            self.model.replace(rows, by_workers.draft_token_ids)
        self.began = time.perf_counter()
        self.stats.draft_s += self.began - began
        return DraftTokenIds(names, [[*row.draft.tokens] if row else [] for row in rows])

    def _observe(self, seconds: float) -> None:
        """The step took `seconds`, without the time to ask for the next drafts.

        Prompts that it read take time that no draft is to blame for, so its rows are counted only where it read none.
        """
        step = self.step
        self.stats.count_pass(step.tokens, seconds, step.drafted > 0, step.decoding)
        if step.decoding:
            tokens = step.tokens - step.ahead_tokens
            rows = step.rows if tokens == step.rows + step.drafted else 0
            self.drafting.budget.observe_pass(
                tokens,
                seconds,
                rows,
                emitted=step.emitted,
                asking=step.asking,
                ahead=(step.ahead, step.ahead_tokens),
            )
