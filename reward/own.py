"""A user's own rewards: a function, a class or an object, named as module:attribute."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from typing import Any

from specrl.reward.base import Outcome, Reward, RewardError, Sample, attempt, checked_outcomes
from specrl.reward.config import RewardConfig
from specrl.reward.pool import WorkerPool


def load(spec: str, config: RewardConfig, known: Collection[str] = ()) -> Reward:
    """The reward at "module:attribute", in worker processes with `config.isolate_user`.

    Args: known: other names of rewards, for the message. Raises RewardError.
    """
    target, name = find(spec, known)
    if config.isolate_user:
        return IsolatedReward(spec, name, config, target)
    if inspect.isclass(target):
        try:
            target = target()
        except Exception as error:
            raise RewardError(f"reward {spec!r} cannot be created without arguments: {error!r}") from error
        if not callable(target):
            raise RewardError(f"reward {spec!r} makes objects of type {type(target).__name__} that cannot be called")
    return target if _named(target) else FunctionReward(target, name)


class FunctionReward:
    """A plain function `f(prompt, completion, answer, **fields) -> float | None` as a Reward.

    A function without `**fields` gets only the columns it names. The messages of a chat come as the column `messages`,
    where the data has none of that name.
    """

    def __init__(self, function: Callable[..., Any], name: str):
        self.name = name
        self.deterministic = getattr(function, "deterministic", False)
        self.verifiable = getattr(function, "verifiable", False)
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
        columns = {"messages": sample.messages} | sample.fields
        fields = {key: value for key, value in columns.items() if self._wanted is None or key in self._wanted}
        return self._function(sample.prompt, sample.completion, sample.answer, **fields)


class IsolatedReward:
    """A user reward in killable worker processes (`reward.isolate_user`), one sample a call.

    Args: target: the reward itself, which says what it promises; it runs in the workers only.
    """

    def __init__(self, spec: str, name: str, config: RewardConfig, target: Callable[..., Any]):
        self.name = name
        self.deterministic = getattr(target, "deterministic", False)
        self.verifiable = getattr(target, "verifiable", False)
        self.pool = WorkerPool("specrl.reward.own:serve", config, [spec])
        self.pool.start()

    def __call__(self, samples: Sequence[Sample]) -> list[Outcome]:
        return self.pool.map([asdict(sample) for sample in samples])

    def close(self) -> None:
        self.pool.close()


def serve(spec: str) -> Callable[[dict[str, Any]], float | None]:
    """The worker's side of IsolatedReward."""
    reward = load(spec, RewardConfig(isolate_user=False))

    def handler(payload: dict[str, Any]) -> float | None:
        (outcome,) = checked_outcomes(reward, [Sample(**payload)])
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return handler


def find(spec: str, known: Collection[str]) -> tuple[Callable[..., Any], str]:
    """The callable at "module:attribute", which takes what it will be given, and what it is reported as.

    Args: known: see `load`. Raises RewardError.
    """
    module_name, colon, attribute = spec.partition(":")
    if not (module_name and colon and attribute):
        near = difflib.get_close_matches(spec, known, n=1)
        module, _, last = spec.rpartition(".")
        guess = f"did you mean {near[0]!r}? " if near else f"did you mean '{module}:{last}'? " if module else ""
        raise RewardError(
            f"unknown reward {spec!r}; {guess}Known: {', '.join(sorted(known))}; "
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
    elif not _named(target):
        FunctionReward(target, attribute)
    return target, target.name if _named(target) else attribute


def _named(target: Any) -> bool:
    """Whether a user's reward says itself what it is called."""
    return isinstance(getattr(target, "name", None), str)


def _check_constructor(spec: str, target: type) -> None:
    try:
        inspect.signature(target).bind()
    except TypeError as error:
        raise RewardError(f"reward {spec!r} cannot be created without arguments: {error}") from None
    except ValueError:  # a C class without a signature
        return
