"""`doc`, which describes an option, and the sections of `rollout.*` and `cluster.*`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from math import inf
from typing import Any, Literal


def doc(default: Any, help: str, *, low: float = 0, high: float = inf, only: str = "") -> Any:
    """A dataclass field with the metadata of an option or of a section.

    Args:
        default: the default value, or the dataclass of a section.
        help: one phrase for `help=KEY` and docs/configuration.md.
        low, high: the smallest and the largest legal number.
        only: the algorithm that reads the option: ppo, or grpo for grpo and dapo. The options of a section inherit it.
    """
    metadata = {"help": help, "limits": (low, high), "only": only}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def unknown_name(key: str, name: str, known: tuple[str, ...]) -> str:
    """The message for a name in an option that is none of the known ones."""
    near = get_close_matches(name, known, 1, cutoff=0)[0]
    return f"{key} has {name!r}, which is none of {', '.join(known)}. Did you mean {near}?"


SOURCES = ("prefix", "position", "earlier", "prompt", "group")
"""The texts that drafts are copied from, as described at `rollout.sources`."""
SPECULATORS = ("texts", "device", "ngram_gpu", "eagle", "eagle3", "mtp")
"""What drafts in vLLM: specrl on the host or on the `device`, or a method of vLLM."""


@dataclass
class CacheConfig:
    max_mb: int = doc(
        512,
        "memory limit of the stored responses in MB (2^20 bytes); the least recently sampled prompts are evicted",
        low=1,
    )
    start_from: str = doc("", "stored responses to start with, such as the directory `trajectories` of an earlier run")
    log: bool = doc(False, "keep every response by its key in the run's `texts`, for rollout.twin and for resumes")


@dataclass
class RoutedConfig:
    by: Literal["likelihood", "arbitrage"] = doc(
        "likelihood",
        "score that decides whether the policy rewrites a draft step. likelihood: the policy's, in a pass over the "
        "step; arbitrage: a trained router that sees the draft alone",
    )
    threshold: float = doc(
        0.5,
        "largest score at which a draft step is kept. arbitrage: probability of a gain by the policy; likelihood: nats",
    )
    separators: list[str] = doc(["\\n\\n"], "texts that end a reasoning step; \\n is a newline")
    max_step_tokens: int = doc(128, "longest draft step in tokens; the policy generates longer ones", low=1)

    def problems(self) -> Iterator[str]:
        """Messages for options of no use, with `<key>` for `key=value`."""
        if self.by == "arbitrage" and self.threshold > 1:
            yield "<rollout.routed.threshold> is no probability, as <rollout.routed.by> needs. Try 0.5."
        if not self.separators or "" in self.separators:
            yield r"rollout.routed.separators must name at least one text. Try rollout.routed.separators=[\n\n]."

    @property
    def step_separators(self) -> list[str]:
        """The separators, with newlines."""
        return [separator.replace("\\n", "\n") for separator in self.separators]


@dataclass
class VLLMConfig:
    runner: Literal["auto", "v1", "v2"] = doc("auto", "vLLM's model runner; auto: v2 if Triton runs (GPUs), else v1")
    speculator: str = doc(
        "texts",
        "what drafts. texts: rollout.sources and rollout.drafter, on the host. On runner v2, with asynchronous "
        "scheduling, device: stored responses or rollout.drafter, on the device; or vLLM's ngram_gpu, eagle=DIR, "
        "eagle3=DIR or mtp",
    )
    memory_utilization: float = doc(0.45, "share of GPU memory for vLLM, weights included", low=0.01, high=1)
    tensor_parallel: int = doc(1, "GPUs that share one copy of the model", low=1)
    compile: Literal["auto", "on", "off"] = doc("auto", "torch.compile and CUDA graphs, a slow start; auto: on GPUs")
    sleep: bool = doc(True, "release vLLM's GPU memory to the trainer between rollouts")

    def problems(self) -> Iterator[str]:
        """Messages for wrong options, with `<key>` for `key=value`."""
        name, _, path = self.speculator.partition("=")
        if name == "draft_model":
            yield f"<rollout.vllm.speculator> is set by rollout.drafter. Try rollout.drafter={path or 'DIR'}."
        elif name not in SPECULATORS:
            yield unknown_name("rollout.vllm.speculator", name, SPECULATORS)

    @property
    def on_device(self) -> str:
        """The option that moves drafting to the device; empty if the host drafts."""
        return "" if self.speculator == "texts" else f"rollout.vllm.speculator={self.speculator}"


@dataclass
class ClusterConfig:
    num_workers: int = doc(0, "rollout workers; 0 generates in the trainer's process")
    address: str = doc("", "empty starts Ray on loopback; auto or host:port joins a running cluster")
    cpus_per_worker: float = doc(1.0, "CPU cores of each worker", low=0.01)
    gpus_per_worker: float = doc(0.0, "GPUs of each worker")
    task_timeout_s: float = doc(
        1800.0,
        "seconds for one call, and at least 300 to load the model or weights; a worker that exceeds them is replaced",
        low=1,
    )

    def problems(self) -> Iterator[str]:
        """Messages for options of no use, with `<key>` for `key=value`."""
        if self.address and not self.num_workers:
            yield "<cluster.address> with <cluster.num_workers> has no use. Try cluster.num_workers=2."
