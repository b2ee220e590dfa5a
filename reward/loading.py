"""Finding rewards: built-in ones by name, a user's own as module:attribute."""

from __future__ import annotations

from contextlib import ExitStack
from pkgutil import resolve_name

from specrl.reward.base import Reward
from specrl.reward.config import RewardConfig
from specrl.reward.set import RewardSet, check_settings

BUILT_IN = {"format": "specrl.reward.format:FormatReward", "math": "specrl.reward.math:MathReward"}
"""Classes by the names of their rewards; each is made from the configuration, and imported when it is asked for."""


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


def check(config: RewardConfig) -> None:
    """RewardError, in one line, when the configured rewards cannot work: a name, a module, a signature, a weight.

    Cheap enough for the start of a program: it imports the user's modules, starts no worker and calls nothing.
    """
    names = [spec if spec in BUILT_IN else _own_name(spec) for spec in config.functions]
    check_settings(names, config.weights or [1.0] * len(names), config.max_failure_ratio)


def _own_name(spec: str) -> str:
    from specrl.reward.own import find

    return find(spec, BUILT_IN)[1]


def load_reward(spec: str, config: RewardConfig | None = None) -> Reward:
    """A built-in reward by name, or a user's own as "module:attribute"; RewardError says why it cannot be loaded.

    The attribute is a Reward object, a class of them that needs no arguments, or a plain function
    `f(prompt, completion, answer, **fields) -> float`. With `config.isolate_user` it runs in worker processes.
    """
    config = config or RewardConfig()
    if spec in BUILT_IN:
        return resolve_name(BUILT_IN[spec])(config)
    from specrl.reward.own import load

    return load(spec, config, BUILT_IN)
