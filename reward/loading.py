"""Loads rewards: built-in ones by name, user-defined functions, classes and objects as module:attribute."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from pkgutil import resolve_name
from typing import Any

from specrl.reward.base import Outcome, Reward, RewardError, Sample, attempt, checked_outcomes
from specrl.reward.config import RewardConfig
from specrl.reward.pool import WorkerPool
from specrl.reward.sandbox import missing
from specrl.reward.set import RewardSet, check_settings

BUILT_IN = {
    "code": "specrl.reward.code:CodeReward",
    "format": "specrl.reward.format:FormatReward",
    "math": "specrl.reward.math:MathReward",
}
"""Classes by the names of their rewards; each is made from the configuration."""


def load_rewards(config: RewardConfig) -> RewardSet:
    """The configured rewards, combined. Raises RewardError."""
    with ExitStack() as loaded:
        rewards = []
        for spec in config.functions:
            reward = load_reward(spec, config)
            loaded.callback(getattr(reward, "close", lambda: None))
            rewards.append(reward)
        combined = RewardSet(rewards, config.weights, config.on_limit)
        loaded.pop_all()  # from here on `combined.close` closes them
    return combined


def check(config: RewardConfig, columns: Collection[str] | None = None) -> None:
    """Raises RewardError, in one line, when the configured rewards cannot work: a name, module, signature or weight.

    Cheap enough for the start of a program: it imports the user's modules, starts no worker and calls nothing. For the
    code reward it runs an empty program, as the kernel may refuse to confine any.

    Args: columns: the data's, which functions must not go beyond; None if the data has not been read.
    """
    found = {spec: find(spec) for spec in config.functions if spec not in BUILT_IN}
    if "code" in config.functions and (reason := missing()):
        raise RewardError(reason)
    names = [found[spec][1] if spec in found else spec for spec in config.functions]
    check_settings(names, config.weights or [1.0] * len(names))
    for spec, (target, _) in found.items():
        if columns is None or not isinstance(target, FunctionReward):
            continue
        if absent := sorted(target.needed.difference(columns)):
            raise RewardError(
                f"reward {spec!r} needs the column {absent[0]!r}, which the data does not have. It has: "
                f"{', '.join(columns) or 'none'}. Rename it, or give that parameter a default"
            )


def load_reward(spec: str, config: RewardConfig | None = None) -> Reward:
    """A built-in reward by name, or a user-defined one as "module:attribute"; RewardError says why it cannot be loaded.

    The attribute is a Reward object, a class of them that needs no arguments, or a plain function
    `f(prompt, completion, answer, **fields) -> float`. It runs in worker processes.
    """
    config = config or RewardConfig()
    return resolve_name(BUILT_IN[spec])(config) if spec in BUILT_IN else UserReward(spec, config)


class FunctionReward:
    """A plain function `f(prompt, completion, answer, **fields) -> float | None` as a Reward.

    A function without `**fields` gets only the columns that it names. The messages of a chat are passed as the column
    `messages`, unless the data has a column of that name.
    """

    def __init__(self, function: Callable[..., Any], name: str):
        self.name = name
        self.deterministic = getattr(function, "deterministic", False)
        self.verifiable = getattr(function, "verifiable", False)
        self._function = function
        self.columns: set[str] | None = None
        """The columns that the function takes; None is all of them."""
        self.needed: set[str] = set()
        """The columns without which it cannot be called."""
        try:
            signature = inspect.signature(function)
            signature.bind_partial("prompt", "completion", "answer")
        except (TypeError, ValueError) as error:  # ValueError: a function in C without a signature
            raise RewardError(f"reward {name!r} must take (prompt, completion, answer, **fields): {error}") from None
        parameters = [*signature.parameters.values()]
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            self.columns = set(signature.parameters)
        fixed = [p for p in parameters[3:] if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        self.needed = {p.name for p in fixed if p.default is p.empty} - {"messages"}

    def __call__(self, samples: Sequence[Sample]) -> list[Outcome]:
        return [attempt(self._score, sample) for sample in samples]

    def taken(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The columns of a row that the function takes."""
        return {name: value for name, value in fields.items() if self.columns is None or name in self.columns}

    def _score(self, sample: Sample) -> Any:
        columns = self.taken({"messages": sample.messages} | sample.fields)
        return self._function(sample.prompt, sample.completion, sample.answer, **columns)


class UserReward:
    """A user-defined reward in killable worker processes, one sample per call.

    A plain function gets only the columns that it takes, as JSON carries them there.
    """

    def __init__(self, spec: str, config: RewardConfig):
        self._target, self.name = find(spec)
        self.deterministic = getattr(self._target, "deterministic", False)
        self.verifiable = getattr(self._target, "verifiable", False)
        self.pool = WorkerPool("specrl.reward.loading:make_handler", config, [spec])
        self.pool.start()

    def __call__(self, samples: Sequence[Sample]) -> list[Outcome]:
        taken = self._target.taken if isinstance(self._target, FunctionReward) else dict
        return self.pool.map([vars(sample) | {"fields": taken(sample.fields)} for sample in samples])

    def close(self) -> None:
        self.pool.close()


def make_handler(spec: str) -> Callable[[dict[str, Any]], float | None]:
    """The handler that a worker of UserReward runs."""
    reward, _ = find(spec)
    if inspect.isclass(reward):
        reward = reward()

    def handler(payload: dict[str, Any]) -> float | None:
        (outcome,) = checked_outcomes(reward, [Sample(**payload)])
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return handler


def find(spec: str) -> tuple[Any, str]:
    """The reward or the class of rewards at "module:attribute", whose signature is checked, and its name.

    Raises RewardError.
    """
    module_name, _, attribute = spec.partition(":")
    if not (module_name and attribute):
        raise RewardError(
            f"unknown reward {spec!r}. Known: {', '.join(BUILT_IN)}; a user-defined function is written "
            "module:attribute, for example my_rewards:brevity"
        )
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        if isinstance(error, ModuleNotFoundError) and error.name == module_name.partition(".")[0]:
            reason = f"it is neither in {os.getcwd()}, where the run starts, nor on PYTHONPATH"
        raise RewardError(f"reward {spec!r}: module {module_name!r} cannot be imported: {reason}") from error
    if not hasattr(module, attribute):
        raise RewardError(f"reward {spec!r}: module {module_name!r} has no attribute {attribute!r}")
    target = getattr(module, attribute)
    if not callable(target):
        raise RewardError(f"reward {spec!r} must be callable, but it is {type(target).__name__} {target!r:.80}")
    named = isinstance(getattr(target, "name", None), str)
    name = target.name if named else attribute
    if not inspect.isclass(target):
        return target if named else FunctionReward(target, name), name
    try:
        inspect.signature(target).bind()
    except (TypeError, ValueError) as error:
        raise RewardError(f"reward {spec!r} cannot be created without arguments: {error}") from None
    return target, name
