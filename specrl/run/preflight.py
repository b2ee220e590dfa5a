"""What can be found wrong with a run before torch is imported: packages, models, data, device, rewards and paths."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import reward.loading
from reward.base import RewardError
from specrl.config.options import ConfigError
from specrl.run import policy
from specrl.run.data import load_examples

if TYPE_CHECKING:
    from specrl.config.schema import Config
    from specrl.run.data import Example

GPU_FILES = ("nvidia*", "nvhost*", "nvgpu*", "kfd", "dxg")
"""In /dev, one of which a driver of NVIDIA or AMD makes."""
HEAD = "the head of the config file may say with what options"


def needs(config: Config) -> None:
    """Raises ConfigError for the first package or model that is not there, with the command that makes it."""
    for problem in (*_packages(config), *_drafter(config), *_learned(config)):
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


def _drafter(config: Config) -> Iterator[str]:
    """The draft model, which a first command distils, or the policy's own first layers."""
    given = config.rollout.drafter
    name, _, layers = given.partition("=")
    if name == "layers":
        depth = _depth(config.model)
        if depth and int(layers) >= depth:
            yield f"rollout.drafter={given}: model={config.model} has {depth} layers; N must be below that."
    elif given and _absent(given, config.output_dir):
        yield (
            f"rollout.drafter={given} does not exist. Make it first: python -m specrl.drafter out={given} ({HEAD}). "
            "Or take rollout.drafter=layers=N, the policy's own first layers."
        )
    elif given and policy.is_path(given) and (flaw := _flaw(Path(given).expanduser())):
        yield f"rollout.drafter={given} cannot be loaded: {flaw}."


def _learned(config: Config) -> Iterator[str]:
    """The learned router or judge of a lossy law."""
    law = config.rollout.law
    if law not in ("judged", "routed"):
        return
    by, path = getattr(config.rollout, law).by, getattr(config.rollout, law).path
    maker = {"arbitrage": "train_router", "judge": "train_judge"}.get(by)
    if maker and _absent(path, config.output_dir, hub=False):
        yield (
            f"rollout.{law}.path={path} does not exist, which rollout.{law}.by={by} asks. Make it first: "
            f"python -m specrl.{maker} config={config.name} out={path} ({HEAD})."
        )


def _absent(given: str, output_dir: str, hub: bool = True) -> bool:
    """True for a directory that is not there. Args: hub: `given` may also be the name of a model on a hub."""
    path = Path(given).expanduser()
    if path.is_dir():
        return False
    ours = any(path.is_relative_to(folder) for folder in (output_dir, "outputs"))
    return not hub or ours or "/" not in given or policy.is_path(given)


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
        reward.loading.check(config.reward)
    except RewardError as error:
        raise ConfigError(" ".join(str(error).split())) from error


def _paths(config: Config, training: bool) -> None:
    _device(config.device)
    _model(config)
    cache = config.rollout.cache
    new = training and config.resume == "no" and not cache.clear
    if new and cache.start_from and not Path(cache.start_from).is_dir():
        raise ConfigError(f"the trajectory cache {cache.start_from} does not exist. Check rollout.cache.start_from.")


def _device(name: str) -> None:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise ConfigError(policy.UNKNOWN_DEVICE.format(name))
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if name.startswith("cuda") and (hidden or not any(any(Path("/dev").glob(file)) for file in GPU_FILES)):
        raise ConfigError(policy.NO_GPU.format(name))


def _model(config: Config) -> None:
    local = config.model != "tiny" and policy.is_path(config.model)
    if local and (flaw := _flaw(Path(config.model).expanduser())):
        raise ConfigError(policy.BAD_MODEL.format(config.model, flaw))
    policy.find_tokenizer(config)


def _flaw(path: Path) -> str:
    """Why this cannot be a model's directory; empty when it can."""
    if not path.is_dir():
        return "there is no such directory"
    known = any((path / name).is_file() for name in ("config.json", "adapter_config.json"))
    return "" if known else "the directory has no config.json"


def _depth(model: str) -> int | None:
    """The number of layers by the model's config.json, None where it does not say."""
    file = (policy.TINY_PATH if model == "tiny" else Path(model).expanduser()) / "config.json"
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # loading says what is wrong with it
    names = ("num_hidden_layers", "n_layer")
    return next((read[name] for name in names if isinstance(read.get(name), int)), None)
