"""Configuration of the rollout stage. No heavy imports: `help=true` must answer in about a second."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from math import inf
from re import fullmatch
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
        make = {"default_factory": default.copy} if isinstance(default, list) else {"default": default}
    said = {"resume": resume, "only": only}
    limits = {"limits": (low, high)}
    return field(**make, metadata={"help": help, **limits, **{key: word for key, word in said.items() if word}})


SOURCES = ("prefix", "position", "earlier", "group", "contexts")
"""Where drafts come from: the slot's old text until the response leaves it, and after that, at the same positions; the
prompt's stored texts; what the rows of the prompt have emitted in this rollout; the texts of all prompts."""


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


@dataclass
class RolloutConfig:
    engine: Literal["transformers", "vllm"] = doc("transformers", "inference engine")
    law: Literal["exact", "off", "lenient", "judged", "routed"] = doc(
        "exact",
        "exact: bit-identical to plain decoding; off: plain decoding; the rest is lossy: lenient (SPEC-RL as "
        "published), judged (drafted tokens also stand where a judge allows), routed (steps of rollout.drafter stand "
        "where a router allows)",
        resume="law",
    )
    ahead: Literal["auto", "off"] = doc(
        "auto",
        "idle rollout workers begin the next batch while this one is scored and trained on; what they have is drafted "
        "first (see docs/ahead.md). auto: where workers have CPUs or GPUs of their own, under law=exact",
        resume="free",
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
    sources: list[str] = doc(
        list(SOURCES),
        "texts to draft from: the slot's old one until it is left, and after that; the prompt's old ones; what its "
        "rows emit now; what followed the last tokens in the texts of all prompts",
        resume="drafts",
    )
    drafter: str = doc(
        "",
        "draft model for rows that left their old texts: a directory, or layers=N for the policy's own first layers; "
        "with engine=vllm a directory, which drafts for all rows (v2)",
        resume="drafts",
    )
    rows_per_batch: int = doc(256, "most rows at a time; fewer where their KV does not fit", low=1, resume="free")
    tokens_per_pass: int = doc(
        4096, "most tokens in one forward pass; bounds verification memory", low=1, resume="free"
    )
    logits_mb: int = doc(
        256,
        "memory for logits and noise, in MB; larger passes are scored in chunks. GPUs take more where it is free",
        low=1,
        resume="free",
    )
    tie_margin: float = doc(
        1e-4, "draws whose two best scores are closer than this are decided by a canonical pass; fp32 only, 0 is off"
    )
    measure_every: int = doc(
        10,
        "every N steps also roll out plainly with the same keys, to measure spec/speedup and compare tokens; 0 never",
        resume="keys",
    )
    cache: CacheConfig = doc(CacheConfig, "stored responses", resume="free")
    budget: BudgetConfig = doc(BudgetConfig, "how much is drafted", resume="free")
    judged: JudgedConfig = doc(JudgedConfig, "law=judged: who allows tokens")
    routed: RoutedConfig = doc(RoutedConfig, "law=routed: what a step is, and who writes it")
    local: LocalConfig = doc(LocalConfig, "the engine transformers", resume="free")
    vllm: VLLMConfig = doc(VLLMConfig, "the engine vllm")

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

    @property
    def on_device(self) -> str:
        """engine=vllm: the option by which drafts are made on the device; empty: by the host."""
        return f"rollout.drafter={self.drafter}" if self.drafter else self.vllm.on_device

    def problems(self) -> Iterator[str]:
        """Sentences about options that contradict each other or are of no use."""
        if self.top_p == 0:
            yield "rollout.top_p=0 keeps no token. Try rollout.top_p=1, which keeps all."
        for name in self.sources:
            if name not in SOURCES:
                near = get_close_matches(name, SOURCES, 1, cutoff=0)[0]
                yield f"rollout.sources has {name!r}, which is none of {', '.join(SOURCES)}. Did you mean {near}?"
        if self.replay_gap and self.replay != "auto":
            yield (
                f"rollout.replay_gap={self.replay_gap} has no effect with rollout.replay={self.replay}. "
                "Try rollout.replay=auto, or leave it out."
            )
        if self.replay == "auto" and self.replay_gap and not self.measure_every:
            yield (
                "rollout.replay=auto chooses by what control steps measure, and rollout.measure_every=0 makes none. "
                f"Try rollout.measure_every={RolloutConfig.measure_every}."
            )
        if self.old_text_stands and self.replay:
            yield (
                f"rollout.replay={self.replay} cannot be combined with rollout.law={self.law}, which draws with fresh "
                "noise. Try rollout.replay=0, or rollout.law=exact."
            )
        if self.engine == "vllm":
            yield from self._vllm_problems()
        yield from self._lenient_problems()
        yield from self._draft_problems()

    def _lenient_problems(self) -> Iterator[str]:
        lenient = self.law == "lenient"
        if self.lenience == 0:
            yield "rollout.lenience=0 accepts nothing. Try rollout.lenience=1, or rollout.law=off."
        elif self.lenience != 1 and not lenient:
            yield (
                f"rollout.lenience={self.lenience} has no effect with rollout.law={self.law}. "
                "Try rollout.lenience=1, or rollout.law=lenient."
            )
        if lenient and self.temperature == 0:
            yield (
                "rollout.law=lenient compares probabilities, and rollout.temperature=0 has none. "
                "Try rollout.temperature=1, or rollout.law=exact."
            )
        if lenient and self.drafter:
            yield (
                f"rollout.drafter={self.drafter} cannot be combined with rollout.law=lenient, which drafts stored text "
                "only. Leave it out, or take rollout.law=exact."
            )

    def _draft_problems(self) -> Iterator[str]:
        if self.drafter.startswith("layers") and not fullmatch("layers=[1-9][0-9]*", self.drafter):
            yield f"rollout.drafter={self.drafter} names no number of layers. Try rollout.drafter=layers=2."

    def _vllm_problems(self) -> Iterator[str]:
        if self.law == "routed":
            yield (
                "rollout.law=routed has the policy go on with the KV of a row behind each step of rollout.drafter, and "
                "rollout.engine=vllm frees a row's KV with its request. Try rollout.engine=transformers."
            )
        elif self.law == "judged" and self.judged.by == "kl":
            yield (
                "rollout.judged.by=kl compares the laws of rollout.drafter and the policy, and rollout.engine=vllm has "
                "stored text judged only. Try rollout.judged.by=judge, or rollout.engine=transformers."
            )
        elif self.lossy and self.on_device:
            yield (
                f"rollout.law={self.law} decides on the host what stands of a draft, and {self.on_device} leaves "
                "drafts to the device. Try rollout.law=exact."
            )
        if not self.drafter:
            return
        given, vllm = f"rollout.drafter={self.drafter}", self.vllm
        if self.drafter.startswith("layers"):
            yield (
                f"{given} drafts with layers of the trainer's own model, and rollout.engine=vllm has a copy that runs "
                "whole. Try rollout.drafter=DIR with a model that `python -m specrl.drafter out=DIR` makes."
            )
        if vllm.speculator != "texts":
            yield (
                f"{given} and rollout.vllm.speculator={vllm.speculator} would both propose. "
                "Try rollout.vllm.speculator=texts, which leaves it to the drafter."
            )
        for option, other in {"runner": "v1", "scheduling": "sync"}.items():
            if getattr(vllm, option) == other:
                yield (
                    f"rollout.vllm.{option}={other} lets the host draft, and {given} drafts on the device with "
                    f"rollout.engine=vllm. Try rollout.vllm.{option}=auto."
                )
