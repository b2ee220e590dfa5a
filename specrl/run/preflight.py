"""What can be found wrong with a run before torch is imported: packages, models, data, device, rewards and paths."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from specrl.config.options import ConfigError
from specrl.reward.base import RewardError
from specrl.reward.loading import check as check_rewards
from specrl.run import policy
from specrl.run.data import load_examples

if TYPE_CHECKING:
    from specrl.config.schema import Config
    from specrl.run.data import Example

GPU_FILES = ("nvidia*", "nvhost*", "nvgpu*", "kfd", "dxg")
"""In /dev, one of which a driver of NVIDIA or AMD makes."""


def needs(config: Config) -> None:
    """Raises ConfigError for the first package or model that is not there, with the command that makes it."""
    problems = [*_packages(config)]
    if config.rollout.drafter or config.rollout.lossy:
        from specrl.run.prepared import missing

        problems += missing(config)
    for problem in problems:
        raise ConfigError(problem)


def _packages(config: Config) -> Iterator[str]:
    engine, workers, rank = config.rollout.engine, config.cluster.num_workers, config.lora.rank
    wanted = {
        "vllm": (engine == "vllm", f"rollout.engine={engine} needs vLLM", "vllm"),
        "ray": (workers, f"cluster.num_workers={workers} needs Ray", "ray"),
        "peft": (rank, f"lora.rank={rank} needs peft", "peft"),
    }
    for module, (used, why, extra) in wanted.items():
        if used and find_spec(module) is None:
            yield f"{why}. Install it with: pip install 'specrl[{extra}]'"


def check(config: Config, training: bool = True, read: bool = True) -> dict[str, list[Example]]:
    """The examples of the splits that the command reads, once everything else that is cheap to look at is right.

    What `needs` asks comes before it. Args: read: the data; without it there are no examples.

    Raises:
        ConfigError: the first thing that is wrong.
    """
    _paths(config, training)
    examples = _examples(config, training) if read else {}
    _rewards(config)
    return examples


def _examples(config: Config, training: bool) -> dict[str, list[Example]]:
    found = {split: load_examples(config.data, config.dataset, split, config.seed) for split in config.splits}
    if training and len(found["train"]) < config.trainer.prompts_per_step:
        count = len(found["train"])
        raise ConfigError(
            f"trainer.prompts_per_step={config.trainer.prompts_per_step} but data={config.data} has {count} "
            f"training prompts. Use prompts_per_step={count} or less, or more prompts."
        )
    return found


def _rewards(config: Config) -> None:
    if not config.scores:
        return
    try:
        check_rewards(config.reward)
    except RewardError as error:
        raise ConfigError(" ".join(str(error).split())) from error


def _paths(config: Config, training: bool) -> None:
    _device(config.device)
    _workers(config)
    _model(config)
    cache = config.rollout.cache
    new = training and config.resume == "no" and not cache.clear
    if new and cache.start_from and not Path(cache.start_from).is_dir():
        raise ConfigError(f"the trajectory cache {cache.start_from} does not exist. Check rollout.cache.start_from.")


def _device(name: str) -> None:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise ConfigError(policy.UNKNOWN_DEVICE.format(name))
    if name.startswith("cuda") and not _gpus():
        raise ConfigError(policy.NO_GPU.format(name))


def _gpus() -> bool:
    """Whether this process may see a GPU, as far as can be known without a driver's library."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return not hidden and any(any(Path("/dev").glob(file)) for file in GPU_FILES)


def _workers(config: Config) -> None:
    """The workers of a Ray that is started here have this machine's GPUs."""
    cluster = config.cluster
    if cluster.num_workers and cluster.gpus_per_worker and not cluster.address and not _gpus():
        raise ConfigError(
            f"cluster.gpus_per_worker={cluster.gpus_per_worker:g}: with cluster.address empty the workers start on "
            "this machine, which has no GPU. Try cluster.gpus_per_worker=0, or cluster.address= of a cluster with GPUs."
        )


def _model(config: Config) -> None:
    local = config.model != "tiny" and policy.is_path(config.model)
    if local and (flaw := policy.flaw(Path(config.model).expanduser())):
        raise ConfigError(policy.BAD_MODEL.format(config.model, flaw))
    policy.find_tokenizer(config)
