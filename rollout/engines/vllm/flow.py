"""What happens in a step of vLLM where the host drafts: which drafts it verifies, and what of them is accepted.

Each row's inputs are its last token and its draft; what is sampled at these positions decides which draft tokens are
accepted. How drafts get into a step and samples out of it depends on vLLM's model runner: see v1.py and planned.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from specrl.rollout.drafting.draft import EMPTY, Draft
from specrl.rollout.drafting.drafting import Drafting
from specrl.rollout.engines.response import refuse_unusable
from specrl.rollout.engines.vllm.batch import BUG, LogprobBuffer, StepBatch, VerifyInputs, VLLMRow
from specrl.rollout.engines.vllm.logits import LogitsBudget
from specrl.rollout.types import EngineStats, RolloutError
from specrl.rollout.verify import AcceptanceRule, Accepted, TargetSamples, exact


@dataclass
class Step:
    """What the last engine step did, for the accounting."""

    tokens: int = 0
    rows: int = 0
    """Rows that are sampled."""
    drafted: int = 0
    emitted: int = 0
    """Tokens of all rows."""
    decoding: bool = False
    """A draft is verified, or a row has tokens already."""
    draft_s: float = 0.0
    asking: float | None = None
    """Seconds that it took to ask for this step's drafts; None if nobody was asked."""
    next_asking: float | None = None
    """The same for the following step."""

    def next(self) -> Step:
        """The following step begins."""
        return Step(asking=self.next_asking)


@dataclass(kw_only=True)
class Flow:
    """Drafts of the rows of a step, and which of their tokens are accepted.

    No draft token follows a row's last position. The lenient rule decides about the tokens of an old text and not about
    samples, so it uses this position for the text's next token, and decides about the first token too.

    Args:
        draft_tokens: most draft tokens of a row in one step.
        budget: draft tokens of all rows in one step; those that have drafts share it.
    """

    drafting: Drafting
    draft_tokens: int
    budget: LogitsBudget
    rule: AcceptanceRule = exact
    weight_version: int = 0
    stats: EngineStats = field(default_factory=EngineStats)
    """Of the current rollout."""
    hidden: Tensor | None = None
    """Final hidden states of a step's logits, in their order, if the rule reads them."""
    rows: dict[str, VLLMRow | None] = field(default_factory=dict)
    """By vLLM's request id. Requests that are None or missing are scored, or sampled by vLLM itself."""
    logprobs: LogprobBuffer | None = None
    """None where nobody reads more of a response than its tokens."""
    batch: StepBatch = field(default_factory=lambda: StepBatch([]))
    """Of the last step."""
    step: Step = field(default_factory=Step)

    def propose(self, rows: Sequence[VLLMRow | None]) -> list[list[int]]:
        """The draft tokens of each row in the next step; none for None."""
        active = [row for row in rows if row]
        if not self.step.decoding:
            self.budget.renew()
        if self.drafting.verifies_once:
            drafts = [self._old_text(row, min(self.draft_tokens, row.remaining - 1)) for row in active]
        else:
            drafts = self.drafting.propose(active, self.stats)
            self.step.next_asking = self.drafting.asking
        lengths = [len(draft.tokens) for draft in drafts]
        share = self.budget.share(len(lengths) - lengths.count(0), len(active), self.draft_tokens)
        if max(lengths, default=0) > share:
            drafts = [draft.first(share) for draft in drafts]
        for row, draft in zip(active, drafts, strict=True):
            row.draft = draft
        return [[*row.draft.tokens] if row else [] for row in rows]

    def _old_text(self, row: VLLMRow, most: int) -> Draft:
        text = row.old_text if row.drafting else EMPTY
        part = slice(len(row.tokens), len(row.tokens) + most)
        return Draft(text.tokens[part], text.source, (text.logprobs or ())[part])

    def verify_inputs(self, rows: list[VLLMRow | None], counts: np.ndarray, tokens: np.ndarray) -> VerifyInputs:
        """The positions of this step. Args: see VerifyInputs."""
        if rows != self.batch.rows:
            self.batch = StepBatch(rows)
        inputs = VerifyInputs(self.batch, counts, tokens)
        self.step.rows += len(self.batch.active)
        self.step.drafted += inputs.drafted
        self.step.decoding |= inputs.drafted > 0 or any(row.tokens for row in self.batch.active)
        return inputs

    def drafts_of(self, inputs: VerifyInputs) -> list[Draft]:
        """The drafts that are verified; under the lenient rule with the next token of the row's old text.

        Raises:
            RolloutError: vLLM verifies other tokens than were proposed. The exact rule compares samples with the tokens
                that vLLM verified, so it needs no check.
        """
        rows = inputs.batch.rows
        sizes = inputs.sizes.tolist()
        if self.drafting.verifies_once:
            return [self._old_text(row, n) if row else EMPTY for row, n in zip(rows, sizes, strict=True)]
        drafts = [row.draft if row else EMPTY for row in rows]
        if [len(draft.tokens) + 1 for draft in drafts] != sizes:
            drafts = [draft.first(max(0, n - 1)) for draft, n in zip(drafts, sizes, strict=True)]
        if self.rule is not exact:
            verified = inputs.next_draft[inputs.sampled]
            verified = verified[verified >= 0].tolist()
            proposed = [token for draft in drafts for token in draft.tokens]
            if verified != proposed:
                raise RolloutError(f"vLLM verifies the draft tokens {verified} where {proposed} were proposed; {BUG}")
        return drafts

    def targets(self, inputs: VerifyInputs, drafts: Sequence[Draft]) -> np.ndarray:
        """The token whose log-prob is needed at each position, int64 [N]: the draft's. The exact rule needs none."""
        targets = np.zeros(len(inputs.next_draft), np.int64)
        for draft, start in zip(drafts, inputs.starts.tolist(), strict=True):
            targets[start : start + len(draft.tokens)] = draft.tokens
        return targets

    def accept(
        self, inputs: VerifyInputs, drafts: Sequence[Draft], packed: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The tokens that each row emits: int32 [N], from each row's start on, and their number, int64 [R].

        A request without a row gets one token 0: vLLM drops it, or ends a scored request with it.

        Args:
            drafts: of `drafts_of`.
            packed: int32 [4, N], what was sampled, see rollout/engines/local/sampler.py; overwritten.

        Raises:
            RolloutError: logits of a row are NaN or infinite.
        """
        gaps = packed[3].view(np.float32)
        if np.isnan(gaps.min()):
            refuse_unusable((~np.isnan(gaps[inputs.sampled])).tolist(), self.weight_version)
        if self.rule is exact:
            counts = self._accept_exact(inputs, drafts, packed)
        else:
            counts = self._accept_by_rule(inputs, drafts, packed)
        batch, missing = inputs.batch, inputs.batch.missing
        if missing:
            packed[0, inputs.starts[missing]] = 0
            counts[missing] = 1
        batch.num_tokens += np.delete(counts, missing) if missing else counts
        self.step.emitted += int(counts.sum()) - len(missing)
        return packed[0], counts

    def _accept_exact(self, inputs: VerifyInputs, drafts: Sequence[Draft], packed: np.ndarray) -> np.ndarray:
        """Samples are emitted up to the first that differs from the draft, that one included.

        `accept_exact` of rollout/verify.py for all rows at once, as this runs for each row in each step.
        """
        same = packed[0] == inputs.next_draft
        differing = (~same).nonzero()[0]  # each row's last position among them
        counts = differing[differing.searchsorted(inputs.starts)] - inputs.starts + 1
        if self.logprobs:
            index = inputs.columns[0] + inputs.columns[2]
            self.logprobs.logprobs[index] = packed[1].view(np.float32)[inputs.sampled]
            self.logprobs.reused[index] = same[inputs.sampled]
        samples = memoryview(packed[0])
        learn, redraws = self.drafting.learn, self.drafting.redraws
        by_source: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
        any_eos = (packed[0] == inputs.batch.eos_ids).any()
        positions = (inputs.starts.tolist(), inputs.sizes.tolist(), counts.tolist())
        for i, (row, draft, start, size, n) in enumerate(zip(inputs.batch.rows, drafts, *positions, strict=True)):
            if row is None:
                continue
            end, drafted = start + n, n - 1
            tokens = samples[start:end].tolist()
            learn(row, draft, tokens, drafted, samples[end : start + size].tolist() if redraws else ())
            capped = len(row.tokens) + n >= row.request.max_new_tokens
            may_stop = any_eos or row.request.stop_ids
            if capped or (may_stop and row.stops(tokens, row.sampling.eos_ids)):
                counts[i] = n = row.emit(Accepted(tokens, (), (), drafted), row.sampling.eos_ids)
                drafted = min(drafted, n)
                if self.logprobs:
                    self.logprobs.complete(row)
            else:
                row.tokens += tokens
                row.passes += 1
            count = by_source[draft.source]
            count[0] += size - 1
            count[1] += drafted
        for source, count in by_source.items():
            self.stats.count(source, *count)
        return counts

    def _accept_by_rule(self, inputs: VerifyInputs, drafts: Sequence[Draft], packed: np.ndarray) -> np.ndarray:
        """Each row emits what another rule than the exact one accepts."""
        columns = [packed[0].tolist(), *packed[1:3].view(np.float32).tolist()]
        counts = np.ones(len(drafts), np.int64)
        rows = zip(inputs.batch.rows, drafts, inputs.starts.tolist(), inputs.sizes.tolist(), strict=True)
        for i, (row, draft, start, size) in enumerate(rows):
            if row is None:
                continue
            states = None if self.hidden is None else (self.hidden, start)
            tokens, logprobs, draft_logprobs = (column[start : start + size] for column in columns)
            position = row.request.position + len(row.tokens)
            samples = TargetSamples(position, tokens, logprobs, draft_logprobs, states=states)
            accepted = self.rule(row.request.key, draft, samples)
            packed[0, start : start + len(accepted.tokens)] = accepted.tokens
            counts[i] = self.drafting.advance(row, draft, accepted, row.sampling.eos_ids, self.stats)
        return counts

    def observe(self, seconds: float) -> None:
        """The step took `seconds`, without the time to ask for the next drafts.

        Prompts that it read take time that no draft is to blame for, so its rows are counted only where it read none.
        """
        step = self.step
        self.stats.draft_s += step.draft_s
        self.stats.count_pass(step.tokens, seconds, step.drafted > 0, step.decoding)
        if step.decoding:
            rows = step.rows if step.tokens == step.rows + step.drafted else 0
            self.drafting.budget.observe_pass(step.tokens, seconds, rows, emitted=step.emitted, asking=step.asking)

    def keep_hidden(self, model: Any) -> None:
        """Stores the hidden states that vLLM's model computes a step's logits from, if the rule reads them."""
        compute = model.compute_logits

        def compute_logits(hidden_states: Tensor, *args, **kwargs) -> Tensor | None:
            self.hidden = hidden_states
            return compute(hidden_states, *args, **kwargs)

        if self.drafting.reads_states:
            model.compute_logits = compute_logits
