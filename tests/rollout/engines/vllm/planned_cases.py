"""Drafts that vLLM's scheduler carries to its workers. Run by test_vllm_v2.py under vllm_shim."""

# ruff: noqa: F811 - fixtures of device_cases, which tests name as arguments

from dataclasses import replace

import pytest
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from specrl.rollout.engines.vllm import planned_model, planned_v2, sampler
from specrl.rollout.types import RolloutError
from specrl.trainers.weights import PolicyWeights
from tests.rollout.engines.vllm.device_cases import (
    drafters,  # noqa: F401
    texts_of_every_quality,
)
from tests.rollout.engines.vllm.engines import (
    adjusted,
    assert_generates_as,
    close,
    exactly,
    moved,
    probe_of,
    spec_of,
    start,
)
from tests.rollout.golden import EOS_IDS, Script, differing, requests_of


@pytest.fixture(scope="session")
def engine_of(saved):
    """engine_of(parallel=1, drafter="", **settings): an engine whose scheduler carries the drafts."""
    engines = {}

    def get(parallel=2, eos_ids=EOS_IDS, distribution=(1.0, 0, 1.0), window=6, **settings):
        name = repr((settings, parallel))
        if name not in engines:
            spec = spec_of(saved("qwen3")[1], **settings)
            spec.rollout.vllm.tensor_parallel = parallel
            engines[name] = start(spec)
        return adjusted(engines[name], eos_ids=eos_ids, distribution=distribution, window=window)

    yield get
    for engine in reversed(engines.values()):
        close(engine)


def test_two_ranks_sample_what_one_process_samples_with_drafts_of_any_quality(engine_of, some):
    distribution = (0.8, 9, 0.9)
    cases, want = some(distribution=distribution)
    engine = engine_of(distribution=distribution)
    plain, stats = engine.generate(requests_of(cases))
    assert differing(plain, want, 1e-4) == []
    assert stats.drafted == 0
    steps = stats.passes
    done, stats = engine.generate(requests_of(cases, texts_of_every_quality([t for t, _, _ in want])))
    assert exactly(done) == exactly(plain), "bit for bit, log-probs too"
    assert 0 < stats.accepted < stats.drafted
    done, stats = engine.generate(requests_of(cases, [Script(t) for t, _, _ in want]))
    assert exactly(done) == exactly(plain)
    assert stats.passes < steps / 2


def test_rows_of_the_next_batch_join_the_steps_of_this_one(engine_of, some):
    """Where another process is at work for longer, they go on to their ends."""
    cases, want = some()
    engine = engine_of(parallel=1)
    plain, _ = engine.generate(requests_of(cases))
    coming = [replace(request, key=request.key + 1) for request in requests_of(cases)]
    whole, _ = engine.generate(coming)
    for others in (False, True):
        mine, theirs = (texts_of_every_quality([t for t, _, _ in want]) for _ in range(2))
        engine.fill = 64
        engine.others_at_work = lambda others=others: others
        try:
            engine.begin([replace(request, drafter=text) for request, text in zip(coming, theirs, strict=True)])
            done, stats = engine.generate(requests_of(cases, mine))
        finally:
            engine.fill = 0
            del engine.others_at_work
        assert exactly(done) == exactly(plain)
        ahead, _ = engine.stop()
        assert others == all(r.key in ahead and ahead[r.key].finish for r in coming)
        assert stats.ahead_tokens == sum(len(text.tokens) for text in ahead.values()) > 0
        for request, c in zip(coming, whole, strict=True):
            if text := ahead.get(request.key):
                assert [*text.tokens] == c.tokens[: len(text.tokens)]
                assert text.finish is None or [*text.tokens] == c.tokens


def test_prompts_computed_in_parts_change_nothing(engine_of, some, drafters):
    cases, want = some()
    texts = texts_of_every_quality([t for t, _, _ in want])
    engine = engine_of(parallel=1, drafter=drafters(0.1), tokens_per_pass=16, rows_per_batch=4)
    done, stats = engine.generate(requests_of(cases, texts))
    assert differing(done, want, 1e-4) == []
    assert stats.accepted > 0


def test_log_probs_are_those_of_the_engine_that_has_no_draft_model(engine_of, some, drafters, monkeypatch):
    """They are in the loss, so a draft model would train other weights."""
    cases, _ = some()
    plain, _ = engine_of(parallel=1).generate(requests_of(cases))
    engine = engine_of(parallel=1, drafter=drafters(0.05), draft_tokens=24)
    assert exactly(engine.generate(requests_of(cases))[0]) == exactly(plain)
    monkeypatch.delattr(sampler.RolloutVerifier, "_get_logprobs_tensors")  # vLLM computes them once more
    assert exactly(engine.generate(requests_of(cases))[0]) != exactly(plain), "the planted fault is seen"


@pytest.fixture(scope="session")
def halves(some):
    """Rows, the policy's responses, and drafters that know every second response."""
    cases, want = some()
    return cases, want, lambda: [Script(t) if i % 2 else None for i, (t, _, _) in enumerate(want)]


def test_each_row_takes_the_draft_that_promises_more(engine_of, halves, drafters):
    cases, want, texts = halves
    engine = engine_of(parallel=1, drafter=drafters(0.05), draft_tokens=24, window=0)
    for _ in range(2):  # acceptance is known from the second time on
        by_model = engine.generate(requests_of(cases))
        both = engine.generate(requests_of(cases, texts()))
    assert differing(both[0], want, 1e-4) == []
    assert differing(by_model[0], want, 1e-4) == []
    assert by_model[1].sources.keys() == {"model"}
    assert both[1].sources["model"][1] > 0
    assert both[1].sources["custom"][1] > 0
    assert both[1].passes <= by_model[1].passes


@pytest.fixture
def draft_passes(monkeypatch):
    """A list with an entry for each pass of vLLM's draft model."""
    passes = []
    run_model = StandaloneARSpeculator._run_model

    def count(speculator, *arguments):
        passes.append(1)
        return run_model(speculator, *arguments)

    monkeypatch.setattr(StandaloneARSpeculator, "_run_model", count)
    return passes


def check_draft_passes(engine, cases, want, passes: list[int]) -> None:
    """Rows that draft pay for the tokens that their steps are planned to have, and plain rows pay for none."""
    rows = requests_of(cases)
    done, stats = engine.generate(rows)
    assert differing(done, want, 1e-4) == []
    assert stats.accepted > 0
    assert stats.passes <= len(passes) < 8 * stats.passes
    passes.clear()
    done, stats = engine.generate([replace(row, plain=True) for row in rows])
    assert differing(done, want, 1e-4) == []
    assert passes == [], "the baseline that speed is compared with"
    passes.clear()
    done, stats = engine.generate([replace(row, plain=i > 0) for i, row in enumerate(rows)])
    assert differing(done, want, 1e-4) == []
    assert stats.accepted > 0
    assert passes


def test_the_model_makes_the_passes_that_are_planned(engine_of, some, drafters, draft_passes, monkeypatch):
    engine = engine_of(parallel=1, drafter=drafters(0.05), draft_tokens=24, window=0)
    check_draft_passes(engine, *some(), draft_passes)
    monkeypatch.setattr(planned_model.ModelDrafts, "proposes", lambda model, rows: 24)
    with pytest.raises(AssertionError):  # the planted fault is seen: all tokens that vLLM was configured with
        check_draft_passes(engine, *some(), draft_passes)


def test_a_worker_that_ignores_the_drafts_of_the_plan_is_found(engine_of, some, monkeypatch):
    cases, want = some()
    monkeypatch.setattr(planned_v2, "take_drafts", lambda states, drafts: None)
    _, stats = engine_of(parallel=1).generate(requests_of(cases, [Script(t) for t, _, _ in want]))
    assert stats.accepted < stats.drafted / 4


def test_two_ranks_take_new_weights_and_refuse_wrong_ones(saved, engine_of, some):
    """They are processes, which read the weights from memory that the trainer wrote."""
    cases, want = some()
    engine, (model, _) = engine_of(), saved("qwen3")
    assert engine.updates.route == "memory"
    new = moved(model, 1)
    engine.update_weights(PolicyWeights(new), 1, probe_of(new))
    assert_generates_as(engine, new, cases)
    assert differing(engine.generate(requests_of(cases))[0], want), "control: the update changed the policy"
    with pytest.raises(RolloutError, match="lacks 1"):
        engine.update_weights(iter(list(PolicyWeights(new))[:-1]), 2)
    with pytest.raises(RolloutError, match="does not run the weights it was sent"):
        engine.update_weights(PolicyWeights(moved(model, 2)), 2, probe_of(new))
    engine.update_weights(PolicyWeights(model), 3, probe_of(model))
    assert_generates_as(engine, model, cases)
