"""A keyed request on the wire: what rides in vLLM's `SamplingParams.extra_args` from a trainer to its servers.

Flat numbers, texts and lists of them, which every transport carries (Ray, MessagePack, `vllm_xargs` of the HTTP
servers). Drafts are guesses here as everywhere: a lost or wrong one costs time and changes no token.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from rollout.drafting.suffix import PromptTexts, SuffixDrafter

KEY, PROMPT_TOKENS, TEXTS = "specrl_key", "specrl_prompt_tokens", "specrl_texts"


@dataclass(frozen=True, slots=True)
class KeyedRequest:
    """How a request is drawn, and what it may draft from."""

    key: int
    """Signed 64-bit noise key of the response."""
    prompt_tokens: int
    """Tokens of the prompt. What the server gets beyond them is the response's beginning: a request that was cut off
    and sent again with its text so far draws on as if nothing had happened."""
    group: str
    """Requests of one group are drawn from one prompt, and draft from each other's texts."""
    texts: tuple[tuple[int, ...], ...] = ()
    """Earlier responses to the prompt, the newest first."""
    own: int = -1
    """Index in `texts` of the slot's own; -1 without one."""

    def extra_args(self) -> dict[str, Any]:
        """The request as vLLM's `extra_args`."""
        return {
            KEY: self.key,
            PROMPT_TOKENS: self.prompt_tokens,
            "specrl_group": self.group,
            "specrl_tokens": [token for text in self.texts for token in text],
            "specrl_lengths": [len(text) for text in self.texts],
            "specrl_own": self.own,
        }

    @classmethod
    def read(cls, extra_args: Mapping[str, Any] | None) -> KeyedRequest | None:
        """What `extra_args` wrote; None for the requests of others."""
        if not extra_args or KEY not in extra_args:
            return None
        tokens, ends = extra_args["specrl_tokens"], accumulate(extra_args["specrl_lengths"], initial=0)
        return cls(
            extra_args[KEY],
            extra_args[PROMPT_TOKENS],
            extra_args["specrl_group"],
            tuple(tuple(tokens[first:end]) for first, end in pairwise(ends)),
            extra_args["specrl_own"],
        )

    def drafter(self, groups: MutableMapping[str, PromptTexts]) -> SuffixDrafter:
        """A drafter that shares its texts with those of the same group; `groups` holds the texts of each."""
        texts = groups.get(self.group)
        if texts is None:
            texts = groups[self.group] = PromptTexts(self.texts)
        return SuffixDrafter(texts, self.texts[self.own] if self.own >= 0 else None)
