"""Conversations of the next batch: idle workers continue them through tools whose answers are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specrl.rollout.speculative import SpeculativeRollout
from specrl.rollout.types import Completion, Row
from specrl.trainers.conversations import Conversation, Tools


@dataclass
class _Asked:
    """A turn of a conversation."""

    conversation: Conversation
    row: Row
    turn: int


class ConversationsAhead:
    """The conversations of a batch, as far as they were rolled out ahead of it.

    A turn that has ended ahead and calls deterministic tools is followed by the next one, once the answers are known.
    All of it is a guess, which the weights of the batch verify turn by turn; a wrong one costs time only.

    Args:
        conversations: that have not begun.
        tools: of the run.
        source: rolls them out.
        max_turns: responses of a conversation.
        max_tokens: of a conversation after its first prompt.
    """

    def __init__(
        self,
        conversations: Sequence[Conversation],
        tools: Tools,
        source: SpeculativeRollout,
        *,
        max_turns: int,
        max_tokens: int,
    ):
        self._tools = tools
        self._source = source
        self._max_turns = max_turns
        self._max_tokens = max_tokens
        self._asked = [_Asked(c, c.row(c.tokens, 0, max_tokens), 0) for c in conversations]
        self._going = [*self._asked]
        """The latest turn of each conversation that may go on."""

    def announce_beside(self, this_batch: ConversationsAhead | None, turn: int) -> None:
        """Continues the conversations with what was rolled out since the last call, and announces their turns.

        Args:
            this_batch: what was rolled out ahead of the batch that comes before; its later turns are announced too, so
                that their texts are kept.
            turn: of that batch, which is rolled out next.
        """
        self._source.stop_ahead()
        going = self._going
        self._going = []
        for latest in going:
            self._continue(latest)
        self._announce(-1)
        if this_batch is not None:
            this_batch._announce(turn)

    def _announce(self, after: int) -> None:
        """Args: after: only turns with higher numbers."""
        asked = [each for each in self._asked if each.turn > after]
        self._source.announce(
            [each.row for each in asked],
            visit=[each.conversation.visit for each in asked],
            sample_indices=[each.conversation.sample_index for each in asked],
        )

    def _continue(self, latest: _Asked) -> None:
        while True:
            conversation = latest.conversation
            if len(conversation.responses) == latest.turn and not self._respond(latest):
                self._going.append(latest)
                return
            if not conversation.calls or latest.turn + 1 == self._max_turns:
                return
            answer = self._tools.foresee(conversation.calls)
            if answer is None:
                self._going.append(latest)
                return
            if not conversation.go_on(answer, self._max_tokens):
                return
            turn = latest.turn + 1
            row = conversation.row(conversation.tokens, turn, self._max_tokens - conversation.used)
            latest = _Asked(conversation, row, turn)
            self._asked.append(latest)

    def _respond(self, asked: _Asked) -> bool:
        """Adds the response to a turn if it has ended ahead; returns whether it has."""
        conversation = asked.conversation
        text = self._source.text_ahead(asked.row, visit=conversation.visit, sample_index=conversation.sample_index)
        if text is None or text.finish is None:
            return False
        response = Completion([*text.tokens], [], [], [], text.finish, version=0, passes=0)
        conversation.respond(response, self._tools.message(conversation.tokens, response.tokens))
        return True
