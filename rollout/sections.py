"""How an option is described, and the sections of `rollout.*` and `cluster.*`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from math import inf
from typing import Any, Literal


def doc(default: Any, help: str, *, low: float = 0, high: float = inf, resume: str = "", only: str = "") -> Any:
    """A dataclass field with what is said of an option. What is said of a section holds for its options too.

    Args:
        default: the value; or a section's dataclass.
        help: one line, shown by `help=KEY` and in docs/configuration.md.
        low, high: limits of a number, both included.
        resume: when it may change between two parts of one run, a word of MAY_CHANGE (specrl/config); empty: never.
        only: the algorithm that reads it, where others would ignore it: ppo, or grpo for all but ppo.
    """
    if isinstance(default, type):
        make = {"default_factory": default}
    else:
        make = {"default_factory": default.copy} if isinstance(default, list | dict) else {"default": default}
    said = {"resume": resume, "only": only}
    limits = {"limits": (low, high)}
    return field(**make, metadata={"help": help, **limits, **{key: word for key, word in said.items() if word}})


SOURCES = ("prefix", "position", "earlier", "prompt", "group", "contexts", "redraw")
"""Where drafts come from: the slot's old text until the response leaves it, and after that, at the same positions; the
prompt's stored texts; the prompt itself; what its rows have emitted in this rollout; the texts of all prompts; what the
last pass drew behind a mismatch."""


@dataclass
class CacheConfig:
    max_mb: int = doc(
        512,
        "memory bound of stored trajectories in MB (2^20 bytes); prompts not rolled out for longest go first",
        low=1,
        resume="old text",
    )
    start_from: str = doc("", "directory of trajectories to start with, such as an earlier run's `trajectories`")
    clear: bool = doc(False, "resume with an empty cache instead of the checkpoint's")
    on_write_error: Literal["warn", "stop"] = doc(
        "warn", "when the cache cannot be written: go on without saving, or stop"
    )


@dataclass
class BudgetConfig:
    window: int = doc(
        0, "draft tokens a row carries in one pass; 0 decides from measured costs and acceptance", resume="drafts"
    )


@dataclass
class JudgedConfig:
    by: Literal["judge", "kl"] = doc(
        "judge",
        "judge: a learned head, for old text and that of rollout.drafter; kl: how far the laws of rollout.drafter and "
        "the policy are apart",
    )
    path: str = doc("", "directory of the learned judge")
    threshold: float = doc(0.5, "by=kl: most nats between the laws; judge: not used, its training chose one")
    uncorrected: bool = doc(False, "allow training on judged tokens without a correction, as if they were on-policy")


@dataclass
class RoutedConfig:
    by: Literal["likelihood", "entropy", "rsd", "arbitrage"] = doc(
        "likelihood", "what decides whether the policy writes a step instead of the draft model"
    )
    path: str = doc("", "directory of the learned router (arbitrage), or the process reward model (rsd)")
    threshold: float = doc(
        0.5,
        "arbitrage: chance of a gain above which the policy writes; rsd: least score kept; likelihood, entropy: nats",
    )
    separators: list[str] = doc(["\\n\\n"], "texts that end a reasoning step; \\n is a newline")
    max_step_tokens: int = doc(128, "a draft step longer than this is a runaway, which the policy writes", low=1)
    uncorrected: bool = doc(False, "allow training on routed tokens without a correction, as if they were on-policy")

    def problems(self) -> Iterator[str]:
        """Sentences about options that are of no use."""
        if self.by in ("rsd", "arbitrage") and self.threshold > 1:
            given = f"rollout.routed.by={self.by}"
            yield f"rollout.routed.threshold={self.threshold} is no probability, as {given} needs. Try 0.5."
        if not all(self.separators) or not self.separators:
            yield r"rollout.routed.separators must name at least one text. Try rollout.routed.separators=[\n\n]."

    @property
    def step_separators(self) -> list[str]:
        """The separators as the texts they stand for."""
        return [separator.replace("\\n", "\n") for separator in self.separators]


@dataclass
class LocalConfig:
    kv_cache_mb: int = doc(0, "most KV of a rollout in MB; 0 plans with what is free when it begins")
    graphs: Literal["auto", "off"] = doc("auto", "capture passes as CUDA graphs, on GPUs in half precision")
    drafter_vocab: int = doc(
        32_768,
        "acceptance=exact: ids that rollout.drafter draws from, the most frequent in the run so far; 0 draws from all",
    )


SPECULATORS = ("texts", "ngram_gpu", "eagle", "eagle3", "mtp")


@dataclass
class VLLMConfig:
    runner: Literal["auto", "v1", "v2"] = doc(
        "auto", "vLLM's model runner; auto takes v2 where Triton runs, so on GPUs, else v1"
    )
    scheduling: Literal["auto", "sync", "async"] = doc(
        "auto",
        "v2: sync lets the host draft and learn between steps, async drafts on the device; auto takes sync where the "
        "host can reach the drafts",
    )
    speculator: str = doc(
        "texts", "v2: what proposes without rollout.drafter: texts, or vLLM's own: ngram_gpu, eagle=DIR, mtp"
    )
    draft_tokens: int = doc(
        32, "most draft tokens of a row in one step, up to 127; fewer where memory lacks for logits", low=1, high=127
    )
    kv_cache_mb: int = doc(0, "KV cache in MB; 0 takes memory_utilization of a GPU, or 512 on a CPU")
    memory_utilization: float = doc(0.45, "share of a GPU's memory for vLLM, its weights included", low=0.01, high=1)
    tensor_parallel: int = doc(1, "GPUs that hold one copy of the model; more copies are cluster.num_workers", low=1)
    compile: Literal["auto", "on", "off"] = doc("auto", "compiled model and CUDA graphs: slow start; auto: on GPUs")
    sleep: bool = doc(True, "give the GPU memory back to the trainer between rollouts")

    def problems(self) -> Iterator[str]:
        """Sentences about options that contradict each other."""
        name = self.speculator.partition("=")[0]
        if name == "draft_model":
            yield (
                f"rollout.vllm.speculator={self.speculator} is set by rollout.drafter. "
                f"Try rollout.drafter={self.speculator.partition('=')[2] or 'DIR'}."
            )
        elif name not in SPECULATORS:
            near = get_close_matches(name, SPECULATORS, 1, cutoff=0)[0]
            yield f"rollout.vllm.speculator={self.speculator} is none of {', '.join(SPECULATORS)}. Did you mean {near}?"
        for option, other in {"runner": "v1", "scheduling": "sync"}.items():
            if self.on_device and getattr(self, option) == other:
                yield (
                    f"rollout.vllm.{option}={other} lets the host draft, and {self.on_device} leaves that to the "
                    f"device. Try rollout.vllm.{option}=auto."
                )

    @property
    def on_device(self) -> str:
        """The option by which drafts are made on the device, with asynchronous scheduling; empty: by the host."""
        if self.scheduling == "async":
            return "rollout.vllm.scheduling=async"
        if self.tensor_parallel > 1:
            return f"rollout.vllm.tensor_parallel={self.tensor_parallel}"
        return "" if self.speculator == "texts" else f"rollout.vllm.speculator={self.speculator}"


@dataclass
class ClusterConfig:
    num_workers: int = doc(0, "rollout workers: Ray actors, each with an engine; 0 rolls out in the trainer's process")
    address: str = doc("", "empty starts Ray here, on loopback only; auto joins the running cluster, or host:port")
    cpus_per_worker: float = doc(1.0, "CPU cores of each worker", low=0.01)
    gpus_per_worker: float = doc(0.0, "GPUs of each worker")
    tasks_per_worker: int = doc(
        1, "shares of a rollout per worker; more balance the tail better, fewer batch better", low=1
    )
    start_timeout_s: float = doc(300.0, "deadline for workers to load their model, in seconds", low=1)
    task_timeout_s: float = doc(
        1800.0, "deadline for one share of a rollout, in seconds; a hung worker is replaced", low=1
    )
    max_restarts: int = doc(3, "replacements of workers in a row without a finished share; more stop the run")
    max_failed_ratio: float = doc(
        0.05, "share of rows that may fail and be masked, or one prompt's; more stop the run", high=1
    )
    object_store_mb: int = doc(256, "shared memory of a Ray started here, in MB; weights travel through it", low=80)
    dashboard: bool = doc(False, "start Ray's dashboard, on loopback, with a Ray started here")

    def problems(self) -> Iterator[str]:
        """Sentences about options that have no use together."""
        if self.address and not self.num_workers:
            yield f"cluster.address={self.address} with cluster.num_workers=0 has no use. Try cluster.num_workers=2."
        if self.dashboard and self.address:
            yield "cluster.dashboard=true has no effect on a cluster that runs already. Leave it out."
