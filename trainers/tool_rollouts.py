"""Rolls out the conversations of a batch where the policy has tools, and announces those of the next batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specrl.rollout.reduction import Metric
from specrl.rollout.speculative import SpeculativeRollout
from specrl.rollout.types import Completion, Row
from specrl.trainers.conversations import Conversation, Tools, converse
from specrl.trainers.scored import Generated, check_batch
from specrl.trainers.turns import Turn, by_turn
from specrl.trainers.turns_ahead import ConversationsAhead


class ToolRollouts:
    """The conversations of one process.

    Args:
        tools: of the run.
        source: of the responses.
        max_turns: responses of a conversation.
    """

    def __init__(self, tools: Tools, source: SpeculativeRollout, max_turns: int):
        self._tools = tools
        self._source = source
        self._max_turns = max_turns
        self._max_tokens = source.config.max_new_tokens
        self._ahead: ConversationsAhead | None = None
        """Of the batch that was announced last."""

    def generate(
        self,
        rows: Sequence[Row],
        sample_indices: Sequence[int],
        visits: Sequence[int],
        step: int,
        announce: Callable[[int], None],
    ) -> tuple[list[Conversation], Generated, dict[str, Metric]]:
        """A conversation that begins with each row, what was generated for all of them, and the metrics.

        Args: announce: announces the next batch in each turn, whose number it gets.
        """
        turns: list[Turn] = []

        def respond(going: list[Conversation], rows: list[Row]) -> list[Completion]:
            announce(len(turns))
            batch = self._source.generate(
                rows,
                visit=[conversation.visit for conversation in going],
                step=step,
                sample_indices=[conversation.sample_index for conversation in going],
            )
            check_batch(batch, len(rows), step)
            turns.append(Turn(rows, batch, step, training=True))
            return batch.completions

        begun = _begun(rows, sample_indices, visits)
        converse(begun, respond, self._tools, max_turns=self._max_turns, max_tokens=self._max_tokens)
        return begun, Generated.of_turns(turns), by_turn(turns) | self._tools.take_metrics(len(begun))

    def announcement(
        self, rows: Sequence[Row], sample_indices: Sequence[int], visits: Sequence[int]
    ) -> Callable[[int], None]:
        """Announces the conversations that begin with these rows, in each turn of the batch before them."""
        before = self._ahead
        coming = ConversationsAhead(
            _begun(rows, sample_indices, visits),
            self._tools,
            self._source,
            max_turns=self._max_turns,
            max_tokens=self._max_tokens,
        )
        self._ahead = coming
        return lambda turn: coming.announce_beside(before, turn)


def _begun(rows: Sequence[Row], sample_indices: Sequence[int], visits: Sequence[int]) -> list[Conversation]:
    """A conversation that begins with each row."""
    columns = zip(rows, sample_indices, visits, strict=True)
    return [Conversation(row.example_id, i, visit, len(row.prompt), [*row.prompt]) for row, i, visit in columns]
