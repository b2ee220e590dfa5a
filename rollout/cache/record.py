"""Packs trajectories into the bytes that the cache holds and its files contain, and checks those of a file."""

from __future__ import annotations

import struct
from collections.abc import Collection
from math import isfinite, isnan, nan

from specrl.rollout.types import Trajectory

HEAD = struct.Struct("<qqqdB")
"""key, version, step, reward (NaN if unknown) and flags. int32 tokens follow, then float32 log-probs."""
STOP, LOGPROBS = 1, 2
"""Flags: finish is "stop", and log-probs are present."""
LOGPROB_SLACK = 1e-4  # a float32 log-softmax may exceed zero by a rounding error

Entry = tuple[str, int, bytes]
"""(example id, sample index, packed trajectory)."""


def complaint(trajectory: Trajectory, vocab_size: int, eos_ids: Collection[int] = ()) -> str | None:
    """The reason why a trajectory of a file cannot be used with this vocabulary, or None if it can."""
    tokens, finish = trajectory.tokens, trajectory.finish
    if len(tokens) == 0:
        return "it has no tokens"
    if not 0 <= min(tokens) <= max(tokens) < vocab_size:
        bad = next(t for t in tokens if not 0 <= t < vocab_size)
        return f"token id {bad} is outside 0..{vocab_size - 1}"
    if eos_ids and (finish == "stop") != (tokens[-1] in eos_ids):
        return f"finish is {finish!r} but the last token is {tokens[-1]}, with EOS ids {sorted(eos_ids)}"
    wrong = [x for x in trajectory.logprobs or () if not (isfinite(x) and x <= LOGPROB_SLACK)]
    return f"log-prob {wrong[0]} is not a finite number <= 0" if wrong else None


def pack(trajectory: Trajectory) -> bytes:
    """Packs 33 + 4 bytes a token + 4 bytes a log-prob, little-endian. Raises struct.error on values of other types."""
    tokens, logprobs, reward = trajectory.tokens, trajectory.logprobs, trajectory.reward
    flags = (STOP if trajectory.finish == "stop" else 0) | (0 if logprobs is None else LOGPROBS)
    head = HEAD.pack(trajectory.key, trajectory.version, trajectory.step, nan if reward is None else reward, flags)
    tail = b"" if logprobs is None else struct.pack(f"<{len(logprobs)}f", *logprobs)
    return head + struct.pack(f"<{len(tokens)}i", *tokens) + tail


def unpack(blob: bytes) -> Trajectory:
    """The inverse of `pack`. Log-probs have been rounded to float32."""
    key, version, step, reward, flags = HEAD.unpack_from(blob)
    words = (len(blob) - HEAD.size) // 4
    n = words // 2 if flags & LOGPROBS else words
    return Trajectory(
        tokens=struct.unpack_from(f"<{n}i", blob, HEAD.size),
        key=key,
        finish="stop" if flags & STOP else "length",
        version=version,
        step=step,
        reward=None if isnan(reward) else reward,
        logprobs=struct.unpack_from(f"<{n}f", blob, HEAD.size + 4 * n) if flags & LOGPROBS else None,
    )


def origin(blob: bytes) -> tuple[int, int]:
    """(step, version) of a packed trajectory, without unpacking it."""
    _, version, step, _, _ = HEAD.unpack_from(blob)
    return step, version


def key_of(blob: bytes) -> int:
    """The noise key of a packed trajectory, without unpacking it."""
    return HEAD.unpack_from(blob)[0]
