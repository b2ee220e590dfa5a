"""Configuration of the rollout stage. No heavy imports: `help=true` must answer in about a second."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Literal


def doc(default, help: str, *, low: float | None = None, high: float | None = None):
    """A dataclass field with its one-line documentation, shown by `help=rollout` and in docs/configuration.md.

    A number lies within `low` and `high`, both included; without them it is 0 or more.
    """
    make = {"default_factory": lambda: type(default)(default)} if isinstance(default, list) else {"default": default}
    limits = {} if (low, high) == (None, None) else {"limits": (low or 0, inf if high is None else high)}
    return field(**make, metadata={"help": help, **limits})


SOURCES = ("prefix", "position", "earlier", "group", "contexts")
"""Where drafts come from: the slot's old text until the response leaves it, and after that, at the same positions; the
prompt's stored texts; what the rows of the prompt have emitted in this rollout; the texts of all prompts."""


@dataclass
class CacheConfig:
    max_mb: int = doc(
        512, "memory bound of stored trajectories in MB (2^20 bytes); the least recently used go first", low=1
    )
    start_from: str = doc("", "directory of trajectories to start with, such as an earlier run's `trajectories`")
    clear: bool = doc(False, "resume with an empty cache instead of the checkpoint's")
    on_write_error: Literal["warn", "stop"] = doc(
        "warn", "when the cache cannot be written: go on without saving, or stop"
    )


@dataclass
class BudgetConfig:
    window: int = doc(0, "draft tokens a row carries in one pass; 0 decides from measured costs and acceptance")
    branches: int = doc(
        1, "most continuations of a row verified together, as a tree, where this pays; 1 is one path", low=1
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
    separators: list[str] = field(
        default_factory=lambda: ["\\n\\n"], metadata={"help": "texts that end a reasoning step; \\n is a newline"}
    )
    max_step_tokens: int = doc(128, "a draft step longer than this is a runaway, which the policy writes", low=1)
    uncorrected: bool = doc(False, "allow training on routed tokens without a correction, as if they were on-policy")

    @property
    def step_separators(self) -> list[str]:
        """The separators as the texts they stand for."""
        return [separator.replace("\\n", "\n") for separator in self.separators]


@dataclass
class VLLMConfig:
    runner: Literal["auto", "v1", "v2"] = doc(
        "auto", "vLLM's model runner; auto takes v1 where drafts can ride in the request, else v2"
    )
    draft_tokens: int = doc(
        32, "most draft tokens of a row in one step, up to 127; bounds logits memory", low=1, high=127
    )
    kv_cache_mb: int = doc(0, "KV cache in MB; 0 takes memory_utilization of a GPU, or 512 on a CPU")
    memory_utilization: float = doc(0.45, "share of a GPU's memory for vLLM, its weights included", low=0.01, high=1)
    tensor_parallel: int = doc(1, "GPUs that hold one copy of the model; more copies are cluster.num_workers", low=1)
    compile: bool = doc(False, "compile the model and capture CUDA graphs: slower to start, faster to decode")
    sleep: bool = doc(True, "give the GPU memory back to the trainer between rollouts")


@dataclass
class ClusterConfig:
    num_workers: int = doc(0, "rollout workers: Ray actors, each with an engine; 0 rolls out in the trainer's process")
    address: str = doc("", "empty starts Ray here, on loopback only; auto joins the running cluster, or host:port")
    cpus_per_worker: float = doc(1.0, "CPU cores of each worker")
    gpus_per_worker: float = doc(0.0, "GPUs of each worker")
    tasks_per_worker: int = doc(1, "shares of a rollout per worker; more balance the tail better, fewer batch better")
    start_timeout_s: float = doc(300.0, "deadline for workers to load their model, in seconds")
    task_timeout_s: float = doc(1800.0, "deadline for one share of a rollout, in seconds; a hung worker is replaced")
    max_restarts: int = doc(3, "replacements of workers in a row without a finished share; more stop the run")
    max_failed_ratio: float = doc(0.05, "share of rows that may fail and be masked, or one prompt's; more stop the run")
    object_store_mb: int = doc(256, "shared memory of a Ray started here, in MB; weights travel through it")
    dashboard: bool = doc(False, "start Ray's dashboard, on loopback, with a Ray started here")


@dataclass
class RolloutConfig:
    engine: Literal["transformers", "vllm"] = doc("transformers", "inference engine")
    law: Literal["exact", "off", "lenient", "judged", "routed"] = doc(
        "exact",
        "exact: bit-identical to plain decoding; off: plain decoding; the rest is lossy: lenient (SPEC-RL as "
        "published), judged (drafted tokens also stand where a judge allows), routed (steps of rollout.drafter stand "
        "where a router allows)",
    )
    replay: float | Literal["auto"] = doc(
        0.0,
        "share of slots that keep their noise key from their last visit, 0 to 1; auto: chosen at each visit by the "
        "measured reuse gap (see docs/guarantees.md)",
        high=1,
    )
    replay_gap: float = doc(
        0.0, "with replay=auto: largest reuse gap of a batch, in units of the reward; 0 replays nothing"
    )
    lenience: float = doc(1.0, "factor l of the published acceptance min(1, l*p_new/p_old); only for law=lenient")
    group_size: int = doc(8, "responses per prompt", low=1)
    temperature: float = doc(1.0, "sampling temperature; 0 is greedy")
    top_p: float = doc(1.0, "nucleus sampling mass; 1 is off", high=1)
    top_k: int = doc(0, "sample from the k most likely tokens; 0 is off")
    max_new_tokens: int = doc(256, "response cap in tokens, EOS included", low=1)
    sources: list[str] = field(
        default_factory=lambda: list(SOURCES),
        metadata={
            "help": "texts to draft from: the slot's old one until it is left, and after that; the prompt's old ones; "
            "what its rows emit now; what followed the last tokens in the texts of all prompts"
        },
    )
    drafter: str = doc(
        "", "draft model for rows that left their old texts: a directory, or layers=N for the policy's own first layers"
    )
    rows_per_batch: int = doc(256, "rows decoded together, bounds KV memory; more rows run in further batches", low=1)
    tokens_per_pass: int = doc(4096, "most tokens in one forward pass; bounds verification memory", low=1)
    logits_mb: int = doc(
        256, "most memory for logits and noise at a time, in MB; larger passes are scored in chunks", low=1
    )
    tie_margin: float = doc(
        1e-4, "draws whose two best scores are closer than this are decided by a canonical pass; fp32 only, 0 is off"
    )
    measure_every: int = doc(
        10,
        "every N steps also roll out plainly with the same keys, to measure spec/speedup and compare tokens; 0 never",
    )
    cache: CacheConfig = field(default_factory=CacheConfig, metadata={"help": "stored responses"})
    budget: BudgetConfig = field(default_factory=BudgetConfig, metadata={"help": "how much is drafted"})
    judged: JudgedConfig = field(default_factory=JudgedConfig, metadata={"help": "law=judged: who allows tokens"})
    routed: RoutedConfig = field(
        default_factory=RoutedConfig, metadata={"help": "law=routed: what a step is, and who writes it"}
    )
    vllm: VLLMConfig = field(default_factory=VLLMConfig, metadata={"help": "the engine vllm"})

    @property
    def lossy(self) -> bool:
        """True where responses follow another law than the policy's, which the loss must correct."""
        return self.law in ("lenient", "judged", "routed")

    @property
    def reuses(self) -> bool:
        """True where responses are kept as drafts of the next visit."""
        return self.law in ("exact", "lenient") or self.old_text_stands

    @property
    def old_text_stands(self) -> bool:
        """True where old text may stand beside the policy's draws.

        It is then stored with the log-probs of its law, and noise is always fresh: replayed, it is no second draw.
        """
        return self.law == "lenient" or (self.law == "judged" and bool(self.sources))
