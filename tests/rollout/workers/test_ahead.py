"""Rollouts ahead without workers: an engine that can be stopped, and the requests of the coming batch."""

from itertools import count

import pytest

from specrl.rollout.drafting.suffix import PromptTexts, SuffixDrafter
from specrl.rollout.types import AheadText, Request
from specrl.rollout.workers.ahead import Ahead
from tests.engines import local
from tests.rollout.golden import SAMPLING, prompts_and_caps, requests_of


def after(passes):
    """A `stop` that allows so many passes."""
    asked = count()
    return lambda: next(asked) >= passes


# An engine that can be stopped ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cases():
    return prompts_and_caps(12)


@pytest.mark.parametrize("passes", [0, 2, 13])
def test_a_stop_lets_no_further_pass_begin_and_what_is_there_is_a_beginning(tiny, cases, passes):
    engine = local(tiny("qwen3"), SAMPLING, tokens_per_pass=8)
    whole, _ = engine.generate(requests_of(cases))
    begun, forward = [], engine.policy.decoder.forward

    def counted(*args, **kwargs):
        begun.append(1)
        return forward(*args, **kwargs)

    engine.policy.decoder.forward = counted
    try:
        texts = engine.ahead(requests_of(cases), after(passes))
    finally:
        del engine.policy.decoder.forward
    assert len(begun) == passes, "prefill, passes of a part of the rows and near ties too"
    for text, c in zip(texts, whole, strict=True):
        assert list(text.tokens) == c.tokens[: len(text.tokens)]
        assert text.finish in (None, c.finish)
        assert (text.finish is not None) == (len(text.tokens) == len(c.tokens))
    assert [c.tokens for c in engine.generate(requests_of(cases))[0]] == [c.tokens for c in whole]


# The coming batch -----------------------------------------------------------------------------------------------------


def asked(*prompts, expected=None):
    """One request for each prompt, with key 0, 1, ..."""
    return [Request([8 + p], key, 20, expected_tokens=(expected or {}).get(p, 10)) for key, p in enumerate(prompts)]


def keys_of(requests):
    return sorted(request.key for request in requests)


def test_idle_workers_get_the_longest_share_that_nobody_works_on():
    ahead = Ahead()
    ahead.plan(asked(0, 0, 1, 1, 2, 2, expected={0: 5, 1: 30, 2: 10}))
    first, second = ahead.share(3), ahead.share(2)
    assert keys_of(first) == [2, 3], "the prompt with the most tokens to come"
    assert keys_of(second) == [4, 5]
    assert keys_of(ahead.share(1)) == [0, 1]
    assert ahead.share(1) == []
    ahead.forget(second)
    assert keys_of(ahead.share(1)) == [4, 5], "of a worker that died"
    ahead.learn(first, [AheadText([3, 4], None), AheadText([5, 1], "stop")], 2.0)
    (again,) = ahead.share(1)
    assert again.key == 2, "what has ended is not asked for again"
    assert again.drafter.propose([], 9) == [3, 4], "the rest continues its text so far"
    texts, seconds = ahead.take()
    assert (texts, seconds) == ({2: AheadText([3, 4], None), 3: AheadText([5, 1], "stop")}, 2.0)
    assert (ahead.take(), ahead.share(1)) == (({}, 0.0), []), "it is over"


@pytest.mark.parametrize(
    ("later", "kept"),
    [
        (AheadText([3], None), [3, 4, 5]),
        (AheadText([3, 9], None), [3, 9]),  # new weights wrote something else
        (AheadText([3, 4], "stop"), [3, 4]),
        (AheadText([3, 4, 5, 6], None), [3, 4, 5, 6]),
    ],
    ids=["a beginning of it", "another", "ended", "longer"],
)
def test_a_text_that_is_only_the_beginning_of_an_earlier_one_replaces_it_not(later, kept):
    ahead = Ahead()
    ahead.plan(asked(0))
    for text in (AheadText([3, 4, 5], None), later):
        ahead.learn(ahead.share(1), [text], 1.0)
    assert ahead.take()[0][0].tokens == kept


def test_what_is_no_longer_wanted_is_not_kept():
    ahead = Ahead()
    ahead.plan(asked(0, 1))
    late = ahead.share(1)
    ahead.plan(asked(0))
    ahead.learn(late, [AheadText([3], None)] * 2, 1.0)
    assert list(ahead.take()[0]) == [0]


def test_what_was_rolled_out_ahead_is_followed_first_and_after_a_mismatch():
    texts = PromptTexts([[2, 3, 4, 5, 6, 7]])
    drafter = SuffixDrafter(texts, old=[2, 3, 4, 5, 6, 7], keyed=[9, 8, 7, 6, 5, 4])
    assert (drafter.propose([], 3), drafter.source) == ([9, 8, 7], "ahead")
    assert (drafter.propose([9, 8, 30], 3), drafter.source) == ([6, 5, 4], "ahead")
