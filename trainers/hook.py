"""Reuse in an existing TRL script: `GRPOTrainer(..., rollout_func=ReuseRollouts())`, and nothing else changes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from accelerate.utils import gather_object

from rollout.cache import Fingerprint, TrajectoryCache
from rollout.config import RolloutConfig
from rollout.engines import EngineSpec, build_engine
from rollout.speculative import SpeculativeRollout
from rollout.types import RolloutBatch, RolloutError, Row


class ReuseRollouts:
    """A `rollout_func` of TRL's GRPOTrainer (1.16): rollouts by the trainer's own model that reuse old responses.

    The trainer's arguments give sampling law, cap, group size and seed. A prompt is known by its token ids. Responses
    are those of plain decoding with the same keys (`RolloutConfig(acceptance="off")`). What is stored lives as long as
    the object: a resumed script begins with an empty cache, which costs time and changes no token. Checkpoints, control
    steps, the report and other engines are those of `python -m specrl.train`.

    Args: config: options of reuse (`acceptance`, `replay`, `sources`, `cache`, memory bounds); what the trainer's
    arguments give is taken from there.
    """

    def __init__(self, config: RolloutConfig | None = None):
        self._config = config or RolloutConfig()
        lossy = self._config.acceptance in ("lenient", "judged") or self._config.router.kind != "off"
        if self._config.engine != "transformers" or lossy:
            raise RolloutError(
                "ReuseRollouts runs the trainer's own model under the exact rule; engine=vllm, acceptance=lenient or "
                "judged, and routers need python -m specrl.train"
            )
        self._rollout: SpeculativeRollout | None = None
        self.last: RolloutBatch | None = None
        """The latest batch of this process, with what was reused and what it cost."""

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list]:
        """Token ids and log-probs of one response to each prompt, as TRL takes them.

        Args: prompts: texts or chat messages, each repeated group size times; trainer: the GRPOTrainer.
        """
        rollout = self._rollout = self._rollout or self._open(trainer)
        rows = [_row(trainer, prompt) for prompt in prompts]
        step, gather = trainer.state.global_step, self._exchange(trainer)
        seen = gather([row.example_id for row in rows])  # equal prompts, here or in other processes, share no slot
        first = trainer.accelerator.process_index * len(rows)
        rollout.engine.update_weights(None, step)
        self.last = batch = rollout.generate(
            rows,
            visit=int((trainer.state.epoch or 0.0) + 1e-6),
            step=step,
            slots=[seen[:at].count(seen[at]) for at in range(first, first + len(rows))],
        )
        if rollout.cache is not None:
            entries = rollout.entries(rows, batch, step=step)
            with batch.charge_store():
                rollout.cache.merge(gather(entries))
        return {
            "prompt_ids": [list(row.prompt) for row in rows],
            "completion_ids": [c.tokens for c in batch.completions],
            "logprobs": [c.logprobs for c in batch.completions],
        }

    @staticmethod
    def _exchange(trainer: Any) -> Callable[[list], list]:
        return gather_object if trainer.accelerator.num_processes > 1 else lambda entries: entries

    def _open(self, trainer: Any) -> SpeculativeRollout:
        args, model = trainer.args, trainer.accelerator.unwrap_model(trainer.model)
        config = replace(
            self._config,
            group_size=trainer.num_generations,
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k or 0,
            max_new_tokens=trainer.max_completion_length,
        )
        ends = getattr(model.generation_config, "eos_token_id", None)
        eos_ids = {trainer.processing_class.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}
        engine = build_engine(EngineSpec(eos_ids=frozenset(eos_ids), rollout=config), model)
        cache = TrajectoryCache(Fingerprint(), engine.vocab, frozenset(eos_ids), max_mb=config.cache.max_mb)
        return SpeculativeRollout(engine, cache, config, args.seed)


def _row(trainer: Any, prompt: Any) -> Row:
    """A prompt as token ids, known by them."""
    tokenizer = trainer.processing_class
    if isinstance(prompt, str):
        ids = tokenizer(prompt, add_special_tokens=True)["input_ids"]
    else:
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    return Row(hashlib.blake2b(repr(ids).encode(), digest_size=16).hexdigest(), tuple(ids))
