"""A server reads back what was written into a keyed request, and rejects everything else."""

import pytest

from specrl.rollout.engines.vllm.wire import KeyedRequest, pack_text
from specrl.rollout.types import RolloutError

GOOD = KeyedRequest(-(1 << 63), 4, "g", ((5, 6, 7), (8,)), own=1)


def test_what_is_written_is_read():
    assert KeyedRequest.read(GOOD.extra_args()) == GOOD
    assert KeyedRequest.read({**GOOD.extra_args(), "others": 1}) == GOOD
    short = KeyedRequest(3, 4, "g")
    sent = {name: value for name, value in short.extra_args().items() if name not in ("specrl_texts", "specrl_own")}
    assert KeyedRequest.read(sent) == short
    assert KeyedRequest.read({"others": 1}) is KeyedRequest.read({}) is KeyedRequest.read(None) is None


@pytest.mark.parametrize("missing", ["specrl_key", "specrl_prompt_tokens", "specrl_group"])
def test_an_entry_that_is_missing_is_named(missing):
    sent = {name: value for name, value in GOOD.extra_args().items() if name != missing}
    with pytest.raises(RolloutError, match=f"lacks {missing}"):
        KeyedRequest.read(sent)


def test_a_misspelt_entry_is_named_and_not_ignored():
    with pytest.raises(RolloutError, match=r"'specrl_kye'.*Did you mean specrl_key\?"):
        KeyedRequest.read({"specrl_kye": 3})


@pytest.mark.parametrize(
    ("entry", "values"),
    [
        ("specrl_key", [None, "7", 1.0, True, 1 << 63, -(1 << 63) - 1, [3]]),
        ("specrl_prompt_tokens", [None, "4", 4.0, True, 0, -1, 1 << 31]),
        ("specrl_group", [None, 3, b"g", ["g"]]),
        ("specrl_own", [None, "0", 0.0, True, 2, -2]),
        ("specrl_texts", [None, 3, "x", {"a": 1}]),
        ("specrl_texts", [[text] for text in ("x", "AAA=", "AAAA", "!!!!", "é", None, 3, b"AAAAAA==x", ["AAAAAA=="])]),
    ],
)
def test_a_value_that_cannot_be_is_named(entry, values):
    for value in values:
        with pytest.raises(RolloutError, match=entry):
            KeyedRequest.read({**GOOD.extra_args(), entry: value})


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ([""] * 100_000, "has 100000 texts, the first 64 of 0 bytes"),
        (["!" * 3_000_000] * 6, "has 6 texts, the first 6 of 18000000 bytes"),
    ],
)
def test_more_texts_than_a_request_may_bring_are_refused_before_they_are_unpacked(texts, said):
    """An exclamation mark is no base64, so unpacking one would have been another error."""
    with pytest.raises(RolloutError, match=said):
        KeyedRequest.read({**GOOD.extra_args(), "specrl_texts": texts})
    most = [pack_text([5] * 100_000)] * 31
    assert len(KeyedRequest.read({**GOOD.extra_args(), "specrl_texts": most}).texts) == 31


@pytest.mark.parametrize("own", [0, 1])
def test_a_request_drafts_first_from_its_own_text(own):
    request = KeyedRequest(3, 4, "g", ((5, 6, 7), (8, 9)), own)
    drafter = request.drafter({}, [1, 2, 3, 4])
    assert tuple(drafter.propose([], 9)) == request.texts[own]
    assert drafter.source == "prefix"


def test_ids_of_another_model_are_guesses():
    """They are never accepted; drafters omit them."""
    sent = {**GOOD.extra_args(), "specrl_texts": [pack_text([1 << 30, -1, 5]), ""]}
    assert KeyedRequest.read(sent).texts == ((1 << 30, -1, 5), ())
