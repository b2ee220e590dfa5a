"""The transformers engine: plain and speculative decoding of ragged batches with the trainer's own model.

A row's life: its prompt is prefilled (once per distinct prompt), then every pass carries its last token and a draft of
the next ones, draws a token at each of those positions, keeps what agrees and emits the first draw that does not. A row
without a draft simply carries one token. Rows leave as they finish.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from copy import copy

import torch
from torch import Tensor

from rollout.budget import Budget
from rollout.chain import Chain
from rollout.drafters.contexts import ContextTable
from rollout.drafters.model import ModelDrafter
from rollout.engines.base import Probe, Sampling, Speculation, out_of_memory
from rollout.engines.branching import Branching
from rollout.engines.ragged import Pass, RaggedKV, RaggedModel, chunks
from rollout.engines.rows import LENIENT_KEY, Row, ask_all, check_request, learn_all, pack
from rollout.noise import uniform
from rollout.types import Completion, EngineStats, Request, RolloutError
from rollout.verify import accept_exact, accept_lenient, accept_tree

MAX_CUTS = 3
"""How often rows that do not fit the memory together are cut in two."""
_OF_DRAFTS = ("drafted", "accepted", "sources", "paused", "paused_acceptance", "paused_needed", "forks", "fork_mass")


class TransformersEngine:
    """Generates with any decoder-only causal LM of transformers that uses its attention interface.

    The model is shared with the trainer: `update_weights(None, version)` only records the new version. No KV outlives a
    `generate` call, so nothing stale can be served.

    Args:
        model: a causal LM, or a peft model around one.
        sampling, speculation: the sampler's law and the verification rule.
        own_weights: the model is not the trainer's, so updates carry tensors.
        rows_per_batch, tokens_per_pass, logits_mb: memory bounds, see RolloutConfig.
        tie_margin: draws closer than this are decided by a canonical pass (float32 models only).
        window: draft tokens per row and pass; 0 lets the budget decide from measured costs.
        branches: most continuations of a row that are verified together, as a tree; 1 drafts a single path.
        drafter: a small model with the same vocabulary that drafts for rows whose own drafters do worse.
        contexts: rows that speculate may also draft from the responses to all prompts, see ContextTable.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        sampling: Sampling,
        speculation: Speculation | None = None,
        *,
        own_weights: bool = False,
        rows_per_batch: int = 256,
        tokens_per_pass: int = 4096,
        logits_mb: int = 256,
        tie_margin: float = 1e-4,
        window: int = 0,
        branches: int = 1,
        drafter: torch.nn.Module | None = None,
        contexts: bool = False,
    ):
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        if any(adapter.is_prompt_learning for adapter in getattr(model, "peft_config", {}).values()):
            raise RolloutError("adapters that learn a prompt are not in the model's own layers; use LoRA instead")
        bounds = {"tokens_per_pass": tokens_per_pass, "logits_mb": logits_mb}
        self._policy = RaggedModel(base, sampling, **bounds)
        self.model, self.sampling, self.speculation = base, sampling, speculation or Speculation()
        self.vocab, self.context, self.limit = self._policy.vocab, self._policy.context, self._policy.limit
        self.rows_per_batch, self.tokens_per_pass = rows_per_batch, tokens_per_pass
        self.tie_margin = tie_margin if self._policy.dtype == torch.float32 else 0.0
        self.weight_version, self.own_weights = 0, own_weights
        if drafter is not None and self.speculation.rule == "lenient":
            raise RolloutError(
                "the lenient rule, as published, drafts stored text only; use acceptance=exact or no draft model"
            )
        self.drafter = None if drafter is None else ModelDrafter(drafter, self.vocab, sampling, **bounds)
        self.contexts = ContextTable() if contexts else None
        self.budget = Budget(window)
        self.branching = None
        if branches > 1:
            self.branching = Branching(branches, self.vocab, tokens_per_pass - 1, None if window else self.contexts)
        self._calibrate()

    @property
    def device(self) -> torch.device:
        return self._policy.device

    def generate(self, requests: Sequence[Request]) -> tuple[list[Completion], EngineStats]:
        """See Engine.generate. Prompts need at least one token and must fit the model's context with the response."""
        for request in requests:
            check_request(request, self.vocab, self.context, self.speculation, self.limit)
        stats = EngineStats()
        if any(not request.plain and (self.drafter or request.drafter) for request in requests):
            self.budget.next_rollout()
            if self.branching:
                self.branching.next_rollout()
        rows = [Row(request, drafting=not request.plain) for request in requests]
        with ExitStack() as stack:
            for model in (self._policy, self.drafter):
                if model is not None:
                    stack.enter_context(model.inference())
            for i in range(0, len(rows), self.rows_per_batch):
                self._fit(rows[i : i + self.rows_per_batch], stats)
        learn_all(rows, self.contexts, stats)
        return [row.completion(self.weight_version, self.speculation.rule) for row in rows], stats

    def update_weights(
        self, weights: Iterable[tuple[str, Tensor]] | None, version: int, probe: Probe | None = None
    ) -> None:
        if version < self.weight_version:
            raise RolloutError(f"weight version {version} is older than the engine's {self.weight_version}")
        if weights is not None:
            self._load(weights)
        if probe is not None:
            probe.check(self.score(probe.tokens), version)
        self.weight_version = version

    def score(self, tokens: Sequence[int]) -> list[float]:
        """See Engine.score."""
        with self._policy.inference():
            layout = Pass(RaggedKV(1, len(tokens)), 0, [0], [len(tokens)], self.device)
            logits = self._policy.lm_head(self._policy.forward(tokens, layout)).float()
            targets = torch.tensor(tokens[1:], device=self.device)[:, None]
            return logits[:-1].log_softmax(-1).gather(-1, targets)[:, 0].tolist()

    def reset_cache(self) -> None:
        """Nothing to forget: KV lives only inside `generate`."""

    def close(self) -> None:
        """Nothing to free: the model belongs to the trainer."""

    def _load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        state = self.model.state_dict()
        with torch.no_grad():
            for name, tensor in weights:
                if name not in state:
                    raise RolloutError(f"the update names the weight {name!r}, which the engine's model does not have")
                if tensor.shape != state[name].shape:  # copy_ would broadcast a smaller one
                    shapes = f"{tuple(tensor.shape)}, the engine's model has {tuple(state[name].shape)}"
                    raise RolloutError(f"the update gives the weight {name!r} the shape {shapes}")
                state[name].copy_(tensor)

    # One batch ---------------------------------------------------------------------------------------------------

    def _fit(self, rows: list[Row], stats: EngineStats, cuts: int = 0) -> None:
        """Finishes rows together; where memory runs out, in halves. Which rows share a pass changes no token.

        What is thrown away is paid for, in passes, tokens and seconds; of its drafts nothing is left to be counted.
        """
        before = {name: copy(getattr(stats, name)) for name in _OF_DRAFTS}
        try:
            return self._run(rows, stats)
        except Exception as error:
            if not out_of_memory(error):
                raise
            reason = str(error)  # the error itself would keep what fills the memory
        if cuts == MAX_CUTS or len(rows) == 1:
            raise RolloutError(
                f"out of memory with {len(rows)} rows, cut {cuts} times: {reason}. Use a lower rollout.rows_per_batch "
                f"(now {self.rows_per_batch}), tokens_per_pass ({self.tokens_per_pass}) or max_new_tokens"
            )
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        for name, value in before.items():
            setattr(stats, name, value)
        for row in rows:
            row.restart()
        half = (len(rows) + 1) // 2
        for part in (rows[:half], rows[half:]):
            self._fit(part, stats, cuts + 1)

    def _run(self, rows: list[Row], stats: EngineStats) -> None:
        kv = self._prefill(rows, stats)
        while rows:
            drafts = self._propose(rows, stats)
            lengths = [0 if draft is None else 1 + len(draft) for draft in drafts]
            for first, last in chunks(lengths, self.tokens_per_pass):
                self._step(kv, first, rows[first:last], drafts[first:last], stats)
            alive = [i for i, row in enumerate(rows) if row.finish is None]
            if len(alive) <= 3 * len(rows) // 4:  # amortised: the survivors are copied a few times in all
                kv.select(torch.tensor(alive, device=self.device, dtype=torch.long))
                rows = [rows[i] for i in alive]
                if self.drafter:
                    self.drafter.select(alive)

    def _prefill(self, rows: list[Row], stats: EngineStats) -> RaggedKV:
        """KV of every row's prompt but its last token."""
        began = time.perf_counter()
        kv, tokens = self._policy.prefill([row.request.prompt for row in rows])
        stats.forward_tokens += tokens
        if self.drafter:
            self.drafter.open([row.request for row in rows])
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        stats.prefill_s += time.perf_counter() - began
        return kv

    def _propose(self, rows: list[Row], stats: EngineStats) -> list[list[int] | None]:
        """The draft of each row's next tokens; None for finished rows."""
        began = time.perf_counter()
        active = [i for i, row in enumerate(rows) if row.finish is None]
        drafts: list[list[int] | None] = [None] * len(rows)
        if self.speculation.rule == "lenient":  # as published: one draft, verified whole
            for i in active:
                drafts[i] = rows[i].ask(rows[i].room, self.vocab)
        else:
            plan = ask_all(
                [rows[i] for i in active], self.budget, self.vocab, stats, self.contexts, self.drafter is not None
            )
            if self.branching:
                self.branching.grow([rows[i] for i in active], plan)
            for i in active:
                drafts[i] = rows[i].draft
        if self.drafter:
            wanting = [
                i
                for i in active
                if rows[i].drafting and (rows[i].kind in plan.handed or not drafts[i]) and self._reach(rows[i]) > 0
            ]
            behind = [self.drafter.behind(i, len(rows[i].tokens)) for i in wanting]
            self._draft_by_model(rows, wanting, drafts, self.budget.chain(behind, plan))
        stats.draft_s += time.perf_counter() - began
        return drafts

    def _reach(self, row: Row) -> int:
        """Tokens that the model may draft for the row: the response's cap and the model's context are not exceeded."""
        return min(row.room - 1, self.drafter.context - row.cached)

    def _draft_by_model(self, rows: list[Row], places: list[int], drafts: list, chain: Chain) -> None:
        """Lets the model draft for the rows at `places`; those it has nothing for keep their own draft."""
        texts, room = [rows[i].tokens for i in places], [self._reach(rows[i]) for i in places]
        proposed = self.drafter.propose(places, texts, room, chain, self.budget)
        for i, draft, logprobs in zip(places, proposed, chain.logprobs, strict=False):  # a probe is of a few rows
            if draft:
                drafts[i], rows[i].chain, rows[i].carried = draft, logprobs, "model"

    def _step(self, kv: RaggedKV, first: int, rows: list[Row], drafts: list[list[int] | None], stats: EngineStats):
        """One pass over some rows: draw at every position, accept, emit."""
        began = time.perf_counter()
        tokens, keys, at, targets, trees = pack(rows, drafts)
        lengths = [0 if draft is None else len(draft) + 1 for draft in drafts]
        starts = [row.cached if n else 0 for row, n in zip(rows, lengths, strict=True)]
        layout = Pass(kv, first, starts, lengths, self.device, trees)
        drawn = self._score(self._policy.forward(tokens, layout), keys, at, targets)
        i, moves = 0, []
        for place, (row, draft) in enumerate(zip(rows, drafts, strict=True), first):
            if draft is not None:
                behind = row.cached + 1
                path = self._settle(row, draft, *(column[i : i + len(draft) + 1] for column in drawn), stats)
                if row.parents is not None:
                    moves += [(place, behind + node, behind + n) for n, node in enumerate(path) if node != n]
                i += len(draft) + 1
        if moves:  # what was accepted goes where a single path would have written it
            kv.move(*torch.tensor(moves, device=self.device).T)
        spent = time.perf_counter() - began
        carrying = sum(map(bool, lengths))
        self.budget.observe_pass(len(tokens), spent, carrying, layout.width)
        stats.passes += 1
        stats.forward_tokens += len(tokens)
        if len(tokens) > carrying:
            stats.verify_s += spent
        else:
            stats.decode_s += spent

    def _settle(self, row: Row, draft, draws, logp, logp_draft, gaps, stats: EngineStats) -> Sequence[int]:
        """Applies the acceptance rule to one row's draws and emits; returns the accepted places of the draft."""
        if self.speculation.rule == "lenient" and draft:
            old = torch.tensor(row.request.draft_logprobs[: len(draft)], device="cpu")
            u = uniform(torch.tensor(row.request.key ^ LENIENT_KEY).expand(len(draft)), torch.arange(len(draft)))
            n = accept_lenient(torch.tensor(logp_draft[: len(draft)]), old, u, self.speculation.lenience)
            path, emitted, logprobs = range(n), [*draft[:n], draws[n]], [*logp_draft[:n], logp[n]]
            behaviour = [*old[:n].tolist(), logp[n]]
            row.drafting = False  # the published method drafts once
        else:
            self._break_ties(row, draft, draws, logp, gaps, stats)
            path = _accepted(row, draft, draws)
            if row.parents is not None:
                draws, logp = ([column[0], *(column[node + 1] for node in path)] for column in (draws, logp))
            n = len(path)
            emitted, logprobs = draws[: n + 1], logp[: n + 1]
            behaviour = logprobs
        count = row.emit(emitted, logprobs, behaviour, n, self.sampling.eos_ids)
        stats.count(row.carried, len(draft), min(n, count))
        if row.chain is not None and n < min(len(draft), count):
            row.rejected.append(len(row.tokens) - 1)
        if row.chain is not None:
            self.budget.drafter.observe_chain(row.chain, n)
        if row.parents is not None:
            self.branching.learn(row, path, count, logp_draft, stats)
        row.learn(self.budget, draft, emitted, n)
        return path

    def _break_ties(self, row: Row, draft, draws: list, logp: list, gaps: list, stats: EngineStats) -> None:
        """Replaces draws that rounding could flip by canonical ones, so that every route emits the same token.

        Logits of one position differ in the last bits between passes of different shapes. Where the two best scores are
        closer than `tie_margin`, the draw is taken from a pass over this row's prefix alone, whose shape depends on
        nothing but the prefix. About 1 token in 20 000 needs it.
        """
        path, n = _accepted(row, draft, draws), 0
        while n <= len(path):
            i = path[n - 1] + 1 if n else 0
            if gaps[i] < self.tie_margin:
                prefix = [*row.request.prompt, *row.tokens, *(draft[node] for node in path[:n])]
                layout = Pass(RaggedKV(1, len(prefix)), 0, [0], [len(prefix)], self.device)
                hidden = self._policy.forward(prefix, layout)[-1:]
                (draws[i],), (logp[i],), _, _ = self._score(hidden, [row.request.key], [len(row.tokens) + n], [0])
                stats.ties += 1
                path = _accepted(row, draft, draws)
            n += 1

    def _score(
        self, hidden: Tensor, keys: list[int], at: list[int], targets: list[int]
    ) -> tuple[list, list, list, list]:
        """Draws, log-probs of draws and of targets, and gaps, as lists [N]."""
        drawn = self._policy.draw(hidden, keys, at, targets)
        if any(gap != gap for gap in drawn[3]):
            raise RolloutError(
                f"the policy returned NaN or infinite logits (weight version {self.weight_version}); "
                "check the learning rate and the last update"
            )
        return drawn

    def _calibrate(self) -> None:
        """Times passes of few and of many rows and tokens for the budget."""
        for rows, tokens in ((1, 1), (1, min(256, self.context)), (32, 32)):
            self.budget.calibrate([self._policy.timing(rows, tokens)], rows, tokens // rows)
            if self.drafter:
                self.budget.drafter.calibrate([self.drafter.timing(rows, tokens)], rows)


def _accepted(row: Row, draft: Sequence[int], draws: Sequence[int]) -> Sequence[int]:
    """Places of the draft that stand under the exact rule."""
    if row.parents is None:
        return range(accept_exact(draws, draft))
    return accept_tree(draws, draft, row.parents)
