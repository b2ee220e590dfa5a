"""Finding rewards: built-in ones by name, a user's own as module:attribute."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from reward.base import Outcome, Reward, RewardError, Sample, attempt, checked_outcomes
from reward.config import RewardConfig
from reward.format import FormatReward
from reward.math import MathReward
from reward.pool import WorkerPool
from reward.set import RewardSet, check_settings

BUILT_IN: dict[str, Callable[[RewardConfig], Reward]] = {"format": lambda config: FormatReward(), "math": MathReward}


def load_rewards(config: RewardConfig) -> RewardSet:
    """What the configuration names, loaded and combined. Raises RewardError."""
    with ExitStack() as loaded:
        rewards = []
        for spec in config.functions:
            rewards.append(load_reward(spec, config))
            loaded.callback(getattr(rewards[-1], "close", lambda: None))
        made = RewardSet(rewards, config.weights, config.max_failure_ratio, config.on_limit)
        loaded.pop_all()  # from here on `made.close` closes them
    return made


class FunctionReward:
    """A plain function `f(prompt, completion, answer, **fields) -> float | None` as a Reward.

    A function without `**fields` gets only the columns it names.
    """

    def __init__(self, function: Callable[..., Any], name: str):
        self.name = name
        self.deterministic = getattr(function, "deterministic", False)
        self._function = function
        try:
            signature = inspect.signature(function)
            signature.bind_partial("prompt", "completion", "answer")
        except TypeError as error:
            raise RewardError(f"reward {name!r} must take (prompt, completion, answer, **fields): {error}") from None
        except ValueError:  # a C function without a signature
            self._wanted = None
            return
        takes_all = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        self._wanted = None if takes_all else set(signature.parameters)

    def __call__(self, samples: Sequence[Sample]) -> list[Outcome]:
        return [attempt(self._score, sample) for sample in samples]

    def _score(self, sample: Sample) -> Any:
        fields = {key: value for key, value in sample.fields.items() if self._wanted is None or key in self._wanted}
        return self._function(sample.prompt, sample.completion, sample.answer, **fields)


class IsolatedReward:
    """A user reward in killable worker processes (`reward.isolate_user`), one sample a call."""

    def __init__(self, spec: str, name: str, config: RewardConfig, deterministic: bool = False):
        self.name, self.deterministic = name, deterministic
        self.pool = WorkerPool("reward.loading:serve", config, [spec])
        self.pool.start()

    def __call__(self, samples: Sequence[Sample]) -> list[Outcome]:
        return self.pool.map([asdict(sample) for sample in samples])

    def close(self) -> None:
        self.pool.close()


def serve(spec: str) -> Callable[[dict[str, Any]], float | None]:
    """The worker's side of IsolatedReward."""
    reward = load_reward(spec, RewardConfig(isolate_user=False))

    def handler(payload: dict[str, Any]) -> float | None:
        (outcome,) = checked_outcomes(reward, [Sample(**payload)])
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return handler


def check(config: RewardConfig) -> None:
    """RewardError, in one line, when the configured rewards cannot work: a name, a module, a signature, a weight.

    Cheap enough for the start of a program: it imports the user's modules, starts no worker and calls nothing.
    """
    targets = {spec: None if spec in BUILT_IN else _resolve(spec) for spec in config.functions}
    names = [spec if spec in BUILT_IN else _name(spec, targets[spec])[0] for spec in config.functions]
    check_settings(names, config.weights or [1.0] * len(names), config.max_failure_ratio)


def load_reward(spec: str, config: RewardConfig | None = None) -> Reward:
    """A built-in reward by name, or a user's own as "module:attribute"; RewardError says why it cannot be loaded.

    The attribute is a Reward object, a class of them that needs no arguments, or a plain function
    `f(prompt, completion, answer, **fields) -> float`. With `config.isolate_user` it runs in worker processes.
    """
    config = config or RewardConfig()
    if spec in BUILT_IN:
        return BUILT_IN[spec](config)
    target = _resolve(spec)
    name, named = _name(spec, target)
    if config.isolate_user:
        return IsolatedReward(spec, name, config, getattr(target, "deterministic", False))
    if inspect.isclass(target):
        try:
            target = target()
        except Exception as error:
            raise RewardError(f"reward {spec!r} cannot be created without arguments: {error!r}") from error
        named = isinstance(getattr(target, "name", None), str)
        if not callable(target):
            raise RewardError(f"reward {spec!r} makes objects of type {type(target).__name__} that cannot be called")
    return target if named else FunctionReward(target, name)


def _name(spec: str, target: Any) -> tuple[str, bool]:
    """What a user's reward is reported as, and whether it says so itself."""
    name = getattr(target, "name", None)
    return (name, True) if isinstance(name, str) else (spec.partition(":")[2], False)


def _resolve(spec: str) -> Callable[..., Any]:
    """The callable that "module:attribute" names, which takes what it will be given."""
    module_name, colon, attribute = spec.partition(":")
    if not (module_name and colon and attribute):
        near = difflib.get_close_matches(spec, BUILT_IN, n=1)
        module, _, last = spec.rpartition(".")
        guess = f"did you mean {near[0]!r}? " if near else f"did you mean '{module}:{last}'? " if module else ""
        raise RewardError(
            f"unknown reward {spec!r}; {guess}Known: {', '.join(sorted(BUILT_IN))}; "
            "a function of your own is given as module:attribute, for example my_rewards:brevity"
        )
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        if isinstance(error, ModuleNotFoundError) and error.name == module_name.partition(".")[0]:
            reason = f"there is none in {os.getcwd()}, where the run starts, nor along PYTHONPATH"
        raise RewardError(f"reward {spec!r}: module {module_name!r} cannot be imported: {reason}") from error
    if not hasattr(module, attribute):
        near = difflib.get_close_matches(attribute, dir(module), n=1)
        guess = f"; did you mean {near[0]!r}?" if near else ""
        raise RewardError(f"reward {spec!r}: module {module_name!r} has no attribute {attribute!r}{guess}")
    target = getattr(module, attribute)
    if not callable(target):
        raise RewardError(f"reward {spec!r} must be callable, but it is {type(target).__name__} {target!r:.80}")
    if inspect.isclass(target):
        _check_constructor(spec, target)
    elif not _name(spec, target)[1]:
        FunctionReward(target, attribute)
    return target


def _check_constructor(spec: str, target: type) -> None:
    try:
        inspect.signature(target).bind()
    except TypeError as error:
        raise RewardError(f"reward {spec!r} cannot be created without arguments: {error}") from None
    except ValueError:  # a C class without a signature
        return
