"""Templates for conversations with tools, of the chat templates that TRL knows."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from trl.chat_template_utils import (
    add_response_schema,
    get_training_chat_template,
    is_chat_template_prefix_preserving,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def adapt(tokenizer: PreTrainedTokenizerBase) -> None:
    """As TRL does for tools: a response template if there is none, and a chat template that only appends.

    Nothing changes where TRL does not know the chat template; the tokenizer is saved with what was set.
    """
    with suppress(ValueError):
        if getattr(tokenizer, "response_template", None) is None:
            add_response_schema(tokenizer)
    with suppress(ValueError):
        if not is_chat_template_prefix_preserving(tokenizer) and (template := get_training_chat_template(tokenizer)):
            tokenizer.chat_template = template
