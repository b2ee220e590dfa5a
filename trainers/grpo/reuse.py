"""The generation of one TRL trainer: conversations with keys, drafts from earlier visits, and what a resume needs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from datasets import IterableDataset
from transformers import TrainerCallback, TrainerState, TrainingArguments

from specrl.rollout.build import build_engine
from specrl.rollout.cache.log import open_log
from specrl.rollout.cache.memory import Fingerprint, TrajectoryCache, load
from specrl.rollout.checks import check
from specrl.rollout.config import RolloutConfig
from specrl.rollout.control import Control
from specrl.rollout.engines.base import EngineSpec
from specrl.rollout.engines.local.engine import TransformersEngine
from specrl.rollout.keys import Visits
from specrl.rollout.metrics import rollout_metrics
from specrl.rollout.planned import Domain
from specrl.rollout.reduction import Metric, merged
from specrl.rollout.speculative import SpeculativeRollout
from specrl.rollout.types import Completion, RolloutError, Row
from specrl.trainers.checkpoint import EVALUATIONS
from specrl.trainers.conversations import Conversation, begin, match
from specrl.trainers.grpo.foresight import Foresight, upcoming
from specrl.trainers.grpo.limits import INSTALL, check_trainer
from specrl.trainers.grpo.vllm import TRLEngine
from specrl.trainers.keeping import Keeping
from specrl.trainers.peers import Peers
from specrl.trainers.scored import Scored
from specrl.trainers.tools import ToolResults
from specrl.trainers.turns import logged
from specrl.trainers.weights import check_shared, exact_bits

log = logging.getLogger(__name__)
STATE = "specrl"
"""Key of the counts that a resumed run needs in the trainer's state."""


class Reuse:
    """Generates the turns of one trainer, and keeps what they draft from.

    Args:
        trainer: built by TRL.
        config: options of reuse.
        results: of its deterministic tools.
    """

    def __init__(self, trainer: Any, config: RolloutConfig, results: ToolResults):
        self.trainer = trainer
        self.results = results
        self.config = replace(
            config,
            group_size=trainer.num_generations,
            temperature=trainer.args.temperature,
            top_p=trainer.args.top_p,
            top_k=trainer.args.top_k,
            max_new_tokens=trainer.max_completion_length,
        )
        check(self.config)
        check_trainer(trainer)
        self._rollout: SpeculativeRollout | None = None
        self._visits = {"rollout": Visits(), "eval": Visits()}
        self._control: Control
        self._keeping = Keeping()
        self.sampler: Foresight | None = None
        """Of the training rows; None while TRL has another one."""
        self._foresees = False  # the engine of some process rolls out ahead, so all announce
        self._context = 0
        """Most tokens of a prompt and its response, once the engine is open."""
        self._resumed = False
        self._conversations: list[Conversation] = []
        self._coming: list[Conversation] = []  # of the next batch
        self._domain: Domain = "rollout"
        self.turns: list[Scored] = []
        """Of the latest batch of this process, with what was reused and what it cost."""

    @property
    def rollout(self) -> SpeculativeRollout:
        """Built when it is first needed, as TRL places the model after its constructor."""
        if self._rollout is None:
            self._rollout = self._open()
        return self._rollout

    # A batch of conversations --------------------------------------------------------------------------------------

    def begin(self) -> None:
        """TRL begins a batch."""
        self._resume()
        self.turns = []

    def turn(self, prompts: Sequence[Sequence[int]]) -> list[Completion]:
        """One response to each prompt. Every process has a first turn, in which all take part.

        Args:
            prompts: token ids; of a later turn, those of the conversations that go on.
        """
        number = len(self.turns)
        trainer, rollout = self.trainer, self.rollout
        domain = self._domain = "rollout" if trainer.model.training else "eval"  # TRL's own criterion
        if number == 0:
            process = trainer.accelerator.process_index
            self._conversations = begin(prompts, self._visits[domain].next, gather_object, process)
            conversations = self._conversations
            self._coming = self._next(process) if self._foresees and domain == "rollout" else []
        else:
            conversations = match(self._conversations, prompts)
        if self._foresees and domain == "rollout":
            coming = self._coming
            rollout.announce(
                [self._row(c, c.tokens, 0) for c in coming],
                visit=[c.visit for c in coming],
                sample_indices=[c.sample_index for c in coming],
            )
        rows = [self._row(c, ids, number) for c, ids in zip(conversations, prompts, strict=True)]
        active = [i for i, row in enumerate(rows) if row.max_new_tokens]
        step = max(trainer.state.global_step, rollout.engine.weight_version)  # a second train() restarts at 0
        rollout.engine.update_weights(None, step)
        together = self._peers.batch(rollout.engine) if number == 0 else nullcontext()
        with self._autocast(), together:
            batch = rollout.generate(
                [rows[i] for i in active],
                visit=[conversations[i].visit for i in active],
                step=step,
                sample_indices=[conversations[i].sample_index for i in active],
                domain=domain,
            )
        self.turns.append(Scored.turn([rows[i] for i in active], batch))
        completions = [_empty(step) for _ in rows]
        for i, completion in zip(active, batch.completions, strict=True):
            completions[i] = completion
        for conversation, ids, completion in zip(conversations, prompts, completions, strict=True):
            conversation.tokens = [*ids, *completion.tokens]
        return completions

    def _next(self, process: int) -> list[Conversation]:
        """The next batch, of which every turn of this one announces the first turns; all processes take part."""
        prompts = upcoming(self.trainer, self.sampler, self._control.rollouts + 1)
        ids = self.trainer._tokenize_prompts(prompts)[0] if prompts else []
        return begin(ids, self._visits["rollout"].so_far, gather_object, process)

    def end(self) -> None:
        """TRL has all turns of a batch: stores them, measures if it is time to, and logs. Every process takes part."""
        if not self.turns:
            raise RolloutError(f"TRL generated a batch without the method that reusing() overrides. {INSTALL}")
        trainer, rollout = self.trainer, self.rollout
        sampled = sum(self.turns[1:], self.turns[0])
        step = rollout.engine.weight_version
        self._keeping.keep(sampled, rollout, step, number=self._control.rollouts, domain=self._domain)
        if self._domain == "eval":
            metrics = rollout_metrics(sampled.batch)
        else:
            if self._control.due and isinstance(rollout.engine, TRLEngine):
                rollout.engine.reset_cache()
            with self._autocast():
                metrics = self._control(sampled.rows, sampled.batch, sampled.rewards, step=step)
        metrics = logged(metrics | self._keeping.stats(rollout), self.turns) | self.results.take_metrics()
        state = {"visits": {"rollout": self._visits["rollout"].state()}, "batches": self._control.rollouts}
        trainer.state.stateful_callbacks[STATE] = state  # saved in every checkpoint
        for name, value in merged(gather_object([metrics]), Metric.beside).items():
            trainer._log_metric(name, float(value))  # TRL keeps evaluation apart

    def evaluated(self) -> None:
        """TRL has ended an evaluation: the next one has the same keys, and drafts from this one's texts."""
        self._visits["eval"] = Visits()

    def _row(self, conversation: Conversation, ids: Sequence[int], turn: int) -> Row:
        """The row of a turn, capped where TRL would cut the response: what is left of max_completion_length."""
        cap = self.config.max_new_tokens
        if turn:
            used = len(ids) - conversation.prompt_tokens
            cap = max(0, min(cap - used, self._context - len(ids)))
        return conversation.row(ids, turn, cap)

    def _autocast(self) -> Any:
        """Rollouts of the trainer's own model sample from the distribution that its passes compute."""
        return nullcontext() if self.trainer.use_vllm else self.trainer.accelerator.autocast()

    # Start and resume ----------------------------------------------------------------------------------------------

    def _open(self) -> SpeculativeRollout:
        trainer, config = self.trainer, self.config
        eos_ids = frozenset(trainer.eos_token_ids)
        engine: TRLEngine | TransformersEngine
        if trainer.use_vllm:
            engine = TRLEngine(trainer, eos_ids)
        else:
            check_shared(False, trainer.accelerator)
            model = trainer.accelerator.unwrap_model(trainer.model)
            with self._autocast():
                built = build_engine(EngineSpec(eos_ids=eos_ids, rollout=config), model)
            assert isinstance(built, TransformersEngine), "check_config refuses other engines"
            engine = built
        self._context = engine.context
        self._vocab = engine.vocab
        cache = TrajectoryCache(Fingerprint(), max_mb=config.cache.max_mb)
        evaluations = TrajectoryCache(Fingerprint(), max_mb=config.cache.max_mb)
        texts, twin = open_log(
            Path(trainer.args.output_dir),
            Path(config.twin) if config.twin else None,
            config.cache,
            Fingerprint({"seed": str(trainer.args.seed), "vocabulary": str(engine.vocab)}),
            writes=trainer.accelerator.is_main_process,
        )
        self._keeping = Keeping(texts)
        rollout = SpeculativeRollout(engine, cache, config, trainer.args.seed, evaluations, twin)
        unknown = ""
        if getattr(trainer, "environment_factories", None) is not None:
            unknown = "environments may write the prompts of the next batch when they are reset"
        elif isinstance(trainer.train_dataset, IterableDataset):
            unknown = "a dataset that is streamed does not tell the next prompts"
        log.log(logging.WARNING if unknown and rollout.runs_ahead else logging.INFO, rollout.about_ahead(unknown))
        self._foresees = not unknown and any(gather_object([rollout.runs_ahead]))
        self._peers = Peers()
        same_numerics = not trainer.use_vllm and trainer.accelerator.mixed_precision == "no"
        strict = same_numerics and exact_bits(trainer.model.dtype, trainer.accelerator.device, config)
        self._control = Control(rollout, _unscored, gather_object, strict=strict)
        return rollout

    def _resume(self) -> None:
        """Restores the counts from the state of a resumed trainer, and trajectories from its output directory.

        The checkpoint of this step in that directory need not be the resumed one, but trajectories only affect speed.
        """
        trainer = self.trainer
        if self._resumed or not (trainer.state.global_step or trainer.model.training):
            return  # an evaluation before training
        self._resumed = True
        if not trainer.state.global_step:
            return
        state = trainer.state.stateful_callbacks.get(STATE, {})
        self._visits |= {name: Visits(counts) for name, counts in state.get("visits", {}).items()}
        home = _home(trainer.args, trainer.state)
        rollout = self.rollout
        self._control.rollouts = state.get("batches", 0)
        if rollout.cache is not None:
            rollout.cache = self._loaded(home)
        if rollout.evaluations is not None:
            rollout.evaluations = self._loaded(home / EVALUATIONS)

    def _loaded(self, folder: Path) -> TrajectoryCache:
        return load(
            folder,
            Fingerprint(),
            self._vocab,
            self.trainer.eos_token_ids,
            max_step=self.trainer.state.global_step,
            max_mb=self.config.cache.max_mb,
        )


class SaveTrajectories(TrainerCallback):
    """Saves the trajectories into every checkpoint that TRL writes, and notes the end of an evaluation."""

    def __init__(self, reuse: Reuse):
        self._reuse = reuse

    def on_save(self, args: TrainingArguments, state: TrainerState, control, **kwargs) -> None:
        home = _home(args, state)
        rollout = self._reuse.rollout
        elsewhere = not home.parent.is_dir()  # a hyperparameter search saves to other directories
        if rollout.cache is not None and state.is_world_process_zero and not elsewhere:
            rollout.save(home, home / EVALUATIONS, state.global_step)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control, **kwargs) -> None:
        self._reuse.evaluated()

    def on_predict(self, args: TrainingArguments, state: TrainerState, control, metrics, **kwargs) -> None:
        self._reuse.evaluated()


def _home(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(str(args.output_dir)) / f"checkpoint-{state.global_step}" / "specrl"


def _empty(version: int) -> Completion:
    """The response of a conversation that has no tokens left, which TRL leaves out."""
    return Completion([], [], [], [], finish="length", version=version, passes=0)


def _unscored(rows: Sequence[Row], responses: Sequence[list[int]]) -> list[float | None]:
    """TRL scores its own batch only, so there is no reuse gap."""
    return [None] * len(rows)
