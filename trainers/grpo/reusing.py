"""Reuse in a TRL script: `reusing(GRPOTrainer)` is a GRPOTrainer whose generation drafts from earlier responses."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, TypeVar

from specrl.rollout.config import RolloutConfig
from specrl.rollout.types import RolloutError
from specrl.trainers.grpo.foresight import Foresight
from specrl.trainers.grpo.limits import check_args, check_class, check_config
from specrl.trainers.grpo.reuse import Reuse, SaveTrajectories
from specrl.trainers.grpo.vllm import check_server, keyed_vllm
from specrl.trainers.tools import ToolResults

if TYPE_CHECKING:
    from trl import GRPOTrainer, RLOOTrainer

    TrainerClass = TypeVar("TrainerClass", bound=type[GRPOTrainer] | type[RLOOTrainer])


def reusing(trainer_class: TrainerClass, config: RolloutConfig | None = None) -> TrainerClass:
    """A subclass of a TRL trainer (1.16) that generates with drafts from earlier responses.

        Trainer = reusing(GRPOTrainer)
        trainer = Trainer(model, rewards, args=args, train_dataset=data, tools=[search])

    The constructor, and everything but the sampling of tokens, are TRL's. It works with transformers generation, with
    vLLM in the trainer's process and with a vLLM server, and for every turn of a conversation with tools. Responses
    follow the distribution that TRL samples from, with other noise. Token for token they equal those of
    `RolloutConfig(acceptance="off")`, which never drafts (fp32 on a CPU; else up to rounding).

    Sampling params, length limits, group size, seed and precision are those of the trainer's arguments. Options that
    TRL would obey and specrl cannot are refused before a model is loaded, as far as they are in the arguments.

    A prompt is identified by its token ids. Each rollout of it is a new visit, with fresh noise unless it is a replay.
    Evaluation has noise of its own, the same each time, and drafts from the last one's texts. TRL's checkpoints hold
    the state that a resumed run needs: counts in `trainer_state.json`, trajectories in `checkpoint-N/specrl`. Metrics
    are added to TRL's log (docs/trl.md).

    Args:
        trainer_class: GRPOTrainer, RLOOTrainer, or a subclass of one of them.
        config: options of reuse (`acceptance`, `replay`, `sources`, `measure_every`, `cache.max_mb`, memory limits).
            Options that the trainer's arguments also have are overridden by them.

    Raises:
        RolloutError: an option is not supported; the message suggests a value.
    """
    config = config or RolloutConfig()
    check_config(config)
    check_class(trainer_class)
    options = {"specrl_config": config, "__doc__": trainer_class.__doc__, "__module__": trainer_class.__module__}
    return type(f"Reusing{trainer_class.__name__}", (_Reusing, trainer_class), options)  # type: ignore[return-value]


class _Reusing:
    """Overrides of a TRL trainer, which comes next in the order of classes."""

    specrl_config: RolloutConfig
    specrl: Reuse

    def __init__(self, *args: Any, **options: Any):
        bound = inspect.signature(super().__init__).bind(*args, **options)
        given = bound.arguments
        if (arguments := given.get("args")) is not None:
            check_args(arguments, given, self.specrl_config)
            check_server(arguments)
        results = ToolResults()
        if tools := given.get("tools"):
            given["tools"] = [results.wrap(tool) for tool in tools]
        off = self.specrl_config.ahead == "off" or self.specrl_config.acceptance != "exact"
        with keyed_vllm(0 if off else self.specrl_config.fill):
            super().__init__(*bound.args, **bound.kwargs)
        trainer: Any = self
        self.specrl = Reuse(trainer, self.specrl_config, results)
        trainer.add_callback(SaveTrajectories(self.specrl))

    def _get_train_sampler(self, *args: Any, **options: Any) -> Any:
        """TRL's sampler of the training rows, of which the next batch is known."""
        from trl.trainer.utils import RepeatSampler

        sampler = super()._get_train_sampler(*args, **options)  # type: ignore[misc]
        if not isinstance(sampler, RepeatSampler):
            return sampler
        self.specrl.sampler = Foresight(sampler)
        return self.specrl.sampler

    def _generate(self, prompts: list) -> Any:
        """TRL's method, which generates all turns of a batch of conversations."""
        self.specrl.begin()
        generated = super()._generate(prompts)  # type: ignore[misc]
        self.specrl.end()
        return generated

    def _generate_single_turn(self, prompt_ids: list, images: Any, multimodal_fields: Any, *_: Any, **__: Any) -> Any:
        """Token ids of the responses of a turn; for GRPO also their log-probs, None where TRL needs none."""
        if images is not None or multimodal_fields:
            raise RolloutError("the prompts contain images, which reusing() cannot draft with; train with TRL alone")
        completions = self.specrl.turn(prompt_ids)
        tokens = [c.tokens for c in completions]
        trainer: Any = self
        if "num_generations" not in inspect.signature(super()._generate_single_turn).parameters:  # type: ignore[misc]
            return tokens  # RLOO
        return tokens, [c.logprobs for c in completions] if trainer.use_vllm else None
