"""Values of partial responses: how good a response is after some of its reasoning steps.

A process reward model (PRM) predicts them; Monte-Carlo values estimate them from the verifiable reward, by finishing
the response several times. Both lie between 0 and 1. A prefix that cannot be scored has the value None, never 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from math import isnan
from statistics import fmean

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
    """Values of prefixes: the mean reward of several continuations, which is the chance of success for a 0/1 reward.

    With n continuations a value v has the standard error sqrt(v (1 - v) / n). PRMs are trained towards these values
    (Math-Shepherd, arXiv 2312.08935).

    Args:
        continuations: returns, for each unfinished prefix, the texts that follow it.
        score: rewards of complete responses, 0 to 1, None for one that cannot be scored.
    """
    unfinished = [prefix for prefix in prefixes if not prefix.finished]
    generated = iter(continuations(unfinished) if unfinished else [])
    endings = [[""] if prefix.finished else next(generated) for prefix in prefixes]
    samples = [
        Sample(prefix.prompt, prefix.completion + ending, prefix.answer, prefix.fields, prefix.messages)
        for prefix, group in zip(prefixes, endings, strict=True)
        for ending in group
    ]
    scores = iter(score(samples))
    values: list[float | None] = []
    for group in endings:
        known = [value for value in islice(scores, len(group)) if value is not None]
        values.append(fmean(known) if known else None)
    return values


class TransformersPRM:
    """A process reward model: a transformers classifier, evaluated at the last token of the step.

    Token classifiers and sequence classifiers over a decoder-only model both work, with one output (a logit) or two
    (the second is "good"). Remote code is not run.

    Args:
        source: directory or hub id.
        rows_per_pass: prefixes in a forward pass.

    Raises:
        RewardError: the model cannot be loaded, or is not a classifier with one or two classes.
    """

    def __init__(self, source: str, device: str = "cpu", rows_per_pass: int = 32):
        try:
            architectures = AutoConfig.from_pretrained(source).architectures or [""]
            by_token = architectures[0].endswith("ForTokenClassification")
            model_class = AutoModelForTokenClassification if by_token else AutoModelForSequenceClassification
            self._model = model_class.from_pretrained(source, dtype=torch.float32).eval().to(device)
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
        """The value of each prefix, None where the model returned NaN."""
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
        return [None if isnan(value) else value for value in good.tolist()]
