"""Renders examples as prompts: the text, with the chat template if there is one, and its token ids."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from specrl.config.options import ConfigError, plain
from specrl.reward.base import Sample
from specrl.rollout.checks import suggestion

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from specrl.config.schema import DatasetConfig
    from specrl.run.data import Example


SET_HERE = {"messages", "conversation", "add_generation_prompt", "tokenize"}
"""Names that `apply_chat_template` sets itself, so an option cannot."""


@dataclass(frozen=True)
class Prompt:
    """A rendered prompt."""

    ids: list[int]
    text: str
    """The text that `ids` encode; with a chat template its complete output, including special tokens."""
    messages: list[dict[str, Any]] | None
    """The messages of a chat; None if the prompt is plain text."""
    example: Example

    def sample(self, completion: str | list[dict[str, Any]]) -> Sample:
        """The input of reward functions for one response to this prompt.

        Args: completion: the response's text, or the messages that followed the prompt; the last one is then the text.
        """
        answer = self.example.answer
        fields = self.example.fields
        if isinstance(completion, str):
            return Sample(self.text, completion, answer, fields, self.messages)
        return Sample(self.text, completion[-1]["content"], answer, fields, [*(self.messages or []), *completion])


def render(example: Example, tokenizer: PreTrainedTokenizerBase, options: DatasetConfig) -> Prompt:
    """Renders and tokenizes a prompt as TRL does: with the chat template, or as plain text if there is none.

    With a chat template, plain text becomes one user message, and a last message of the assistant is continued.
    Without one, messages are joined by blank lines.

    Raises:
        ConfigError: the tokenizer has no chat template although the options need one, or it rejects the messages.
    """
    prompt = example.prompt
    messages = None if isinstance(prompt, str) else prompt
    template = chat_template(tokenizer, options)
    if template:
        messages = messages or [{"role": "user", "content": prompt}]
        text = _templated(messages, tokenizer, options, example)
    else:
        text = prompt if isinstance(prompt, str) else "\n\n".join(message["content"] for message in prompt)
    # `check_lengths` reports prompts that are too long, so the tokenizer's own warning is off
    ids = tokenizer(text, add_special_tokens=not template, verbose=False)["input_ids"]
    return Prompt(list(ids), text, messages, example)


def chat_template(tokenizer: PreTrainedTokenizerBase, options: DatasetConfig) -> str:
    """The chat template that is applied to prompts; empty if none is.

    Raises:
        ConfigError: the options need a template and the tokenizer has none, or the template does not read a variable
            that the options set.
    """
    if options.chat_template == "off":
        return ""
    template = tokenizer.get_chat_template() if tokenizer.chat_template else ""
    names = options.chat_template_kwargs
    if not template and (options.chat_template == "on" or names or options.tools):
        option = "chat_template=on" if options.chat_template == "on" else f"chat_template_kwargs={plain(names)}"
        if options.tools:
            option = f"tools={plain(options.tools)}"
        raise ConfigError(
            f"dataset.{option} needs a chat template, and the tokenizer has none. Try dataset.chat_template=auto and "
            "no dataset.chat_template_kwargs, or tokenizer=DIR_OR_HUB_ID, that of a chat model."
        )
    words = _words(template)
    for variable in names:
        if variable not in words:
            raise ConfigError(
                f"dataset.chat_template_kwargs sets {variable}, which the tokenizer's chat template does not read."
                f"{suggestion(variable, words)} Give variables of the template, or leave it out."
            )
    return template


@cache
def _words(template: str) -> list[str]:
    """All identifiers in a chat template; its variables are among them."""
    return sorted(set(re.findall(r"[a-zA-Z_]\w*", template)) - SET_HERE)


def _templated(
    messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, options: DatasetConfig, example: Example
) -> str:
    from jinja2 import TemplateError

    given = variables(options)
    if options.tools:
        from specrl.run.tools import load_tools

        given["tools"] = load_tools(tuple(options.tools))[1]
    begun = messages[-1]["role"] == "assistant"
    given |= {"continue_final_message": True} if begun else {"add_generation_prompt": True}
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **given)
    except TemplateError as error:  # for example a template that does not accept system messages
        raise ConfigError(
            f"The tokenizer's chat template refuses the messages of {name(example)}: {error}. Change the roles, leave "
            "out dataset.system_prompt, or set dataset.chat_template=off."
        ) from error
    assert isinstance(text, str), "With tokenize=False a chat template gives text."
    return text


def variables(options: DatasetConfig) -> dict[str, Any]:
    """The variables of the chat template."""
    return {name: _value(text) for name, text in options.chat_template_kwargs.items()}


def _value(text: str) -> Any:
    """The value of an entry of `dataset.chat_template_kwargs`: parsed as JSON if possible (false, 5), else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def described(example: Example, tokenizer: PreTrainedTokenizerBase, options: DatasetConfig) -> list[str]:
    """Two lines: whether a chat template is applied, and one rendered prompt, shortened to 80 characters."""
    set_by = f"dataset.chat_template={options.chat_template}"
    if chat_template(tokenizer, options):
        names = options.chat_template_kwargs
        how = f"the tokenizer's ({set_by}{f', {plain(names)}' if names else ''})"
    else:
        how = f"not used ({set_by})" if options.chat_template == "off" else f"the tokenizer has none ({set_by})"
    return [f"Chat template: {how}.", f"A prompt: {shortened(repr(render(example, tokenizer, options).text), 68)}"]


def shortened(text: str, width: int) -> str:
    """The text, with the middle of a longer one cut out, because a chat template writes at both ends."""
    if len(text) <= width:
        return text
    return f"{text[: width // 2 - 1]}…{text[-(width - width // 2) :]}"


def seen(
    examples: Sequence[Example],
    responses: Sequence[str | list[dict[str, Any]]],
    tokenizer: PreTrainedTokenizerBase,
    options: DatasetConfig,
) -> list[Sample]:
    """The input of reward functions for one response to each example. Args: responses: texts, or messages each."""
    pairs = zip(examples, responses, strict=True)
    return [render(example, tokenizer, options).sample(text) for example, text in pairs]


def name(example: Example) -> str:
    """The source of an example, or else its id, for messages."""
    return example.source or f"example {example.id}"


def check_lengths(
    examples: Iterable[Example], tokenizer: PreTrainedTokenizerBase, options: DatasetConfig, limit: int | None = None
) -> int:
    """The number of tokens of the longest prompt, after a check against the limits.

    Args: limit: tokens that the model's context leaves for a prompt, besides the limit in `options`; None for none.

    Raises:
        ConfigError: prompts are too long; names their number, the longest, its source and the option to set.
    """
    lengths = [(len(render(e, tokenizer, options).ids), name(e)) for e in examples]
    longest, which = max(lengths, key=lambda pair: pair[0], default=(0, ""))
    rule = "dataset.max_prompt_tokens"
    remedy = f"Set dataset.max_prompt_tokens={longest}"
    if limit is None or options.max_prompt_tokens <= limit:
        limit = options.max_prompt_tokens
    else:
        rule = "the model's context less rollout.max_new_tokens"
        remedy = "Lower rollout.max_new_tokens"
    if over := sum(length > limit for length, _ in lengths):
        raise ConfigError(
            f"{over} of {len(lengths)} prompts have more than {limit} tokens ({rule}); the longest has {longest} "
            f"({which}). {remedy}, or take those rows out."
        )
    return longest
