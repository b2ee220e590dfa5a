"""Conversations with tools: calls that the policy writes, answers that it reads, and conversations outside training."""

from __future__ import annotations

import asyncio
import inspect
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import wraps
from importlib.util import find_spec
from threading import Thread
from typing import TYPE_CHECKING, Any

from specrl.config.options import ConfigError
from specrl.rollout.reduction import Metric, count, mean, seconds
from specrl.rollout.speculative import SpeculativeRollout
from specrl.rollout.types import EngineStats, Row
from specrl.run.prompts import render, variables
from specrl.run.tools import load_tools
from specrl.trainers.conversations import Answer, Conversation
from specrl.trainers.tool_rollouts import ToolRollouts
from specrl.trainers.tools import ToolResults

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from specrl.config.schema import Config, DatasetConfig
    from specrl.rollout.engines.base import Engine
    from specrl.run.data import Example

MARK = "\udc80"
"""Marks in a rendered dialogue where a special token of an answer is cut in two; no text with a UTF-8 form has it."""
LONGEST = 10_000
"""Characters of an answer that the model reads."""
GRACE_S = 1.0
"""Seconds for asynchronous tools to notice that their time is over."""


def adapt(tokenizer: PreTrainedTokenizerBase) -> None:
    """Gives a tokenizer the templates of conversations where TRL knows its chat template; see `grpo/templates.py`."""
    if find_spec("trl"):
        from specrl.trainers.grpo import templates

        templates.adapt(tokenizer)


class Toolbox:
    """The tools of a run, synchronous ones and coroutine functions, between the policy's responses.

    Calls are parsed by the tokenizer's response template, and answers rendered by its chat template, as TRL does. A
    tool that raises, takes longer than `dataset.tool_timeout_s`, or does not exist has an error as its answer, and a
    long answer is cut; each is counted. Synchronous tools run one after the other, in a thread that is abandoned when
    the time is over; asynchronous ones run at the same time.

    Raises:
        ConfigError: the tokenizer's templates cannot express calls and their results.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: DatasetConfig):
        adapt(tokenizer)
        self.results = ToolResults()
        self._tokenizer = tokenizer
        self._options = options
        functions, schemas = load_tools(tuple(options.tools))
        self._schemas: list[dict | Callable] = [*schemas]
        self._tools = {f.__name__: self.results.wrap(self._bounded(f)) for f in functions}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._counts: Counter[str] = Counter()
        self._spent_s = 0.0
        self._check()

    # Text --------------------------------------------------------------------------------------------------------

    def message(self, prompt: Sequence[int], response: Sequence[int]) -> dict[str, Any]:
        """The response to a prompt as a chat message; one that the template cannot parse has no calls."""
        text = self._tokenizer.decode([*response], skip_special_tokens=True)
        if not response:
            return {"role": "assistant", "content": text}
        try:
            message = self._tokenizer.parse_response([*response], prefix=[*prompt], tools=self._schemas)
            calls = [_valid(call) for call in message.get("tool_calls") or []]
        except (ValueError, TypeError, KeyError, AttributeError):  # text of the model, which can be anything
            return {"role": "assistant", "content": text}
        content = (message.get("content") or "").removesuffix(str(self._tokenizer.eos_token))
        return message | {"content": content} | ({"tool_calls": calls} if calls else {})

    def answer(self, calls: Sequence[list[dict[str, Any]]]) -> list[Answer]:
        """Makes the calls of each response, and returns what follows them."""
        began = time.perf_counter()
        made = [call["function"] for part in calls for call in part]
        texts = iter(self._call(made))
        answers = [self._answer(part, [next(texts) for _ in part]) for part in calls]
        self._spent_s += time.perf_counter() - began
        return answers

    def _answer(self, calls: Sequence[dict[str, Any]], texts: Sequence[str]) -> Answer:
        names = [call["function"]["name"] for call in calls]
        messages = [{"role": "tool", "name": n, "content": text} for n, text in zip(names, texts, strict=True)]
        return Answer(messages, self._follow(messages))

    def _follow(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """The token ids of tool messages after a response with its EOS token, and of the next response's opening.

        A special token in what a tool answered is text: a web page closes no turn and opens no role.
        """
        begun = _dialogue(messages[0]["name"], {})
        before = self._render(begun, add_generation_prompt=False)
        everything = self._as_text([*begun, *messages], messages)
        ends = [i for i, token in enumerate(before) if token == self._tokenizer.eos_token_id]
        before = before[: ends[-1] + 1] if ends else before
        if everything[: len(before)] != before:
            raise ConfigError(
                "dataset.tools: the tokenizer's chat template changes earlier messages after a tool's result, "
                "but token ids can only be appended. Set a chat template that appends."
            )
        return everything[len(before) :]

    def _as_text(self, dialogue: Sequence[dict[str, Any]], answers: Sequence[dict[str, Any]]) -> list[int]:
        """The token ids of a dialogue in which no added token of the tokenizer comes from the answers at its end."""
        added = sorted(
            {token.content for token in self._tokenizer.added_tokens_decoder.values()}, key=len, reverse=True
        )
        pattern = re.compile("|".join(map(re.escape, added)) or r"(?!)")
        marked = [
            answer | {"content": pattern.sub(lambda found: found[0][:1] + MARK + found[0][1:], answer["content"])}
            for answer in answers
        ]
        text = self._render([*dialogue[: -len(answers)], *marked], add_generation_prompt=True, tokenize=False)
        pieces = [self._tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in text.split(MARK)]
        return [token for piece in pieces for token in piece]

    def _render(self, messages: Sequence[dict[str, Any]], **options: Any) -> Any:
        options = {"tokenize": True, "return_dict": False} | variables(self._options) | options
        return self._tokenizer.apply_chat_template([*messages], **options)

    def _check(self) -> None:
        name, argument, value, result = "a_tool", "an_argument", "its_value", "its_result"
        answer = {"role": "tool", "name": name, "content": result}
        text = self._render([*_dialogue(name, {argument: value}), answer], tokenize=False)
        if not all(word in text for word in (name, argument, value, result)):
            raise ConfigError(
                "dataset.tools: the tokenizer's chat template leaves out calls or results of tools. Give tokenizer="
                "DIR_OR_HUB_ID with a template for tools."
            )
        if getattr(self._tokenizer, "response_template", None) is None:
            raise ConfigError(
                "dataset.tools: the tokenizer has no response_template, by which calls are parsed, and TRL knows none "
                "for its chat template. Set one and save the tokenizer."
            )
        self._follow([answer])

    # Calls -------------------------------------------------------------------------------------------------------

    def _call(self, calls: Sequence[dict[str, Any]]) -> list[str]:
        """The answer of each call, the asynchronous ones at the same time."""
        outcomes: list[Any] = []
        for call in calls:
            try:
                if (tool := self._tools.get(call["name"])) is None:
                    raise ValueError(f"Tool {call['name']} not found.")
                outcomes.append(tool(**call["arguments"]))
            except Exception as error:
                outcomes.append(error)
        waiting = [i for i, outcome in enumerate(outcomes) if inspect.iscoroutine(outcome)]
        for i, outcome in zip(waiting, self._await([outcomes[i] for i in waiting]), strict=True):
            outcomes[i] = outcome
        self._counts["calls"] += len(calls)
        return [self._text(outcome) for outcome in outcomes]

    def _await(self, coroutines: Sequence[Any]) -> Sequence[Any]:
        """The result or the exception of each coroutine."""
        if not coroutines:
            return []
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            Thread(target=self._loop.run_forever, name="specrl-tools", daemon=True).start()

        async def gather() -> list[Any]:
            return await asyncio.gather(*coroutines, return_exceptions=True)

        try:
            waiting = asyncio.run_coroutine_threadsafe(gather(), self._loop)
            return waiting.result(self._options.tool_timeout_s + GRACE_S)
        except TimeoutError as error:  # one blocks the loop, so the next calls get another
            self._loop = None
            return [error] * len(coroutines)

    def _bounded(self, tool: Callable) -> Callable:
        """The tool with its result as text, within the time limit."""
        limit = self._options.tool_timeout_s
        if inspect.iscoroutinefunction(tool):

            async def ending(coroutine: Any) -> str:
                try:
                    return self._readable(await coroutine)
                except (KeyboardInterrupt, SystemExit) as error:  # they would end the loop, with all other calls
                    raise _failure(error) from error

            @wraps(tool)
            async def call_later(**arguments: Any) -> str:
                return await asyncio.wait_for(ending(tool(**arguments)), limit)

            return call_later

        @wraps(tool)
        def call(**arguments: Any) -> str:
            done: Future[str] = Future()

            def work() -> None:
                try:
                    done.set_result(self._readable(tool(**arguments)))
                except BaseException as error:  # this thread is the tool's
                    done.set_exception(_failure(error))

            Thread(target=work, name=f"tool-{tool.__name__}", daemon=True).start()
            return done.result(limit)

        return call

    def _readable(self, result: Any) -> str:
        """A result as text that has a UTF-8 form; other code units are replaced by question marks."""
        text = str(result)
        readable = text.encode("utf-8", "replace").decode()
        self._counts["replaced"] += readable != text
        return readable

    def _text(self, outcome: Any) -> str:
        """What the model reads: the result, or the error as TRL shows it, cut to LONGEST characters."""
        text = outcome
        if isinstance(outcome, BaseException):
            self._counts["failures"] += 1
            reason = str(outcome)
            if isinstance(outcome, TimeoutError) and not reason:
                self._counts["timeouts"] += 1
                reason = f"no result within {self._options.tool_timeout_s:g} s"
            text = self._readable({"error": reason[:LONGEST]})
        self._counts["cut"] += len(text) > LONGEST
        return _shortened(text)

    def take_metrics(self, conversations: int) -> dict[str, Metric]:
        """The metrics of the calls since the last time."""
        counts = self._counts
        metrics = {
            "tools/call_frequency": mean(counts["calls"], conversations),
            "tools/failure_frequency": mean(counts["failures"], counts["calls"]),
            **{f"tools/{name}": count(counts[name]) for name in ("timeouts", "cut", "replaced")},
            "timing_s/tools": seconds(self._spent_s),
        }
        self._counts = Counter()
        self._spent_s = 0.0
        return metrics | self.results.take_metrics()


def _shortened(text: str) -> str:
    return f"{text[:LONGEST]}... (cut from {len(text)} characters)" if len(text) > LONGEST else text


def _failure(error: BaseException) -> Exception:
    """What a tool raised, as its answer; one that ends the program ends its call only."""
    return error if isinstance(error, Exception) else RuntimeError(f"it raised {type(error).__name__}")


def _dialogue(name: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """A conversation up to a call."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]


def _valid(call: Any) -> dict[str, Any]:
    """A call with a name and arguments. Raises KeyError, TypeError, UnicodeError or AttributeError."""
    function = call.get("function", call)
    if not isinstance(function["name"], str):
        raise TypeError(f"no call: {call!r:.80}")
    function["name"].encode()  # a name without a UTF-8 form could not be rendered
    return {"type": "function", "function": {"name": function["name"], "arguments": function.get("arguments") or {}}}


def conversations(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    config: Config,
    samples: int,
) -> tuple[list[Conversation], EngineStats]:
    """`samples` conversations about each example, with the keys of evaluations."""
    rollout = SpeculativeRollout(engine, None, config.rollout, config.seed)
    tools = ToolRollouts(Toolbox(tokenizer, config.dataset), rollout, config.dataset.max_turns)
    prompts = [Row(example.id, tuple(render(example, tokenizer, config.dataset).ids)) for example in examples]
    rows = [row for row in prompts for _ in range(samples)]
    indices = [*range(samples)] * len(prompts)
    held, turns, _ = tools.generate(rows, indices, [0] * len(rows), engine.weight_version, domain="eval")
    return held, turns.batch.stats
