"""Keyed requests to a vLLM server on Model Runner V2. test_vllm_v2.py runs this file under vllm_shim.

test_vllm_served.py tests what V1 supports too. This file tests features of V2 only, and faults planted on its device.
"""

from unittest import mock

import pytest

from specrl.rollout.engines.vllm import sampler
from specrl.rollout.engines.vllm.wire import KeyedRequest
from specrl.rollout.types import RolloutError
from tests.rollout.engines.vllm.device_cases import trusting
from tests.rollout.engines.vllm.servers import Served, arguments, logprobs, start_served, tokens
from tests.rollout.golden import EOS_IDS, all_wrong

PARAMS = [
    {"repetition_penalty": 1.4},
    {"presence_penalty": 0.7, "frequency_penalty": 0.5, "temperature": 0.8},
    {"presence_penalty": 0.5, "top_k": 9, "top_p": 0.9},
    {"allowed_token_ids": list(range(1, 40))},
    {"repetition_penalty": 1.4, "temperature": 0.0},
]


def test_params_that_vllm_applies_are_served_with_drafts_as_without(served, requests, plain):
    """Requests of one batch, each with one of these sampling params."""

    def ask(texts):
        asked = zip(requests, texts, strict=True)
        return served.ask_with(
            [(list(r.prompt), served.params(r, text, **PARAMS[i % 5])) for i, (r, text) in enumerate(asked)]
        )

    want = ask([[]] * len(requests))
    slow = served.steps
    for i in range(5):
        assert tokens(want)[i::5] != plain[0][i::5], "control: the params are applied"
    for change in (list, all_wrong):
        done = ask([[change(text)] for text in tokens(want)])
        assert tokens(done) == tokens(want)
        assert [logprobs(output) for output in done] == [logprobs(output) for output in want], "bit for bit"
        assert change is all_wrong or served.steps < slow / 2


def test_requests_without_a_key_are_those_of_an_engine_without_us(served, requests, plain, saved):
    from specrl.rollout.engines.vllm.engine import shut_down

    # without top-k and top-p, as vLLM's kernel for them does not run in the interpreter
    theirs = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 7}, {"temperature": 0.6, "seed": 3}]
    asked = [(list(r.prompt), served.vllm_params(r, **theirs[i % 3])) for i, r in enumerate(requests[:9])]
    other = Served.__new__(Served)
    other.llm = start_served(saved("qwen3")[1], {})
    want = other.ask_with(asked)
    with mock.patch("gc.collect"):
        shut_down(other.llm, True)
    keyed = [(list(r.prompt), served.params(r, [text])) for r, text in zip(requests[:9], plain[0], strict=False)]
    done = served.ask_with([pair for both in zip(keyed, asked, strict=True) for pair in both])
    assert tokens(done[::2]) == plain[0][:9]
    assert tokens(done[1::2]) == tokens(want)
    assert [logprobs(output) for output in done[1::2]] == [logprobs(output) for output in want], "bit for bit"


def test_control_a_draft_that_is_not_verified_is_found(served, requests, plain, monkeypatch):
    monkeypatch.setattr(sampler.KeyedVerifier, "accept", trusting())
    wrong = tokens(served.ask(requests, [all_wrong(text) for text in plain[0]], logprobs=None))
    assert sum(a != b for a, b in zip(wrong, plain[0], strict=True)) > 13


def test_only_keyed_requests_with_texts_carry_drafts(served, requests, plain):
    few, texts = requests[:6], plain[0][:6]
    served.ask(few)
    served.ask(few, keyed=False, temperature=0.0)
    served.ask(few, texts, plain=True)
    assert served.flow.stats.drafted == 0
    served.ask(few, texts)
    assert served.flow.stats.drafted > 0
    assert not served.flow.requests.keys() & served.core.scheduler.requests.keys()
    served.ask(requests[:1])
    assert len(served.flow.requests) <= 1, "finished requests are forgotten"


def test_params_that_vllm_refuses_with_drafts_are_refused_request_by_request(served, requests, plain):
    from vllm.exceptions import VLLMValidationError

    for params in ({"min_p": 0.1}, {"logit_bias": {3: 1.0}}):
        with pytest.raises(VLLMValidationError, match="min_p and logit_bias"):
            served.ask(requests[:1], **params)
    assert tokens(served.ask(requests[:1])) == plain[0][:1], "the server serves on"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"async_scheduling": False}, "async_scheduling=False"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, "speculative method ngram"),
    ],
)
def test_a_server_that_was_started_otherwise_says_so(saved, change, named):
    with pytest.raises(RolloutError, match=named):
        start_served(saved("qwen3")[1], {**arguments(), **change})


def test_the_wire_is_what_an_http_server_takes():
    """`vllm_xargs` of vLLM's HTTP servers accepts numbers, strings and lists of them."""
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    wire = KeyedRequest(-(1 << 63) + 1, 4, "g", ((5, 6, 7), (8,)), own=0)
    body = {"prompt": [1, 2], "vllm_xargs": wire.extra_args(), "stop_token_ids": list(EOS_IDS)}
    taken = CompletionRequest.model_validate_json(CompletionRequest(**body).model_dump_json())
    assert KeyedRequest.read(taken.to_sampling_params(9, {}).extra_args) == wire
