"""The adapters by contract, against fakes of verl and OpenRLHF: reuse changes how many passes it takes and no token."""

import asyncio
import json
import sys
from types import SimpleNamespace

import pytest

from rollout.engines.vllm.wire import KeyedRequest
from rollout.types import RolloutError
from specrl.adapters import openrlhf, verl
from specrl.adapters.base import ReuseSession
from tests.specrl.adapters.fakes import (
    FakeAgentExecutor,
    FakeLLMServerClient,
    FakeRolloutActor,
    FakeSamplingParams,
    FakeSingleTurnAgentLoop,
    FakeToolAgentLoop,
    FakeToolExecutor,
    Here,
    Server,
)

PROMPTS, GROUP, CAP = ["ab", "cde"], 3, 24


def tokenize(text):
    return [ord(c) - 90 for c in text]


def verl_step(session, server, step, prompts=PROMPTS, client=None, loop=FakeSingleTurnAgentLoop, **row):
    """One step of verl's V1 trainer: `rollout.n` loops for each prompt, all at once. [(prompt, response)]."""
    client = client or FakeLLMServerClient(server)
    make = verl.reusing(loop)

    async def sample(prompt, i):
        made = make(Here(session), trainer_config=None, server_manager=client, tokenizer=tokenize, tools=None)
        params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
        given = {"raw_prompt": prompt, "session_id": i, "global_steps": step, "uid": f"{prompt}{i}", **row}
        return prompt, (await made.run(params, **given)).response_ids

    async def batch():
        return await asyncio.gather(*[sample(prompt, i) for prompt in prompts for i in range(GROUP)])

    return asyncio.run(batch())


def openrlhf_step(session, server, _step, executor=FakeAgentExecutor):
    """One step of OpenRLHF: the actor runs its executor for each sample. [(prompt, response)]."""
    executor = openrlhf.reusing(executor, Here(session))()
    actor = FakeRolloutActor(server, executor)
    params = FakeSamplingParams(temperature=1.0, max_tokens=CAP, extra_args=None)

    async def batch():
        done = []
        for prompt in PROMPTS:
            for response in await actor.generate_responses(prompt, "", params, 64, tokenize, num_samples=GROUP):
                assert response["reward"] in (1.0, len(response["observation_tokens"]) - len(prompt))
                done.append((prompt, response["observation_tokens"][len(prompt) :]))
        return done

    return asyncio.run(batch())


def wrong_rows(server, served):
    """Rows whose tokens are not those of plain decoding with the key that the row's request named."""
    keys = [keyed.key for keyed, _ in server.done]
    plain = [(p, server.plain(tokenize(p), key, CAP)) for (p, _), key in zip(served, keys, strict=True)]
    return [i for i, (got, want) in enumerate(zip(served, plain, strict=True)) if got != want]


@pytest.mark.parametrize("step", [verl_step, openrlhf_step])
def test_reuse_changes_how_many_passes_it_takes_and_nothing_else(build_model, step):
    session = ReuseSession(seed=5, group_size=GROUP)
    models = [build_model("llama", seed=0), build_model("llama", seed=0), build_model("llama", seed=3)]
    keys = []
    for number, model in enumerate(models, start=1):
        server = Server(model)
        served = step(session, server, number)
        assert wrong_rows(server, served) == []
        keys += [keyed.key for keyed, _ in server.done]
        assert all((keyed.own == 0) == (number > 1) for keyed, _ in server.done)
        assert (sum(sum(c.reused) for _, c in server.done) > 0) or number == 1
    assert len(set(keys)) == len(keys) == 3 * len(PROMPTS) * GROUP, "no two responses share their noise"
    assert len(session.cache) == len(PROMPTS) * GROUP


@pytest.mark.parametrize("step", [verl_step, openrlhf_step])
def test_replayed_noise_is_accepted_whole(build_model, step):
    """The drafts are at work: an equal key on an equal model accepts all that was stored."""
    model, first = build_model("llama"), ReuseSession(seed=5, group_size=GROUP)
    server = Server(model)
    want = step(first, server, 1)
    again = ReuseSession(seed=5, group_size=GROUP)
    again.cache = first.cache
    replay = Server(model)
    assert step(again, replay, 1) == want
    slow, fast = (sum(c.passes for _, c in s.done) for s in (server, replay))
    assert fast < slow / 3


def verl_turns(session, server, step):
    return verl_step(session, server, step, loop=FakeToolAgentLoop)


def openrlhf_turns(session, server, step):
    return openrlhf_step(session, server, step, executor=FakeToolExecutor)


@pytest.mark.parametrize("step", [verl_turns, openrlhf_turns])
def test_later_turns_find_their_old_text(build_model, step):
    """Though their prompts differ from visit to visit."""
    session, keys, old = ReuseSession(seed=5, group_size=GROUP), [], set()
    for number, model in enumerate((build_model("llama", seed=0), build_model("llama", seed=0)), start=1):
        server = Server(model)
        step(session, server, number)
        assert len(server.done) == 3 * len(PROMPTS) * GROUP
        for (keyed, done), prompt in zip(server.done, server.prompts, strict=True):
            assert done.tokens == server.plain(prompt, keyed.key, CAP), "as plain decoding with its key"
            assert (keyed.own == 0) == (number > 1)
            assert number == 1 or keyed.texts[0] in old
        keys += [keyed.key for keyed, _ in server.done]
        old = {tuple(done.tokens) for _, done in server.done}
        assert (sum(sum(c.reused) for _, c in server.done) > 0) or number == 1
    assert len(set(keys)) == len(keys), "no two turns share their noise"
    assert len(session.cache) == 3 * len(PROMPTS) * GROUP


def test_a_turn_is_known_by_its_number_and_where_its_conversation_began():
    session = ReuseSession(seed=2)
    for visit, said in ((1, [8, 9]), (2, [6])):
        first = session.request([1, 2], visit=visit, slot=4)
        second = session.request([1, 2, *said, 3], after=first)
        third = session.request([1, 2, *said, 3, *said], after=second)
        assert [(t.slot, t.visit, t.turn) for t in (first, second, third)] == [(4, visit, i) for i in range(3)]
        assert len({t.request.key for t in (first, second, third)}) == 3
        assert [t.request.prompt_tokens for t in (first, second, third)] == [2, 3 + len(said), 3 + 2 * len(said)]
        want = ((), (), ()) if visit == 1 else (((10,),), ((11,),), ((12,),))
        assert tuple(t.request.texts for t in (first, second, third)) == want
        for ticket in (first, second, third):
            session.finish(ticket, [10 + ticket.turn])
    other = ReuseSession(seed=2)
    again = other.request([1, 2, 5, 5, 3], after=other.request([1, 2], visit=2, slot=4))
    assert again.request.key == session.request([9], after=first).request.key, "a pure function of place and seed"


def test_requests_that_a_sample_makes_at_once_are_turns_of_their_own(build_model):
    client = FakeLLMServerClient(Server(build_model("llama")))
    reuse = verl.ReuseClient(client, Here(ReuseSession()), visit=1, slot=0)

    async def ask():
        await reuse.generate("r", prompt_ids=[5, 6], sampling_params={})
        await asyncio.gather(*[reuse.generate("r", prompt_ids=[5, 6, 7], sampling_params={}) for _ in range(2)])

    asyncio.run(ask())
    assert len({keyed.key for keyed, _ in client.server.done}) == 3


def test_stale_and_wrong_texts_change_nothing(build_model):
    session, model = ReuseSession(seed=1), build_model("llama")
    want = verl_step(ReuseSession(seed=1), Server(model), 4)
    for prompt in PROMPTS:
        for slot in range(GROUP):
            ticket = session.request(tokenize(prompt), visit=1, slot=slot)
            session.finish(ticket, [(7 * slot + i) % 300 for i in range(40)])  # ids that the model lacks, too
    server = Server(model)
    assert verl_step(session, server, 4) == want
    assert all(keyed.texts for keyed, _ in server.done)


def test_control_a_client_that_replays_the_cached_text_is_found(build_model):
    """The planted bug: what was stored is returned unverified."""

    class Replaying(FakeLLMServerClient):
        async def generate(self, request_id, *, prompt_ids, sampling_params, **more):
            output = await super().generate(request_id, prompt_ids=prompt_ids, sampling_params=sampling_params, **more)
            keyed = KeyedRequest.read(sampling_params["extra_args"])
            if keyed.own >= 0:
                output.token_ids = list(keyed.texts[keyed.own])
            return output

    session, model = ReuseSession(), build_model("llama")
    for step in (1, 2):
        server = Server(model)
        served = verl_step(session, server, step, client=Replaying(server))
        assert bool(wrong_rows(server, served)) == (step == 2)


def test_a_prompt_that_occurs_twice_is_drawn_apart(build_model):
    session, server = ReuseSession(), Server(build_model("llama"))
    verl_step(session, server, 1, prompts=["ab", "ab"])
    assert len({keyed.key for keyed, _ in server.done}) == 2 * GROUP
    assert len(session.cache) == 2 * GROUP


@pytest.mark.parametrize("step", [verl_step, openrlhf_step])
def test_a_failure_of_the_engine_goes_through_and_stores_nothing(build_model, step):
    session = ReuseSession(group_size=GROUP)
    with pytest.raises(RuntimeError, match="EngineDeadError"):
        step(session, Server(build_model("llama"), fail_at=0), 1)
    assert len(session.cache) == 0


def test_the_callers_parameters_are_left_alone_and_others_entries_kept(build_model):
    client = FakeLLMServerClient(Server(build_model("llama")))
    reuse = verl.ReuseClient(client, Here(ReuseSession()), visit=1, slot=0)
    params = {"temperature": 1.0, "extra_args": {"kv_transfer_params": {"x": 1}}}
    asyncio.run(reuse.generate("r", prompt_ids=[5, 6], sampling_params=params))
    assert params == {"temperature": 1.0, "extra_args": {"kv_transfer_params": {"x": 1}}}
    assert client.seen[0]["extra_args"]["kv_transfer_params"] == {"x": 1}
    assert reuse.server is client.server, "the rest of the client is in reach"
    given = FakeSamplingParams(max_tokens=4, extra_args=None)
    engine = openrlhf.ReuseEngine(FakeRolloutActor(client.server, None), Here(ReuseSession(group_size=1)))
    asyncio.run(engine.generate([5, 6], given))
    assert given.extra_args is None


def test_images_pass_unchanged_and_a_row_without_its_place_is_refused(build_model):
    session, client = ReuseSession(), FakeLLMServerClient(Server(build_model("llama")))
    verl_step(session, client.server, 1, client=client, images=["picture"])
    assert len(client.seen) == len(PROMPTS) * GROUP
    assert all("extra_args" not in params for params in client.seen)
    assert len(session.cache) == 0
    loop = verl.reusing(FakeSingleTurnAgentLoop)(
        Here(session), trainer_config=None, server_manager=client, tokenizer=tokenize
    )
    with pytest.raises(RolloutError, match="no session_id and no global_steps"):
        asyncio.run(loop.run({}, raw_prompt="ab"))


def test_what_verl_instantiates(build_model, monkeypatch):
    """verl passes the entries of its YAML and its own arguments, and makes one loop a sample."""
    made = []
    monkeypatch.setattr(verl, "SharedSession", lambda **options: made.append(options) or Here(ReuseSession()))
    client = FakeLLMServerClient(Server(build_model("llama")))
    path = f"{FakeSingleTurnAgentLoop.__module__}.FakeSingleTurnAgentLoop"
    entry = {"name": "specrl", "seed": 3, "max_mb": 7, "loop": path}
    loop = verl.agent_loop(**entry, trainer_config=None, server_manager=client, tokenizer=tokenize, tools=None)
    assert isinstance(loop, FakeSingleTurnAgentLoop)
    done = asyncio.run(loop.run({}, raw_prompt="ab", session_id=0, global_steps=1))
    assert done.response_ids == client.server.done[0][1].tokens
    assert made == [{"seed": 3, "max_mb": 7}]


def test_what_openrlhf_loads(monkeypatch):
    """OpenRLHF checks the class and makes it without arguments; its engine starts afterwards."""
    served, made = [], []
    module = SimpleNamespace(serve_by_default=lambda: served.append(1))
    monkeypatch.setitem(sys.modules, "rollout.engines.vllm.served", module)
    monkeypatch.setattr(openrlhf, "SharedSession", lambda **options: made.append(options))
    executor = openrlhf.reuse_executor(FakeAgentExecutor, seed=4, group_size=8)
    assert isinstance(executor(), FakeAgentExecutor)
    assert (served, made) == ([1], [{"seed": 4, "group_size": 8, "max_mb": 512}])


def test_keys_depend_on_seed_prompt_slot_and_visit():
    def key(seed=0, prompt=(1, 2), visit=1, slot=0):
        return ReuseSession(seed).request(prompt, visit=visit, slot=slot).request.key

    assert key() == key()
    assert len({key(), key(seed=1), key(prompt=(1, 3)), key(visit=2), key(slot=1)}) == 5


def test_counted_visits():
    session = ReuseSession(group_size=2)
    tickets = [session.request([1, 2]) for _ in range(6)]
    assert [(t.visit, t.slot) for t in tickets] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert session.request([9]).visit == 0
    with pytest.raises(RolloutError, match="group_size=0"):
        ReuseSession().request([1, 2])


def test_the_texts_that_travel_are_bounded_and_the_slots_own_comes_first():
    session = ReuseSession()
    for slot in range(20):
        session.finish(session.request([1], visit=1, slot=slot), [slot] * 3)
    request = session.request([1], visit=2, slot=15).request
    assert request.texts[0] == (15, 15, 15)
    assert request.own == 0
    assert len(set(request.texts)) == len(request.texts) == 8
    new = session.request([1], visit=2, slot=30).request
    assert new.own == -1
    assert len(new.texts) == 8


def test_a_late_response_of_an_older_visit_does_not_replace_a_newer_one():
    session = ReuseSession()
    late, new = (session.request([1], visit=visit) for visit in (1, 2))
    session.finish(new, [5, 6])
    session.finish(late, [7])
    session.finish(late, [])
    assert session.request([1], visit=3).request.texts == ((5, 6),)


def test_a_request_survives_json():
    request = KeyedRequest(-(1 << 63), 4, "g", ((5, 6, 7), (), (8,)), own=2)
    sent = json.loads(json.dumps({"theirs": 1, **request.extra_args()}))
    assert KeyedRequest.read(sent) == request
    assert KeyedRequest.read({"theirs": 1}) is None
    assert KeyedRequest.read(None) is None


def test_requests_of_a_group_draft_from_each_other_and_from_their_prompt():
    groups = {}
    first, second = (KeyedRequest(k, 2, "g", ((4, 5, 6, 7),)).drafter(groups, [11, 12, 13]) for k in (1, 2))
    first.propose([9, 9, 8, 3], 4)
    assert second.propose([9, 9], 2) == [8, 3]
    assert second.propose([9, 9, 2, 11, 12], 2)[:1] == [13]
    assert list(groups) == ["g"]
