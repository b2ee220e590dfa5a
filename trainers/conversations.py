"""Conversations of several turns: what their keys need, how they go on with a tool's answers, and as one response."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from specrl.rollout.keys import occurrences, turn_id
from specrl.rollout.reduction import Metric
from specrl.rollout.types import Completion, RolloutError, Row

Gather = Callable[[list], list]
"""Turns a list of this process into that of all processes, in the order of the processes; collective."""


class Answer(NamedTuple):
    """What follows the calls of a response."""

    messages: list[dict[str, Any]]
    """The result of each call."""
    tokens: list[int]
    """The same by the chat template, up to where the next response begins."""


class Tools(Protocol):
    """The tools of a run, and the chat template around them."""

    def message(self, prompt: Sequence[int], response: Sequence[int]) -> dict[str, Any]:
        """The response to a prompt as a chat message; its `tool_calls` are the calls."""

    def answer(self, calls: Sequence[list[dict[str, Any]]]) -> list[Answer]:
        """Makes the calls of each response. Whatever a tool does, it has an answer."""

    def take_metrics(self, conversations: int) -> dict[str, Metric]:
        """The metrics of the calls since the last time, in this many conversations."""


@dataclass
class Conversation:
    """One sample of a prompt: its responses, and the tool results or user messages between them."""

    example_id: str
    """Of the first prompt: the data's, or a hash of its token ids."""
    sample_index: int
    """Of all rows of the batch with this first prompt, in all processes."""
    visit: int
    """How often the prompt was rolled out before."""
    prompt_tokens: int
    """Of the first prompt: a trainer's cap counts what follows it."""
    tokens: list[int]
    """First prompt, and everything that followed it so far."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """What followed the first prompt, as chat messages."""
    responses: list[Completion] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    """Token ids between the responses."""

    def begins(self, ids: Sequence[int]) -> bool:
        """Whether these token ids continue the conversation."""
        n = len(self.tokens)
        return len(ids) >= n and list(ids[:n]) == self.tokens

    def row(self, ids: Sequence[int], turn: int, cap: int) -> Row:
        """The row of a turn, whose key is a hash of (seed, first prompt, turn, sample index, visit).

        What tools answered is part of the prompt and of no key: a changed answer costs accepted drafts only.

        Args:
            ids: prompt of the turn.
            turn: its number, from 0.
            cap: most tokens of its response.
        """
        return Row(turn_id(self.example_id, turn), tuple(ids), max_new_tokens=cap)

    @property
    def used(self) -> int:
        """Tokens after the first prompt, of responses and of answers."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The calls of the latest response, which have no answer yet."""
        return self.messages[-1].get("tool_calls") or []

    def respond(self, response: Completion, message: dict[str, Any]) -> None:
        """Adds a response."""
        self.responses.append(response)
        self.messages.append(message)
        self.tokens += response.tokens

    def go_on(self, answer: Answer, cap: int) -> bool:
        """Adds an answer if at least one token of `cap` is left for a response after it; returns whether it is."""
        if self.used + len(answer.tokens) >= cap:
            return False
        self.messages += answer.messages
        self.answers.append(answer.tokens)
        self.tokens += answer.tokens
        return True

    def whole(self) -> Completion:
        """All that followed the first prompt as one response, with a mask."""
        last = self.responses[-1]
        whole = Completion([], [], [], [], finish=last.finish, version=last.version, passes=0)
        mask: list[int] = []
        for i, response in enumerate(self.responses):
            whole.passes += response.passes
            whole.seconds += response.seconds
            answer = self.answers[i] if i < len(self.answers) else []
            no = [0.0] * len(answer)
            whole.tokens += [*response.tokens, *answer]
            whole.logprobs += [*response.logprobs, *no]
            whole.behaviour_logprobs += [*response.behaviour_logprobs, *no]
            whole.reused += [*response.reused, *([False] * len(answer))]
            mask += [1] * len(response.tokens) + [0] * len(answer)
        whole.mask = mask
        return whole


Respond = Callable[[list[Conversation], list[Row]], Sequence[Completion]]
"""A response to the row of a turn of each conversation."""


def converse(
    conversations: Sequence[Conversation], respond: Respond, tools: Tools, *, max_turns: int, max_tokens: int
) -> None:
    """Lets conversations go on, a turn of all of them at a time, while their responses call tools.

    As under TRL, a conversation whose answer does not fit into its tokens ends with its call.

    Args:
        conversations: that begin; they are changed in place.
        max_turns: responses of a conversation.
        max_tokens: of a conversation after its first prompt, with the answers of tools.
    """
    going = [*conversations]
    for turn in range(max_turns):
        rows = [c.row(c.tokens, turn, max_tokens - c.used) for c in going]
        for conversation, response in zip(going, respond(going, rows), strict=True):
            conversation.respond(response, tools.message(conversation.tokens, response.tokens))
        going = [conversation for conversation in going if conversation.calls]
        if not going or turn == max_turns - 1:
            return
        answers = tools.answer([conversation.calls for conversation in going])
        pairs = zip(going, answers, strict=True)
        going = [conversation for conversation, answer in pairs if conversation.go_on(answer, max_tokens)]
        if not going:
            return


def begin(
    prompts: Sequence[Sequence[int]], visits: Callable[[list[str]], list[int]], gather: Gather, process: int
) -> list[Conversation]:
    """The conversations of a batch, which is one visit to each of its prompts; every process takes part.

    Args:
        prompts: token ids of this process's first prompts.
        visits: a method of Visits, whose counts are equal in all processes: `next` counts this visit.
        process: index of this process.
    """
    names = [hashlib.blake2b(repr([*ids]).encode(), digest_size=16).hexdigest() for ids in prompts]
    parts = gather([names])
    everyone = [name for part in parts for name in part]
    first = sum(map(len, parts[:process]))
    share = slice(first, first + len(names))
    columns = zip(names, occurrences(everyone)[share], visits(everyone)[share], prompts, strict=True)
    return [Conversation(name, index, visit, len(ids), [*ids]) for name, index, visit, ids in columns]


def match(conversations: Sequence[Conversation], prompts: Sequence[Sequence[int]]) -> list[Conversation]:
    """The conversation that each prompt of a later turn continues.

    A trainer passes the conversations that go on, in their order and without an index. Several fit a prompt only if
    they are equal so far; taking one for the other costs drafts and repeats no key.

    Raises:
        RolloutError: a prompt continues none, or they come in another order.
    """
    rest = iter(conversations)
    matched: list[Conversation] = []
    for ids in prompts:
        conversation = next((conversation for conversation in rest if conversation.begins(ids)), None)
        if conversation is None:
            raise RolloutError(
                f"row {len(matched)} of a later turn continues no conversation of the batch in its order, so it has no "
                "noise key. The trainer must append to the token ids of earlier turns, as trl==1.16.0 does"
            )
        matched.append(conversation)
    return matched
