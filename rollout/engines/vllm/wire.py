"""A keyed request on the wire: entries of vLLM's `SamplingParams.extra_args` that a trainer sends to its servers.

They are numbers, strings and lists of them, which every transport carries (Ray, MessagePack, `vllm_xargs` of the HTTP
servers). A lost or wrong draft, such as an id that the model does not have, costs time and changes no token. Malformed
entries are refused (`KeyedRequest.read`).
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import numpy as np

from specrl.rollout.drafting.suffix import PromptTexts, SuffixDrafter
from specrl.rollout.types import Request, RolloutError

KEY, PROMPT_TOKENS, TEXTS = "specrl_key", "specrl_prompt_tokens", "specrl_texts"
_GROUP, _OWN, PLAIN = "specrl_group", "specrl_own", "specrl_plain"
_NAMES = KEY, PROMPT_TOKENS, _GROUP, TEXTS, _OWN, PLAIN


MOST_TEXTS, MOST_BYTES = 64, 1 << 24
"""Of one request: texts, and bytes of all of them as packed (3 million tokens). The engine unpacks them in its process,
whose other requests wait."""
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
DRAFTED = "vllm:spec_decode_num_draft_tokens"
STEPS = "vllm:iteration_tokens_total"
"""Counters of vLLM; the last one has an entry for every step of the engine that samples."""


def acceptance_counts(counters: Mapping[str, int]) -> tuple[int, int, int]:
    """Engine steps, draft tokens and accepted draft tokens so far. Args: counters: of vLLM, by name."""
    return counters.get(STEPS, 0), counters.get(DRAFTED, 0), counters.get(ACCEPTED, 0)


def pack_text(text: Sequence[int]) -> str:
    """Token ids, each below 2^31, as a string: base64 of little-endian int32, shorter than a list of ids in JSON."""
    return b64encode(np.array(text, "<i4").tobytes()).decode()


def extra_args_of(request: Any) -> Mapping[str, Any]:
    """The `extra_args` of one of vLLM's requests; requests for pooling have no sampling params."""
    params = request.sampling_params
    return (params and params.extra_args) or {}


def keyed_args(request: Request) -> dict[str, Any]:
    """The `extra_args` by which the samplers of this package find the noise of a request."""
    return {KEY: request.key, PROMPT_TOKENS: len(request.prompt) - request.position}


def unpack_text(packed: str) -> np.ndarray:
    """The inverse of `pack_text`, int32 and read-only.

    Raises:
        ValueError, TypeError: this is no packed text.
    """
    return np.frombuffer(b64decode(packed, validate=True), "<i4")


@dataclass(frozen=True, slots=True)
class KeyedRequest:
    """The noise key of a request, and the texts that it may draft from."""

    key: int
    """Signed 64-bit noise key of the response."""
    prompt_tokens: int
    """Tokens of the prompt. The server takes what follows them as the response's beginning: a request that was cut off
    and sent again with its text so far continues with the same tokens."""
    group: str
    """Requests of one group draft from each other's texts and prompts."""
    texts: tuple[tuple[int, ...], ...] = ()
    """Earlier responses to the prompt, the newest first."""
    own: int = -1
    """Index in `texts` of the sample's own; -1 without one."""
    plain: bool = False
    """Decode without drafts: the baseline."""

    def extra_args(self) -> dict[str, Any]:
        """The request as vLLM's `extra_args`."""
        return {
            KEY: self.key,
            PROMPT_TOKENS: self.prompt_tokens,
            _GROUP: self.group,
            TEXTS: [pack_text(text) for text in self.texts],
            _OWN: self.own,
            PLAIN: int(self.plain),  # `vllm_xargs` carries no booleans
        }

    @classmethod
    def read(cls, extra_args: Mapping[str, Any] | None) -> KeyedRequest | None:
        """The inverse of `extra_args`; None for requests of others, which have no entry of that kind.

        Raises:
            RolloutError: an entry is missing, unknown, or has an invalid value.
        """
        entries = {name: value for name, value in (extra_args or {}).items() if str(name).startswith("specrl_")}
        if not entries:
            return None
        for name in entries.keys() - _NAMES:
            near = get_close_matches(str(name), _NAMES, 1, cutoff=0)[0]
            raise RolloutError(f"a request has an entry {name!r:.60}, which is none of {_NAMES}. Did you mean {near}?")
        if missing := [name for name in (KEY, PROMPT_TOKENS, _GROUP) if name not in entries]:
            raise RolloutError(f"a request with {', '.join(entries)} lacks {', '.join(missing)}. {_TRY}")
        texts = entries.get(TEXTS, ())
        if not isinstance(texts, list | tuple):
            raise RolloutError(f"{TEXTS}={texts!r:.60} is no list of packed texts. {_TRY}")
        size = sum(len(text) for text in texts[:MOST_TEXTS] if isinstance(text, str | bytes))
        if len(texts) > MOST_TEXTS or size > MOST_BYTES:
            raise RolloutError(
                f"{TEXTS} has {len(texts)} texts, the first {min(len(texts), MOST_TEXTS)} of {size} bytes. A request "
                f"may bring {MOST_TEXTS} texts of {MOST_BYTES} bytes together; send the newest ones"
            )
        request = cls(
            key=entries[KEY],
            prompt_tokens=entries[PROMPT_TOKENS],
            group=entries[_GROUP],
            texts=tuple(map(_read_text, texts)),
            own=entries.get(_OWN, -1),
            plain=entries.get(PLAIN, 0) == 1,
        )
        valid = {
            KEY: ("signed 64-bit integer", _within(request.key, -(2**63), 2**63)),
            PROMPT_TOKENS: ("number of tokens", _within(request.prompt_tokens, 1, 2**31)),
            _GROUP: ("text", isinstance(request.group, str)),
            _OWN: (f"index of {len(request.texts)} texts, nor -1", _within(request.own, -1, len(request.texts))),
            PLAIN: ("0 or 1", _within(entries.get(PLAIN, 0), 0, 2)),
        }
        for name, (kind, is_valid) in valid.items():
            if not is_valid:
                raise RolloutError(f"{name}={entries[name]!r:.60} is no {kind}. {_TRY}")
        return request

    def drafter(self, groups: MutableMapping[str, PromptTexts], prompt: Sequence[int]) -> SuffixDrafter:
        """A drafter that shares its texts with those of the same group.

        Args: groups: the texts of each group; prompt: token ids.
        """
        texts = groups.get(self.group)
        if texts is None:
            texts = groups[self.group] = PromptTexts(self.texts, prompt=prompt)
        texts.add_prompt(prompt)
        return SuffixDrafter(texts, self.texts[self.own] if self.own >= 0 else None)


_TRY = "Try KeyedRequest(...).extra_args() of rollout.engines.vllm.wire, which writes all entries"


def _within(value: Any, low: int, end: int) -> bool:
    return type(value) is int and low <= value < end


def _read_text(packed: Any) -> tuple[int, ...]:
    try:
        return tuple(unpack_text(packed).tolist())
    except (ValueError, TypeError) as error:
        raise RolloutError(f"{TEXTS} has {packed!r:.60}, which is no packed text: {error}. {_TRY}") from error
