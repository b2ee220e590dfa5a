"""Packs trajectories into the bytes that the cache holds and that a snapshot's digest covers, and checks them."""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable
from hashlib import blake2b
from math import isfinite, isnan, nan

from specrl.rollout.types import Trajectory

HEAD = struct.Struct("<qqqdB")
"""key, version, step, reward (NaN if unknown) and flags. int32 tokens follow, then float32 log-probs."""
STOP, LOGPROBS = 1, 2
"""Flags: finish is "stop", and log-probs are present."""
FINISH = {"length": 0, "stop": STOP}
LOGPROB_SLACK = 1e-4  # a float32 log-softmax may exceed zero by a rounding error

Entry = tuple[str, int, bytes]
"""(example id, sample index, packed trajectory)."""


def complaint(sample_index: int, trajectory: Trajectory, vocab_size: int, eos_ids: Collection[int] = ()) -> str | None:
    """The reason why a trajectory cannot be stored, as part of a message, or None if it can."""
    tokens, logprobs = trajectory.tokens, trajectory.logprobs
    if sample_index < 0:
        return f"sample_index {sample_index} is negative"
    if len(tokens) == 0:
        return "it has no tokens"
    if not 0 <= min(tokens) <= max(tokens) < vocab_size:
        bad = next(t for t in tokens if not 0 <= t < vocab_size)
        return f"token id {bad} is outside 0..{vocab_size - 1}"
    if trajectory.finish not in ("stop", "length"):
        return f"finish is {trajectory.finish!r}, neither 'stop' nor 'length'"
    if eos_ids and (trajectory.finish == "stop") != (tokens[-1] in eos_ids):
        return f"finish is {trajectory.finish!r} but the last token is {tokens[-1]}, with EOS ids {sorted(eos_ids)}"
    if trajectory.version < 0 or trajectory.step < 0:
        return f"version {trajectory.version} or step {trajectory.step} is negative"
    if trajectory.reward is not None and not isfinite(trajectory.reward):
        return f"reward {trajectory.reward} is not finite (None means a failed reward)"
    if logprobs is None:
        return None
    if len(logprobs) != len(tokens):
        return f"it has {len(tokens)} tokens but {len(logprobs)} log-probs"
    wrong = [x for x in logprobs if not (isfinite(x) and x <= LOGPROB_SLACK)]
    return f"log-prob {wrong[0]} is not a finite number <= 0" if wrong else None


def pack(trajectory: Trajectory) -> bytes:
    """Packs 33 + 4 bytes a token + 4 bytes a log-prob, little-endian. Raises struct.error on values of other types."""
    tokens, logprobs, reward = trajectory.tokens, trajectory.logprobs, trajectory.reward
    flags = FINISH[trajectory.finish] | (0 if logprobs is None else LOGPROBS)
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


def digest_of(entries: Iterable[Entry]) -> str:
    """The 16-byte BLAKE2b digest, in hex, of all entries in order: sample indices, lengths, ids and packed bytes."""
    digest = blake2b(digest_size=16)
    for example_id, sample_index, blob in entries:
        name = example_id.encode()
        digest.update(struct.pack("<qqq", sample_index, len(name), len(blob)) + name + blob)
    return digest.hexdigest()
