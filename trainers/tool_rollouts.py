"""Rolls out the conversations of a batch where the policy has tools."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specrl.rollout.planned import Domain
from specrl.rollout.reduction import Metric
from specrl.rollout.speculative import SpeculativeRollout
from specrl.rollout.types import Completion, Row
from specrl.trainers.conversations import Conversation, Tools, converse
from specrl.trainers.scored import Scored, check_batch
from specrl.trainers.turns import by_turn


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

    def generate(
        self,
        rows: Sequence[Row],
        sample_indices: Sequence[int],
        visits: Sequence[int],
        step: int,
        announce: Callable[[], None] = lambda: None,
        domain: Domain = "rollout",
    ) -> tuple[list[Conversation], Scored, dict[str, Metric]]:
        """A conversation that begins with each row, what was generated for all of them, and the metrics.

        Args:
            announce: announces the first turns of the next batch, in each turn of this one.
            domain: see SpeculativeRollout.generate.
        """
        turns: list[Scored] = []

        def respond(going: list[Conversation], rows: list[Row]) -> list[Completion]:
            announce()
            batch = self._source.generate(
                rows,
                visit=[conversation.visit for conversation in going],
                step=step,
                sample_indices=[conversation.sample_index for conversation in going],
                domain=domain,
            )
            check_batch(batch, len(rows), step)
            turns.append(Scored.turn(rows, batch))
            return batch.completions

        columns = zip(rows, sample_indices, visits, strict=True)
        begun = [Conversation(row.example_id, i, visit, len(row.prompt), [*row.prompt]) for row, i, visit in columns]
        converse(begun, respond, self._tools, max_turns=self._max_turns, max_tokens=self._source.config.max_new_tokens)
        return begun, sum(turns[1:], turns[0]), by_turn(turns) | self._tools.take_metrics(len(begun))
