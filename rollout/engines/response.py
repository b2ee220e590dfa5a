"""A response that is being generated, and the checks of requests."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from specrl.rollout.drafting.budget import AcceptanceBucket, State
from specrl.rollout.drafting.draft import EMPTY, Draft
from specrl.rollout.types import Completion, FinishReason, Request, RolloutError, UnusableLogits
from specrl.rollout.verify import Accepted, cut


@dataclass(slots=True)
class Response:
    """One response that is being generated. An engine's KV holds everything but its last token."""

    request: Request
    number: int = 0
    """Of its request in the engine's call."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    behaviour: list[float] = field(default_factory=list)
    reused: list[bool] = field(default_factory=list)
    finish: FinishReason | None = None
    began: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0
    passes: int = 0
    drafting: bool = True
    ahead: bool = False
    """It belongs to the next batch."""
    guess: Draft = EMPTY
    """What its own drafter expects next, drafted or not; empty if it was not asked."""
    bucket: AcceptanceBucket = None
    """By which the acceptance of the last guess is estimated; None if there was no guess."""
    state: State = "start"
    """How much of that guess was accepted."""
    own: tuple[int, float] | None = None
    """See `Completion.own`."""

    @property
    def length(self) -> int:
        """Tokens of the prompt and of what was emitted."""
        return len(self.request.prompt) + len(self.tokens)

    @property
    def lead(self) -> int:
        """Passes that its drafts have saved."""
        return len(self.tokens) - self.passes

    @property
    def last(self) -> int:
        return self.tokens[-1] if self.tokens else self.request.prompt[-1]

    @property
    def remaining(self) -> int:
        """Tokens until the cap."""
        return self.request.max_new_tokens - len(self.tokens)

    def stops(self, tokens: Sequence[int], eos_ids: frozenset[int]) -> bool:
        """Whether one of the tokens ends the request."""
        return not (eos_ids.isdisjoint(tokens) and self.request.stop_ids.isdisjoint(tokens))

    def emit(self, accepted: Accepted, eos_ids: frozenset[int]) -> int:
        """Appends the tokens up to the first EOS or stop id, or the cap; returns their number."""
        tokens, logprobs, behaviour = accepted.tokens, accepted.logprobs, accepted.behaviour
        count = len(tokens)
        remaining = self.request.max_new_tokens - len(self.tokens)
        if count >= remaining or self.stops(tokens, eos_ids):
            count, self.finish = cut(tokens, eos_ids | self.request.stop_ids, remaining)
            tokens, logprobs, behaviour = tokens[:count], logprobs[:count], behaviour[:count]
        drafted = min(accepted.drafted, count)
        self.tokens += tokens
        self.logprobs += logprobs
        self.behaviour += behaviour
        self.reused += [True] * drafted + [False] * (count - drafted)
        self.passes += 1
        self.own = self.own or accepted.own
        if self.finish:
            self.seconds = time.perf_counter() - self.began
            if self.request.drafter and self.drafting:  # rows that draft from this one get its end too
                self.request.drafter.propose(tuple(self.tokens), 0)
        return count

    def completion(self, version: int) -> Completion:
        """The finished response, under the weights `version`."""
        assert self.finish is not None
        return Completion(
            self.tokens,
            self.logprobs,
            self.behaviour,
            self.reused,
            self.finish,
            version,
            self.passes,
            self.seconds,
            draft_version=self.request.draft_version,
            own=self.own,
        )


def check_request(request: Request, vocab: int, context: int, limit: str = "") -> None:
    """Raises RolloutError for a request that the engine cannot serve.

    Args: vocab: ids below it exist; context: most tokens of a prompt with its response; limit: why there are no more.
    """
    prompt, cap = request.prompt, request.max_new_tokens
    if not (isinstance(prompt, Sequence) and {*map(type, prompt)} <= {int}):  # a tensor, an array, floats, a text
        raise RolloutError(
            f"a prompt is no sequence of token ids: {prompt!r:.60}. Give Python integers, as prompt.tolist() does"
        )
    if not (type(request.key) is int and -(2**63) <= request.key < 2**63):
        raise RolloutError(f"key={request.key!r:.60} is no signed 64-bit integer, as rollout.keys.derive_key gives")
    if type(cap) is not int:
        raise RolloutError(f"max_new_tokens={cap!r:.60} is not a whole number")
    if not prompt:
        raise RolloutError("a prompt has no tokens; a rollout needs at least one")
    if not 0 <= min(prompt) <= max(prompt) < vocab:
        bad = next(t for t in prompt if not 0 <= t < vocab)
        raise RolloutError(f"a prompt holds the token id {bad}, outside the model's 0..{vocab - 1}")
    if not 0 <= request.position < len(prompt):
        raise RolloutError(
            f"position={request.position} of a request with a prompt of {len(prompt)} tokens: so many of them would be "
            f"the response, before which there is at least one. Use 0 to {len(prompt) - 1}"
        )
    if cap < 1:
        raise RolloutError(f"max_new_tokens={cap} leaves no room for a response; use at least 1")
    if len(prompt) >= context:
        raise RolloutError(
            f"a prompt of {len(prompt)} tokens leaves no room for a response in the model's context of {context}"
            f"{limit}; use a shorter prompt, of at most {context - 1} tokens"
        )
    if cap > context - len(prompt):
        raise RolloutError(
            f"a prompt of {len(prompt)} tokens plus max_new_tokens={cap} exceeds the model's context of {context}"
            f"{limit}. Use rollout.max_new_tokens={context - len(prompt)} or less"
        )


def refuse_unusable(usable: Iterable[bool], version: int) -> None:
    """Raises UnusableLogits when logits of the model, at weight version `version`, were NaN or infinite."""
    if not all(usable):
        raise UnusableLogits(
            f"the policy returned NaN or infinite logits (weight version {version}); "
            "check the learning rate and the last update"
        )
