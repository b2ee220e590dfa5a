"""Loads rewards: built-in ones by name, user-defined functions, classes and objects as module:attribute."""

from __future__ import annotations

import difflib
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
        combined = RewardSet(rewards, config.weights, config.max_failure_ratio, config.on_limit)
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
        absent = [] if columns is None else [name for name in _needed(target) if name not in columns]
        if absent:
            raise RewardError(
                f"reward {spec!r} needs the column {absent[0]!r}, which the data does not have. It has: "
                f"{', '.join(columns or ()) or 'none'}. Rename it, or give that parameter a default"
            )


def _needed(target: Callable[..., Any]) -> list[str]:
    """The columns without which a plain function cannot be called."""
    if inspect.isclass(target) or _has_name(target):
        return []
    try:
        parameters = [*inspect.signature(target).parameters.values()][3:]
    except ValueError:  # a C function without a signature
        return []
    fixed = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in fixed]
    return [name for name in needed if name != "messages"]


def load_reward(spec: str, config: RewardConfig | None = None) -> Reward:
    """A built-in reward by name, or a user-defined one as "module:attribute"; RewardError says why it cannot be loaded.

    The attribute is a Reward object, a class of them that needs no arguments, or a plain function
    `f(prompt, completion, answer, **fields) -> float`. With `config.isolate_user` it runs in worker processes.
    """
    config = config or RewardConfig()
    if spec in BUILT_IN:
        return resolve_name(BUILT_IN[spec])(config)
    target, name = find(spec)
    if config.isolate_user:
        return IsolatedReward(spec, name, config, target)
    reward: Any = target
    if inspect.isclass(target):
        try:
            reward = target()
        except Exception as error:
            raise RewardError(f"reward {spec!r} cannot be created without arguments: {error!r}") from error
    return reward if _has_name(reward) else FunctionReward(reward, name)


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
        try:
            signature = inspect.signature(function)
            signature.bind_partial("prompt", "completion", "answer")
        except TypeError as error:
            raise RewardError(f"reward {name!r} must take (prompt, completion, answer, **fields): {error}") from None
        except ValueError:  # a C function without a signature
            return
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values()):
            self.columns = set(signature.parameters)

    def __call__(self, samples: Sequence[Sample]) -> list[Outcome]:
        return [attempt(self._score, sample) for sample in samples]

    def _score(self, sample: Sample) -> Any:
        columns = {"messages": sample.messages} | sample.fields
        if self.columns is not None:
            columns = {key: value for key, value in columns.items() if key in self.columns}
        return self._function(sample.prompt, sample.completion, sample.answer, **columns)


class IsolatedReward:
    """A user-defined reward in killable worker processes (`reward.isolate_user`), one sample per call.

    A plain function gets only the columns that it takes, as JSON carries them there.

    Args: target: the reward itself, for what it declares; it runs in the workers only.
    """

    def __init__(self, spec: str, name: str, config: RewardConfig, target: Callable[..., Any]):
        self.name = name
        self.deterministic = getattr(target, "deterministic", False)
        self.verifiable = getattr(target, "verifiable", False)
        plain = not inspect.isclass(target) and not _has_name(target)
        self._columns = FunctionReward(target, name).columns if plain else None
        self.pool = WorkerPool("specrl.reward.loading:make_handler", config, [spec])
        self.pool.start()

    def __call__(self, samples: Sequence[Sample]) -> list[Outcome]:
        return self.pool.map([vars(sample) | {"fields": self._taken(sample.fields)} for sample in samples])

    def _taken(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in fields.items() if self._columns is None or name in self._columns}

    def close(self) -> None:
        self.pool.close()


def make_handler(spec: str) -> Callable[[dict[str, Any]], float | None]:
    """The handler that a worker of IsolatedReward runs."""
    reward = load_reward(spec, RewardConfig(isolate_user=False))

    def handler(payload: dict[str, Any]) -> float | None:
        (outcome,) = checked_outcomes(reward, [Sample(**payload)])
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return handler


def find(spec: str) -> tuple[Callable[..., Any], str]:
    """The callable at "module:attribute", whose signature is checked, and the name for its results.

    Raises RewardError.
    """
    module_name, _, attribute = spec.partition(":")
    if not (module_name and attribute):
        module_path, _, last = spec.rpartition(".")
        guess = [f"{module_path}:{last}"] if module_path else difflib.get_close_matches(spec, BUILT_IN, n=1)
        raise RewardError(
            f"unknown reward {spec!r}{_did_you_mean(guess)}. Known: {', '.join(BUILT_IN)}; "
            "a user-defined function is written module:attribute, for example my_rewards:brevity"
        )
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        if isinstance(error, ModuleNotFoundError) and error.name == module_name.partition(".")[0]:
            reason = f"it is neither in {os.getcwd()}, where the run starts, nor on PYTHONPATH"
        raise RewardError(f"reward {spec!r}: module {module_name!r} cannot be imported: {reason}") from error
    if not hasattr(module, attribute):
        near = difflib.get_close_matches(attribute, dir(module), n=1)
        raise RewardError(
            f"reward {spec!r}: module {module_name!r} has no attribute {attribute!r}{_did_you_mean(near)}"
        )
    target = getattr(module, attribute)
    if not callable(target):
        raise RewardError(f"reward {spec!r} must be callable, but it is {type(target).__name__} {target!r:.80}")
    if inspect.isclass(target):
        _check_constructor(spec, target)
    elif not _has_name(target):
        FunctionReward(target, attribute)
    return target, target.name if _has_name(target) else attribute


def _did_you_mean(names: Sequence[str]) -> str:
    return f"; did you mean {names[0]!r}?" if names else ""


def _has_name(target: Any) -> bool:
    return isinstance(getattr(target, "name", None), str)


def _check_constructor(spec: str, target: type) -> None:
    try:
        inspect.signature(target).bind()
    except TypeError as error:
        raise RewardError(f"reward {spec!r} cannot be created without arguments: {error}") from None
    except ValueError:  # a C class without a signature
        return
