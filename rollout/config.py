"""The options `rollout.*`. This module imports nothing heavy: `help=true` must answer in about a second."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from specrl.rollout.sections import (
    SOURCES,
    CacheConfig,
    RoutedConfig,
    VLLMConfig,
    doc,
    unknown_name,
)


@dataclass
class RolloutConfig:
    engine: Literal["transformers", "vllm"] = doc("transformers", "inference engine")
    acceptance: Literal["exact", "off", "lenient", "judged", "routed"] = doc(
        "exact",
        "which draft tokens are accepted. exact: those that plain decoding would sample; off: no drafts. Lossy rules: "
        "lenient (SPEC-RL as published), judged (also tokens that a judge allows), routed (reasoning steps of "
        "rollout.drafter that a router allows)",
    )
    ahead: Literal["auto", "off"] = doc(
        "auto",
        "auto: idle rollout workers, with CPUs or GPUs of their own, or passes with room begin the next batch, and the "
        "new weights verify its text (docs/ahead.md); needs acceptance=exact",
    )
    fill: int | Literal["auto"] = doc(
        "auto",
        "rows of the next batch join passes of fewer tokens than this, the number up to which a pass takes no longer. "
        "auto: timed on GPUs, 0 on CPUs and where rollout.engine=vllm drafts on the device; 0 is off (docs/ahead.md)",
    )
    replay: float = doc(
        0.0,
        "share of samples that keep the noise key of their previous visit: more reuse, and a reuse gap "
        "(docs/guarantees.md)",
        high=1,
    )
    lenience: float = doc(1.0, "l of acceptance=lenient, which accepts with probability min(1, l*p_new/p_old)")
    group_size: int = doc(8, "responses per prompt", low=1)
    temperature: float = doc(1.0, "sampling temperature; 0 is greedy")
    top_p: float = doc(1.0, "probability mass of nucleus sampling; 1 is off", high=1)
    top_k: int = doc(0, "sample from the k most likely tokens; 0 is off")
    max_new_tokens: int = doc(256, "maximum response length in tokens, EOS included", low=1)
    sources: list[str] = doc(
        list(SOURCES),
        "texts that drafts are copied from. prefix: the sample's previous response up to the first mismatch; position: "
        "that response after it; earlier: the prompt's other stored responses; prompt: the prompt; group: its "
        "responses in this rollout",
    )
    draft_tokens: int = doc(
        0,
        "draft tokens per row and pass; rows of the next batch share rollout.fill. 0 chooses by measured cost and "
        "acceptance, with engine=vllm up to 32, and 8 of a draft model; fewer if memory is short",
    )
    trained: str = doc("", "directory of the judge of acceptance=judged, or of the router of routed.by=arbitrage")
    drafter: str = doc(
        "",
        "draft model for rows that left their previous responses: a directory with a model or a head; head: a new "
        "head, for co-training. engine=vllm: a directory (runner v2)",
    )
    rows_per_batch: int = doc(256, "most rows decoded at once; fewer if memory is short", low=1)
    tokens_per_pass: int = doc(4096, "maximum tokens of a forward pass, which limits its memory", low=1)
    kv_cache_mb: int = doc(
        0,
        "memory of the KV cache in MB; 0: what is free; with engine=vllm memory_utilization on a GPU, 512 on a CPU",
    )
    measure_every: int = doc(
        10,
        "every N rollouts also decode without drafts under the same keys, to compare tokens and measure spec/speedup; "
        "0 is never",
    )
    twin: str = doc(
        "",
        "run with the same seed and cache.log=true, or its directory, whose texts under the same keys are the first "
        "drafts (docs/sweeps.md)",
    )
    cache: CacheConfig = doc(CacheConfig, "stored responses")
    routed: RoutedConfig = doc(RoutedConfig, "reasoning steps that acceptance=routed accepts")
    vllm: VLLMConfig = doc(VLLMConfig, "options of engine=vllm")

    @property
    def lossy(self) -> bool:
        """Whether responses follow another distribution than the policy's, which the loss must correct."""
        return self.acceptance in ("lenient", "judged", "routed")

    @property
    def reuses(self) -> bool:
        """Whether responses are stored as drafts for the next visit."""
        return self.acceptance in ("exact", "lenient") or self.accepts_old_text

    @property
    def uses_trained(self) -> bool:
        """Whether what was `trained` decides over drafts."""
        return self.acceptance == "judged" or (self.acceptance == "routed" and self.routed.by == "arbitrage")

    @property
    def accepts_old_text(self) -> bool:
        """Whether old tokens that differ from the policy's own samples may be accepted.

        They are then stored with their log-probs, and noise is always fresh: replayed noise is no second sample.
        """
        return self.acceptance == "lenient" or (self.acceptance == "judged" and bool(self.sources))

    @property
    def planned(self) -> str:
        """The option for which vLLM's scheduler has to carry the host's drafts to its workers; empty if none does."""
        if self.vllm.on_device:
            return ""
        if self.drafter and self.acceptance != "routed":  # whose draft model has an engine of its own
            return f"rollout.drafter={self.drafter}"
        parallel = self.vllm.tensor_parallel
        return f"rollout.vllm.tensor_parallel={parallel}" if parallel > 1 else ""

    def problems(self) -> Iterator[str]:
        """Messages for options that contradict each other, with `<key>` for `key=value`."""
        if self.top_p == 0:
            yield "<rollout.top_p> keeps no token. Try rollout.top_p=1, which keeps all."
        for name in self.sources:
            if name not in SOURCES:
                yield unknown_name("rollout.sources", name, SOURCES)
        if self.accepts_old_text and self.replay:
            yield "<rollout.replay> repeats noise, and <rollout.acceptance> needs fresh noise. Try rollout.replay=0."
        lenient = self.acceptance == "lenient"
        if self.lenience == 0:
            yield "<rollout.lenience> accepts nothing. Try rollout.lenience=1, or rollout.acceptance=off."
        elif self.lenience != 1 and not lenient:
            yield "<rollout.lenience> has no effect with <rollout.acceptance>. Try rollout.lenience=1."
        if lenient and self.temperature == 0:
            yield "<rollout.acceptance> needs sampling, not <rollout.temperature>. Try rollout.temperature=1."
        if lenient and self.drafter:
            yield (
                "<rollout.acceptance> drafts from stored responses only, not from <rollout.drafter>. Leave it out, or "
                "try rollout.acceptance=exact."
            )
        if self.twin and self.acceptance != "exact":
            yield "<rollout.twin> gives drafts to exact acceptance, not to <rollout.acceptance>. Leave it out."
        if self.fill not in ("auto", 0):
            if self.acceptance != "exact":
                yield "<rollout.fill> rolls out ahead, which <rollout.acceptance> does not. Leave it out."
            elif self.ahead == "off":
                yield "<rollout.fill> has no effect with <rollout.ahead>. Leave it out."
            elif self.engine == "vllm" and self.vllm.on_device:
                yield f"<rollout.fill> needs drafts from the host, not from {self.vllm.on_device}. Leave it out."
        if self.cache.log and self.lossy:
            yield "<rollout.cache.log> keeps what keys decide, not what <rollout.acceptance> accepts. Leave it out."
        if self.engine == "vllm":
            yield from self._vllm_problems()
        if self.vllm.on_device and self.vllm.runner == "v1":
            drafts = f"<rollout.vllm.runner> drafts on the host, and {self.vllm.on_device} drafts on the device"
            yield f"{drafts}. Try rollout.vllm.runner=auto."

    def _vllm_problems(self) -> Iterator[str]:
        if self.draft_tokens > 127:
            yield "<rollout.draft_tokens> is more than a step of vLLM verifies for a row. Try rollout.draft_tokens=127."
        if self.lossy and (elsewhere := self.vllm.on_device or self.planned):
            conflict = f"<rollout.acceptance> accepts drafts in one process, and {elsewhere} in vLLM's workers"
            stored_only = self.acceptance == "judged" and elsewhere == f"rollout.drafter={self.drafter}"
            yield f"{conflict}. Try {'rollout.drafter= or ' * stored_only}rollout.acceptance=exact."
        elif self.lossy and self.vllm.runner == "v2":
            yield (
                "<rollout.acceptance> accepts drafts in one process, and <rollout.vllm.runner> in vLLM's workers. Try "
                "rollout.vllm.runner=auto."
            )
        if self.planned and self.vllm.runner == "v1":
            yield f"<rollout.vllm.runner> cannot serve {self.planned}. Try rollout.vllm.runner=auto."
        if self.drafter == "head":
            yield (
                "<rollout.drafter> is a head in the trainer's model, and <rollout.engine> loads a drafter from disk. "
                "Try rollout.drafter=DIR with a head that `python -m specrl.drafter kind=head out=DIR` makes."
            )
        if self.drafter and self.vllm.speculator not in ("texts", "device"):
            yield "<rollout.drafter> and <rollout.vllm.speculator> would both draft. Try rollout.vllm.speculator=texts."
