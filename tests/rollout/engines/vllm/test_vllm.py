"""The vLLM engine on Model Runner V1: it emits the tokens of the transformers engine, whatever the drafts.

Positive tests and planted faults share one comparison, `differing`. test_updates.py tests new weights.
"""

import itertools
import random
from unittest import mock

import numpy as np
import pytest
import torch

from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.engines.local.engine import TransformersEngine
from specrl.rollout.noise import keyed_sample
from specrl.rollout.types import Request, RolloutError
from tests.rollout.engines.vllm.engines import (
    CONTEXT,
    MANY_BLOCKS,
    RUNNER,
    assert_generates_as,
    exactly,
    needs_vllm,
    on_v1,
    policy,
    probe_of,
    spec_of,
    start,
)
from tests.rollout.golden import (
    VOCAB,
    Script,
    all_wrong,
    corrupt,
    differing,
    drafts_of_every_quality,
    requests_of,
)

pytestmark = needs_vllm


# Identity -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3", pytest.param("llama", marks=on_v1)])
def test_plain_decoding_equals_the_transformers_engine(engine_of, golden, family):
    cases, want = golden(family)
    engine = engine_of(family)
    done, stats = engine.generate(requests_of(cases))
    assert differing(done, want, 1e-4) == []
    assert {c.finish for c in done} == {"stop", "length"}
    assert stats.drafted == stats.accepted == 0
    assert all(c.passes == len(c.tokens) and not any(c.reused) for c in done)
    assert all(c.behaviour_logprobs == c.logprobs and set(c.versions) == {engine.weight_version} for c in done)
    assert stats.passes == max(len(c.tokens) for c in done), "a pass decodes all rows"
    assert stats.prefill_s > 0 < stats.decode_s
    assert stats.verify_s == 0
    assert engine.generate([])[0] == []
    other, _ = engine.generate(requests_of(cases, visit=1))
    assert len(differing(other, want)) > 13  # control: other keys give other texts


def test_drafts_of_any_quality_change_nothing(engine_of, golden):
    cases, want = golden()
    engine = engine_of(draft_tokens=40, window=40, sources=())
    plain, _ = engine.generate(requests_of(cases))
    for seed in range(3 if RUNNER == "v1" else 1):
        drafters = drafts_of_every_quality([t for t, _, _ in want], seed)
        random.Random(seed).shuffle(drafters)
        done, stats = engine.generate(requests_of(cases, drafters))
        assert exactly(done) == exactly(plain), "bit for bit, log-probs too"
        assert differing(done, want, 1e-4) == []
        assert 0 < stats.accepted < stats.drafted
        assert sum(sum(c.reused) for c in done) == stats.accepted
        assert stats.verify_s > 0


@on_v1
@pytest.mark.parametrize("distribution", [(0.0, 0, 1.0), (0.8, 9, 0.9)])
def test_every_distribution(engine_of, golden, distribution):
    cases, want = golden(distribution=distribution)
    engine = engine_of(distribution=distribution)
    plain, _ = engine.generate(requests_of(cases))
    assert differing(plain, want, 1e-4) == []
    drafters = drafts_of_every_quality([t for t, _, _ in want])
    done, stats = engine.generate(requests_of(cases, drafters))
    assert exactly(done) == exactly(plain)
    assert 0 < stats.accepted < stats.drafted
    assert differing(done, golden()[1]), "control: the sampling params matter"


def test_all_accepted_all_rejected_and_one_mismatch(engine_of, golden):
    cases, want = golden()
    engine, texts = engine_of(draft_tokens=40, window=40, sources=()), [t for t, _, _ in want]
    done, stats = engine.generate(requests_of(cases, [Script(t) for t in texts]))
    assert differing(done, want, 1e-4) == []
    assert stats.passes == 2, "one step for the prompts, one for all drafts"
    for (_, cap), (text, _, finish), c in zip(cases, want, done, strict=True):
        bonus = len(text) == cap > 1
        assert c.reused == [False] + [True] * (len(text) - 1 - bonus) + [False] * bonus
        assert (c.passes, c.finish) == (1 + (len(text) > 1), finish)

    done, stats = engine.generate(requests_of(cases, [Script(all_wrong(t)) for t in texts]))
    assert differing(done, want, 1e-4) == []
    assert stats.accepted == 0 < stats.drafted
    assert stats.sources == {"custom": (stats.drafted, 0)}, "drafts are counted by their source"
    assert [c.passes for c in done] == [len(t) for t in texts]
    assert not any(any(c.reused) for c in done)

    wrong_once = [Script([*t[:3], (t[3] + 1) % VOCAB, *t[4:]] if len(t) > 3 else t) for t in texts]
    done, stats = engine.generate(requests_of(cases, wrong_once))
    assert differing(done, want, 1e-4) == []
    assert stats.passes == 3, "the drafter is asked again"
    assert max(sum(c.reused) for c in done) > 20


@on_v1
def test_memory_bounds_change_nothing(engine_of, golden):
    cases, want = golden()
    drafters = drafts_of_every_quality([t for t, _, _ in want])
    done, stats = engine_of(tokens_per_pass=40, rows_per_batch=5).generate(requests_of(cases, drafters))
    assert differing(done, want, 1e-4) == []
    _, free = engine_of().generate(requests_of(cases, drafters))
    assert stats.passes > free.passes, "the bound was at work"


def test_a_cache_too_small_for_the_batch_changes_nothing(engine_of, monkeypatch):
    """vLLM preempts rows and recomputes their KV."""
    from vllm.v1.core.sched.scheduler import Scheduler

    plain, _ = engine_of(eos_ids=frozenset()).generate(requests_of(MANY_BLOCKS))
    engine = engine_of(eos_ids=frozenset(), kv_mb=1)
    preempted = []
    preempt = Scheduler._preempt_request
    monkeypatch.setattr(Scheduler, "_preempt_request", lambda *a, **more: preempted.append(1) or preempt(*a, **more))
    drafters = [Script(corrupt(c.tokens, random.Random(i), 0.1)) for i, c in enumerate(plain)]
    done, _ = engine.generate(requests_of(MANY_BLOCKS, drafters))
    assert exactly(done) == exactly(plain)
    assert preempted


@on_v1
def test_no_step_begins_after_a_stop_and_what_there_is_is_a_beginning(engine_of, golden):
    from vllm.v1.engine.llm_engine import LLMEngine

    engine, (cases, want) = engine_of(), golden()
    for steps in (0, 1, 9):
        asked = itertools.count()
        with mock.patch.object(LLMEngine, "step", autospec=True, side_effect=LLMEngine.step) as step:
            texts = engine.ahead(requests_of(cases), lambda asked=asked, steps=steps: next(asked) >= steps)
        assert step.call_count == steps
        for text, (tokens, _, finish) in zip(texts, want, strict=True):
            assert list(text.tokens) == tokens[: len(text.tokens)]
            assert text.finish in (None, finish)
        assert any(text.finish is None for text in texts)
    assert differing(engine.generate(requests_of(cases))[0], want, 1e-4) == [], "nothing of it is kept"


def test_a_row_that_fills_the_context(saved, engine_of):
    """vLLM pads rows near the end of the context with placeholder drafts; ours never do."""
    cases = [([6 + i % 50 for i in range(CONTEXT - 30)], 30), ([5, 6], 30)]  # of which nothing is cached
    engine = engine_of(eos_ids=frozenset())
    want, _ = TransformersEngine(saved("qwen3")[0], SamplingParams(frozenset())).generate(requests_of(cases))
    done, stats = engine.generate(requests_of(cases))
    assert differing(done, want, 1e-4) == []
    assert stats.drafted == 0
    assert stats.forward_tokens == CONTEXT - 30 + 2 + 2 * 29
    done, _ = engine.generate(requests_of(cases, [Script(c.tokens) for c in want]))
    assert differing(done, want, 1e-4) == []


@on_v1
def test_noise_off_by_one_position_is_found(engine_of, golden, monkeypatch):
    """Control: samples keyed by the next position differ."""
    cases, want = golden()

    def sample(logits, keys, positions, *more, **params):
        return keyed_sample(logits, keys, positions + 1, *more, **params)

    monkeypatch.setattr("specrl.rollout.engines.local.sampler.keyed_sample", sample)
    assert len(differing(engine_of().generate(requests_of(cases))[0], want)) > 13


# Errors ---------------------------------------------------------------------------------------------------------------


@on_v1
def test_requests_and_texts_beyond_the_context_are_refused(engine_of):
    with pytest.raises(RolloutError, match="max_new_tokens=6 or less"):
        engine_of().generate([Request([5], 1, 4), Request([3] * (CONTEXT - 6), 1, 7)])
    for tokens in ((), (5,) * CONTEXT):
        with pytest.raises(RolloutError, match=f"1 to {CONTEXT - 1} tokens, not {len(tokens)}"):
            engine_of().score(tokens)


@on_v1
def test_nan_logits_are_an_error_and_the_engine_recovers(updated, golden):
    engine, model = updated()
    cases, want = golden()
    weights = {n: t.clone() for n, t in model.state_dict().items()}
    weights["model.norm.weight"][3] = float("nan")
    version = engine.weight_version + 1
    engine.update_weights(weights.items(), version)
    for drafters in (None, [Script(t) for t, _, _ in want]):
        with pytest.raises(RolloutError, match=rf"NaN.*weight version {version}"):
            engine.generate(requests_of(cases, drafters))
    with pytest.raises(RolloutError, match="nan"):
        engine.update_weights(weights.items(), version, probe_of(model))
    engine.update_weights(model.state_dict().items(), version, probe_of(model))
    assert differing(engine.generate(requests_of(cases))[0], want, 1e-4) == []


def test_kv_that_a_failed_step_announced_is_forgotten(engine_of, saved):
    """vLLM lists the blocks of a prompt as cached when it schedules them, before they are computed."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    runner = CPUModelRunner if RUNNER == "v1" else GPUModelRunner
    cases = [([7 + i % 50 for i in range(90)], 9)] * 4
    failing = mock.patch.object(runner, "execute_model", side_effect=MemoryError("planted"))
    with failing, pytest.raises(MemoryError, match="planted"):
        engine_of().generate(requests_of(cases))
    assert_generates_as(engine_of(), saved("qwen3")[0], cases)


@on_v1
def test_a_cache_that_holds_no_row_is_refused_at_start(tmp_path):
    model = policy("qwen3")
    model.config.max_position_embeddings = 1 << 14
    model.save_pretrained(tmp_path)
    spec = spec_of(tmp_path, kv_mb=1)
    spec.rollout.max_new_tokens = 8192
    with pytest.raises(RolloutError, match=r"row of \d+ tokens.*max_new_tokens=8192.*kv_cache_mb"):
        start(spec)


@on_v1
def test_a_start_that_cannot_succeed_says_why(tmp_path, monkeypatch):
    spec = spec_of(tmp_path / "nowhere")
    with pytest.raises(RolloutError, match="nowhere"):
        start(spec)
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    spec.rollout.vllm.compile = "on"
    with pytest.raises(RolloutError, match=r"compile=on has no effect.*TORCH_COMPILE_DISABLE=0"):
        start(spec)


@on_v1
def test_starting_and_closing_leave_the_process_as_it_was(saved, engine_of):
    engine_of()
    threads, states = torch.set_num_threads, (torch.get_rng_state(), random.getstate(), torch.get_num_threads())
    np.random.seed(3)
    engine = start(spec_of(saved("qwen3")[1]))
    engine.generate(requests_of([([5], 3)]))
    assert torch.set_num_threads is threads
    assert torch.get_rng_state().equal(states[0])
    assert (random.getstate(), torch.get_num_threads()) == states[1:]
    assert np.random.random() == np.random.RandomState(3).random()
    engine.close()
    engine.close()
    assert torch.distributed.is_initialized(), "a process group that was there before stays"
