"""Configuration of the rollout stage. No heavy imports: `help=true` must answer in about a second."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from specrl.rollout.sections import (
    SOURCES,
    BudgetConfig,
    CacheConfig,
    JudgedConfig,
    LocalConfig,
    RoutedConfig,
    VLLMConfig,
    doc,
)


@dataclass
class RolloutConfig:
    engine: Literal["transformers", "vllm"] = doc("transformers", "inference engine")
    acceptance: Literal["exact", "off", "lenient", "judged", "routed"] = doc(
        "exact",
        "exact: bit-identical to plain decoding; off: plain decoding; the rest is lossy: lenient (SPEC-RL as "
        "published), judged (drafted tokens also stand where a judge allows), routed (steps of rollout.drafter stand "
        "where a router allows)",
        resume="acceptance",
    )
    ahead: Literal["auto", "off"] = doc(
        "auto",
        "idle rollout workers begin the next batch while this one is scored and trained on; what they have is drafted "
        "first (see docs/ahead.md). auto: where workers have CPUs or GPUs of their own, under acceptance=exact",
        resume="free",
    )
    replay: float = doc(
        0.0,
        "share of slots that keep their noise key from their last visit, 0 to 1; above 0 see the reuse gap in "
        "docs/guarantees.md",
        high=1,
    )
    lenience: float = doc(
        1.0, "factor l of the published acceptance min(1, l*p_new/p_old); only for acceptance=lenient"
    )
    group_size: int = doc(8, "responses per prompt", low=1)
    temperature: float = doc(1.0, "sampling temperature; 0 is greedy")
    top_p: float = doc(1.0, "nucleus sampling mass; 1 is off", high=1)
    top_k: int = doc(0, "sample from the k most likely tokens; 0 is off")
    max_new_tokens: int = doc(256, "response cap in tokens, EOS included", low=1)
    sources: list[str] = doc(
        list(SOURCES),
        "texts to draft from: the slot's old one until it is left, and after that; the prompt's old ones; the prompt; "
        "what its rows emit now; what followed the last tokens in the texts of all prompts; what the last pass drew "
        "behind a mismatch",
        resume="drafts",
    )
    drafter: str = doc(
        "",
        "drafts for rows that left their old texts: a directory with a draft model or a head on the policy's hidden "
        "states; head for a new one that co-training makes. With engine=vllm a directory, which drafts for all rows "
        "(v2)",
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
        resume="free",
    )
    cache: CacheConfig = doc(CacheConfig, "stored responses", resume="free")
    budget: BudgetConfig = doc(BudgetConfig, "how much is drafted", resume="free")
    judged: JudgedConfig = doc(JudgedConfig, "acceptance=judged: who allows tokens")
    routed: RoutedConfig = doc(RoutedConfig, "acceptance=routed: what a step is, and who writes it")
    local: LocalConfig = doc(LocalConfig, "the engine transformers", resume="free")
    vllm: VLLMConfig = doc(VLLMConfig, "the engine vllm")

    @property
    def lossy(self) -> bool:
        """True where responses follow another law than the policy's, which the loss must correct."""
        return self.acceptance in ("lenient", "judged", "routed")

    @property
    def reuses(self) -> bool:
        """True where responses are kept as drafts of the next visit."""
        return self.acceptance in ("exact", "lenient") or self.old_text_stands

    @property
    def old_text_stands(self) -> bool:
        """True where old text may stand beside the policy's draws.

        It is then stored with the log-probs of its law, and noise is always fresh: replayed, it is no second draw.
        """
        return self.acceptance == "lenient" or (self.acceptance == "judged" and bool(self.sources))

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
        if self.old_text_stands and self.replay:
            yield (
                f"rollout.replay={self.replay} cannot be combined with rollout.acceptance={self.acceptance}, which "
                "draws with fresh noise. Try rollout.replay=0, or rollout.acceptance=exact."
            )
        if self.engine == "vllm":
            yield from self._vllm_problems()
        yield from self._lenient_problems()

    def _lenient_problems(self) -> Iterator[str]:
        lenient = self.acceptance == "lenient"
        if self.lenience == 0:
            yield "rollout.lenience=0 accepts nothing. Try rollout.lenience=1, or rollout.acceptance=off."
        elif self.lenience != 1 and not lenient:
            yield (
                f"rollout.lenience={self.lenience} has no effect with rollout.acceptance={self.acceptance}. "
                "Try rollout.lenience=1, or rollout.acceptance=lenient."
            )
        if lenient and self.temperature == 0:
            yield (
                "rollout.acceptance=lenient compares probabilities, and rollout.temperature=0 has none. "
                "Try rollout.temperature=1, or rollout.acceptance=exact."
            )
        if lenient and self.drafter:
            yield (
                f"rollout.drafter={self.drafter} cannot be combined with rollout.acceptance=lenient, which drafts "
                "stored text only. Leave it out, or take rollout.acceptance=exact."
            )

    def _vllm_problems(self) -> Iterator[str]:
        if self.acceptance == "routed":
            yield (
                "rollout.acceptance=routed has the policy go on with the KV of a row behind each step of "
                "rollout.drafter, and rollout.engine=vllm frees a row's KV with its request. "
                " Try rollout.engine=transformers."
            )
        elif self.acceptance == "judged" and self.judged.by == "kl":
            yield (
                "rollout.judged.by=kl compares the laws of rollout.drafter and the policy, and rollout.engine=vllm has "
                "stored text judged only. Try rollout.judged.by=judge, or rollout.engine=transformers."
            )
        elif self.lossy and self.on_device:
            yield (
                f"rollout.acceptance={self.acceptance} decides on the host what stands of a draft, and "
                f"{self.on_device} leaves drafts to the device. Try rollout.acceptance=exact."
            )
        if not self.drafter:
            return
        given, vllm = f"rollout.drafter={self.drafter}", self.vllm
        if self.drafter == "head":
            yield (
                f"{given} is made beside the trainer's model, and rollout.engine=vllm loads its drafter from disk. Try "
                "rollout.drafter=DIR with a head that `python -m specrl.drafter kind=head out=DIR` makes."
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
