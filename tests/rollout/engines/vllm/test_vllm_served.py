"""Keyed requests to a plain vLLM server: the texts sent with them change its number of steps and no token.

One engine runs in this process, started as usual with `ENGINE_ARGS`. Requests use vLLM's API. This file tests Model
Runner V1; test_vllm_v2.py runs it on V2.
"""

import asyncio
import itertools
import random

import pytest

from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.engines.local.engine import TransformersEngine
from specrl.rollout.engines.vllm import planned_v1
from specrl.rollout.engines.vllm.wire import KeyedRequest
from specrl.rollout.types import EngineStats, Request, RolloutError
from specrl.rollout.verify import Accepted
from specrl.session import ReuseSession
from tests.rollout.engines.vllm.engines import RUNNER, needs_vllm, on_v1, spec_of
from tests.rollout.engines.vllm.servers import arguments, keep_async, logprobs, start_served, tokens
from tests.rollout.golden import EOS_IDS, VOCAB, all_wrong, corrupt

pytestmark = needs_vllm


def test_without_texts_it_samples_as_the_transformers_engine(served, requests, plain):
    want, stats = TransformersEngine(served.model, SamplingParams(EOS_IDS)).generate(requests)
    assert stats.ties == 0
    assert plain[0] == [c.tokens for c in want]
    got = [p for row in plain[1] for p in row]
    assert got == pytest.approx([p for c in want for p in c.logprobs], abs=1e-4)
    late = 2 if RUNNER == "v2" else 0  # it receives a step's tokens when the next one runs
    drafted = 3 if RUNNER == "v1" else 0  # prompts are drafted without texts
    assert -drafted <= plain[2] - max(map(len, plain[0])) <= late, "about a token a step"


@pytest.mark.parametrize("window", [8, pytest.param(0, marks=on_v1)])
def test_texts_change_the_number_of_steps_and_nothing_else(served, requests, plain, window):
    rng = random.Random(0)
    served.flow.drafting.budget.window = window  # 0: the measured costs decide
    for change in (list, all_wrong, lambda text: corrupt(text, rng, 0.1), lambda _: [VOCAB, -1, 1 << 30]):
        outputs = served.ask(requests, [change(text) for text in plain[0]])
        assert tokens(outputs) == plain[0]
        assert [logprobs(output) for output in outputs] == plain[1], "bit for bit"
        if (change, window) == (list, 8):
            assert served.steps < plain[2] / (3 if RUNNER == "v1" else 2)
    served.flow.drafting.budget.window = 8


@on_v1
def test_control_a_draft_that_is_not_verified_is_found(served, requests, plain, monkeypatch):
    monkeypatch.setattr(planned_v1, "exact", _trusting)
    assert tokens(served.ask(requests, [all_wrong(text) for text in plain[0]], logprobs=None)) != plain[0]


def _trusting(key, draft, samples) -> Accepted:
    """Planted fault: every draft token is accepted."""
    return Accepted([*draft.tokens, samples.tokens[-1]], samples.logprobs, samples.logprobs, len(draft.tokens))


@on_v1
def test_requests_of_others_are_vllms_own(served, requests, plain):
    """Greedy ones, whose tokens are known, in one batch with keyed ones that draft. On V2: served_cases.py."""
    greedy = tokens(served.ask(requests, keyed=False, temperature=0.0))
    keyed = [(list(r.prompt), served.params(r, [text])) for r, text in zip(requests, plain[0], strict=True)]
    theirs = [(list(r.prompt), served.vllm_params(r, temperature=0.0, logprobs=2)) for r in requests]
    mixed = served.ask_with([pair for both in zip(keyed, theirs, strict=True) for pair in both])
    assert tokens(mixed[::2]) == plain[0]
    assert [logprobs(output) for output in mixed[::2]] == plain[1]
    assert tokens(mixed[1::2]) == greedy != plain[0]
    ranks = [e[t].rank for o in mixed[1::2] for t, e in zip(o.token_ids, o.logprobs, strict=True)]
    assert set(ranks) == {1}, "the likeliest"
    assert served.ask(requests, keyed=False, temperature=1.0), "vLLM samples by itself"


def test_every_request_has_its_own_distribution(served, requests):
    distributions = [(0.0, 0, 1.0), (0.7, 0, 1.0), (1.0, 5, 1.0), (0.8, 9, 0.9)]
    want = [None] * len(requests)
    for i, distribution in enumerate(distributions):
        engine = TransformersEngine(served.model, SamplingParams(EOS_IDS, *distribution))
        want[i::4] = [c.tokens for c in engine.generate(requests[i::4])[0]]
    asked = []
    for i, request in enumerate(requests):
        params = dict(zip(("temperature", "top_k", "top_p"), distributions[i % 4], strict=True))
        asked.append((list(request.prompt), served.params(request, [want[i]] if i else [], **params)))
    assert tokens(served.ask_with(asked)) == want


def test_a_response_that_was_cut_off_goes_on_as_if_it_had_not_been(served, requests, plain):
    """An asynchronous trainer sends the text so far as the prompt, with the same extra_args."""
    cut = [(r, text) for r, text in zip(requests, plain[0], strict=True) if len(text) > 4]
    asked = [
        (
            [*r.prompt, *text[:3]],
            served.params(r, [text], prompt_tokens=len(r.prompt), max_tokens=r.max_new_tokens - 3),
        )
        for r, text in cut
    ]
    assert len(cut) > 8
    assert tokens(served.ask_with(asked)) == [text[3:] for _, text in cut]


def test_rows_of_the_next_batch_join_the_passes_of_a_trainers_own_engine(served, requests, plain, saved, monkeypatch):
    """They change no token, are the beginnings of their texts, and have left when the weights change."""
    from specrl.rollout.engines.vllm.colocated import KeyedLLM
    from specrl.rollout.engines.vllm.engine import shut_down

    llm = start_served(saved("qwen3")[1], {"fill": 4}, KeyedLLM)
    params = served.params(requests[0])
    whole = {request.key: text for request, text in zip(requests, plain[0], strict=True)}

    def batch(own: list[Request], later: list[Request]) -> list[list[int]]:
        """The batch's own rows draft nothing; those of the next one draft what they will emit."""
        llm.rows = [(read(served.params(r, plain=True)), r.max_new_tokens) for r in own]
        llm.begin([(read(served.params(r, [whole[r.key]])), r.max_new_tokens, list(r.prompt)) for r in later])
        prompts = [{"prompt_token_ids": list(r.prompt)} for r in own]
        return tokens(output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False))

    for now, later in (requests[::2], requests[1::2]), (requests[1::2], requests[::2]):
        assert batch(now, later) == [whole[r.key] for r in now]
        texts = llm.stop()
        assert list(texts) == [r.key for r in later]
        assert all(text == whole[key][: len(text)] for key, (text, _) in texts.items())
        assert all(cut == (text != whole[key]) for key, (text, cut) in texts.items())
        assert {cut for _, cut in texts.values()} == ({True, False} if llm.fill == 4 else {False})
        assert llm.counters()[1:] == (0, 0), "what rows of the next batch draft is not the batch's"
        llm.reset_prefix_cache()
        llm.fill = 64
    with monkeypatch.context() as planted:
        planted.setattr(llm.llm_engine, "abort_request", lambda *_, **__: None)
        shorter, *longer = sorted((r for r in requests if len(whole[r.key]) > 2), key=lambda r: len(whole[r.key]))
        batch([shorter], longer)
    with pytest.raises(RolloutError, match="kept KV of older weights"):
        llm.reset_prefix_cache()
    shut_down(llm, True)


def read(params) -> KeyedRequest:
    """The keyed request of sampling params."""
    return KeyedRequest.read(params.extra_args)


def test_min_tokens_holds_whatever_the_drafts(served, requests, plain):
    rows = [(r, text) for r, text in zip(requests, plain[0], strict=True) if r.max_new_tokens >= 20]
    asked = [r for r, _ in rows]
    assert any(len(text) < 12 for _, text in rows), "else there is nothing to prevent"
    want = tokens(served.ask(asked, min_tokens=12))
    assert min(map(len, want)) >= 12
    assert any(len(text) < r.max_new_tokens for r, text in zip(asked, want, strict=True)), "it may end after them"
    for texts in (want, [text for _, text in rows]):
        assert tokens(served.ask(asked, texts, min_tokens=12)) == want


@on_v1
def test_a_session_serves_two_visits_of_a_prompt(served):
    session, prompt, reused = ReuseSession(), [5, 6, 7], []
    for visit in (1, 2):
        tickets = [session.request(prompt, visit=visit, sample_index=i) for i in range(4)]
        rows = [Request(prompt, t.request.key, 30) for t in tickets]
        served.flow.stats = EngineStats()
        asked = [(prompt, served.vllm_params(r, extra_args=t.add_to(None))) for r, t in zip(rows, tickets, strict=True)]
        done = tokens(served.ask_with(asked))
        assert done == [c.tokens for c in TransformersEngine(served.model, SamplingParams(EOS_IDS)).generate(rows)[0]]
        for ticket, text in zip(tickets, done, strict=True):
            session.finish(ticket, text)
        reused.append({*served.flow.stats.sources} - {"group", "prompt"})
    assert reused[0] == set() != reused[1], "drafts from stored texts"


BAD_ARGS = [{"specrl_texts": ["x"]}, {"specrl_own": 1}, {"specrl_prompt_tokens": 10_000}, {"specrl_kye": 7}]
"""test_wire.py has all that cannot be read."""
BAD_PARAMS = [{"n": 2}]
if RUNNER == "v1":
    BAD_PARAMS += [{"presence_penalty": 0.5}, {"repetition_penalty": 1.1}, {"bad_words": ["x"]}]
    BAD_PARAMS += [{"allowed_token_ids": [3]}, {"logprob_token_ids": [3], "logprobs": 1}]


def bad_requests(served, request, text):
    """(fault, prompt, sampling parameters), with one fault each."""
    good = served.params(request, [text]).extra_args
    for change in BAD_ARGS:
        yield next(iter(change)), list(request.prompt), served.vllm_params(request, extra_args={**good, **change})
    for change in BAD_PARAMS:
        yield next(iter(change)), list(request.prompt), served.vllm_params(request, extra_args=good, **change)
    yield "the id 61", [VOCAB], served.vllm_params(request, extra_args={**good, "specrl_prompt_tokens": 1})


def test_a_request_that_cannot_be_served_is_refused_alone(served, requests, plain):
    """In process: the caller that adds it gets the error, and the responses to all other requests are unchanged."""
    from vllm.exceptions import VLLMValidationError

    engine = served.llm.llm_engine
    for i, (word, prompt, params) in enumerate(bad_requests(served, requests[2], plain[0][2])):
        engine.add_request("beside", {"prompt_token_ids": list(requests[i].prompt)}, served.params(requests[i]))
        with pytest.raises(VLLMValidationError, match=word) as raised:
            engine.add_request("bad", {"prompt_token_ids": prompt}, params)
        assert isinstance(raised.value, RolloutError)
        done = [o for _ in iter(engine.has_unfinished_requests, False) for o in engine.step() if o.finished]
        assert [list(o.outputs[0].token_ids) for o in done] == [plain[0][i]]
    assert tokens(served.ask(requests[:4], plain[0][:4])) == plain[0][:4]


@on_v1
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("first", [0, 3], ids=["in_the_prompts_step", "later"])
def test_a_request_whose_logits_are_unusable_ends_alone(served, requests, plain, monkeypatch, caplog, value, first):
    """With an error, beside others of its step; the server answers them and what is asked next."""
    row = next(i for i, text in enumerate(plain[0]) if len(text) > 8)
    asked = [row, *(i for i in range(6) if i != row)]
    compute, names = served.runner.model.compute_logits, []

    def broken(hidden_states, *arguments):
        logits = compute(hidden_states, *arguments)
        names.append(served.runner.input_batch.req_ids[0])
        if len(names) > first and names[-1] == names[0]:
            logits[0] = value  # where the request that was asked first samples
        return logits

    with monkeypatch.context() as patch:
        patch.setattr(served.runner.model, "compute_logits", broken)
        done = served.ask([requests[i] for i in asked], [all_wrong(plain[0][i]) for i in asked])
    assert done[0].finish_reason == "error"
    sampled = list(done[0].token_ids)
    assert sampled == plain[0][row][: len(sampled)], "nothing that was sampled from them"
    assert (len(sampled) > 0) == (first > 0)
    assert tokens(done[1:]) == [plain[0][i] for i in asked[1:]]
    assert caplog.text.count("ends with an error") == 1
    assert tokens(served.ask(requests, plain[0])) == plain[0]


def test_requests_without_a_key_are_not_checked(served, requests):
    params = {"temperature": 0.0, "repetition_penalty": 1.1, "extra_args": {"others": object}}
    assert len(served.ask_with([(list(requests[0].prompt), served.vllm_params(requests[0], **params))])) == 1


@pytest.mark.long
def test_a_bad_request_does_not_end_a_server_of_several_processes(served, requests, plain, saved, monkeypatch):
    """Where the front end does not know keys, as under `vllm serve`, the engine core ends the request."""
    import vllm
    from vllm.v1.engine.input_processor import InputProcessor

    from specrl.rollout.engines.vllm.engine import settings

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    if RUNNER == "v2":
        keep_async(monkeypatch)
    monkeypatch.setattr(InputProcessor, "process_inputs", InputProcessor.process_inputs.__wrapped__)
    bad = [*bad_requests(served, requests[2], plain[0][2])]
    bad = [request for request in bad if request[0] != "n"]  # the front end sends each response separately
    options = {**settings(spec_of(saved("qwen3")[1])), "tensor_parallel_size": 2 if RUNNER == "v2" else 1}

    async def answers() -> tuple[list, list]:
        engine = vllm.AsyncLLMEngine.from_engine_args(vllm.AsyncEngineArgs(**options, **arguments()))
        numbers = itertools.count()

        async def answer(prompt, params):
            async for output in engine.generate({"prompt_token_ids": prompt}, params, str(next(numbers))):
                last = output.outputs[0]
            return last.finish_reason if last.finish_reason == "error" else list(last.token_ids)

        good = [(list(r.prompt), served.params(r, [text])) for r, text in zip(requests[:4], plain[0], strict=False)]
        try:
            refused = []
            for _, prompt, params in bad:
                refused.append(await answer(prompt, params))
            return refused, await asyncio.gather(*[answer(*each) for each in good])
        finally:
            engine.shutdown()

    refused, after = asyncio.run(answers())
    assert after == plain[0][:4], "the server serves on"
    assert refused == ["error"] * len(bad)


@on_v1
def test_a_server_whose_core_would_not_refuse_does_not_start(saved):
    changed = {**arguments(), "scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"}
    with pytest.raises((RolloutError, RuntimeError), match=r"scheduler_cls=.*ENGINE_ARGS\['v1'\]"):
        start_served(saved("qwen3")[1], changed)


def test_engines_that_serve_by_default(served, tmp_path, monkeypatch, caplog):
    import vllm

    from specrl.rollout.engines.vllm.served import ENGINE_ARGS, serve_by_default

    monkeypatch.setattr(vllm, "AsyncEngineArgs", vllm.AsyncEngineArgs)  # restored afterwards
    model = str(tmp_path)  # a directory: a name would be looked up in the hub
    assert vllm.AsyncEngineArgs(model=model).speculative_config is None
    serve_by_default()
    made = vllm.AsyncEngineArgs(model=model, seed=3)
    assert {name: getattr(made, name) for name in ENGINE_ARGS[RUNNER]} == ENGINE_ARGS[RUNNER]
    others = {"method": "ngram"}
    made = vllm.AsyncEngineArgs(model=model, speculative_config=others)
    assert made.speculative_config == others
    assert (made.worker_cls, made.scheduler_cls) == ("auto", None)
    assert "its own speculative_config: it will not serve keyed requests" in caplog.text
