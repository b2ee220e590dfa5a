"""The transformers engine: drafts never change what is sampled.

The oracle is a one-row loop with full forward passes and no cache. `differing` is the one comparison that positive
tests and planted bugs share.
"""

import copy
import random
from dataclasses import dataclass

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, T5Config, T5ForConditionalGeneration

from rollout.build import build_engine
from rollout.config import JudgedConfig, RolloutConfig
from rollout.drafting.cost import CostModel, Trial
from rollout.engines.base import EngineSpec, Sampling
from rollout.engines.local import ragged
from rollout.engines.local.attention import RaggedKV
from rollout.engines.local.engine import TransformersEngine
from rollout.engines.local.reader import Reader
from rollout.keys import derive_key
from rollout.noise import gumbel, keyed_draw, row_words
from rollout.types import EngineStats, Request, RolloutError
from tests.engines import local

FAMILIES = ["qwen3", "qwen2", "llama", "gpt2", "mistral"]
VOCAB, EOS_IDS = 61, frozenset({1, 7})
SAMPLING = Sampling(EOS_IDS)


@dataclass
class Script:
    """Proposes `text` at the same positions, whatever was emitted; `limit` is ignored when `rude`."""

    text: list[int]
    rude: bool = False
    calls: int = 0

    def propose(self, tokens, limit):
        self.calls += limit > 0
        return self.text[len(tokens) :] if self.rude else self.text[len(tokens) : len(tokens) + limit]


def prompts_and_caps(n: int, seed: int = 0) -> list[tuple[list[int], int]]:
    """Ragged prompts, some shared, some of one token; caps from 1 on."""
    rng = random.Random(seed)
    pool = [[rng.randrange(2, VOCAB) for _ in range(length)] for length in (1, 1, 2, 5, 9, 14)]
    return [(pool[i // 2 % len(pool)], rng.choice([1, 2, 9, 20, 30])) for i in range(n)]


def requests_of(cases, drafters=None, visit: int = 0) -> list[Request]:
    drafters = drafters or [None] * len(cases)
    return [
        Request(prompt, derive_key(3, "engine", i, visit), cap, drafter)
        for i, ((prompt, cap), drafter) in enumerate(zip(cases, drafters, strict=True))
    ]


def engine_of(model, sampling=SAMPLING, **settings) -> TransformersEngine:
    return local(model, sampling, **settings)


def reference(model, requests, sampling=SAMPLING) -> list[tuple[list[int], list[float], str]]:
    """Each row alone: a full forward pass of the model itself for every token."""
    law = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    model = copy.deepcopy(model).eval()
    rows = []
    for r in requests:
        tokens, logprobs, finish = [], [], "length"
        while len(tokens) < r.max_new_tokens and finish == "length":
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([[*r.prompt, *tokens]]), use_cache=False).logits[0, -1:]
            draw, logp, _, gap = keyed_draw(logits, torch.tensor([r.key]), torch.tensor([len(tokens)]), **law)
            assert gap.item() > 1e-5, "a near tie would make the comparison depend on rounding; choose another seed"
            tokens.append(draw.item())
            logprobs.append(logp.item())
            finish = "stop" if tokens[-1] in sampling.eos_ids else "length"
        rows.append((tokens, logprobs, finish))
    return rows


def differing(done, want, tolerance: float = 1e-5) -> list[int]:
    """Rows whose tokens, finish reason or log-probs differ."""
    assert len(done) == len(want)
    rows = [(c.tokens, c.logprobs, c.finish) if hasattr(c, "tokens") else c for c in want]
    return [
        i
        for i, (c, (tokens, logprobs, finish)) in enumerate(zip(done, rows, strict=True))
        if c.tokens != tokens
        or c.finish != finish
        or max(abs(a - b) for a, b in zip(c.logprobs, logprobs, strict=True)) > tolerance
    ]


def corrupt(text, rng, rate):
    return [rng.randrange(VOCAB) if rng.random() < rate else t for t in text]


def all_wrong(text):
    return [(t + 1) % VOCAB for t in text]


def drafts_of_every_quality(texts, seed=0) -> list[Script]:
    """One drafter per row, cycling through everything a drafter may do, right or wrong."""
    rng = random.Random(seed)
    kinds = [
        lambda t: Script(t),
        lambda t: Script(corrupt(t, rng, 0.2)),
        lambda t: Script([rng.randrange(VOCAB) for _ in range(40)]),
        lambda t: Script(t[: len(t) // 2]),
        lambda t: Script(t + [5] * 100, rude=True),  # longer than the cap and than what was asked for
        lambda t: Script([*t[:3], VOCAB, *t[4:]]),  # ids that do not exist
        lambda t: Script([*t[:2], -1, 10**9, *t[4:]], rude=True),
        lambda t: Script([*t[:2], 1, *t[3:]]),  # an EOS where the policy has none
        lambda t: Script([1] * 40),
        lambda t: Script([]),
        lambda t: None,
        lambda t: Script([9, *t]),  # shifted
        lambda t: Script(all_wrong(t)),
    ]
    return [kinds[i % len(kinds)](list(text)) for i, text in enumerate(texts)]


@pytest.fixture(scope="module")
def golden(tiny):
    """golden(family): the model, 26 requests without drafts, and their reference responses."""
    done = {}

    def get(family: str):
        if family not in done:
            cases = prompts_and_caps(26)
            done[family] = tiny(family), cases, reference(tiny(family), requests_of(cases))
        return done[family]

    return get


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
    assert len(differing(other, want)) > 13  # control: other keys, other texts


@pytest.mark.parametrize(("family", "window"), [*((f, 16) for f in FAMILIES), *(("llama", w) for w in (0, 1, 3, 200))])
def test_drafts_of_any_quality_change_nothing(golden, family, window):
    model, cases, want = golden(family)
    drafters = drafts_of_every_quality([t for t, _, _ in want])
    done, stats = engine_of(model, window=window).generate(requests_of(cases, drafters))
    assert differing(done, want) == []
    if window:  # 0 leaves it to measured times
        assert 0 < stats.accepted < stats.drafted, "both acceptances and rejections happened"
    assert sum(sum(c.reused) for c in done) == stats.accepted
    assert all(len(c.tokens) == len(c.logprobs) == len(c.behaviour_logprobs) == len(c.reused) for c in done)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_texts_of_all_prompts_change_nothing(golden, family, monkeypatch):
    model, cases, want = golden(family)
    monkeypatch.setattr(CostModel, "fit", lambda self: (1.0, 0.0, 1e-3, 0.0))  # tokens cost little: chances are taken
    monkeypatch.setattr(Trial, "pays", lambda self: True)  # nor are they judged by measured time
    monkeypatch.setattr(Trial, "rests", lambda self: False)  # responses this short would be over
    engine = engine_of(model, contexts=True)
    for _ in range(4):
        requests = requests_of(cases)
        for request in requests[::3]:
            request.plain = True
        done, stats = engine.generate(requests)
        assert differing(done, want) == []
    assert stats.sources["contexts"] == (stats.drafted, stats.accepted)
    assert sum(sum(c.reused) for c in done) == stats.accepted > 0.5 * sum(len(t) for t, _, _ in want[1::3])
    assert not any(any(c.reused) for c in done[::3]), "plain rows decode plainly"


def test_texts_of_all_prompts_that_lie_change_nothing_and_are_left(golden, monkeypatch):
    model, cases, want = golden("llama")
    monkeypatch.setattr(CostModel, "fit", lambda self: (1.0, 0.0, 1e-3, 0.0))
    monkeypatch.setattr(Trial, "pays", lambda self: True)
    engine = engine_of(model, contexts=True)
    for _ in range(4):
        texts = zip(cases, want, strict=True)
        engine.drafting.contexts.learn((prompt, all_wrong(text)) for (prompt, _), (text, _, _) in texts)
    drafted = []
    for _ in range(6):
        done, stats = engine.generate(requests_of(cases))
        assert differing(done, want) == []
        drafted.append(stats.drafted - stats.accepted)
    assert drafted[0] > drafted[-1]


@pytest.mark.parametrize(
    "settings",
    [
        {"tokens_per_pass": 1},
        {"tokens_per_pass": 7},
        {"tokens_per_pass": 40},
        {"rows_per_batch": 1},
        {"rows_per_batch": 5},
        {"logits_mb": 0},  # one position at a time
        {"rows_per_batch": 9, "tokens_per_pass": 11, "logits_mb": 0},
    ],
)
def test_memory_bounds_change_nothing(golden, settings):
    model, cases, want = golden("qwen3")
    drafters = drafts_of_every_quality([t for t, _, _ in want])
    engine = engine_of(model, window=6, **settings)
    for batch in (requests_of(cases), requests_of(cases, drafters)):
        done, stats = engine.generate(batch)
        assert differing(done, want) == []
    _, free = engine_of(model, window=6).generate(requests_of(cases, drafters))
    if "logits_mb" not in settings or len(settings) > 1:
        assert stats.passes > free.passes, "the bound was at work"


def scarce(monkeypatch, limit: int, error: Exception) -> None:
    """Passes of more than `limit` rows fail once some tokens are out."""
    step = TransformersEngine._step

    def failing(self, kv, first, rows, drafts, stats):
        if len(rows) > limit and any(len(row.tokens) > 3 for row in rows):
            raise error
        step(self, kv, first, rows, drafts, stats)

    monkeypatch.setattr(TransformersEngine, "_step", failing)


@pytest.mark.parametrize("drafting", [False, True])
@pytest.mark.parametrize("limit", [13, 5])
def test_rows_that_do_not_fit_the_memory_run_in_parts(golden, monkeypatch, limit, drafting):
    model, cases, want = golden("llama")
    scarce(monkeypatch, limit, torch.OutOfMemoryError("CUDA out of memory"))
    drafters = drafts_of_every_quality([t for t, _, _ in want]) if drafting else None
    done, _ = engine_of(model, window=3).generate(requests_of(cases, drafters))
    assert differing(done, want) == []
    assert sum(c.passes for c in done) > sum(len(t) for t, _, _ in want) or drafting, "what was lost was paid for"


def test_what_an_out_of_memory_cut_throws_away_is_counted_no_more(golden, monkeypatch):
    """Shares of reused tokens by source add up to the share of all, whatever was tried in between."""
    model, cases, want = golden("llama")
    texts = [t for t, _, _ in want]
    drafters = [
        Named(t if i % 2 else corrupt(t, random.Random(i), 0.2), source=f"s{i % 3}") for i, t in enumerate(texts)
    ]
    whole, free = engine_of(model, window=3).generate(requests_of(cases, drafters))
    scarce(monkeypatch, 5, torch.OutOfMemoryError("CUDA out of memory"))
    done, stats = engine_of(model, window=3).generate(requests_of(cases, drafters))
    assert differing(done, whole) == []
    assert stats.accepted == sum(sum(c.reused) for c in done) == sum(accepted for _, accepted in stats.sources.values())
    assert stats.drafted == sum(drafted for drafted, _ in stats.sources.values())
    assert stats.passes > free.passes, "the cut happened"
    assert stats.forward_tokens > free.forward_tokens, "and was paid for"


def test_memory_that_never_suffices_is_one_readable_error(golden, monkeypatch):
    model, cases, _ = golden("llama")
    scarce(monkeypatch, 2, RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 4 bytes"))
    with pytest.raises(RolloutError, match=r"out of memory with \d rows, cut 3 times: .*rows_per_batch \(now"):
        engine_of(model).generate(requests_of(cases))


def test_other_errors_are_not_taken_for_a_lack_of_memory(golden, monkeypatch):
    model, cases, _ = golden("llama")
    scarce(monkeypatch, 2, RuntimeError("an illegal memory access"))
    with pytest.raises(RuntimeError, match=r"^an illegal memory access$"):
        engine_of(model).generate(requests_of(cases))


def test_logits_exist_in_chunks_only(golden, monkeypatch):
    model, cases, want = golden("llama")
    sizes = []
    monkeypatch.setattr(ragged, "keyed_draw", lambda z, *a, **k: sizes.append(len(z)) or keyed_draw(z, *a, **k))
    for logits_mb, largest in ((0, 1), (256, 26)):
        sizes.clear()
        engine = engine_of(model, logits_mb=logits_mb)
        sizes.clear()
        done, _ = engine.generate(requests_of(cases))
        assert differing(done, want) == []
        assert max(sizes) == largest


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


def test_one_token_prompts_only(tiny):
    """Nothing is prefilled: the cache has no layers when the first pass comes."""
    model, cases = tiny("qwen3"), [([4], 12), ([9], 12), ([4], 12)]
    want = reference(model, requests_of(cases))
    done, stats = engine_of(model, window=3).generate(requests_of(cases, [Script(t) for t, _, _ in want]))
    assert differing(done, want) == []
    assert want[0][0] != want[2][0], "one prompt, two keys"
    assert stats.accepted > 0


def test_a_shared_prompt_is_computed_once(tiny):
    model = tiny("llama")
    prompt = list(range(2, 22))
    _, stats = engine_of(model).generate(requests_of([(prompt, 4)] * 8))
    _, apart = engine_of(model).generate(requests_of([([*prompt[:10], i, *prompt[11:]], 4) for i in range(2, 10)]))
    assert apart.forward_tokens - stats.forward_tokens >= 7 * 19 - 8 * 4
    assert stats.forward_tokens <= 19 + 8 * 4


def test_the_cap_is_exact_and_eos_at_the_cap_is_a_stop(tiny):
    model = tiny("qwen3")
    free = Sampling(frozenset())
    (text, _, _) = reference(model, requests_of([([8, 9], 12)]), free)[0]
    eos = text[5]
    first = text.index(eos) + 1
    for cap in range(1, 13):
        for draft in (None, Script(text), Script(text[:first] + [3] * 9), Script(all_wrong(text))):
            sampling = Sampling(frozenset({eos}))
            (c,), _ = engine_of(model, sampling, window=16).generate(requests_of([([8, 9], cap)], [draft]))
            assert c.tokens == text[: min(cap, first)]
            assert c.finish == ("stop" if cap >= first else "length")


def test_several_eos_ids_stop_at_the_first_of_any(tiny):
    model, cases = tiny("llama"), [([11, 12, 13], 30)] * 12
    texts = [t for t, _, _ in reference(model, requests_of(cases), Sampling(frozenset()))]
    for eos_ids in (frozenset(range(10)), frozenset({texts[0][4], texts[1][7]}), frozenset(range(VOCAB))):
        drafters = [Script(t) for t in texts]  # the drafts run past every EOS
        done, _ = engine_of(model, Sampling(eos_ids), window=30).generate(requests_of(cases, drafters))
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


@pytest.mark.parametrize(
    "law", [(0.0, 0, 1.0), (0.7, 0, 1.0), (1.3, 0, 1.0), (1.0, 5, 1.0), (1.0, 0, 0.8), (0.8, 9, 0.9)]
)
def test_every_sampling_law(golden, law):
    model, cases, plain_law = golden("qwen2")
    sampling = Sampling(EOS_IDS, *law)
    want = reference(model, requests_of(cases), sampling)
    engine = engine_of(model, sampling, window=6)
    assert differing(engine.generate(requests_of(cases))[0], want) == []
    drafters = drafts_of_every_quality([t for t, _, _ in want])
    done, stats = engine.generate(requests_of(cases, drafters))
    assert differing(done, want) == []
    assert 0 < stats.accepted < stats.drafted
    assert differing(done, plain_law), "control: the law matters"


def test_rows_leave_as_they_finish(golden, monkeypatch):
    model, cases, want = golden("llama")
    kept = []
    select = RaggedKV.select
    monkeypatch.setattr(RaggedKV, "select", lambda kv, rows: kept.append(len(rows)) or select(kv, rows))
    drafters = drafts_of_every_quality([t for t, _, _ in want])
    done, stats = engine_of(model, window=3).generate(requests_of(cases, drafters))
    assert differing(done, want) == []
    assert any(0 < n < len(cases) for n in kept), "rows were compacted while others went on"
    assert stats.forward_tokens < stats.passes * len(cases) * 4


def test_the_budget_learns_what_became_of_the_last_draft(golden):
    model, cases, want = golden("llama")
    (prompt, _), (text, _, _) = max(zip(cases, want, strict=True), key=lambda pair: len(pair[1][0]))
    place = next(i for i, (t, _, _) in enumerate(want) if t == text)
    wrong = [t if at not in (5, 9, 10) else (t + 1) % VOCAB for at, t in enumerate(text)]
    engine, seen = engine_of(model, window=3), []
    engine.drafting.budget.observe_draft = lambda *observed: seen.append(observed)
    request = Request(prompt, derive_key(3, "engine", place, 0), len(text), Script(wrong))
    assert engine.generate([request])[0][0].tokens == text
    states = [("start", 3, 3), ("agreeing", 3, 1), ("diverged", 3, 3), ("agreeing", 3, 0), ("lost", 3, 3)]
    assert seen[:5] == [((state, "custom"), drafted, stood) for state, drafted, stood in states]


@dataclass
class Named(Script):
    source: str = ""


def test_drafts_are_counted_by_their_source(golden):
    model, cases, want = golden("llama")
    texts = [text for text, _, _ in want]
    drafters = [
        (Named(t, source="right"), Named(all_wrong(t), source="wrong"), None)[i % 3] for i, t in enumerate(texts)
    ]
    done, stats = engine_of(model, window=4).generate(requests_of(cases, drafters))
    assert differing(done, want) == []
    assert set(stats.sources) == {"right", "wrong"}
    assert stats.sources["wrong"][1] == 0
    assert tuple(map(sum, zip(*stats.sources.values(), strict=True))) == (stats.drafted, stats.accepted)
    assert stats.sources["right"][1] == sum(sum(c.reused) for c in done[::3])
    total = EngineStats(drafted=2, sources={"right": (2, 1)}) + stats
    assert total.sources["right"] == (stats.sources["right"][0] + 2, stats.sources["right"][1] + 1)
    assert total.sources["wrong"] == stats.sources["wrong"]
    assert total.drafted == stats.drafted + 2


@dataclass
class Vandal(Script):
    """Does to its argument what it likes."""

    harm: str = "clear"

    def propose(self, tokens, limit):
        if self.harm == "append" and hasattr(tokens, "append"):
            tokens.append(9)
        if self.harm == "clear" and hasattr(tokens, "clear"):
            tokens.clear()
        return super().propose(tokens, limit)


@pytest.mark.parametrize("harm", ["append", "clear"])
def test_a_drafter_cannot_harm_the_text(golden, harm):
    model, cases, want = golden("llama")
    drafters = [Vandal(t, harm=harm) for t, _, _ in want]
    done, stats = engine_of(model, window=4).generate(requests_of(cases, drafters))
    assert differing(done, want) == []
    assert stats.accepted > 0


@pytest.mark.parametrize("proposal", [[3.0], [None], None, ["3"], 5, [[3]]], ids=str)
def test_what_is_no_token_id_is_an_error_of_the_drafter(tiny, proposal):
    class Wrong:
        def propose(self, tokens, limit):
            return proposal

    with pytest.raises(RolloutError, match=r"the drafter Wrong proposed .*no token ids"):
        engine_of(tiny("llama"), window=4).generate(requests_of([([3, 4], 5)], [Wrong()]))


@pytest.mark.parametrize("wrap", [tuple, iter, torch.tensor, lambda t: [torch.tensor(x) for x in t]], ids=range(4))
def test_token_ids_of_any_kind_are_taken(golden, wrap):
    model, cases, want = golden("llama")

    class Wrapped(Script):
        def propose(self, tokens, limit):
            return wrap(list(super().propose(tokens, limit)))

    done, stats = engine_of(model, window=4).generate(requests_of(cases, [Wrapped(t) for t, _, _ in want]))
    assert differing(done, want) == []
    assert stats.accepted > 0


def test_a_finished_row_shows_its_end_to_those_that_draft_from_it(golden):
    model, cases, want = golden("llama")

    class Sees(Script):
        def propose(self, tokens, limit):
            self.shown, self.limit = list(tokens), limit
            return super().propose(tokens, limit)

    drafters = [Sees(corrupt(t, random.Random(i), 0.3)) for i, (t, _, _) in enumerate(want)]
    engine_of(model, window=3).generate(requests_of(cases, drafters))
    assert [d.shown for d in drafters] == [t for t, _, _ in want]
    assert {d.limit for d in drafters} == {0}


def test_drafts_that_would_lose_time_are_counted_as_paused(golden):
    model, cases, want = golden("llama")
    engine = engine_of(model)
    engine.drafting.budget.observe_pass = lambda *_: None
    engine.drafting.budget._passes = CostModel()
    engine.drafting.budget.calibrate([(1, 1.001), (1000, 1001.0)])  # a token costs what a pass costs
    for _ in range(2000):
        engine.drafting.budget.observe_draft(("start", "custom"), 1, 0)
    drafters = [Script(all_wrong(text)) if i % 2 else None for i, (text, _, _) in enumerate(want)]
    done, stats = engine.generate(requests_of(cases, drafters))
    assert differing(done, want) == []
    rows = [c for i, c in enumerate(done) if i % 2]
    probed = sum(any(c.reused) for c in rows)
    assert stats.paused > 0.7 * sum(c.passes for c in rows) - probed
    assert stats.paused_acceptance / stats.paused < 0.1 < stats.paused_needed / stats.paused
    plain = engine.generate(requests_of(cases))[1]
    assert plain.paused == 0  # control: nothing to carry


def test_random_batches(golden, tiny):
    """Thirty batches of random size, bounds, windows and drafts."""
    model, cases, want = golden("qwen3")
    rng = random.Random(9)
    for trial in range(30):
        rows = rng.sample(range(len(cases)), rng.randint(1, len(cases)))
        drafters = drafts_of_every_quality([t for t, _, _ in want], seed=trial)
        rng.shuffle(drafters)
        requests = [requests_of(cases, drafters)[i] for i in rows]
        engine = engine_of(
            model,
            window=rng.choice([0, 1, 2, 5, 40]),
            rows_per_batch=rng.choice([3, 8, 256]),
            tokens_per_pass=rng.choice([5, 30, 4096]),
        )
        assert differing(engine.generate(requests)[0], [want[i] for i in rows]) == [], f"trial {trial}"


# Planted bugs: the same comparison must see them ----------------------------------------------------------------------


def speculate(model, cases, want, **settings):
    drafters = [Script(corrupt(t, random.Random(i), 0.3)) for i, (t, _, _) in enumerate(want)]
    return engine_of(model, window=8, **settings).generate(requests_of(cases, drafters))[0]


def test_the_control_speculates_correctly(golden):
    assert differing(speculate(*golden("llama")), golden("llama")[2]) == []


def test_noise_drawn_per_pass_is_seen(golden, monkeypatch):
    counter = iter(range(10**9))

    def per_pass(logits, keys, positions, targets=None, **law):
        return keyed_draw(logits, keys + next(counter), positions, targets, **law)

    monkeypatch.setattr(ragged, "keyed_draw", per_pass)
    assert len(differing(speculate(*golden("llama")), golden("llama")[2])) > 13


def test_an_off_by_one_position_is_seen(golden, monkeypatch):
    def shifted(logits, keys, positions, targets=None, **law):
        with_drafts = len(keys) > len(keys.unique())
        return keyed_draw(logits, keys, positions + with_drafts, targets, **law)

    monkeypatch.setattr(ragged, "keyed_draw", shifted)
    assert len(differing(speculate(*golden("llama")), golden("llama")[2])) > 13


def test_kv_that_is_not_rolled_back_is_seen(golden, monkeypatch):
    """The write cursor counts all tokens that were fed."""
    monkeypatch.setattr(Reader, "rollback", lambda reader, row, length: None)
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


# Ties -----------------------------------------------------------------------------------------------------------------


def test_draws_that_are_decided_canonically_are_the_same(golden):
    model, cases, want = golden("llama")
    engine = engine_of(model, window=5, tie_margin=0.5)
    plain, stats = engine.generate(requests_of(cases))
    assert differing(plain, want) == []
    assert stats.ties > 20
    done, stats = engine.generate(requests_of(cases, drafts_of_every_quality([t for t, _, _ in want])))
    assert differing(done, plain) == []
    assert stats.ties > 20
    _, stats = engine_of(model, window=5, tie_margin=0.0).generate(requests_of(cases))
    assert stats.ties == 0


class Noisy:
    """An output layer whose rounding depends on the shape of the pass, far worse than a real one's."""

    def __init__(self, layer, size: float):
        self.layer, self.size, self.weight = layer, size, layer.weight

    def __call__(self, hidden):
        generator = torch.Generator().manual_seed(len(hidden))
        return self.layer(hidden) + self.size * torch.randn(len(hidden), VOCAB, generator=generator)


class NoisyHead(torch.nn.Linear):
    """The same as a model's own output layer."""

    size = 3e-5

    def forward(self, hidden):
        generator = torch.Generator().manual_seed(hidden[..., 0].numel())
        out = super().forward(hidden)
        return out + self.size * torch.randn(out.shape, generator=generator)


def noisy(model):
    """A copy of the model whose logits are rounded as the pass has it."""
    rounded, head = copy.deepcopy(model), model.get_output_embeddings()
    rounded.lm_head = NoisyHead(head.in_features, head.out_features, bias=False)
    rounded.lm_head.weight = head.weight
    return rounded


def nearly_tied_keys(model, prompt, closer_than: float) -> list[int]:
    """Keys whose first draw has two best scores closer than that."""
    with torch.no_grad():
        logits = copy.deepcopy(model).eval()(input_ids=torch.tensor([prompt])).logits[0, -1]
    found = []
    for start in range(0, 300_000, 50_000):
        keys = torch.arange(start, start + 50_000) * 0x9E3779B97F4A7C1 + 12345
        best = (logits + gumbel(*row_words(keys, torch.zeros_like(keys)), VOCAB)).topk(2).values
        found += keys[best[:, 0] - best[:, 1] < closer_than].tolist()
    return found


def test_rounding_that_depends_on_the_pass_flips_tokens_only_without_the_tie_margin(tiny):
    model, prompt = tiny("llama"), [5, 9, 30]
    keys = nearly_tied_keys(model, prompt, 3e-5)
    assert len(keys) >= 5

    def differences(tie_margin):
        engine = engine_of(model, window=4, tie_margin=tie_margin)
        engine.policy.lm_head = Noisy(engine.policy.lm_head, 3e-5)
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


def test_the_margin_of_ties_is_a_run_s_and_on_by_default(build_model, tmp_path):
    build_model("llama").save_pretrained(tmp_path)
    bounds = {"rows_per_batch": 7, "tokens_per_pass": 99, "tie_margin": 0.25}
    for config in (
        RolloutConfig(**bounds),
        RolloutConfig(**bounds, law="judged", judged=JudgedConfig(by="kl"), drafter="layers=1"),
    ):
        engine = build_engine(EngineSpec(eos_ids=EOS_IDS, rollout=config, model=str(tmp_path)))
        assert {name: getattr(engine.limits, name) for name in bounds} == bounds
    default = build_engine(EngineSpec(eos_ids=EOS_IDS, rollout=RolloutConfig(), model=str(tmp_path)))
    assert default.tie_margin == RolloutConfig().tie_margin == TransformersEngine(default.model, SAMPLING).tie_margin
    assert default.tie_margin == 1e-4


# The model and its weights --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(build_model, training):
    model = build_model("qwen3").train(training)
    model.set_attn_implementation("eager")
    engine = engine_of(model)
    before = copy.deepcopy(model.state_dict())
    for _ in range(2):
        engine.generate(requests_of([([3, 4], 5)]))
        assert model.training is training
        assert all(m.training is training for m in model.modules())
        assert model.config._attn_implementation == "eager"
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert model(input_ids=torch.tensor([[3, 4]])).logits.requires_grad


def test_sub_modules_that_were_in_another_mode_stay_so(build_model):
    model = build_model("qwen3").train()
    model.model.layers[0].mlp.eval()
    modes = [m.training for m in model.modules()]
    engine = engine_of(model)
    assert [m.training for m in model.modules()] == modes
    engine.generate(requests_of([([3, 4], 5)]))
    engine.score([3, 4, 5])
    assert [m.training for m in model.modules()] == modes
    assert len(set(modes)) == 2


def test_the_model_s_own_scale_of_attention_is_used(build_model):
    model, cases = build_model("llama"), prompts_and_caps(12)
    usual = reference(model, requests_of(cases))
    for layer in model.model.layers:
        layer.self_attn.scaling = 0.7 * layer.self_attn.head_dim**-0.5
    want = reference(model, requests_of(cases))
    assert [t for t, _, _ in usual] != [t for t, _, _ in want], "control: the scale matters"
    drafters = drafts_of_every_quality([t for t, _, _ in want])
    for drafts in (None, drafters):
        assert differing(engine_of(model, window=5).generate(requests_of(cases, drafts))[0], want) == []


def test_nan_weights_are_an_error_and_the_model_is_left_as_it_was(build_model):
    model = build_model("llama")
    implementation = model.config._attn_implementation
    engine = engine_of(model)
    engine.update_weights(None, 4)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = torch.nan
    with pytest.raises(RolloutError, match=r"NaN.*weight version 4.*learning rate"):
        engine.generate(requests_of([([3, 4], 5)]))
    assert model.training
    assert model.config._attn_implementation == implementation


def test_weight_changes_take_effect_at_once_and_versions_are_stamped(build_model):
    model, other = build_model("qwen2", 0), build_model("qwen2", 5)
    cases = prompts_and_caps(8)
    engine = engine_of(model)
    first, _ = engine.generate(requests_of(cases))
    assert {c.version for c in first} == {0}
    engine.update_weights(other.state_dict().items(), 3)
    assert engine.weight_version == 3
    second, _ = engine.generate(requests_of(cases))
    assert {c.version for c in second} == {3}
    assert differing(second, reference(other, requests_of(cases))) == []
    assert differing(second, first), "other weights, other texts"
    with torch.no_grad():  # shared with the trainer: changed in place
        for p in model.parameters():
            p.mul_(1.1)
    engine.update_weights(None, 4)
    third, _ = engine.generate(requests_of(cases))
    assert differing(third, reference(model, requests_of(cases))) == []
    assert {c.version for c in third} == {4}


def test_an_older_version_or_an_unknown_weight_is_refused(build_model):
    engine = engine_of(build_model("llama"))
    engine.update_weights(None, 5)
    engine.update_weights(None, 5)
    with pytest.raises(RolloutError, match=r"4 is older than the engine's 5"):
        engine.update_weights(None, 4)
    with pytest.raises(RolloutError, match=r"'model\.layers\.9\.weight'"):
        engine.update_weights([("model.layers.9.weight", torch.zeros(1))], 6)
    for shape in ((1,), (3, 3)):  # the first would broadcast
        with pytest.raises(RolloutError, match=r"up_proj.*\(48, 32\)"):
            engine.update_weights([("model.layers.0.mlp.up_proj.weight", torch.zeros(shape))], 6)
    assert engine.weight_version == 5


def test_reset_and_close_may_be_called_twice(golden):
    model, cases, want = golden("llama")
    engine = engine_of(model)
    engine.reset_cache()
    engine.reset_cache()
    assert differing(engine.generate(requests_of(cases))[0], want) == []
    engine.close()
    engine.close()


def test_a_lora_policy_equals_its_merged_model(build_model):
    peft = pytest.importorskip("peft")
    cases = prompts_and_caps(12)
    base = build_model("llama")
    without = reference(base, requests_of(cases))
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM", lora_dropout=0.5
    )
    policy = peft.get_peft_model(copy.deepcopy(base), config).train()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in policy.named_parameters():
            if "lora_" in name:
                p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
    merged = copy.deepcopy(policy).merge_and_unload()
    want = reference(merged, requests_of(cases))
    engine = engine_of(policy, window=5)
    for drafters in (None, drafts_of_every_quality([t for t, _, _ in want])):
        assert differing(engine.generate(requests_of(cases, drafters))[0], want, tolerance=1e-4) == []
    assert differing(engine.generate(requests_of(cases))[0], without), "control: the adapter matters"
    assert policy.training


def test_an_adapter_outside_the_layers_is_refused(build_model):
    """The engine runs the layers themselves: a learned prompt would be left out silently."""
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(RolloutError, match="LoRA"):
        engine_of(peft.get_peft_model(build_model("llama"), config))


class NoTransformer(torch.nn.Module):
    def forward(self, input_ids):
        return input_ids


def scaled_logits(build_model):
    model = build_model("llama")
    forward = model.forward

    def scaled(*args, **kwargs):
        out = forward(*args, **kwargs)
        out.logits = out.logits * 1.02
        return out

    model.forward = scaled
    return model


def softcapped(build_model):
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 8,
    }
    config = Gemma2Config(vocab_size=VOCAB, num_key_value_heads=2, final_logit_softcapping=0.5, **sizes)
    return AutoModelForCausalLM.from_config(config)


def encoder_decoder(build_model):
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCAB, d_model=32, d_ff=48, num_layers=2, num_heads=4))


@pytest.mark.parametrize(
    "make",
    [lambda _: NoTransformer(), scaled_logits, softcapped, encoder_decoder],
    ids=["module", "scaled", "softcap", "t5"],
)
def test_an_unsupported_model_is_refused_at_construction(build_model, make):
    model = make(build_model)
    with pytest.raises(RolloutError, match=f"{type(model).__name__}.*transformers"):
        engine_of(model)
    assert model.training, "left as it was"


# Bad requests ---------------------------------------------------------------------------------------------------------


def test_a_prompt_that_does_not_fit_names_the_number_to_use(tiny):
    engine = engine_of(tiny("llama"))
    with pytest.raises(RolloutError, match=r"prompt of 250 tokens.*context of 256.*rollout\.max_new_tokens=6\b"):
        engine.generate(requests_of([([3], 4), ([5] * 250, 10)]))
    (c,), _ = engine.generate(requests_of([([5] * 250, 6)]))
    assert 1 <= len(c.tokens) <= 6
    with pytest.raises(RolloutError, match=r"rollout\.max_new_tokens=6\b"):
        engine.generate(requests_of([([5] * 250, 7)]))  # one token too many
    with pytest.raises(RolloutError, match=r"prompt of 256 tokens.*shorter prompt"):
        engine.generate(requests_of([([5] * 256, 1)]))


def test_bad_prompts_and_caps_are_refused(tiny):
    engine = engine_of(tiny("llama"))
    with pytest.raises(RolloutError, match="at least one"):
        engine.generate(requests_of([([], 4)]))
    with pytest.raises(RolloutError, match="max_new_tokens=0"):
        engine.generate(requests_of([([3], 0)]))
    for bad in (-1, VOCAB):
        with pytest.raises(RolloutError, match=rf"{bad}, outside the model's 0\.\.60"):
            engine.generate(requests_of([([3, bad, 4], 4)]))


# Lenient: SPEC-RL as published ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def old_rollout(build_model):
    """Texts of an old policy, their log-probs, and a new policy that is somewhat different."""
    old = build_model("llama", 0)
    new = copy.deepcopy(old)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in new.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * 0.05 * p.std())
    cases = [(prompt, 24) for prompt, _ in prompts_and_caps(24)]
    texts, _ = engine_of(old).generate(requests_of(cases, visit=7))
    assert {c.finish for c in texts} == {"stop", "length"}
    return old, new, cases, texts


def lenient(model, cases, texts, lenience, visit=8, sampling=SAMPLING):
    drafters = [Script(c.tokens) for c in texts]
    requests = requests_of(cases, drafters, visit)
    for request, c in zip(requests, texts, strict=True):
        request.draft_logprobs = c.logprobs
    done, stats = engine_of(model, sampling, lenience=lenience).generate(requests)
    return done, stats, drafters


def recomputed(model, prompt, tokens):
    with torch.no_grad():
        logits = copy.deepcopy(model).eval()(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0]
    return logits[len(prompt) - 1 : -1].log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


def test_huge_lenience_reuses_the_whole_stored_text(old_rollout):
    _, new, cases, texts = old_rollout
    done, stats, _ = lenient(new, cases, texts, 1e30)
    assert [c.tokens for c in done] == [c.tokens for c in texts]
    assert [c.finish for c in done] == [c.finish for c in texts]
    assert all(all(c.reused) for c in done)
    assert stats.passes == 1
    for (prompt, _), c, old in zip(cases, done, texts, strict=True):
        assert c.behaviour_logprobs == pytest.approx(old.logprobs, abs=1e-6), "the law that produced the token"
        assert c.logprobs == pytest.approx(recomputed(new, prompt, c.tokens), abs=1e-4), "the current policy's"
    assert max(abs(a - b) for c in done for a, b in zip(c.logprobs, c.behaviour_logprobs, strict=True)) > 0.01


def test_tiny_lenience_reuses_nothing(old_rollout):
    _, new, cases, texts = old_rollout
    done, stats, _ = lenient(new, cases, texts, 1e-30)
    plain, _ = engine_of(new).generate(requests_of(cases, visit=8))
    assert differing(done, plain) == []
    assert stats.accepted == 0
    assert not any(any(c.reused) for c in done)
    assert all(c.behaviour_logprobs == c.logprobs for c in done)


def test_the_same_policy_reuses_everything_at_lenience_one(old_rollout):
    old, _, cases, texts = old_rollout
    done, _, _ = lenient(old, cases, texts, 1.0)
    assert [c.tokens for c in done] == [c.tokens for c in texts]
    assert all(all(c.reused) for c in done)
    for c in done:
        assert c.logprobs == pytest.approx(c.behaviour_logprobs, abs=1e-4)


def test_published_rule_drafts_one_round_only(old_rollout):
    _, new, cases, texts = old_rollout
    done, stats, drafters = lenient(new, cases, texts, 1.0)
    assert {d.calls for d in drafters} == {1}
    cuts = [c.reused.index(False) if False in c.reused else len(c.reused) for c in done]
    assert all(not any(c.reused[n:]) for c, n in zip(done, cuts, strict=True))
    assert any(0 < n < len(c.tokens) for c, n in zip(done, cuts, strict=True)), "some rows were cut in the middle"
    assert 0 < stats.accepted < stats.drafted
    for (prompt, _), c, old, n in zip(cases, done, texts, cuts, strict=True):
        assert c.tokens[:n] == old.tokens[:n]
        assert c.behaviour_logprobs[:n] == pytest.approx(old.logprobs[:n], abs=1e-6)
        assert c.behaviour_logprobs[n:] == c.logprobs[n:]
        assert c.logprobs == pytest.approx(recomputed(new, prompt, c.tokens), abs=1e-4)


def test_a_truncated_text_is_continued_under_a_larger_cap(old_rollout):
    old, _, cases, texts = old_rollout
    longer = [(prompt, 40) for prompt, _ in cases]
    done, _, _ = lenient(old, longer, texts, 1.0, visit=7)
    plain, _ = engine_of(old).generate(requests_of(longer, visit=7))
    assert differing(done, plain, 1e-4) == [], "the same keys and policy: text and continuation are plain decoding's"
    continued = [c for c, t in zip(done, texts, strict=True) if t.finish == "length"]
    assert continued
    for c in continued:
        assert c.reused == [True] * 24 + [False] * (len(c.tokens) - 24)
        assert len(c.tokens) > 24
    shorter = [(prompt, 10) for prompt, _ in cases]
    done, _, _ = lenient(old, shorter, texts, 1.0)
    for c, t in zip(done, texts, strict=True):
        assert c.tokens == t.tokens[:10]
        assert c.finish == ("stop" if len(t.tokens) <= 10 and t.finish == "stop" else "length")


def test_lenient_without_stored_logprobs_is_an_error(old_rollout):
    old, _, cases, texts = old_rollout
    engine = engine_of(old, lenience=1.0)
    with pytest.raises(RolloutError, match="log-probs"):
        engine.generate(requests_of(cases, [Script(c.tokens) for c in texts]))
    assert differing(engine.generate(requests_of(cases, visit=7))[0], texts) == [], "rows without a draft are plain"
