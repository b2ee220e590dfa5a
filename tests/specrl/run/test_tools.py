"""Tools of `dataset.tools`: calls and answers as chat messages and token ids, and tools that misbehave."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
from transformers import PreTrainedTokenizerFast

from benchmarks.tiny_policy import build_tokenizer
from benchmarks.tiny_tools import ASSISTANT, build_tools_tokenizer, conversation
from specrl.config.options import ConfigError
from specrl.config.schema import Config, DatasetConfig
from specrl.run.data import Example
from specrl.run.policy import load_tokenizer
from specrl.run.prompts import render, seen
from specrl.run.tasks import arithmetic
from specrl.run.toolbox import LONGEST, Toolbox
from specrl.run.tools import calculate, load_tools

HERE = "tests.specrl.run.test_tools"


class Beyond(BaseException):
    pass


class Unprintable:
    def __str__(self):
        raise SystemExit(3)


def tool(name: str, act: Callable[[str], object]) -> Callable:
    """A tool that answers with `act(expression)`."""

    def made(expression: str) -> str:
        """Answers.

        Args:
            expression: any.
        """
        return act(expression)

    made.__name__ = name
    return made


def async_tool(name: str, act: Callable[[str], object], after: float = 0.0) -> Callable:
    """An asynchronous tool that answers with `act(expression)` after these seconds."""

    async def made(expression: str) -> str:
        """Answers.

        Args:
            expression: any.
        """
        await asyncio.sleep(after)
        return act(expression)

    made.__name__ = name
    return made


def raising(error: BaseException) -> Callable:
    def act(expression):
        raise error

    return act


def web_page(expression: str) -> str:
    """It has the tokens that end a turn."""
    tokenizer = build_tools_tokenizer()
    special = "".join(token.content for token in tokenizer.added_tokens_decoder.values())
    return f"see {tokenizer.eos_token} {expression}{special}"


fail = tool("fail", raising(ValueError("no such x")))
leave = tool("leave", raising(SystemExit(3)))
interrupt = tool("interrupt", raising(KeyboardInterrupt()))
beyond = tool("beyond", raising(Beyond()))
hang = tool("hang", lambda _: time.sleep(60))
flood = tool("flood", lambda _: "9" * 3_000_000)
surrogate = tool("surrogate", lambda _: "a\ud800b")
echo = tool("echo", lambda expression: expression)
page = tool("page", web_page)
later = async_tool("later", lambda expression: f"later {expression}", after=0.2)
leave_later = async_tool("leave_later", raising(SystemExit(3)))
unprintable_later = async_tool("unprintable_later", lambda _: Unprintable())
hang_later = async_tool("hang_later", lambda _: "late", after=60)
block = async_tool("block", lambda _: time.sleep(60))


def untyped(expression):
    """Has no types.

    Args:
        expression: any.
    """


NOT_A_FUNCTION = 3


def toolbox(*names: str, timeout_s: float = 30.0) -> Toolbox:
    tools = [name if ":" in name else f"{HERE}:{name}" for name in names]
    return Toolbox(build_tools_tokenizer(), DatasetConfig(tools=tools, tool_timeout_s=timeout_s))


def call(name: str, **arguments) -> dict:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def ask(box: Toolbox, *calls: dict) -> list[str]:
    """What the model reads of these calls of one response."""
    (answer,) = box.answer([[*calls]])
    return [message["content"] for message in answer.messages]


def counted(box: Toolbox) -> dict[str, float]:
    return {name: float(value) for name, value in box.take_metrics(2).items()}


# Text -----------------------------------------------------------------------------------------------------------------


def test_calls_are_parsed_and_answers_rendered_as_the_chat_template_does():
    """Piece by piece the same token ids as those of the whole conversation."""
    tokenizer, box = build_tools_tokenizer(), toolbox("specrl.run.tools:calculate")
    messages = conversation(arithmetic("train", 1, level="large")[0])
    whole = tokenizer.apply_chat_template(messages, return_dict=False)
    opening = tokenizer.convert_tokens_to_ids(ASSISTANT)
    ids, said = whole[: whole.index(opening) + 1], messages[:1]
    while len(ids) < len(whole):
        response = whole[len(ids) : whole.index(tokenizer.eos_token_id, len(ids)) + 1]
        message = box.message(ids, response)
        ids, said = [*ids, *response], [*said, message]
        if calls := message.get("tool_calls"):
            (answer,) = box.answer([calls])
            ids, said = [*ids, *answer.tokens], [*said, *answer.messages]
    assert ids == whole
    assert said == messages


@pytest.mark.parametrize("text", ["<call>", "<call>calculate", "</call> 3 + 4", "<call></call>", "#### 5"])
def test_text_that_is_no_call_is_text(text):
    tokenizer, box = build_tools_tokenizer(), toolbox("specrl.run.tools:calculate")
    message = box.message([], tokenizer(text).input_ids)
    (answer,) = box.answer([message["tool_calls"]]) if "tool_calls" in message else [None]
    assert message["role"] == "assistant"
    assert answer is None or "error" in answer.messages[0]["content"]
    assert box.message([], []) == {"role": "assistant", "content": ""}


def test_rewards_see_the_whole_conversation():
    tokenizer = build_tools_tokenizer()
    options = DatasetConfig(tools=["specrl.run.tools:calculate"])
    problem = arithmetic("train", 1, level="large")[0]
    user, *said = conversation(problem)
    (sample,) = seen([Example("a", problem.prompt, problem.answer, {})], [said], tokenizer, options)
    assert sample.messages == [user, *said]
    assert sample.completion == f"#### {problem.answer}"
    assert sample.prompt == render(Example("a", problem.prompt, "", {}), tokenizer, options).text


# Tools ----------------------------------------------------------------------------------------------------------------


def test_the_calculator():
    assert [calculate(e) for e in ("12 + 30", "5 - 7", " 6*7 ")] == [42, -2, 42]
    for wrong in ("", "1 + 2 + 3", "2 ** 9", "__import__('os')"):
        with pytest.raises(ValueError, match="whole numbers"):
            calculate(wrong)


def test_results_of_deterministic_tools_are_kept():
    box = toolbox("specrl.run.tools:calculate")
    for _ in range(2):
        assert ask(box, call("calculate", expression="2 + 3"), call("calculate", expression="2 * 3")) == ["5", "6"]
    assert counted(box)["tools/kept_ratio"] == 0.5


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (call("fail", expression="x"), "no such x"),
        (call("fail", other="x"), "unexpected keyword"),
        ({"function": {"name": "fail", "arguments": "x"}}, "mapping"),
        (call("nothing"), "Tool nothing not found."),
        (call("leave", expression="x"), "SystemExit"),
        (call("interrupt", expression="x"), "KeyboardInterrupt"),
        (call("leave_later", expression="x"), "SystemExit"),
        (call("beyond", expression="x"), "Beyond"),
        (call("unprintable_later", expression="x"), "SystemExit"),
    ],
)
def test_a_call_that_fails_has_an_error_as_its_answer(made, reason):
    box = toolbox("fail", "leave", "interrupt", "leave_later", "beyond", "unprintable_later", "later")
    (text,) = ask(box, made)
    assert text.startswith("{'error': ")
    assert reason in text
    metrics = counted(box)
    assert (metrics["tools/call_frequency"], metrics["tools/failure_frequency"]) == (0.5, 1.0)
    assert metrics["tools/timeouts"] == 0


@pytest.mark.parametrize("name", ["hang", "hang_later", "block"])
def test_a_tool_that_hangs_is_left_behind(name):
    box = toolbox(name, "later", timeout_s=0.3)
    began = time.monotonic()
    (text,) = ask(box, call(name, expression="x"))
    assert "no result within 0.3 s" in text
    assert time.monotonic() - began < 30, "it takes a minute"
    assert ask(box, call("later", expression="y")) == ["later y"], "the next call is made"
    metrics = counted(box)
    assert (metrics["tools/timeouts"], metrics["tools/failure_frequency"]) == (1, 0.5)


def test_calls_beside_one_that_ends_the_program_have_their_answers():
    box = toolbox("leave_later", "later")
    texts = ask(box, call("later", expression="y"), call("leave_later", expression="x"), call("later", expression="z"))
    assert [texts[0], texts[2]] == ["later y", "later z"]
    assert counted(box)["tools/timeouts"] == 0


def test_characters_without_a_utf8_form_are_replaced():
    box = toolbox("surrogate")
    assert ask(box, call("surrogate", expression="x")) == ["a?b"]
    box.answer([[call("surrogate", expression="x")]])
    assert counted(box)["tools/replaced"] == 2


def in_bytes():
    """A tokenizer that has every text, with a chat template that writes calls as JSON."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from trl import chat_template_utils

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.add_tokens(["<|im_start|>"], special_tokens=True)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"])
    tokenizer.chat_template = chat_template_utils.qwen3_chat_template
    return tokenizer


@pytest.mark.parametrize(("name", "calls"), [("echo", 1), ("7f2d9a41", 1), (r"a\ud800b", 0)])
def test_whatever_name_the_model_writes_the_conversation_goes_on(name, calls):
    """A call whose name has no UTF-8 form is text."""
    tokenizer = in_bytes()
    box = Toolbox(tokenizer, DatasetConfig(tools=[f"{HERE}:echo"]))
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "x"}], add_generation_prompt=True, return_dict=False
    )
    made = f'{{"name": "{name}", "arguments": {{"expression": "x"}}}}'
    response = f"<tool_call>\n{made}\n</tool_call><|im_end|>"
    parsed = box.message(prompt, tokenizer.encode(response)).get("tool_calls", [])
    assert len(parsed) == calls
    if parsed:
        assert len(ask(box, *parsed)) == 1


def test_special_tokens_in_an_answer_are_text():
    box = toolbox("page", "later")
    tokenizer = build_tools_tokenizer()
    ends = {tokenizer.eos_token_id, tokenizer.pad_token_id}
    (plain,) = box.answer([[call("later", expression="x")]])
    (answer,) = box.answer([[call("page", expression="x")]])
    (two,) = box.answer([[call("page", expression="x"), call("page", expression="y")]])
    assert answer.messages[0]["content"] == page("x")
    special = [token for token in answer.tokens if token in ends]
    assert special == [token for token in plain.tokens if token in ends], "those of the template alone"
    assert len(two.tokens) > len(answer.tokens) > len(plain.tokens)
    planted = tokenizer(page("x"))["input_ids"]
    assert not ends.isdisjoint(planted)


@pytest.mark.parametrize("made_by", ["content'] | tojson", "content'] | trim"])
def test_an_answer_with_special_tokens_is_rendered_as_the_template_renders_any_text(made_by):
    tokenizer = build_tools_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("<tool>{{ m['content']", "<tool>{{ m['" + made_by)
    box = Toolbox(tokenizer, DatasetConfig(tools=[f"{HERE}:echo"]))
    texts = [' 1 + "2"\n= 3 ', f' 1 + "2"\n= 3 {tokenizer.eos_token} ']
    plain, special = (box.answer([[call("echo", expression=text)]])[0].tokens for text in texts)
    shared = next(i for i, (a, b) in enumerate(zip(plain, special, strict=False)) if a != b)
    assert shared > len(tokenizer(texts[0].strip())["input_ids"]), "they differ from the special token on"
    assert tokenizer.eos_token_id not in special


def test_megabytes_are_cut():
    box = toolbox("flood")
    (text,) = ask(box, call("flood", expression="x"))
    assert len(text) < LONGEST + 100
    assert "cut from 3000000 characters" in text
    assert counted(box)["tools/cut"] == 1


def test_asynchronous_tools_keep_the_order_of_the_calls():
    box = toolbox("later", "fail", "specrl.run.tools:calculate")
    made = [[call("later", expression="a"), call("calculate", expression="1 + 1")], [call("later", expression="b")]]
    answers = box.answer(made)
    assert [[m["content"] for m in answer.messages] for answer in answers] == [["later a", "2"], ["later b"]]


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["calculate"], "is not module:function"),
        (["nowhere_at_all:calculate"], "cannot be imported"),
        (["specrl.run.tools:calculat"], "Did you mean 'calculate'"),
        ([f"{HERE}:NOT_A_FUNCTION"], "must be a function"),
        ([f"{HERE}:untyped"], "Give each argument a type"),
        (["specrl.run.tools:calculate", "specrl.run.tools:calculate"], "name twice"),
    ],
)
def test_functions_that_cannot_be_tools_are_refused(names, reason):
    with pytest.raises(ConfigError, match=reason) as refused:
        load_tools(tuple(names))
    assert "\n" not in str(refused.value)


def test_tokenizers_that_cannot_express_tools_are_refused():
    options = DatasetConfig(tools=["specrl.run.tools:calculate"])
    silent, deaf, forgetful = (build_tools_tokenizer() for _ in range(3))
    silent.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    deaf.response_template = None
    forgetful.chat_template = f"{{{{ messages | length }}}}{forgetful.chat_template}"
    for tokenizer, reason in (
        (silent, "leaves out calls"),
        (deaf, "no response_template"),
        (forgetful, "changes earlier"),
    ):
        with pytest.raises(ConfigError, match=reason) as refused:
            Toolbox(tokenizer, options)
        assert "\n" not in str(refused.value)
    with pytest.raises(ConfigError, match="needs a chat template"):
        render(Example("a", "p", "", {}), build_tokenizer(), options)


def test_the_template_of_conversations_is_set_before_anything_is_rendered_or_digested(tmp_path):
    from trl import chat_template_utils

    tokenizer = build_tokenizer()
    tokenizer.chat_template = chat_template_utils.qwen3_chat_template
    tokenizer.save_pretrained(tmp_path)
    options = DatasetConfig(tools=["specrl.run.tools:calculate"])
    loaded = load_tokenizer(Config(tokenizer=str(tmp_path), dataset=options))
    before = loaded.chat_template
    Toolbox(loaded, options)
    assert loaded.chat_template == before
    plain = load_tokenizer(Config(tokenizer=str(tmp_path)))
    assert plain.chat_template == chat_template_utils.qwen3_chat_template, "without tools it is the model's own"
