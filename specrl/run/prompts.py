"""An example as the policy sees it: the text of its prompt, and the token ids of that text."""

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
"""What a chat template, or the tokenizer that runs it, is given in any case."""


@dataclass(frozen=True)
class Prompt:
    """A prompt of which everything is known: what engines, people and rewards get of it."""

    ids: list[int]
    text: str
    """What `ids` were made from: with a chat template its whole output, special tokens included."""
    messages: list[dict[str, Any]] | None
    """Of a chat; None where the prompt is plain text."""

    def sample(self, completion: str, answer: str | None, fields: dict[str, Any]) -> Sample:
        """What rewards see of a response to it."""
        return Sample(self.text, completion, answer, fields, self.messages)


def render(example: Example, tokenizer: PreTrainedTokenizerBase, options: DatasetConfig) -> Prompt:
    """The prompt with token ids as TRL makes them: by the chat template, or the tokenizer's plain call for text.

    With a chat template plain text is the message of a user. Messages without one become plain text, one blank line
    between them.

    Raises:
        ConfigError: the options ask for a chat template that the tokenizer has not, or that refuses the messages.
    """
    given, quiet = example.prompt, {"verbose": False}  # `check_lengths` says which texts are long
    messages = None if isinstance(given, str) else given
    if not chat_template(tokenizer, options):
        text = given if isinstance(given, str) else "\n\n".join(message["content"] for message in given)
        return Prompt(list(tokenizer(text, **quiet)["input_ids"]), text, messages)
    messages = messages or [{"role": "user", "content": given}]
    text = _templated(messages, tokenizer, options, example.place or f"example {example.id}")
    return Prompt(list(tokenizer(text, add_special_tokens=False, **quiet)["input_ids"]), text, messages)


def chat_template(tokenizer: PreTrainedTokenizerBase, options: DatasetConfig) -> str:
    """The chat template that prompts go through, empty where they go through none.

    Raises:
        ConfigError: the options need one and the tokenizer has none, or a variable is none of the template's.
    """
    if options.chat_template == "off":
        return ""
    template, given = tokenizer.get_chat_template() if tokenizer.chat_template else "", options.chat_template_kwargs
    if not template and (options.chat_template == "on" or given):
        asked = "chat_template=on" if options.chat_template == "on" else f"chat_template_kwargs={plain(given)}"
        raise ConfigError(
            f"dataset.{asked} needs a chat template, and the tokenizer has none. Try dataset.chat_template=auto and no "
            "dataset.chat_template_kwargs, or tokenizer=DIR_OR_HUB_ID, that of a chat model."
        )
    for name in given:
        if name not in (words := _words(template)):
            raise ConfigError(
                f"dataset.chat_template_kwargs sets {name}, which the tokenizer's chat template does not read."
                f"{suggestion(name, words)} Give variables of the template, or leave it out."
            )
    return template


@cache
def _words(template: str) -> list[str]:
    """The words of a chat template, of which its variables are some."""
    return sorted(set(re.findall(r"[a-zA-Z_]\w*", template)) - SET_HERE)


def _templated(
    messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, options: DatasetConfig, place: str
) -> str:
    from jinja2 import TemplateError

    variables = {name: _value(text) for name, text in options.chat_template_kwargs.items()}
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **variables)
    except TemplateError as error:  # such as a template without a place for system messages
        raise ConfigError(
            f"The tokenizer's chat template refuses the messages of {place}: {error}. Change the roles, leave out "
            "dataset.system_prompt, or set dataset.chat_template=off."
        ) from error
    assert isinstance(text, str), "With tokenize=False a chat template gives text."
    return text


def _value(text: str) -> Any:
    """What a word of `dataset.chat_template_kwargs` means: JSON such as false or 5, else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def described(example: Example, tokenizer: PreTrainedTokenizerBase, options: DatasetConfig) -> list[str]:
    """Whether prompts go through a chat template, and one of them on a line of at most 80 characters."""
    set_by = f"dataset.chat_template={options.chat_template}"
    if chat_template(tokenizer, options):
        given = options.chat_template_kwargs
        how = f"the tokenizer's ({set_by}{f', {plain(given)}' if given else ''})"
    else:
        how = f"not used ({set_by})" if options.chat_template == "off" else f"the tokenizer has none ({set_by})"
    return [f"Chat template: {how}.", f"A prompt: {shortened(repr(render(example, tokenizer, options).text), 68)}"]


def shortened(text: str, width: int) -> str:
    """The text, or of a longer one as much of its beginning as of its end: a template writes there."""
    if len(text) <= width:
        return text
    return f"{text[: width // 2 - 1]}…{text[-(width - width // 2) :]}"


def seen(
    examples: Sequence[Example],
    responses: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    options: DatasetConfig,
) -> list[Sample]:
    """What rewards see of one response to each example."""
    said = zip(examples, responses, strict=True)
    return [render(e, tokenizer, options).sample(text, e.answer, e.fields) for e, text in said]


def check_lengths(
    examples: Iterable[Example], tokenizer: PreTrainedTokenizerBase, options: DatasetConfig, room: int | None = None
) -> int:
    """The longest prompt's tokens. Refuses more than `options` admit or `room`: the context less max_new_tokens.

    Raises:
        ConfigError: how many are too long, the longest, where it is and the key to set.
    """
    lengths = [(len(render(e, tokenizer, options).ids), e.place or f"example {e.id}") for e in examples]
    longest, which = max(lengths, key=lambda pair: pair[0], default=(0, ""))
    limit, rule = options.max_prompt_tokens, "dataset.max_prompt_tokens"
    remedy = f"Set dataset.max_prompt_tokens={longest}"
    if room is not None and room < limit:
        limit, rule, remedy = room, "the model's context less rollout.max_new_tokens", "Lower rollout.max_new_tokens"
    if over := sum(length > limit for length, _ in lengths):
        raise ConfigError(
            f"{over} of {len(lengths)} prompts have more than {limit} tokens ({rule}); the longest has {longest} "
            f"({which}). {remedy}, or take those rows out."
        )
    return longest
