"""Rewards of reasoning steps: how good a response is so far.

A process reward model answers from experience; Monte-Carlo values answer from the verifiable reward, by finishing the
response several times. Both are 0 to 1. As everywhere in this package, what cannot be scored is None, never 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer

from specrl.reward.base import RewardError, Sample


@dataclass(frozen=True)
class Prefix(Sample):
    """A response up to the end of one of its steps: `completion` is the text so far."""

    finished: bool = False  # the response has ended
    tokens: tuple[int, ...] = ()  # prompt and response as token ids, for scorers that generate


def monte_carlo(
    prefixes: Sequence[Prefix],
    continuations: Callable[[Sequence[Prefix]], Sequence[Sequence[str]]],
    score: Callable[[Sequence[Sample]], Sequence[float | None]],
) -> list[float | None]:
    """Values of prefixes: mean rewards of several continuations; chances of success under the 0/1 math reward.

    With n continuations a value v has the standard error sqrt(v (1 - v) / n). Needs no process reward model and is the
    ground truth of those that are trained (Math-Shepherd, arXiv 2312.08935).

    Args:
        continuations: for each unfinished prefix, the texts that follow it; handed in, as generating is not known here.
        score: rewards of whole responses, 0 to 1, None for what has none.
    """
    open_ = [prefix for prefix in prefixes if not prefix.finished]
    following = iter(continuations(open_) if open_ else [])
    texts = [[""] if prefix.finished else next(following) for prefix in prefixes]
    samples = [
        Sample(prefix.prompt, prefix.completion + text, prefix.answer, prefix.fields, prefix.messages)
        for prefix, group in zip(prefixes, texts, strict=True)
        for text in group
    ]
    found = iter(score(samples))
    groups = [[value for value in islice(found, len(group)) if value is not None] for group in texts]
    return [sum(group) / len(group) if group else None for group in groups]


class TransformersPRM:
    """A process reward model: a transformers classifier read at the last token of the step.

    Token classifiers and sequence classifiers over a decoder-only model both work, with one output (a logit) or two
    (the second is "good"). Models that need their own code are not run.

    Args:
        source: directory or hub id.
        device: where it runs.
        rows_per_pass: prefixes scored together.

    Raises:
        RewardError: it cannot be loaded, or is no classifier of one or two classes.
    """

    def __init__(self, source: str, device: str = "cpu", rows_per_pass: int = 32):
        try:
            names = AutoConfig.from_pretrained(source).architectures or [""]
            by_token = names[0].endswith("ForTokenClassification")
            kind = AutoModelForTokenClassification if by_token else AutoModelForSequenceClassification
            self._model = kind.from_pretrained(source, dtype=torch.float32).eval().to(device)
            self._tokenizer = AutoTokenizer.from_pretrained(source)
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise RewardError(f"the process reward model {source} cannot be loaded: {reason}") from error
        if self._model.config.num_labels not in (1, 2):
            raise RewardError(
                f"the process reward model {source} has {self._model.config.num_labels} classes; use one with 1 or 2"
            )
        self._rows_per_pass = rows_per_pass

    def __call__(self, prefixes: Sequence[Sample]) -> list[float | None]:
        """How good each response is so far, None for a value that is no number."""
        starts = range(0, len(prefixes), self._rows_per_pass)
        return [value for i in starts for value in self._score(prefixes[i : i + self._rows_per_pass])]

    def _score(self, prefixes: Sequence[Sample]) -> list[float | None]:
        texts = [prefix.prompt + prefix.completion for prefix in prefixes]
        inputs = [torch.tensor(self._tokenizer(text)["input_ids"]) for text in texts]
        ids = pad_sequence(inputs, batch_first=True).to(self._model.device)
        last = torch.tensor([len(row) - 1 for row in inputs], device=ids.device)
        mask = (torch.arange(ids.shape[1], device=ids.device) <= last[:, None]).long()
        with torch.inference_mode():
            hidden = self._model.base_model(input_ids=ids, attention_mask=mask)[0]
            logits = self._model.score(hidden[torch.arange(len(inputs), device=ids.device), last]).float()
        good = logits.sigmoid()[:, 0] if logits.shape[-1] == 1 else logits.softmax(-1)[:, 1]
        return [value if value == value else None for value in good.tolist()]
