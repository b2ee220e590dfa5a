"""An example as the policy sees it: the text of its prompt, and the token ids of that text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reward.base import Sample
from specrl.config.options import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from specrl.run.data import Example


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


def render(example: Example, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    """The prompt with token ids as TRL makes them: the chat template for messages, the tokenizer's plain call for text.

    Messages for a tokenizer without a chat template become plain text, one blank line between them.
    """
    given, quiet = example.prompt, {"verbose": False}  # `check_lengths` says which texts are long
    if isinstance(given, str):
        return Prompt(list(tokenizer(given, **quiet)["input_ids"]), given, None)
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=True)
        return Prompt(list(tokenizer(text, add_special_tokens=False, **quiet)["input_ids"]), text, given)
    text = "\n\n".join(message["content"] for message in given)
    return Prompt(list(tokenizer(text, **quiet)["input_ids"]), text, given)


def seen(examples: Sequence[Example], responses: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    """What rewards see of one response to each example."""
    said = zip(examples, responses, strict=True)
    return [render(e, tokenizer).sample(text, e.answer, e.fields) for e, text in said]


def check_lengths(
    examples: Iterable[Example], tokenizer: PreTrainedTokenizerBase, max_prompt_tokens: int, room: int | None = None
) -> int:
    """The longest prompt's tokens. Refuses more than `max_prompt_tokens` or `room`: the context less max_new_tokens.

    Raises:
        ConfigError: how many are too long, the longest, where it is and the key to set.
    """
    lengths = [(len(render(example, tokenizer).ids), example.place or f"example {example.id}") for example in examples]
    longest, which = max(lengths, key=lambda pair: pair[0], default=(0, ""))
    limit, rule, remedy = max_prompt_tokens, "dataset.max_prompt_tokens", f"Set dataset.max_prompt_tokens={longest}"
    if room is not None and room < limit:
        limit, rule, remedy = room, "the model's context less rollout.max_new_tokens", "Lower rollout.max_new_tokens"
    if over := sum(length > limit for length, _ in lengths):
        raise ConfigError(
            f"{over} of {len(lengths)} prompts have more than {limit} tokens ({rule}); the longest has {longest} "
            f"({which}). {remedy}, or take those rows out."
        )
    return longest
