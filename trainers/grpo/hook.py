"""Reuse in an existing TRL script: `GRPOTrainer(..., rollout_func=ReuseRollouts(args))` is the only change to it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.utils import gather_object
from transformers import TrainerCallback, TrainerState, TrainingArguments

from specrl.rollout.build import build_engine
from specrl.rollout.cache.memory import Fingerprint, TrajectoryCache, load
from specrl.rollout.config import RolloutConfig
from specrl.rollout.engines.base import EngineSpec
from specrl.rollout.engines.local.engine import TransformersEngine
from specrl.rollout.keys import Visits, occurrences
from specrl.rollout.metrics import rollout_metrics
from specrl.rollout.speculative import Domain, SpeculativeRollout
from specrl.rollout.types import RolloutBatch, RolloutError, Row
from specrl.trainers.grpo.hook_limits import check_args, check_config, check_trainer
from specrl.trainers.weights import check_shared

if TYPE_CHECKING:
    from trl import GRPOConfig

LOGGED = (
    "spec/hit_rate",
    "spec/reused_ratio",
    "spec/full_reuse_ratio",
    "spec/draft_acceptance_rate",
    "spec/passes_per_row",
    "timing_s/gen",
)
"""Metrics of a rollout that are added to TRL's log (docs/metrics.md)."""
STATE = "ReuseRollouts"
"""Key of the visit counts in the trainer's state."""


class ReuseRollouts:
    """A `rollout_func` for TRL's GRPOTrainer (1.16) that generates with the trainer's model and reuses old responses.

    Responses follow the distribution of TRL's own generate, with different noise. Token for token, they equal those of
    `ReuseRollouts(args, RolloutConfig(acceptance="off"))`, which never drafts (fp32 on a CPU; else up to rounding).

    Sampling params, length limit, group size, seed and precision are those of the trainer's arguments; its tokenizer
    and chat template render the prompts. Options that TRL supports and this class does not are refused: those of `args`
    in the constructor, before TRL loads a model, all others at the first rollout.

    A prompt is identified by its token ids. Each rollout of it is a new visit, with fresh noise unless it is a replay.
    Evaluation has separate noise and stores nothing. TRL's checkpoints hold the state that a resumed run needs: visits
    in `trainer_state.json`, trajectories in `checkpoint-N/specrl`. Metrics are added to TRL's log (docs/metrics.md).
    Control steps, the report and other engines need `python -m specrl.train`.

    Args:
        args: the trainer's arguments. TRL passes them to a rollout_func only after it has loaded everything, vLLM
            included.
        config: options of reuse (`acceptance`, `replay`, `sources`, `cache.max_mb`, memory limits). Options that the
            trainer's arguments also have are overridden by them.

    Raises:
        RolloutError: an option is not supported; the message suggests a value.
    """

    def __init__(self, args: GRPOConfig, config: RolloutConfig | None = None):
        self._config = config or RolloutConfig()
        check_config(self._config)
        check_args(args)
        self._trainer: Any = None
        self._rollout: SpeculativeRollout | None = None
        self._visits = {"rollout": Visits(), "evaluation": Visits()}
        self._begun = False
        self.last: RolloutBatch | None = None
        """The latest batch of this process, with what was reused and what it cost."""

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list]:
        """Returns the token ids and log-probs of one response to each prompt, in the format of TRL.

        Args:
            prompts: texts or chat messages, each repeated group size times.
            trainer: the GRPOTrainer.

        Raises:
            RolloutError: an argument of the trainer is not supported.
        """
        training = trainer.model.training  # TRL's own criterion
        rollout = self._ready(trainer, training)
        rows, gather = _rows(trainer, prompts), _exchange(trainer)
        parts = gather([[row.example_id for row in rows]])  # one list per process
        everyone = [example_id for part in parts for example_id in part]
        first = sum(map(len, parts[: trainer.accelerator.process_index]))
        own = slice(first, first + len(rows))
        domain: Domain = "rollout" if training else "evaluation"
        step = max(trainer.state.global_step, rollout.engine.weight_version)  # a second train() restarts at 0
        rollout.engine.update_weights(None, step)
        with trainer.accelerator.autocast():  # samples from the distribution that the trainer's passes compute
            self.last = batch = rollout.generate(
                rows,
                visit=self._visits[domain].next(everyone)[own],
                step=step,
                sample_indices=occurrences(everyone)[own],  # equal prompts get different samples, in all processes
                domain=domain,
            )
        if training and rollout.cache is not None:
            entries = rollout.entries(rows, batch, step=step)
            with batch.charge_store():
                rollout.cache.merge(gather(entries))
        state = {name: visits.state() for name, visits in self._visits.items()}
        trainer.state.stateful_callbacks[STATE] = state  # saved in every checkpoint
        metrics = rollout_metrics(batch)
        for name in metrics.keys() & set(LOGGED):
            trainer._log_metric(name, metrics[name])  # TRL averages over processes, and separately for evaluation
        return {
            "prompt_ids": [list(row.prompt) for row in rows],
            "completion_ids": [c.tokens for c in batch.completions],
            "logprobs": [c.logprobs for c in batch.completions],
        }

    def _ready(self, trainer: Any, training: bool) -> SpeculativeRollout:
        """The rollout, which is built at the first call and restored if the script was resumed."""
        if self._rollout is None:
            self._rollout, self._trainer = self._open(trainer), trainer
            trainer.add_callback(SaveTrajectories(self._rollout))
        elif trainer is not self._trainer:
            raise RolloutError("ReuseRollouts serves one GRPOTrainer, whose model it runs; give each one its own")
        if not self._begun and trainer.state.global_step:
            self._resume(trainer, self._rollout)
        self._begun = self._begun or training or trainer.state.global_step > 0
        return self._rollout

    def _open(self, trainer: Any) -> SpeculativeRollout:
        check_shared(False, trainer.accelerator)
        model = trainer.accelerator.unwrap_model(trainer.model)
        check_trainer(trainer, model)
        args = trainer.args
        config = replace(
            self._config,
            group_size=trainer.num_generations,
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            max_new_tokens=trainer.max_completion_length,
        )
        eos_ids = frozenset(trainer.eos_token_ids)
        with trainer.accelerator.autocast():
            engine = build_engine(EngineSpec(eos_ids=eos_ids, rollout=config), model)
        assert isinstance(engine, TransformersEngine), "check_config refuses other engines"
        cache = TrajectoryCache(Fingerprint(), engine.vocab, eos_ids, max_mb=config.cache.max_mb)
        return SpeculativeRollout(engine, cache, config, args.seed)

    def _resume(self, trainer: Any, rollout: SpeculativeRollout) -> None:
        """Restores visits from the state of the resumed trainer, and trajectories from its output directory.

        The checkpoint of this step in that directory need not be the resumed one, but trajectories only affect speed.
        """
        counts = trainer.state.stateful_callbacks.get(STATE, {})
        self._visits |= {name: Visits(seen) for name, seen in counts.items()}
        if (cache := rollout.cache) is not None:
            rollout.cache = load(
                _home(trainer.args, trainer.state),
                cache.fingerprint,
                cache.vocab_size,
                cache.eos_ids,
                max_step=trainer.state.global_step,
                max_mb=rollout.config.cache.max_mb,
            )


class SaveTrajectories(TrainerCallback):
    """Saves the trajectories into every checkpoint that TRL writes."""

    def __init__(self, rollout: SpeculativeRollout):
        self._rollout = rollout

    def on_save(self, args: TrainingArguments, state: TrainerState, control, **kwargs) -> None:
        home, cache = _home(args, state), self._rollout.cache
        elsewhere = not home.parent.is_dir()  # a hyperparameter search saves to other directories
        if cache is not None and state.is_world_process_zero and not elsewhere:
            cache.save(home, state.global_step, self._rollout.config.cache.on_write_error)


def _home(args: TrainingArguments, state: TrainerState) -> Path:
    assert args.output_dir is not None, "TrainingArguments replaces None by a default"
    return Path(args.output_dir) / f"checkpoint-{state.global_step}" / "specrl"


def _rows(trainer: Any, prompts: Sequence[Any]) -> list[Row]:
    """Tokenizes prompts as TRL does. The id of a row is a hash of its token ids."""
    tokenized, images, _ = trainer._tokenize_prompts(list(prompts))
    if images is not None:
        raise RolloutError("ReuseRollouts cannot show images to the model; leave rollout_func out for such prompts")
    return [Row(hashlib.blake2b(repr(ids).encode(), digest_size=16).hexdigest(), tuple(ids)) for ids in tokenized]


def _exchange(trainer: Any) -> Callable[[list], list]:
    """Returns a function that concatenates the lists of all processes, in their order."""
    return gather_object if trainer.accelerator.num_processes > 1 else list
