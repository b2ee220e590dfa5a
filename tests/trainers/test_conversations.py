"""Conversations in our trainers: whose turn it is, what the cap counts, which tokens count, and the keys of turns."""

from __future__ import annotations

import hashlib

import pytest

from specrl.rollout.config import RolloutConfig
from specrl.rollout.keys import derive_key, turn_id
from specrl.rollout.speculative import SpeculativeRollout
from specrl.rollout.types import Completion, EngineStats, Row
from specrl.trainers.conversations import Answer, Conversation, converse
from specrl.trainers.scored import Scored

CALL, PLAIN, ANSWER = 7, 8, 5
"""A response that ends with CALL calls a tool, whose answer is ANSWER and the last token before the call."""


class Echo:
    """Tools that answer with what the call said."""

    def message(self, prompt, response):
        calls = [{"said": response[-2], "after": prompt[0]}] if response[-1:] == [CALL] else []
        return {"role": "assistant", "content": str(response)} | ({"tool_calls": calls} if calls else {})

    def answer(self, calls):
        return [Answer([{"role": "tool", "content": f"{call['said']}"}], [ANSWER, call["said"]]) for (call,) in calls]


def completion(tokens) -> Completion:
    logprobs = [-0.5] * len(tokens)
    return Completion([*tokens], logprobs, [*logprobs], [True] * len(tokens), "stop", 3, passes=2)


def conversations(*prompts: list[int]) -> list[Conversation]:
    return [Conversation(f"p{i}", 0, 4, len(ids), [*ids]) for i, ids in enumerate(prompts)]


def scripted(*turns: list[list[int]]):
    """Responses turn by turn, and the rows that asked for them."""
    asked, left = [], iter(turns)

    def respond(going, rows):
        asked.append(rows)
        return [completion(tokens) for tokens in next(left)]

    return respond, asked


def test_a_conversation_goes_on_while_its_responses_call_tools():
    first, second = conversations([1, 2], [3])
    respond, asked = scripted([[10, CALL], [20, PLAIN]], [[11, CALL]], [[12, PLAIN]])
    converse([first, second], respond, Echo(), max_turns=8, max_tokens=99)
    assert [[row.example_id for row in rows] for rows in asked] == [
        ["p0", "p1"],
        [turn_id("p0", 1)],
        [turn_id("p0", 2)],
    ]
    assert asked[2][0].prompt == (1, 2, 10, CALL, ANSWER, 10, 11, CALL, ANSWER, 11)
    assert first.tokens == [*asked[2][0].prompt, 12, PLAIN]
    assert second.tokens == [3, 20, PLAIN]
    assert [message["role"] for message in first.messages] == ["assistant", "tool", "assistant", "tool", "assistant"]


def test_the_cap_counts_the_tokens_of_tools():
    (conversation,) = conversations([1, 2])
    respond, asked = scripted([[10, CALL]], [[11, CALL]], [[12, PLAIN]])
    converse([conversation], respond, Echo(), max_turns=8, max_tokens=9)
    assert [rows[0].max_new_tokens for rows in asked] == [9, 5, 1]


def test_an_answer_that_leaves_no_token_ends_the_conversation_with_its_call():
    (conversation,) = conversations([1])
    respond, asked = scripted([[10, CALL]])
    converse([conversation], respond, Echo(), max_turns=8, max_tokens=4)
    assert len(asked) == 1
    assert conversation.tokens == [1, 10, CALL]
    assert [message["role"] for message in conversation.messages] == ["assistant"]


def test_no_tool_is_called_after_the_last_turn():
    (conversation,) = conversations([1])
    respond, asked = scripted([[10, CALL]], [[11, CALL]])
    converse([conversation], respond, Echo(), max_turns=2, max_tokens=99)
    assert len(asked) == 2
    assert conversation.tokens[-1] == CALL


# The whole ----------------------------------------------------------------------------------------------------------


def whole() -> Completion:
    (conversation,) = conversations([1, 2])
    respond, _ = scripted([[10, 11, CALL]], [[12, PLAIN]])
    converse([conversation], respond, Echo(), max_turns=8, max_tokens=99)
    return conversation.whole()


def mask_is_right() -> bool:
    """By hand: three tokens of the policy, two of the tool, two of the policy."""
    got = whole()
    assert got.tokens == [10, 11, CALL, ANSWER, 11, 12, PLAIN]
    return got.mask == [1, 1, 1, 0, 0, 1, 1] and got.sampled == 5


def test_tokens_of_tools_are_masked():
    assert mask_is_right()
    got = whole()
    assert got.logprobs == got.behaviour_logprobs == [-0.5, -0.5, -0.5, 0.0, 0.0, -0.5, -0.5]
    assert got.reused == [True, True, True, False, False, True, True]
    assert (got.passes, got.version, got.finish) == (4, 3, "stop")


def test_control_a_mask_that_counts_tools_is_found(monkeypatch):
    mask = Conversation.whole

    def everything(self):
        got = mask(self)
        got.mask = [1] * len(got.tokens)
        return got

    monkeypatch.setattr(Conversation, "whole", everything)
    assert not mask_is_right()


def test_parts_of_a_step_keep_their_turns():
    rows = [Row("a", (1,)), Row("a/1", (1, 2))]
    engine = Scripted()
    rollout = SpeculativeRollout(engine, None, RolloutConfig(), seed=0)
    turns = [Scored.turn([row], rollout.generate([row], visit=0, step=0)) for row in rows]
    generated = turns[0] + turns[1]
    assert (generated.rows, generated.batch.calls) == (rows, [1, 1])
    step = Scored([{}], rows[:1], turns[0].batch, [1.0], [1.0], generated)
    both = step + step
    assert (both.generated.rows, both.generated.batch.calls) == (rows * 2, [1, 1, 1, 1])
    assert both.select([1]).turns is None


# Keys ---------------------------------------------------------------------------------------------------------------


class Scripted:
    """An engine whose first responses call a tool and whose second ones do not."""

    weight_version = 3

    def __init__(self, answer=ANSWER):
        self.requests = []

    def generate(self, requests):
        self.requests += requests
        return [completion([10, PLAIN if ANSWER in r.prompt else CALL]) for r in requests], EngineStats()


class Clock(Echo):
    """A tool whose answer is never the same."""

    times = 0

    def answer(self, calls):
        Clock.times += 1
        return [Answer(messages, [*tokens, 100 + Clock.times]) for messages, tokens in super().answer(calls)]


def keys(visit: int) -> dict[tuple[str, int], int]:
    """The noise keys of a batch with two samples of a prompt, by the row's name and sample."""
    rollout, found = SpeculativeRollout(Scripted(), None, RolloutConfig(), seed=3), {}
    begun = [Conversation("ex", i, visit, 1, [1]) for i in range(2)]

    def respond(going, rows):
        samples = [c.sample_index for c in going]
        batch = rollout.generate(rows, visit=[c.visit for c in going], step=3, sample_indices=samples)
        found.update({(row.example_id, i): key for row, i, key in zip(rows, samples, batch.keys, strict=True)})
        found.setdefault("all", []).extend(batch.keys)
        return batch.completions

    converse(begun, respond, Clock(), max_turns=3, max_tokens=50)
    return found


def keys_are_right() -> bool:
    """They follow from (seed, example, turn, sample, visit) alone, and none comes twice."""
    got, later = keys(0), keys(1)
    every = got.pop("all") + later.pop("all")
    want = {(name, i): derive_key(3, name, i, 0, "rollout") for name in ("ex", turn_id("ex", 1)) for i in range(2)}
    return got == want and len(set(every)) == len(every) == 8


def test_no_two_turns_of_any_examples_share_an_id():
    names = ["a", "a/1", "a/1/1", "", "/1", "a\x1f1", "1\x1fa"]
    ids = [turn_id(name, turn) for name in names for turn in range(12)]
    assert len(set(ids)) == len(ids)
    planted = [f"{name}/{turn}" if turn else name for name in names for turn in range(12)]
    assert len(set(planted)) < len(planted)


def test_keys_follow_from_the_turn_and_not_from_what_tools_answer():
    assert keys_are_right()


def without_turn(self, ids, turn, cap):
    return Row(self.example_id, tuple(ids), max_new_tokens=cap)


def of_context(self, ids, turn, cap):
    name = hashlib.blake2b(repr([*ids]).encode(), digest_size=8).hexdigest()
    return Row(f"{self.example_id}/{name}" if turn else self.example_id, tuple(ids), max_new_tokens=cap)


@pytest.mark.parametrize("fault", [without_turn, of_context])
def test_control_other_keys_are_found(monkeypatch, fault):
    monkeypatch.setattr(Conversation, "row", fault)
    assert not keys_are_right()


def own_answers() -> bool:
    """Each conversation goes on with its own response and the answer to its own call."""
    begun = conversations([1], [2])
    respond, _ = scripted([[10, CALL], [20, CALL]], [[11, PLAIN], [21, PLAIN]])
    converse(begun, respond, Echo(), max_turns=8, max_tokens=99)
    return [c.tokens for c in begun] == [[1, 10, CALL, ANSWER, 10, 11, PLAIN], [2, 20, CALL, ANSWER, 20, 21, PLAIN]]


def test_conversations_are_not_swapped():
    assert own_answers()


def test_control_swapped_conversations_are_found(monkeypatch):
    answer = Echo.answer
    monkeypatch.setattr(Echo, "answer", lambda self, calls: answer(self, calls)[::-1])
    assert not own_answers()
