"""The rollout stage: look up old trajectories, derive keys, generate with drafts, store the result."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from specrl.rollout.cache.log import Twin
from specrl.rollout.cache.memory import TrajectoryCache
from specrl.rollout.checks import check
from specrl.rollout.config import RolloutConfig
from specrl.rollout.drafting.suffix import PromptTexts, SuffixDrafter
from specrl.rollout.engines.base import Engine, WorksAhead
from specrl.rollout.keys import derive_key, generation, occurrences
from specrl.rollout.planned import Domain, Planned, check_keys
from specrl.rollout.types import (
    AheadText,
    Completion,
    EngineStats,
    Request,
    RolloutBatch,
    Row,
    Trajectory,
)


class SpeculativeRollout:
    """Rolls out batches of prompts, reusing each prompt's earlier responses as drafts.

    Under `exact` the responses are those of plain decoding with the same keys, whatever the cache holds. Usable in any
    training loop:

        rollout = SpeculativeRollout(engine, cache, config, seed=0)
        rows = [Row("ex-7", prompt_ids)] * 8
        batch = rollout.generate(rows, visit=visits.next([row.example_id for row in rows]), step=step)
        rollout.store(rows, batch, step=step)

    Before `generate` the rows of the next batch may be announced: idle workers, or passes that the batch leaves room
    in, roll them out ahead, with their present weights and the keys of those rows, and the rows draft from these texts
    first.

    Args:
        engine: produces the responses; its weights are the current policy's.
        cache: earlier responses; None drafts nothing and stores nothing.
        config: acceptance, replay, caps.
        seed: of the run; all noise keys derive from it.
        evaluations: responses of the last evaluation, whose keys are the next one's too; used by `exact` only.
        twin: responses of a run with the same seed, of which those with the rows' keys are followed first.

    Raises:
        RolloutError: the config has a value that the command line would refuse.
    """

    def __init__(
        self,
        engine: Engine,
        cache: TrajectoryCache | None,
        config: RolloutConfig,
        seed: int,
        evaluations: TrajectoryCache | None = None,
        twin: Twin | None = None,
    ):
        check(config)
        self.engine, self.config, self.seed = engine, config, seed
        self.cache = cache if config.reuses else None
        self.evaluations = evaluations if config.acceptance == "exact" else None
        self.twin = twin if config.acceptance == "exact" else None
        self._twin_texts: dict[int, Trajectory] = {}  # by key, of rows to be rolled out
        self._reused = 0.0
        self._announced: list[Planned] = []
        self._ahead: dict[int, AheadText] = {}  # by key, of announced rows
        self._ahead_s = 0.0  # worker seconds ahead that no batch was charged with yet

    def generate(
        self,
        rows: Sequence[Row],
        *,
        visit: int | Sequence[int],
        step: int,
        sample_indices: Sequence[int] | None = None,
        domain: Domain = "rollout",
    ) -> RolloutBatch:
        """One response per row; `store` keeps them for the next visit.

        Args:
            visit: how often each row's prompt was rolled out before, in this domain: one number for all, or one a row.
                `Visits` counts; epoch-wise training that leaves no prompt out may give the epoch.
            step: trainer step, recorded with the trajectories.
            sample_indices: index of each row in its prompt's group; by default the occurrence within `rows`.
            domain: training rows, control rows or evaluation, which never share noise; only training replays.
                Evaluation drafts from and stores in `evaluations`, the others in `cache`.

        Raises:
            RolloutError: two rows have the same prompt, sample and visit, so both would be the same response; a visit
                is no whole number, or there are more or fewer of them, or of sample indices, than rows.
        """
        began = time.perf_counter()
        visits = visit if isinstance(visit, Sequence) else [visit] * len(rows)
        planned = self._plan(rows, sample_indices, visits, domain)
        works_ahead = domain == "rollout" and self.runs_ahead
        if works_ahead:
            self._stop_ahead()
        ahead_s = self._ahead_s if works_ahead else 0.0
        ahead = [self._ahead.get(p.key) for p in planned] if works_ahead else []
        if self.twin and domain == "rollout":
            self._twin_texts = self.twin.texts([p.key for p in (*planned, *self._announced)])
        requests = self._requests(planned, self._cache_of(domain))
        if works_ahead:
            self._begin()
        looked_up = time.perf_counter()
        completions, stats = self.engine.generate(requests) if requests else ([], EngineStats())
        generated = time.perf_counter()
        if domain == "rollout":
            self._reused = sum(sum(c.reused) for c in completions) / max(1, sum(len(c.tokens) for c in completions))
        return RolloutBatch(
            completions,
            sample_indices=[p.sample_index for p in planned],
            keys=[p.key for p in planned],
            ages=[step - p.old.step if p.old else None for p in planned],
            replayed=[p.generation < p.visit for p in planned],
            visits=[p.visit for p in planned],
            unchanged=[p.unchanged(c) for p, c in zip(planned, completions, strict=True)],
            ahead=ahead,
            twin=self._of_twin(planned, completions) if domain == "rollout" else [],
            stats=stats,
            ahead_s=ahead_s,
            lookup_s=looked_up - began,
            total_s=generated - began,
        )

    # Ahead -------------------------------------------------------------------------------------------------------

    @property
    def not_ahead(self) -> str:
        """Why nothing is rolled out ahead; empty where it is."""
        if self.config.ahead == "off":
            return "rollout.ahead=off"
        if self.config.acceptance != "exact":
            return f"it needs rollout.acceptance=exact, not {self.config.acceptance}"
        if not isinstance(self.engine, WorksAhead):
            return "this engine cannot"
        return self.engine.not_ahead

    def about_ahead(self, unknown: str = "") -> str:
        """What rolls out ahead, or why nothing does. Args: unknown: why the next batch is not known."""
        why_not = self.not_ahead or unknown
        if why_not or not isinstance(self.engine, WorksAhead):
            return f"Rollouts ahead: off, because {why_not}"
        return f"Rollouts ahead: on, {self.engine.how_ahead}"

    @property
    def runs_ahead(self) -> bool:
        """Whether announced rows are rolled out ahead."""
        return not self.not_ahead

    def announce(self, rows: Sequence[Row], *, visit: Sequence[int], sample_indices: Sequence[int]) -> None:
        """Names the rows that the `generate` after the next one will probably ask for, with their visits and samples.

        What the next `generate` leaves idle begins them, and those of earlier calls. A wrong guess costs time.
        """
        if rows and self.runs_ahead:
            self._announced += self._plan(rows, sample_indices, visit, "rollout")

    def _stop_ahead(self) -> None:
        """Stops work ahead within a pass, and takes its texts."""
        if isinstance(self.engine, WorksAhead) and self.runs_ahead:
            texts, seconds = self.engine.stop()
            self._ahead |= {key: text.or_longer(self._ahead.get(key)) for key, text in texts.items()}
            self._ahead_s += seconds

    def _begin(self) -> None:
        """Lets the engine continue the announced rows from their texts so far."""
        announced = {planned.key: planned for planned in self._announced}
        self._announced = []
        self._ahead_s = 0.0
        self._ahead = {key: text for key, text in self._ahead.items() if key in announced}
        unfinished = [p for key, p in announced.items() if key not in self._ahead or self._ahead[key].finish is None]
        assert isinstance(self.engine, WorksAhead)
        self.engine.begin(self._requests(unfinished, self.cache))

    # From rows to requests ---------------------------------------------------------------------------------------

    def _plan(
        self, rows: Sequence[Row], sample_indices: Sequence[int] | None, visits: Sequence[int], domain: Domain
    ) -> list[Planned]:
        """The noise key and the stored response of each row."""
        share = self.config.replay if domain == "rollout" else 0.0
        cache = self._cache_of(domain)
        sample_indices = occurrences(row.example_id for row in rows) if sample_indices is None else sample_indices
        check_keys(rows, sample_indices, visits)
        planned = []
        for row, sample_index, seen in zip(rows, sample_indices, visits, strict=True):
            noise = generation(self.seed, row.example_id, sample_index, seen, share)
            key = derive_key(self.seed, row.example_id, sample_index, noise, domain)
            old = None if cache is None else cache.get(row.example_id, sample_index)
            planned.append(Planned(row, sample_index, seen, noise, key, old, domain))
        return planned

    def _cache_of(self, domain: Domain) -> TrajectoryCache | None:
        return self.evaluations if domain == "eval" else self.cache

    def plain(self, rows: Sequence[Row], keys: Sequence[int]) -> RolloutBatch:
        """The same rows by plain decoding with the given keys: the measured baseline. Touches no cache."""
        began = time.perf_counter()
        requests = [Request(r.prompt, k, self._cap(r), plain=True) for r, k in zip(rows, keys, strict=True)]
        completions, stats = self.engine.generate(requests)
        n = len(rows)
        took = time.perf_counter() - began
        sample_indices = occurrences(row.example_id for row in rows)
        return RolloutBatch(completions, sample_indices, list(keys), [None] * n, [False] * n, stats=stats, total_s=took)

    def store(
        self,
        rows: Sequence[Row],
        batch: RolloutBatch,
        *,
        step: int,
        rewards: Sequence[float | None] | None = None,
        domain: Domain = "rollout",
    ) -> None:
        """Puts a batch into the cache of its domain for the next visit, and charges the time to the batch."""
        cache = self._cache_of(domain)
        if cache is None:
            return
        with batch.charge_store():
            cache.put_many(self.entries(rows, batch, step=step, rewards=rewards))

    def save(self, cache: Path, evaluations: Path, step: int) -> None:
        """Saves the caches that there are in these directories; see TrajectoryCache.save for what may fail."""
        for kept, directory in ((self.cache, cache), (self.evaluations, evaluations)):
            if kept is not None:
                kept.save(directory, step)

    def entries(self, rows, batch: RolloutBatch, *, step: int, rewards=None) -> list[tuple[str, int, Trajectory]]:
        """The batch as cache entries (example id, sample index, trajectory); processes of one job exchange these."""
        rewards = rewards if rewards is not None else [None] * len(rows)
        return [
            (r.example_id, s, Trajectory(c.tokens, k, c.finish, c.version, step, reward, self._stored_logprobs(c)))
            for r, s, k, c, reward in zip(
                rows, batch.sample_indices, batch.keys, batch.completions, rewards, strict=True
            )
        ]

    def _stored_logprobs(self, c: Completion) -> Sequence[float] | None:
        """The log-probs that are stored with a response.

        The published method stores those of the policy that verified the text, reused tokens included. A token that a
        judge accepted keeps the log-prob of the distribution that sampled it, however often it is accepted.
        """
        return {"lenient": c.logprobs, "judged": c.behaviour_logprobs}.get(self.config.acceptance)

    def _cap(self, row: Row) -> int:
        return self.config.max_new_tokens if row.max_new_tokens is None else row.max_new_tokens

    def _requests(self, planned: Sequence[Planned], cache: TrajectoryCache | None) -> list[Request]:
        """The engine's requests; the drafters of an example's rows share its texts in the cache."""
        stored: dict[str, list[Trajectory]] = {}
        texts: dict[str, PromptTexts] = {}
        if cache is not None:
            for name, row in ((p.row.example_id, p.row) for p in planned):
                if name not in texts:
                    stored[name] = cache.siblings(name)
                    texts[name] = PromptTexts([t.tokens for t in stored[name]], self.config.sources, row.prompt)
                texts[name].add_prompt(row.prompt)
        return [self._request(p, stored.get(p.row.example_id, []), texts.get(p.row.example_id)) for p in planned]

    def _request(self, planned: Planned, stored: list[Trajectory], texts: PromptTexts | None) -> Request:
        """Args: stored: of the prompt, newest first; texts: the same, shared by its drafters."""
        row, old = planned.row, planned.old
        request = Request(row.prompt, planned.key, self._cap(row), plain=self.config.acceptance == "off")
        keyed, source = self._keyed(planned)
        if known := [old] if old else stored:
            length = sum(len(t.tokens) for t in known) / len(known)
            request.expected_tokens = 1 + round(length * (1 - self._reused))
        if source == "ahead" and keyed and keyed.finish:
            request.expected_tokens = 1
        if self.config.acceptance == "lenient":  # the published method: the sample's own text, once
            if old is not None and old.logprobs is not None:
                request.drafter = SuffixDrafter(PromptTexts(sources=("prefix",)), old.tokens)
                request.draft_logprobs, request.draft_version = old.logprobs, old.version
        elif texts is not None:
            twin = self._twin_texts.get(planned.key)
            own, first, second = (text.tokens if text else None for text in (old, keyed, twin))
            request.drafter = SuffixDrafter(texts, own, first, source, second)
            request.draft_logprobs = old.logprobs if old else None
        return request

    def _keyed(self, planned: Planned) -> tuple[AheadText | Trajectory | None, str]:
        """A text that other weights sampled with the key of the row, and its source."""
        old = planned.old
        if planned.domain == "eval":
            return (old if old and old.key == planned.key else None), "evaluation"
        ahead = self._ahead.get(planned.key)
        return (ahead, "ahead") if ahead else (self._twin_texts.get(planned.key), "twin")

    def _of_twin(self, planned: Sequence[Planned], completions: Sequence[Completion]) -> list[bool | None]:
        """See RolloutBatch.twin."""
        if not self.twin:
            return []
        texts = [self._twin_texts.get(p.key) for p in planned]
        pairs = zip(texts, completions, strict=True)
        return [None if text is None else tuple(c.tokens) == text.tokens for text, c in pairs]
