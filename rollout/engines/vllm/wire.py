"""A keyed request on the wire: what rides in vLLM's `SamplingParams.extra_args` from a trainer to its servers.

Numbers, strings and lists of them, which every transport carries (Ray, MessagePack, `vllm_xargs` of the HTTP servers).
Drafts are guesses here as everywhere: a lost or wrong one costs time and changes no token.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollout.drafting.suffix import PromptTexts, SuffixDrafter

KEY, PROMPT_TOKENS, TEXTS = "specrl_key", "specrl_prompt_tokens", "specrl_texts"


def pack_text(text: Sequence[int]) -> str:
    """Token ids, each below 2^31, as a string: base64 of little-endian int32, shorter than a list of ids in JSON."""
    return b64encode(np.array(text, "<i4").tobytes()).decode()


def unpack_text(packed: str) -> np.ndarray:
    """What `pack_text` wrote, int32 and read-only."""
    return np.frombuffer(b64decode(packed), "<i4")


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
            TEXTS: [pack_text(text) for text in self.texts],
            "specrl_own": self.own,
        }

    @classmethod
    def read(cls, extra_args: Mapping[str, Any] | None) -> KeyedRequest | None:
        """What `extra_args` wrote; None for the requests of others."""
        if not extra_args or KEY not in extra_args:
            return None
        return cls(
            extra_args[KEY],
            extra_args[PROMPT_TOKENS],
            extra_args["specrl_group"],
            tuple(tuple(unpack_text(text).tolist()) for text in extra_args[TEXTS]),
            extra_args["specrl_own"],
        )

    def drafter(self, groups: MutableMapping[str, PromptTexts], prompt: Sequence[int]) -> SuffixDrafter:
        """A drafter that shares its texts with those of the same group, whose prompt is theirs.

        Args: groups: holds the texts of each; prompt: token ids.
        """
        texts = groups.get(self.group)
        if texts is None:
            texts = groups[self.group] = PromptTexts(self.texts, prompt=prompt)
        return SuffixDrafter(texts, self.texts[self.own] if self.own >= 0 else None)
