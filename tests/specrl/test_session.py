"""The session of a trainer that owns its vLLM: keys, drafts and visits. Served by vLLM: test_vllm_served.py."""

import importlib.util

import pytest

from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.engines.vllm.wire import KeyedRequest
from specrl.rollout.sections import ClusterConfig
from specrl.rollout.types import Request, RolloutError
from specrl.run.cluster import connect
from specrl.session import ReuseSession
from tests.engines import local

PROMPTS, GROUP, CAP = [[7, 8], [9, 10, 11]], 3, 24


def visit(session, model, number, replaying=False):
    """One visit of all prompts. [(prompt, request, response)]; `replaying` plants a server that verifies no text."""
    engine, served = local(model, SamplingParams(frozenset({1})), window=16), []
    for prompt in PROMPTS:
        for sample_index in range(GROUP):
            ticket = session.request(prompt, visit=number, sample_index=sample_index)
            keyed = ticket.request
            (done,), _ = engine.generate([Request(prompt, keyed.key, CAP, keyed.drafter({}, prompt))])
            tokens = list(keyed.texts[keyed.own]) if replaying and keyed.own >= 0 else done.tokens
            session.finish(ticket, tokens)
            served.append((prompt, keyed, tokens, done.passes))
    return served


def wrong(model, served):
    """Places of the responses that are not those of plain decoding with their keys."""
    engine = local(model, SamplingParams(frozenset({1})), window=16)
    plain = [engine.generate([Request(p, keyed.key, CAP, plain=True)])[0][0].tokens for p, keyed, _, _ in served]
    return [i for i, (row, want) in enumerate(zip(served, plain, strict=True)) if row[2] != want]


@pytest.mark.slow
def test_reuse_changes_how_many_passes_it_takes_and_nothing_else(build_model):
    session, keys = ReuseSession(seed=5), set()
    for number, seed in enumerate((0, 0, 3), start=1):
        model = build_model("llama", seed=seed)
        served = visit(session, model, number)
        assert wrong(model, served) == []
        assert all((keyed.own == 0) == (number > 1) for _, keyed, _, _ in served)
        keys |= {keyed.key for _, keyed, _, _ in served}
    assert len(keys) == 3 * len(PROMPTS) * GROUP, "no two responses share their noise"
    assert len(session.cache) == len(PROMPTS) * GROUP


@pytest.mark.slow
def test_a_server_that_verifies_no_text_is_found(build_model):
    session, model = ReuseSession(seed=5), build_model("llama")
    assert wrong(model, visit(session, model, 1, replaying=True)) == [], "nothing is stored yet"
    assert wrong(model, visit(session, model, 2, replaying=True)) == [*range(len(PROMPTS) * GROUP)]


def test_replayed_noise_is_accepted_whole(build_model):
    """The drafts are at work: an equal key on an equal model accepts all that was stored."""
    model, first, again = build_model("llama"), ReuseSession(seed=5), ReuseSession(seed=5)
    slow = visit(first, model, 1)
    again.cache = first.cache
    fast = visit(again, model, 1)
    assert [row[2] for row in fast] == [row[2] for row in slow]
    assert sum(row[3] for row in fast) < sum(row[3] for row in slow) / 3


def test_a_prompt_that_occurs_twice_in_a_batch_takes_slots_of_its_own():
    session = ReuseSession()
    tickets = [session.request([1, 2], visit=1, sample_index=sample_index) for sample_index in (0, 1, 0, 1)]
    assert [ticket.sample_index for ticket in tickets] == [0, 1, 2, 3]
    assert len({ticket.request.key for ticket in tickets}) == 4
    assert session.request([1, 2], visit=2, sample_index=0).sample_index == 0


def test_a_turn_is_known_by_its_number_and_where_its_conversation_began():
    session = ReuseSession(seed=2)
    for visit, said in ((1, [8, 9]), (2, [6])):
        first = session.request([1, 2], visit=visit, sample_index=4)
        second = session.request([1, 2, *said, 3], after=first)
        third = session.request([1, 2, *said, 3, *said], after=second)
        assert [(t.sample_index, t.visit, t.turn) for t in (first, second, third)] == [(4, visit, i) for i in range(3)]
        assert len({t.request.key for t in (first, second, third)}) == 3
        assert [t.request.prompt_tokens for t in (first, second, third)] == [2, 3 + len(said), 3 + 2 * len(said)]
        want = ((), (), ()) if visit == 1 else (((10,),), ((11,),), ((12,),))
        assert tuple(t.request.texts for t in (first, second, third)) == want
        for ticket in (first, second, third):
            session.finish(ticket, [10 + ticket.turn])
    other = ReuseSession(seed=2)
    again = other.request([1, 2, 5, 5, 3], after=other.request([1, 2], visit=2, sample_index=4))
    assert again.request.key == session.request([9], after=first).request.key, "a pure function of place and seed"


def test_keys_depend_on_seed_prompt_slot_and_visit():
    def key(seed=0, prompt=(1, 2), visit=1, sample_index=0):
        return ReuseSession(seed).request(prompt, visit=visit, sample_index=sample_index).request.key

    assert key() == key()
    assert len({key(), key(seed=1), key(prompt=(1, 3)), key(visit=2), key(sample_index=1)}) == 5


@pytest.mark.parametrize("visits", [(5, 6, 5), (5, 6, 5, 4, 6, 5, 5), (1, None, None, 0, 0, 1)])
def test_keys_are_unique_whatever_the_order_of_visits(visits):
    session = ReuseSession(group_size=2)
    keys = [session.request([7, 8], visit=number).request.key for number in visits]
    assert len(set(keys)) == len(visits)


def test_counted_visits():
    session = ReuseSession(group_size=2)
    tickets = [session.request([1, 2]) for _ in range(6)]
    assert [(t.visit, t.sample_index) for t in tickets] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert session.request([9]).visit == 0
    with pytest.raises(RolloutError, match="group_size=0"):
        ReuseSession().request([1, 2])


def test_the_texts_that_travel_are_bounded_and_the_slots_own_comes_first():
    session = ReuseSession()
    for sample_index in range(20):
        session.finish(session.request([1], visit=1, sample_index=sample_index), [sample_index] * 3)
    request = session.request([1], visit=2, sample_index=15).request
    assert request.texts[0] == (15, 15, 15)
    assert request.own == 0
    assert len(set(request.texts)) == len(request.texts) == 8
    new = session.request([1], visit=2, sample_index=30).request
    assert new.own == -1
    assert len(new.texts) == 8


def test_a_late_response_of_an_older_visit_does_not_replace_a_newer_one():
    session = ReuseSession()
    late, new = (session.request([1], visit=visit) for visit in (1, 2))
    session.finish(new, [5, 6])
    session.finish(late, [7])
    session.finish(late, [])
    assert session.request([1], visit=3).request.texts == ((5, 6),)


def test_requests_of_a_group_draft_from_each_other_and_from_their_prompt():
    groups = {}
    first, second = (KeyedRequest(k, 2, "g", ((4, 5, 6, 7),)).drafter(groups, [11, 12, 13]) for k in (1, 2))
    first.propose([9, 9, 8, 3], 4)
    assert second.propose([9, 9], 2) == [8, 3]
    assert second.propose([9, 9, 2, 11, 12], 2)[:1] == [13]
    assert list(groups) == ["g"]


def one_visit(session, number):
    """A response to the same prompt by whatever process this runs in: (sample index, key, own text)."""
    import ray

    ticket = ray.get(session.request.remote([1, 2], visit=number))
    ray.get(session.finish.remote(ticket, [number, 7]))
    return ticket.sample_index, ticket.request.key, ticket.request.texts[ticket.request.own :][:1]


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'specrl[ray]'")
def test_all_processes_of_a_job_share_a_session_that_is_a_ray_actor():
    with connect(ClusterConfig(num_workers=1)):
        import ray

        session = ray.remote(num_cpus=0)(ReuseSession).remote(seed=3)
        there = ray.remote(num_cpus=0)(one_visit)
        done = [one_visit(session, 1), ray.get(there.remote(session, 1)), one_visit(session, 2)]
        done.append(ray.get(there.remote(session, 3)))
        del session
    assert [sample_index for sample_index, _, _ in done] == [0, 1, 0, 0], "the same visit: another sample_index"
    assert len({key for _, key, _ in done}) == 4
    assert [text for _, _, text in done[2:]] == [((1, 7),), ((2, 7),)]
