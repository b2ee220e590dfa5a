"""The transformers engine: drafts never change a sampled token, and planted faults are detected (golden.py)."""

import copy
import random

import pytest
import torch

import specrl.rollout.engines.local.reader as reader
from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.engines.local import sampler
from specrl.rollout.engines.local.engine import TransformersEngine
from specrl.rollout.engines.local.reader import Reader
from specrl.rollout.noise import keyed_sample
from specrl.rollout.types import Request
from tests.rollout.golden import (
    EOS_IDS,
    FAMILIES,
    SAMPLING,
    VOCAB,
    Script,
    all_wrong,
    corrupt,
    differing,
    drafts_of_every_quality,
    engine_of,
    nearly_tied_keys,
    noisy,
    reference,
    requests_of,
)

# Identity -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_decoding_equals_one_row_at_a_time(golden, family):
    model, cases, want = golden(family)
    done, stats = engine_of(model).generate(requests_of(cases))
    assert differing(done, want) == []
    assert {c.finish for c in done} == {"stop", "length"}
    assert stats.drafted == stats.accepted == 0
    assert all(c.passes == len(c.tokens) and not any(c.reused) for c in done)
    assert all(c.behaviour_logprobs == c.logprobs for c in done)
    longest = max(len(c.tokens) for c in done)
    assert stats.passes == longest, "all rows ride together"
    other, _ = engine_of(model).generate(requests_of(cases, visit=1))
    assert len(differing(other, want)) > 13  # control: other keys give other texts


@pytest.mark.parametrize("others", [False, True])
def test_rows_of_the_next_batch_end_with_this_one_or_with_the_process_that_takes_longest(golden, others):
    """They end by themselves, however long that takes."""
    model, cases, want = golden("llama")
    engine = engine_of(model, fill=64)
    engine.others_at_work = lambda: others
    later = requests_of(cases, visit=1)
    engine.begin(later)
    done, _ = engine.generate(requests_of(cases[:4]))
    assert differing(done, want[:4]) == []
    texts, _ = engine.stop()
    assert texts
    assert others == all(r.key in texts and texts[r.key].finish for r in later)


@pytest.mark.parametrize(("family", "window"), [*((f, 16) for f in FAMILIES), *(("llama", w) for w in (0, 1, 200))])
def test_drafts_of_any_quality_change_nothing(golden, family, window):
    model, cases, want = golden(family)
    drafters = drafts_of_every_quality([t for t, _, _ in want])
    done, stats = engine_of(model, window=window).generate(requests_of(cases, drafters))
    assert differing(done, want) == []
    if window:  # 0 decides by measured times
        assert 0 < stats.accepted < stats.drafted, "both acceptances and rejections happened"
    assert sum(sum(c.reused) for c in done) == stats.accepted
    assert all(len(c.tokens) == len(c.logprobs) == len(c.behaviour_logprobs) == len(c.reused) for c in done)


def test_plain_rows_beside_rows_that_draft_decode_plainly(golden):
    model, cases, want = golden("llama")
    requests = requests_of(cases, [Script(t) for t, _, _ in want])
    for request in requests[::3]:
        request.plain = True
    done, stats = engine_of(model, window=8).generate(requests)
    assert differing(done, want) == []
    assert stats.sources == {"custom": (stats.drafted, stats.accepted)}
    assert sum(sum(c.reused) for c in done) == stats.accepted > 0.5 * sum(len(t) for t, _, _ in want[1::3])
    assert not any(any(c.reused) for c in done[::3])


def test_all_accepted_all_rejected_and_mixed(golden):
    model, cases, want = golden("qwen2")
    texts = [t for t, _, _ in want]
    engine = engine_of(model, window=200)

    done, stats = engine.generate(requests_of(cases, [Script(t) for t in texts]))
    assert differing(done, want) == []
    assert stats.accepted == stats.drafted > 0
    assert {c.passes for c in done} == {1}
    assert stats.passes == 1
    for (_, cap), (text, _, finish), c in zip(cases, want, done, strict=True):
        assert c.reused == [True] * (len(text) - (len(text) == cap)) + [False] * (len(text) == cap)
        assert c.finish == finish

    done, stats = engine.generate(requests_of(cases, [Script(all_wrong(t)) for t in texts]))
    assert differing(done, want) == []
    assert stats.accepted == 0 < stats.drafted
    assert [c.passes for c in done] == [len(t) for t in texts]
    assert not any(any(c.reused) for c in done)

    half = [Script(t) if i % 2 else Script(all_wrong(t)) for i, t in enumerate(texts)]
    done, stats = engine.generate(requests_of(cases, half))
    assert differing(done, want) == []
    assert 0 < stats.accepted < stats.drafted


@pytest.mark.parametrize("case", [([5], 1), ([5], 20), ([5, 6, 7, 8], 1), ([5, 6, 7, 8], 20)])
def test_a_batch_of_one(tiny, case):
    model = tiny("gpt2")
    want = reference(model, requests_of([case]))
    engine = engine_of(model, window=4)
    assert differing(engine.generate(requests_of([case]))[0], want) == []
    for text in (want[0][0], all_wrong(want[0][0]), []):
        assert differing(engine.generate(requests_of([case], [Script(text)]))[0], want) == []


def test_an_empty_batch(tiny):
    done, stats = engine_of(tiny("llama")).generate([])
    assert done == []
    assert stats.passes == stats.forward_tokens == 0


def test_a_shared_prompt_is_computed_once(tiny):
    model = tiny("llama")
    prompt = list(range(2, 22))
    _, stats = engine_of(model).generate(requests_of([(prompt, 4)] * 8))
    _, apart = engine_of(model).generate(requests_of([([*prompt[:10], i, *prompt[11:]], 4) for i in range(2, 10)]))
    assert apart.forward_tokens - stats.forward_tokens >= 7 * 19 - 8 * 4
    assert stats.forward_tokens <= 19 + 8 * 4


@pytest.mark.parametrize("rows", [2, 6])
def test_every_token_through_the_model_is_counted_once(tiny, rows):
    """However often rows are admitted."""
    requests = requests_of([([i, 6, 7], 4) for i in range(8, 14)])
    done, stats = engine_of(tiny("llama"), rows_per_batch=rows).generate(requests)
    assert stats.forward_tokens == sum(2 + len(c.tokens) for c in done)


@pytest.mark.slow
def test_the_cap_is_exact_and_eos_at_the_cap_is_a_stop(tiny):
    model = tiny("qwen3")
    free = SamplingParams(frozenset())
    (text, _, _) = reference(model, requests_of([([8, 9], 12)]), free)[0]
    eos = text[5]
    first = text.index(eos) + 1
    engine = engine_of(model, SamplingParams(frozenset({eos})), window=16)
    for cap in range(1, 13):
        for draft in (None, Script(text), Script(text[:first] + [3] * 9), Script(all_wrong(text))):
            (c,), _ = engine.generate(requests_of([([8, 9], cap)], [draft]))
            assert c.tokens == text[: min(cap, first)]
            assert c.finish == ("stop" if cap >= first else "length")


def test_several_eos_ids_stop_at_the_first_of_any(tiny):
    model, cases = tiny("llama"), [([11, 12, 13], 30)] * 12
    texts = [t for t, _, _ in reference(model, requests_of(cases), SamplingParams(frozenset()))]
    for eos_ids in (frozenset(range(10)), frozenset({texts[0][4], texts[1][7]}), frozenset(range(VOCAB))):
        drafters = [Script(t) for t in texts]  # the drafts continue after every EOS
        done, _ = engine_of(model, SamplingParams(eos_ids), window=30).generate(requests_of(cases, drafters))
        for c, text in zip(done, texts, strict=True):
            end = next((i + 1 for i, t in enumerate(text) if t in eos_ids), len(text))
            assert c.tokens == text[:end]
            assert c.finish == ("stop" if c.tokens[-1] in eos_ids else "length")


@pytest.mark.parametrize("pad", ["none", "eos", "frequent"])
def test_the_pad_id_means_nothing(build_model, golden, pad):
    _, cases, want = golden("llama")
    model = build_model("llama")
    tokens = [t for text, _, _ in want for t in text[:-1]]
    frequent = max(set(tokens), key=tokens.count)
    model.config.pad_token_id = {"none": None, "eos": 1, "frequent": frequent}[pad]
    drafters = [Script(t) for t, _, _ in want]
    assert differing(engine_of(model, window=5).generate(requests_of(cases, drafters))[0], want) == []
    assert tokens.count(frequent) > 10


@pytest.mark.parametrize("law", [(0.0, 0, 1.0), (1.3, 0, 1.0), (0.8, 9, 0.9)])
def test_every_sampling_law(golden, law):
    model, cases, plain_law = golden("qwen2")
    sampling = SamplingParams(EOS_IDS, *law)
    want = reference(model, requests_of(cases), sampling)
    engine = engine_of(model, sampling, window=6)
    assert differing(engine.generate(requests_of(cases))[0], want, 1e-4) == []
    drafters = drafts_of_every_quality([t for t, _, _ in want])
    done, stats = engine.generate(requests_of(cases, drafters))
    assert differing(done, want) == []
    assert 0 < stats.accepted < stats.drafted
    assert differing(done, plain_law), "control: the law matters"


# Near-ties are decided canonically, so that a pass's rounding does not change a token ---------------------------------


def test_draws_that_are_decided_canonically_are_the_same(golden):
    model, cases, want = golden("llama")
    engine = engine_of(model, window=5)
    engine.tie_margin = 0.5
    plain, stats = engine.generate(requests_of(cases))
    assert differing(plain, want) == []
    assert stats.ties > 20
    done, stats = engine.generate(requests_of(cases, drafts_of_every_quality([t for t, _, _ in want])))
    assert differing(done, plain) == []
    assert stats.ties > 20
    rows = [(r, t) for r, (t, _, _) in zip(requests_of(cases), want, strict=True) if len(t) > 3]
    begun = [Request((*r.prompt, *t[:2]), r.key, r.max_new_tokens - 2, Script(t[2:]), position=2) for r, t in rows]
    rest, stats = engine.generate(begun)
    assert [c.tokens for c in rest] == [t[2:] for _, t in rows], "of a response that is continued too"
    assert stats.ties > 20
    engine.tie_margin = 0.0
    _, stats = engine.generate(requests_of(cases))
    assert stats.ties == 0


@pytest.mark.slow
def test_rounding_that_depends_on_the_pass_flips_tokens_only_without_the_tie_margin(tiny):
    model, prompt = tiny("llama"), [5, 9, 30]
    keys = nearly_tied_keys(model, prompt, 3e-5)
    assert len(keys) >= 5

    def differences(tie_margin):
        engine = engine_of(noisy(model), window=4)
        engine.tie_margin = tie_margin
        plain, _ = engine.generate([Request(prompt, key, 8) for key in keys])
        drafts = [Script(corrupt(c.tokens, random.Random(i), 0.2)) for i, c in enumerate(plain)]
        done, stats = engine.generate([Request(prompt, k, 8, d) for k, d in zip(keys, drafts, strict=True)])
        return differing(done, plain, tolerance=1e-3), stats.ties

    same, ties = differences(TransformersEngine(model, SAMPLING).tie_margin)
    assert same == [], "the margin that is the default is enough for what is hardly rounding any more"
    assert ties >= len(keys)
    flipped, ties = differences(0.0)
    assert flipped, "the planted rounding did not flip anything: the test has no power"
    assert ties == 0
    same, ties = differences(1e-3)
    assert same == []
    assert ties >= len(keys)


# Planted faults: the same comparison must detect them -----------------------------------------------------------------


def speculate(model, cases, want, **settings):
    drafters = [Script(corrupt(t, random.Random(i), 0.3)) for i, (t, _, _) in enumerate(want)]
    return engine_of(model, window=8, **settings).generate(requests_of(cases, drafters))[0]


def test_the_control_speculates_correctly(golden):
    assert differing(speculate(*golden("llama")), golden("llama")[2]) == []


def test_noise_drawn_per_pass_is_seen(golden, monkeypatch):
    counter = iter(range(10**9))

    def per_pass(logits, keys, positions, targets=None, **law):
        return keyed_sample(logits, keys + next(counter), positions, targets, **law)

    monkeypatch.setattr(sampler, "keyed_sample", per_pass)
    assert len(differing(speculate(*golden("llama")), golden("llama")[2])) > 13


def test_an_off_by_one_position_is_seen(golden, monkeypatch):
    def shifted(logits, keys, positions, targets=None, **law):
        with_drafts = len(keys) > len(keys.unique())
        return keyed_sample(logits, keys, positions + with_drafts, targets, **law)

    monkeypatch.setattr(sampler, "keyed_sample", shifted)
    assert len(differing(speculate(*golden("llama")), golden("llama")[2])) > 13


def test_kv_that_is_not_rolled_back_is_seen(golden, monkeypatch):
    """Planted fault: the write cursor counts all tokens of the pass."""
    monkeypatch.setattr(Reader, "rollback", lambda reader, row, length: None)
    monkeypatch.setattr(reader, "row_tokens", lambda requests: 500)  # memory for the kept tokens
    assert differing(speculate(*golden("llama")), golden("llama")[2])


def test_stale_weights_are_seen(golden, build_model):
    stale, cases, want = golden("llama")
    fresh = copy.deepcopy(stale)
    with torch.no_grad():
        for p in fresh.parameters():
            p.mul_(1.05)
    now = reference(fresh, requests_of(cases))
    assert differing(speculate(fresh, cases, want), now) == []
    assert len(differing(speculate(stale, cases, want), now)) > 13
