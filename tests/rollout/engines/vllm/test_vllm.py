"""The vLLM engine on Model Runner V1: it emits the tokens of the transformers engine, whatever the drafts.

The tests share one engine per configuration. Positive tests and planted faults share one comparison, `differing`.
"""

import gc
import importlib.util
import itertools
import os
import random
import tempfile
from collections import Counter
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from specrl.rollout.build import build_engine
from specrl.rollout.config import RolloutConfig
from specrl.rollout.drafting.suffix import PromptTexts, SuffixDrafter
from specrl.rollout.engines.base import EngineSpec, Probe, SamplingParams
from specrl.rollout.engines.local.engine import TransformersEngine
from specrl.rollout.keys import derive_key
from specrl.rollout.noise import keyed_sample
from specrl.rollout.types import Request, RolloutError
from tests.engines import local
from tests.rollout.engines.local.test_engine_drafts import Raises
from tests.rollout.golden import (
    EOS_IDS,
    VOCAB,
    Script,
    all_wrong,
    corrupt,
    differing,
    drafts_of_every_quality,
    prompts_and_caps,
    requests_of,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: pip install 'specrl[vllm]'"),
]
RUNNER = "v2" if os.environ.get("TRITON_INTERPRET") else "v1"
"""Of vLLM's model runners; test_vllm_v2.py runs this file on the other one."""
on_v1 = pytest.mark.skipif(RUNNER == "v2", reason="of model runner V1 only")
CONTEXT = 128
"""Tokens: an engine scores a text of as many when it starts."""
LAWS = [(0.0, 0, 1.0), (0.7, 0, 1.0), (1.3, 0, 1.0), (1.0, 5, 1.0), (0.8, 9, 0.9)]


def policy(family: str, seed: int = 0):
    """A random model of sizes that vLLM's CPU kernels support. qwen3 ties its embeddings, llama has an output layer."""
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": family == "qwen3",
        "pad_token_id": None,
    }
    config = {"qwen3": Qwen3Config, "llama": LlamaConfig}[family](**shape)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(12.0)
    return model.eval()


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """saved(family): a model and its directory."""
    made = {}

    def get(family: str):
        if family not in made:
            model, path = policy(family), tmp_path_factory.mktemp(family)
            model.save_pretrained(path)
            made[family] = model, path
        return made[family]

    return get


def spec_of(path, *, eos_ids=EOS_IDS, window=6, kv_mb=16, draft_tokens=8, **settings) -> EngineSpec:
    config = RolloutConfig(engine="vllm", max_new_tokens=30, **settings)
    config.budget.window, config.vllm.kv_cache_mb, config.vllm.draft_tokens = window, kv_mb, draft_tokens
    config.vllm.runner = RUNNER
    return EngineSpec(model=str(path), eos_ids=eos_ids, rollout=config)


def start(path, **settings):
    """A vLLM engine without vLLM's full garbage collections, each of which takes 0.5 s in a large test process."""
    with mock.patch("gc.collect"):
        return build_engine(spec_of(path, **settings))


def close(engine) -> None:
    with mock.patch("gc.collect"):
        engine.close()


@pytest.fixture(scope="session")
def engine_of(saved):
    """engine_of(family, **settings): a vLLM engine with the weights of that family's model."""
    engines = {}

    def get(family: str = "qwen3", **settings):
        name = repr((family, settings))
        if name not in engines:
            engines[name] = start(saved(family)[1], **settings)
        return engines[name]

    yield get
    for engine in reversed(engines.values()):
        close(engine)


@pytest.fixture(scope="session")
def golden(saved):
    """golden(family, distribution): 26 requests without drafts and the transformers engine's responses."""
    done = {}

    def get(family: str = "qwen3", law=(1.0, 0, 1.0)):
        if (family, law) not in done:
            cases = prompts_and_caps(26)
            engine = TransformersEngine(saved(family)[0], SamplingParams(EOS_IDS, *law))
            completions, stats = engine.generate(requests_of(cases))
            assert stats.ties == 0, "a near tie would make the comparison depend on rounding; choose another seed"
            done[family, law] = cases, [(c.tokens, c.logprobs, c.finish) for c in completions]
        return done[family, law]

    return get


# Identity -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_plain_decoding_equals_the_transformers_engine(engine_of, golden, family):
    cases, want = golden(family)
    done, stats = engine_of(family).generate(requests_of(cases))
    assert differing(done, want, 1e-4) == []
    assert {c.finish for c in done} == {"stop", "length"}
    assert stats.drafted == stats.accepted == 0
    assert all(c.passes == len(c.tokens) and not any(c.reused) for c in done)
    assert all(c.behaviour_logprobs == c.logprobs and set(c.versions) == {0} for c in done)
    assert stats.passes == max(len(c.tokens) for c in done), "all rows ride together"
    assert stats.prefill_s > 0 < stats.decode_s
    assert stats.verify_s == 0
    other, _ = engine_of(family).generate(requests_of(cases, visit=1))
    assert len(differing(other, want)) > 13  # control: other keys give other texts


def exactly(done) -> list:
    return [(c.tokens, c.logprobs, c.finish) for c in done]


@pytest.mark.parametrize("draft_tokens", [1, 8, 40])
def test_drafts_of_any_quality_change_nothing(engine_of, golden, draft_tokens):
    cases, want = golden()
    engine = engine_of(draft_tokens=draft_tokens, window=40)
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


@pytest.mark.parametrize("law", LAWS)
def test_every_sampling_law(engine_of, golden, law):
    cases, want = golden(law=law)
    engine = engine_of(temperature=law[0], top_k=law[1], top_p=law[2])
    plain, _ = engine.generate(requests_of(cases))
    assert differing(plain, want, 1e-4) == []
    drafters = drafts_of_every_quality([t for t, _, _ in want])
    done, stats = engine.generate(requests_of(cases, drafters))
    assert exactly(done) == exactly(plain)
    assert 0 < stats.accepted < stats.drafted
    assert differing(done, golden()[1]), "control: the law matters"


def test_all_accepted_and_all_rejected(engine_of, golden):
    cases, want = golden()
    engine, texts = engine_of(draft_tokens=40, window=40, sources=[]), [t for t, _, _ in want]
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
    assert [c.passes for c in done] == [len(t) for t in texts]
    assert not any(any(c.reused) for c in done)


def test_the_drafter_is_asked_again_after_a_mismatch(engine_of, golden):
    cases, want = golden()
    wrong_once = [Script([*t[:3], (t[3] + 1) % VOCAB, *t[4:]] if len(t) > 3 else t) for t, _, _ in want]
    done, stats = engine_of(draft_tokens=40, window=40).generate(requests_of(cases, wrong_once))
    assert differing(done, want, 1e-4) == []
    assert stats.passes == 3
    assert max(sum(c.reused) for c in done) > 20


def test_drafts_from_siblings_with_shared_prompts(engine_of, golden):
    """As in training: eight rows a prompt, each drafting from a sibling's text."""
    engine, prompt = engine_of(), list(range(2, 50))
    cases = [(prompt, 30)] * 4 + [([*prompt, 7], 30)] * 4
    plain, first = engine.generate(requests_of(cases))
    siblings = [SuffixDrafter(PromptTexts([c.tokens]), plain[i ^ 1].tokens) for i, c in enumerate(plain)]
    done, stats = engine.generate(requests_of(cases, siblings))
    assert exactly(done) == exactly(plain)
    assert stats.accepted > 0
    again, cached = engine.generate(requests_of(cases))
    assert exactly(again) == exactly(plain)
    assert cached.forward_tokens < first.forward_tokens, "the second time the prompts come from the prefix cache"


@pytest.mark.parametrize("settings", [{"tokens_per_pass": 40}, {"rows_per_batch": 5}])
def test_memory_bounds_change_nothing(engine_of, golden, settings):
    cases, want = golden()
    engine = engine_of(**settings)
    drafters = drafts_of_every_quality([t for t, _, _ in want])
    done, stats = engine.generate(requests_of(cases, drafters))
    assert differing(done, want, 1e-4) == []
    _, free = engine_of().generate(requests_of(cases, drafters))
    assert stats.passes > free.passes, "the bound was at work"


@on_v1  # V2 has the same limit, and 150 rows take long there
def test_the_drafts_of_a_step_are_bounded(engine_of, monkeypatch):
    """vLLM holds the logits of all positions of a step at once. A MB holds those of 2148 draft tokens."""
    cases = [([3 + i % 50, i // 50, 9], 30) for i in range(150)]
    plain, _ = engine_of(draft_tokens=40, window=40).generate(requests_of(cases))
    texts = [Script(c.tokens) for c in plain]

    def largest(**settings) -> int:
        """Tokens of the largest step after the prompts."""
        engine, steps = engine_of(draft_tokens=40, window=40, **settings), []
        observe = engine.drafting.budget.observe_pass
        with monkeypatch.context() as patch:
            patch.setattr(
                engine.drafting.budget,
                "observe_pass",
                lambda n, *more, **told: (steps.append(n), observe(n, *more, **told)),
            )
            done, _ = engine.generate(requests_of(cases, texts))
        assert exactly(done) == exactly(plain)
        return max(steps)

    assert largest() > 2148 + len(cases)
    assert 1000 < largest(logits_mb=1) <= 2148 + len(cases)


@on_v1  # V2 always pads the first step after a prompt
def test_drafts_leave_no_row_out_of_a_step(engine_of, monkeypatch):
    """Sixteen rows with drafts of eight tokens: the drafts of seven rows would fill a step of 64 tokens."""
    cases = [([3 + i], 30) for i in range(16)]
    plain, _ = engine_of(eos_ids=frozenset()).generate(requests_of(cases))
    engine, rows = engine_of(eos_ids=frozenset(), window=8, tokens_per_pass=64), []
    ask = engine.drafting.propose
    monkeypatch.setattr(engine.drafting, "propose", lambda of, stats: (rows.append(len(of)), ask(of, stats))[1])
    done, _ = engine.generate(requests_of(cases, [Script(c.tokens) for c in plain]))
    assert exactly(done) == exactly(plain)
    assert max(c.passes for c in done) <= 9, "three tokens of a draft and one more in each step"
    assert {n for n in rows if n} == {16}


MANY_BLOCKS = [([3 + i, *(4 + j % 50 for j in range(90))], 12) for i in range(18)]
"""Of KV: three a row for its prompt, four with its response; a MB holds 64."""


def test_a_cache_too_small_for_the_batch_changes_nothing(engine_of, monkeypatch):
    """vLLM preempts rows and recomputes their KV."""
    from vllm.v1.core.sched.scheduler import Scheduler

    cases = MANY_BLOCKS
    plain, _ = engine_of(eos_ids=frozenset()).generate(requests_of(cases))
    engine = engine_of(eos_ids=frozenset(), kv_mb=1)
    preempted = []
    preempt = Scheduler._preempt_request
    monkeypatch.setattr(Scheduler, "_preempt_request", lambda *a, **more: preempted.append(1) or preempt(*a, **more))
    drafters = [Script(corrupt(c.tokens, random.Random(i), 0.1)) for i, c in enumerate(plain)]
    for batch in (requests_of(cases), requests_of(cases, drafters)):
        done, _ = engine.generate(batch)
        assert exactly(done) == exactly(plain)
    assert preempted


@pytest.mark.parametrize("steps", [0, 1, 4, 9])
def test_a_stop_lets_no_further_step_begin_and_what_is_there_is_a_beginning(engine_of, golden, steps):
    from vllm.v1.engine.llm_engine import LLMEngine

    engine, (cases, expected), asked = engine_of("qwen3"), golden("qwen3"), itertools.count()
    with mock.patch.object(LLMEngine, "step", autospec=True, side_effect=LLMEngine.step) as step:
        texts = engine.ahead(requests_of(cases), lambda: next(asked) >= steps)
    assert step.call_count == steps
    for text, (tokens, _, finish) in zip(texts, expected, strict=True):
        assert list(text.tokens) == tokens[: len(text.tokens)]
        assert text.finish in (None, finish)
    assert any(text.finish is None for text in texts)
    assert differing(engine.generate(requests_of(cases))[0], expected, 1e-4) == [], "nothing of it is left behind"


def test_batches_of_none_and_of_one(engine_of, golden):
    engine = engine_of()
    assert engine.generate([])[0] == []
    cases, want = golden()
    for case, row, i in zip(cases, want, itertools.count()):
        request = Request(case[0], derive_key(3, "engine", i, 0), case[1], Script(row[0]))
        assert differing(engine.generate([request])[0], [row], 1e-4) == []


def test_the_cap_is_exact_and_eos_at_the_cap_is_a_stop(saved, engine_of):
    engine = engine_of(eos_ids=frozenset())
    text = engine.generate(requests_of([([8, 9], 12)]))[0][0].tokens
    eos = text[5]
    first = text.index(eos) + 1
    sampling, engine.sampling = engine.sampling, SamplingParams(frozenset({eos}))
    try:
        for cap in range(1, 13):
            for draft in (None, Script(text), Script(text[:first] + [3] * 9), Script(all_wrong(text))):
                (c,), _ = engine.generate(requests_of([([8, 9], cap)], [draft]))
                assert c.tokens == text[: min(cap, first)]
                assert c.finish == ("stop" if cap >= first else "length")
    finally:
        engine.sampling = sampling


@pytest.mark.parametrize("eos_ids", [frozenset(range(10)), frozenset(range(VOCAB))])
def test_several_eos_ids_stop_at_the_first_of_any(engine_of, eos_ids):
    cases = [([11, 12, 13], 30)] * 8
    texts = [c.tokens for c in engine_of(eos_ids=frozenset()).generate(requests_of(cases))[0]]
    assert {len(t) for t in texts} == {30}
    done, _ = engine_of(eos_ids=eos_ids).generate(requests_of(cases, [Script(t) for t in texts]))
    for c, text in zip(done, texts, strict=True):
        end = next((i + 1 for i, t in enumerate(text) if t in eos_ids), len(text))
        assert c.tokens == text[:end]
        assert c.finish == ("stop" if c.tokens[-1] in eos_ids else "length")


def test_a_row_that_fills_the_context(saved, engine_of):
    """vLLM pads rows near the end of the context with placeholder drafts; ours never do."""
    prompt = [2 + i % 50 for i in range(CONTEXT - 30)]
    cases = [(prompt, 30), ([5, 6], 30)]
    engine = engine_of(eos_ids=frozenset())
    want, _ = TransformersEngine(saved("qwen3")[0], SamplingParams(frozenset())).generate(requests_of(cases))
    done, stats = engine.generate(requests_of(cases))
    assert differing(done, want, 1e-4) == []
    assert stats.drafted == 0
    assert stats.forward_tokens == CONTEXT - 30 + 2 + 2 * 29
    done, _ = engine.generate(requests_of(cases, [Script(c.tokens) for c in want]))
    assert differing(done, want, 1e-4) == []


def test_the_window_follows_costs_and_acceptance(engine_of, golden):
    cases, want = golden()
    engine = engine_of(window=0, draft_tokens=40)
    for text in ([t for t, _, _ in want], [all_wrong(t) for t, _, _ in want]):
        done, _ = engine.generate(requests_of(cases, [Script(t) for t in text]))
        assert differing(done, want, 1e-4) == []
    a, b = engine.drafting.budget.cost()
    assert a > 0 < b


def test_noise_off_by_one_position_is_found(updated, golden, monkeypatch):
    """Control: samples keyed by the next position differ."""
    cases, want = golden()
    late = 1

    def draw(logits, keys, at, *more, **law):
        return keyed_sample(logits, keys, at + late, *more, **law)

    monkeypatch.setattr("specrl.rollout.engines.local.sampler.keyed_sample", draw)
    engine, _ = updated()
    assert len(differing(engine.generate(requests_of(cases))[0], want)) > 13
    late = 0
    assert differing(engine.generate(requests_of(cases))[0], want, 1e-4) == []


# Weights --------------------------------------------------------------------------------------------------------------


def moved(model, seed: int, scale: float = 0.05):
    """A copy of the model with perturbed weights."""
    new = AutoModelForCausalLM.from_config(model.config).eval()
    generator = torch.Generator().manual_seed(seed)
    state = {
        name: t + scale * t.std() * torch.randn(t.shape, generator=generator) if t.dim() > 1 else t.clone()
        for name, t in model.state_dict().items()
    }
    if model.config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    new.load_state_dict(state)
    return new


@pytest.mark.parametrize("what", ["token", "finish"])
def test_a_row_that_vllm_has_otherwise_is_an_error(engine_of, golden, monkeypatch, what):
    from specrl.rollout.engines.vllm.batch import VLLMRow

    cases, want = golden()
    emit = VLLMRow.emit

    def lying(row, *stood):
        count = emit(row, *stood)
        if row.finish and len(row.tokens) > count:  # vLLM already has the first token
            if what == "token":
                row.tokens[0] = (row.tokens[0] + 1) % VOCAB
            else:
                row.finish = {"stop": "length", "length": "stop"}[row.finish]
        return count

    monkeypatch.setattr(VLLMRow, "emit", lying)
    with pytest.raises(RolloutError, match="vLLM and specrl disagree about row"):
        engine_of().generate(requests_of(cases))
    monkeypatch.undo()
    assert differing(engine_of().generate(requests_of(cases))[0], want, 1e-4) == []


TEXT = tuple(2 + i * 7 % 50 for i in range(60))


def probe_of(model, tolerance: float = 1e-4) -> Probe:
    return Probe(TEXT, tuple(TransformersEngine(model, SamplingParams(EOS_IDS)).score(TEXT)), tolerance)


@pytest.fixture
def updated(saved, engine_of):
    """updated(family): a new vLLM engine for tests that change its weights."""
    engine_of()  # vLLM's first engine in a process owns the process group, so it must be closed last
    engines = []

    def get(family: str = "qwen3", **settings):
        model, path = saved(family)
        engines.append(start(path, **settings))
        return engines[-1], model

    yield get
    for engine in engines:
        close(engine)


@on_v1
def test_the_heap_is_at_rest_while_it_works(updated, golden, monkeypatch):
    """vLLM froze the heap when it started. Counting its objects takes as long as many steps, so no rollout does it."""
    engine, asked = updated()[0], requests_of(golden()[0][:2])
    assert gc.get_freeze_count() > 10_000
    monkeypatch.delattr(gc, "get_freeze_count")
    engine.generate(asked)


@pytest.fixture
def shared_memory(tmp_path, monkeypatch):
    """The directory for weight transfers in this test, to which no other process writes."""
    folder, make = tmp_path / "shm", tempfile.mkdtemp
    folder.mkdir()
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **given: make(**{**given, "dir": folder}))
    return folder


@pytest.mark.parametrize(("family", "route"), [("qwen3", "process"), ("llama", "process"), ("qwen3", "memory")])
def test_after_updates_it_is_the_new_policy(updated, golden, shared_memory, monkeypatch, family, route):
    from vllm import LLM

    if route == "memory":  # as with several ranks
        monkeypatch.setattr("specrl.rollout.engines.vllm.weights.choose_route", lambda at: (route, "the test says so"))
    finish, told = LLM.finish_weight_update, []
    monkeypatch.setattr(LLM, "finish_weight_update", lambda *a, **given: told.append(given) or finish(*a, **given))
    engine, model = updated(family)
    cases, want = golden(family)
    assert engine.updates.route == route
    used = shared_memory.stat().st_mtime_ns
    for version in (3, 4, 4):
        new = moved(model, version)
        weights = dict(new.state_dict())
        if version == 4 and family == "qwen3":
            del weights["lm_head.weight"]  # tied, so it may be omitted
        engine.update_weights(iter(weights.items()), version, probe_of(new))
        assert engine.weight_version == version
        assert told[-1] == {"weight_version": str(version)}, "vLLM's own number"
        fresh, _ = TransformersEngine(new, SamplingParams(EOS_IDS)).generate(requests_of(cases))
        drafters = [Script(t) for t, _, _ in want]  # the old policy's texts
        for batch in (requests_of(cases, drafters), requests_of(cases)):
            done, _ = engine.generate(batch)
            assert differing(done, fresh, 1e-4) == []
            assert {c.version for c in done} == {version}
            assert {v for c in done for v in c.versions} == {version}
        assert len(differing(done, want)) > 3, "control: the update changed the policy"
    assert list(shared_memory.iterdir()) == []
    assert (shared_memory.stat().st_mtime_ns > used) == (route == "memory"), "were weights there?"


def test_score_is_the_models_own(saved, engine_of):
    for family in ("qwen3", "llama"):
        model, _ = saved(family)
        with torch.no_grad():
            logprobs = model(input_ids=torch.tensor([TEXT])).logits[0, :-1].log_softmax(-1)
        want = logprobs.gather(-1, torch.tensor(TEXT)[1:, None])[:, 0].tolist()
        assert engine_of(family).score(TEXT) == pytest.approx(want, abs=1e-4)
        assert engine_of(family).score(TEXT[:1]) == []


@pytest.mark.parametrize("fault", ["unknown", "missing", "shape", "twice", "interrupted"])
def test_an_update_that_does_not_fit_is_refused_whole(updated, golden, shared_memory, fault):
    engine, model = updated()
    cases, want = golden()
    weights = list(moved(model, 1).state_dict().items())
    words = {
        "unknown": ([*weights, ("model.extra", torch.ones(1))], "model.extra"),
        "missing": ([w for w in weights if "layers.1.mlp.up" not in w[0]], r"lacks 1 .*layers\.1\.mlp\.up_proj"),
        "shape": ([(n, t[:1] if n.endswith("q_proj.weight") else t) for n, t in weights], r"\(1, 64\).*\(64, 64\)"),
        "twice": (weights[:1] * 2, "twice"),
    }
    if fault == "interrupted":

        def broken():
            yield from weights[:3]
            raise OSError("the trainer is gone")

        with pytest.raises(RolloutError, match="could not load weight version 1: the trainer is gone"):
            engine.update_weights(broken(), 1)
    else:
        bad, word = words[fault]
        with pytest.raises(RolloutError, match=word):
            engine.update_weights(bad, 1)
    assert list(shared_memory.iterdir()) == []
    assert engine.weight_version == 0
    with pytest.raises(RolloutError, match=r"version 1 failed; send the weights again"):
        engine.generate(requests_of(cases))
    engine.update_weights(model.state_dict().items(), 2, probe_of(model))
    done, _ = engine.generate(requests_of(cases))
    assert differing(done, want, 1e-4) == []
    assert {c.version for c in done} == {2}


def test_a_version_never_goes_backwards(updated):
    engine, model = updated()
    engine.update_weights(model.state_dict().items(), 5)
    with pytest.raises(RolloutError, match="version 4 is older than the engine's 5"):
        engine.update_weights(model.state_dict().items(), 4)
    with pytest.raises(RolloutError, match="bring"):
        engine.update_weights(None, 6)


def test_the_probe_finds_wrong_weights(updated):
    engine, model = updated()
    with pytest.raises(RolloutError, match="does not run the weights it was sent"):
        engine.update_weights(moved(model, 2).state_dict().items(), 1, probe_of(moved(model, 3)))
    with pytest.raises(RolloutError, match="version 1 failed"):
        engine.generate([])


def test_the_probe_finds_a_stale_output_layer(updated, monkeypatch):
    """Control: without the repair the CPU build uses the old packed copy of a tied output layer."""
    import specrl.rollout.engines.vllm.worker as transfer

    engine, model = updated()
    new = moved(model, 1)
    with monkeypatch.context() as patch:
        patch.setattr(transfer, "refresh_tied_head", lambda model: None)
        with pytest.raises(RolloutError, match="does not run the weights it was sent"):
            engine.update_weights(new.state_dict().items(), 1, probe_of(new))
    engine.update_weights(new.state_dict().items(), 1, probe_of(new))


def test_kv_of_older_weights_is_found(updated, monkeypatch):
    """Control: without the reset, the old prompt's KV is reused and the tokens differ."""
    engine, model = updated()
    new = moved(model, 1, scale=0.3)
    cases = [([2 + i % 50 for i in range(90)], 30)] * 8
    engine.generate(requests_of(cases))
    want, _ = TransformersEngine(new, SamplingParams(EOS_IDS)).generate(requests_of(cases))
    with monkeypatch.context() as patch:
        patch.setattr(engine, "reset_cache", lambda: None)
        engine.update_weights(new.state_dict().items(), 1)
    done, _ = engine.generate(requests_of(cases))
    assert differing(done, want, 1e-4)
    engine.update_weights(new.state_dict().items(), 1)
    done, _ = engine.generate(requests_of(cases))
    assert differing(done, want, 1e-4) == []


def test_a_reset_that_vllm_refuses_is_an_error(updated, monkeypatch):
    from vllm import LLM

    engine, model = updated()
    monkeypatch.setattr(LLM, "reset_prefix_cache", lambda llm: False)
    with pytest.raises(RolloutError, match="kept KV of older weights"):
        engine.update_weights(model.state_dict().items(), 1)


# The lenient rule -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def old_texts(saved):
    """Texts sampled from the saved policy, and 30 cases that do not end early."""
    cases = [(prompt, 30) for prompt, _ in prompts_and_caps(30)]
    done, _ = TransformersEngine(saved("qwen3")[0], SamplingParams(EOS_IDS)).generate(requests_of(cases))
    return cases, done


def lenient_requests(cases, texts, visit):
    requests = requests_of(cases, [Script(c.tokens) for c in texts], visit)
    for request, c in zip(requests, texts, strict=True):
        request.draft_logprobs, request.draft_version = c.logprobs, 0
    return requests


@pytest.mark.parametrize(("lenience", "draft_tokens"), [(0.5, 8), (1.0, 8), (1.65, 40)])
def test_lenient_decides_as_the_transformers_engine(updated, old_texts, lenience, draft_tokens):
    cases, texts = old_texts
    engine, model = updated(acceptance="lenient", lenience=lenience, draft_tokens=draft_tokens)
    new = moved(model, 1)
    engine.update_weights(new.state_dict().items(), 1, probe_of(new))
    reference = local(new, SamplingParams(EOS_IDS), lenience=lenience)
    reference.update_weights(None, 1)
    want, _ = reference.generate(lenient_requests(cases, texts, visit=1))
    done, stats = engine.generate(lenient_requests(cases, texts, visit=1))
    assert differing(done, want, 1e-4) == []
    for c, w in zip(done, want, strict=True):
        assert (c.reused, c.versions, c.draft_version) == (w.reused, w.versions, 0)
        assert c.behaviour_logprobs == pytest.approx(w.behaviour_logprobs, abs=1e-4)
    assert 0 < stats.accepted < stats.drafted
    assert any(len(set(c.versions)) == 2 for c in done)
    exact, _ = TransformersEngine(new, SamplingParams(EOS_IDS)).generate(requests_of(cases, visit=1))
    assert len(differing(done, exact)) > 10, "control: the rule is not the exact one"


def test_lenient_needs_stored_logprobs(engine_of):
    with pytest.raises(RolloutError, match="log-probs"):
        engine_of(acceptance="lenient").generate(requests_of([([5], 9)], [Script([5] * 9)]))


# Errors ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "cap", "word"),
    [
        ([VOCAB], 5, f"token id {VOCAB}"),
        ([3] * CONTEXT, 5, f"{CONTEXT} tokens leaves no room"),
        ([3] * (CONTEXT - 6), 7, "max_new_tokens=6 or less"),
    ],
)
def test_impossible_requests(engine_of, prompt, cap, word):
    with pytest.raises(RolloutError, match=word):
        engine_of().generate([Request([5], 1, 4), Request(prompt, 1, cap)])


def test_nan_logits_are_an_error_and_the_engine_recovers(updated, golden):
    engine, model = updated()
    cases, want = golden()
    weights = {n: t.clone() for n, t in model.state_dict().items()}
    weights["model.norm.weight"][3] = float("nan")
    engine.update_weights(weights.items(), 1)
    for drafters in (None, [Script(t) for t, _, _ in want]):
        with pytest.raises(RolloutError, match=r"NaN.*weight version 1"):
            engine.generate(requests_of(cases, drafters))
    with pytest.raises(RolloutError, match="nan"):
        engine.update_weights(weights.items(), 2, probe_of(model))
    engine.update_weights(model.state_dict().items(), 3, probe_of(model))
    assert differing(engine.generate(requests_of(cases))[0], want, 1e-4) == []


def test_a_drafter_that_fails_is_left_and_nothing_else_changes(engine_of, golden):
    cases, want = golden("qwen3")
    drafters = [Raises(text) if i % 2 else Script(text) for i, (text, _, _) in enumerate(want)]
    done, stats = engine_of().generate(requests_of(cases, drafters))
    assert differing(done, want, 1e-4) == []
    assert stats.drafter_faults == sum(drafter.failed for drafter in drafters[1::2]) > 3


def test_kv_that_a_failed_step_announced_is_forgotten(updated, saved):
    """vLLM lists the blocks of a prompt as cached when it schedules them, before they are computed."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    engine, model = updated()
    runner = CPUModelRunner if RUNNER == "v1" else GPUModelRunner
    cases = [([2 + i % 50 for i in range(90)], 9)] * 4
    want, _ = TransformersEngine(model, SamplingParams(EOS_IDS)).generate(requests_of(cases))
    failing = mock.patch.object(runner, "execute_model", side_effect=MemoryError("planted"))
    with failing, pytest.raises(MemoryError, match="planted"):
        engine.generate(requests_of(cases))
    assert differing(engine.generate(requests_of(cases))[0], want, 1e-4) == []


def test_a_cache_that_holds_no_row_is_refused_at_start(tmp_path):
    model = policy("qwen3")
    model.config.max_position_embeddings = 1 << 14
    model.save_pretrained(tmp_path)
    spec = spec_of(tmp_path, kv_mb=1)
    spec.rollout.max_new_tokens = 8192
    with pytest.raises(RolloutError, match=r"row of \d+ tokens.*max_new_tokens=8192.*kv_cache_mb"):
        build_engine(spec)


@on_v1
@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"runner": "v2"}, r"runner=v2 does not work here: it needs a GPU, or Triton; use rollout\.vllm\.runner=v1"),
        ({"tensor_parallel": 2}, r"runner=v1 .*tensor_parallel=2 .*; nor does v2: it needs a GPU"),
        ({"tensor_parallel": 2, "runner": "v1"}, "drafts on the host"),
    ],
)
def test_runners_that_do_not_work_here(saved, settings, word):
    from vllm.triton_utils import HAS_TRITON

    assert not HAS_TRITON, "with Triton, Model Runner V2 would start"
    spec = spec_of(saved("qwen3")[1])
    spec.rollout.vllm.runner = "auto"
    for name, value in settings.items():
        setattr(spec.rollout.vllm, name, value)
    with pytest.raises(RolloutError, match=word):
        build_engine(spec)


@pytest.mark.parametrize("tokens", [(), (5,) * CONTEXT])
def test_texts_that_cannot_be_scored(engine_of, tokens):
    with pytest.raises(RolloutError, match=f"1 to {CONTEXT - 1} tokens, not {len(tokens)}"):
        engine_of().score(tokens)


def test_a_compiler_that_is_switched_off_is_told(saved, monkeypatch):
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    spec = spec_of(saved("qwen3")[1])
    spec.rollout.vllm.compile = "on"
    with pytest.raises(RolloutError, match=r"compile=on has no effect.*TORCH_COMPILE_DISABLE=0"):
        build_engine(spec)


def test_a_model_that_is_not_there(tmp_path):
    with pytest.raises(RolloutError, match="nowhere"):
        build_engine(spec_of(tmp_path / "nowhere"))


def test_starting_and_closing_leave_the_process_as_it_was(saved, engine_of):
    engine_of()
    threads, states = torch.set_num_threads, (torch.get_rng_state(), random.getstate(), torch.get_num_threads())
    engine = build_engine(spec_of(saved("qwen3")[1]))
    engine.generate(requests_of([([5], 3)]))
    assert torch.set_num_threads is threads
    assert torch.get_rng_state().equal(states[0])
    assert (random.getstate(), torch.get_num_threads()) == states[1:]
    engine.close()
    engine.close()
    assert torch.distributed.is_initialized(), "a process group that was there before stays"


@on_v1  # sampling the same tokens on V2 is slow
def test_draws_follow_the_policy(saved, engine_of):
    """4,000 keys with one token each: the counts of each token equal those of the transformers engine."""
    requests = [Request([5, 6, 7], derive_key(0, "law", i, 0), 1) for i in range(4000)]
    want, _ = TransformersEngine(saved("qwen3")[0], SamplingParams(frozenset())).generate(requests)
    done, _ = engine_of(eos_ids=frozenset()).generate(requests)
    assert Counter(c.tokens[0] for c in done) == Counter(c.tokens[0] for c in want)
