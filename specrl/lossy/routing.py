"""What a reasoning step is worth: process rewards of a run, and Monte-Carlo values under its policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from reward.process import MonteCarloValue, Prefix, TransformersPRM
from rollout.keys import derive_key
from rollout.types import Request
from specrl.run.data import Example
from specrl.run.policy import device, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from reward.set import RewardSet
    from rollout.lossy.router import Scorer
    from rollout.lossy.steps import Candidate, Step
    from specrl.config.schema import Config
    from specrl.lossy.pair import Pair


def prefix(candidate: Candidate, step: Step, example: Example, tokenizer: PreTrainedTokenizerBase) -> Prefix:
    """What a process reward sees when the response goes on with `step`."""
    steps = [*candidate.history, step]
    texts = tokenizer.batch_decode([s.tokens for s in steps], skip_special_tokens=True)
    tokens = (*candidate.prompt, *(token for s in steps for token in s.tokens))
    finished = step.end == "eos"
    return Prefix(str(example.prompt), tuple(texts), example.answer, example.fields, finished, tokens)


def step_scorer(config: Config) -> Scorer | None:
    """Process rewards of draft steps for `rollout.routed.by=rsd`, NaN where there is none; None for other routers."""
    if (config.rollout.law, config.rollout.routed.by) != ("routed", "rsd"):
        return None
    tokenizer, prm = load_tokenizer(config), TransformersPRM(config.rollout.routed.path, str(device(config)))

    def scores(candidates: Sequence[Candidate]) -> list[float]:
        prompts = tokenizer.batch_decode([c.prompt for c in candidates], skip_special_tokens=True)
        given = zip(candidates, prompts, strict=True)
        found = prm([prefix(c, c.step, Example("", prompt, None, {}), tokenizer) for c, prompt in given])
        return [float("nan") if value is None else value for value in found]

    return scores


class StepValues:
    """Monte-Carlo values of prefixes under the policy; a prefix is valued once, NaN where the reward gave nothing.

    Args:
        pair: the policy finishes the responses, at the run's sampling law.
        rewards: scores them, 0 to 1.
        continuations: responses per prefix.
        seed: of their noise, which is the same for every prefix, so that two steps are compared under equal luck.
    """

    def __init__(self, pair: Pair, rewards: RewardSet, continuations: int, seed: int):
        self._pair, self._engine = pair, pair.plain(pair.policy)
        self._keys = [derive_key(seed, "value", i, 0) for i in range(continuations)]
        self._value = MonteCarloValue(self._continue, lambda samples: rewards.score(samples).total)
        self._known: dict[tuple[int, ...], float] = {}
        self.decoded = 0
        """Tokens spent on continuations."""

    def __call__(self, prefixes: Sequence[Prefix]) -> list[float]:
        new = {p.tokens: p for p in prefixes if p.tokens not in self._known}
        for tokens, value in zip(new, self._value(list(new.values())) if new else [], strict=True):
            self._known[tokens] = float("nan") if value is None else value
        return [self._known[p.tokens] for p in prefixes]

    def _continue(self, prefixes: Sequence[Prefix]) -> list[list[str]]:
        cap, count = self._pair.config.rollout.max_new_tokens, len(self._keys)
        done, _ = self._engine.generate([Request(p.tokens, key, cap) for p in prefixes for key in self._keys])
        self.decoded += sum(len(c.tokens) for c in done)
        texts = self._pair.tokenizer.batch_decode([c.tokens for c in done], skip_special_tokens=True)
        return [texts[i : i + count] for i in range(0, len(texts), count)]


def advantage(
    pair: Pair,
    values: StepValues,
    examples: Sequence[Example],
    seen: Callable[[Candidate, Example, float, float], None] = lambda *_: None,
) -> Scorer:
    """The oracle's scorer: value of the policy's step less that of the draft's.

    Args: examples: of the requests, in their order; seen: told candidate, example, s_d and s_t of every step.
    """

    def scores(candidates: Sequence[Candidate]) -> list[float]:
        owners = [examples[c.row] for c in candidates]
        steps = [(c, step, e) for c, e in zip(candidates, owners, strict=True) for step in (c.step, c.rival)]
        found = values([prefix(c, step, e, pair.tokenizer) for c, step, e in steps])
        pairs = list(zip(found[::2], found[1::2], strict=True))
        for candidate, example, (s_d, s_t) in zip(candidates, owners, pairs, strict=True):
            seen(candidate, example, s_d, s_t)
        return [s_t - s_d for s_d, s_t in pairs]

    return scores
