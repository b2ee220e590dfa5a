"""Tests of the rollout stage over several visits: keys, samples, replay, and that the cache never changes a token."""

import copy
import random
import time
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from specrl.rollout.build import build_engine
from specrl.rollout.cache.memory import Fingerprint, TrajectoryCache
from specrl.rollout.config import RolloutConfig
from specrl.rollout.engines.base import EngineSpec
from specrl.rollout.keys import derive_key, generation
from specrl.rollout.speculative import SpeculativeRollout
from specrl.rollout.types import Completion, EngineStats, RolloutError, Row, Trajectory
from specrl.rollout.verify import Accepted

VOCAB, EOS = 61, frozenset({1, 7})
SEED = 11


class FakeEngine:
    """An engine whose response is a pure function of the key. It records the requests."""

    weight_version = 3

    def __init__(self):
        self.asked = []

    def generate(self, requests):
        self.asked = list(requests)
        done = []
        for r in requests:
            tokens = [random.Random(r.key).randrange(2, VOCAB) for _ in range(r.max_new_tokens)]
            done.append(
                Completion(tokens, [-0.5] * len(tokens), [-0.5] * len(tokens), [False] * len(tokens), "length", 3, 1)
            )
        return done, EngineStats(passes=1)


def cache_of(**settings) -> TrajectoryCache:
    return TrajectoryCache(Fingerprint(), **settings)


def fake(config=None, cache=None, seed=SEED) -> SpeculativeRollout:
    return SpeculativeRollout(FakeEngine(), cache, config or RolloutConfig(max_new_tokens=8), seed)


def rows_of(*names, group: int = 1) -> list[Row]:
    return [Row(name, (5, 6, sum(map(ord, name)) % 50 + 2)) for name in names for _ in range(group)]


def by_slot(rows, batch) -> dict:
    return {(r.example_id, s): c.tokens for r, s, c in zip(rows, batch.sample_indices, batch.completions, strict=True)}


# Keys, samples and requests -------------------------------------------------------------------------------------


def test_the_whole_stage_is_timed_drafting_included(monkeypatch):
    """Reported savings are net because drafting is included in the time."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)

    class Slow(FakeEngine):
        def generate(self, requests):
            clock.now += 0.5
            done, _ = super().generate(requests)
            return done, EngineStats(draft_s=0.25, verify_s=0.125, prefill_s=0.125)

    class SlowCache(TrajectoryCache):
        def siblings(self, example_id):
            clock.now += 2.0
            return super().siblings(example_id)

    rollout = SpeculativeRollout(Slow(), SlowCache(Fingerprint()), RolloutConfig(max_new_tokens=8), SEED)
    batch = rollout.generate(rows_of("a"), visit=0, step=0)
    assert (batch.lookup_s, batch.total_s) == (2.0, 2.5), "what the caller waited for, whatever the engine reports"
    plain = rollout.plain(rows_of("a"), batch.keys)
    assert plain.total_s == 0.5


def test_replay_decides_which_keys_stay():
    """`test_generation_keeps_the_share_that_is_asked_for` has the share."""
    rollout = fake(RolloutConfig(max_new_tokens=4, replay=0.5))
    rows = rows_of(*"abcdefgh", group=25)
    before = []
    for visit in range(4):
        batch = rollout.generate(rows, visit=visit, step=visit)
        slots = [(row.example_id, sample) for row, sample in zip(rows, batch.sample_indices, strict=True)]
        assert batch.keys == [derive_key(SEED, *slot, generation(SEED, *slot, visit, 0.5)) for slot in slots]
        if before:
            assert batch.replayed == [old == new for old, new in zip(before, batch.keys, strict=True)]
            assert 50 < sum(batch.replayed) < 150
        else:
            assert not any(batch.replayed)
        before = batch.keys


def test_fresh_rows_never_use_training_keys():
    rollout = fake(RolloutConfig(max_new_tokens=4, replay=0.5))
    rows = rows_of(*"abcd", group=8)
    training, control = set(), set()
    for visit in range(6):
        training |= set(rollout.generate(rows, visit=visit, step=visit).keys)
        for domain in ("control", "eval"):
            batch = rollout.generate(rows, visit=visit, step=visit, domain=domain)
            control |= set(batch.keys)
            assert not any(batch.replayed)
    assert len(control) == 2 * 6 * 32, "new at every visit, and other noise in each domain"
    assert not training & control
    assert len(training) < 6 * 32  # control: the training rows were replayed


def test_each_row_has_a_visit_of_its_own():
    rollout, rows = fake(RolloutConfig(max_new_tokens=4, replay=1.0)), rows_of("a", "b")
    batch = rollout.generate(rows, visit=[0, 2], step=0)
    assert batch.replayed == [False, True], "a prompt that was never rolled out has no noise to keep"
    assert batch.visits == [0, 2]
    fresh = fake(RolloutConfig(max_new_tokens=4)).generate(rows, visit=[0, 2], step=0)
    assert fresh.keys == [derive_key(SEED, "a", 0, 0), derive_key(SEED, "b", 0, 2)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"visit": 0, "sample_indices": [0, 0]}, "example 'a' has sample_index=0 twice in one batch"),
        ({"visit": -1}, "visit=-1 of example 'a'"),
        ({"visit": [0, 1.5]}, "visit=1.5 of example 'a'"),
        ({"visit": [True, 0]}, "visit=True of example 'a'"),
        ({"visit": 1.0}, r"visit=1\.0 of example 'a'"),
        ({"visit": None}, "visit=None of example 'a'"),
        ({"visit": [0]}, "visit has 1 numbers for 2 rows"),
        ({"visit": 0, "sample_indices": [0, 1, 2]}, "sample_indices has 3 numbers for 2 rows"),
    ],
)
def test_rows_that_would_be_the_same_response_are_refused(options, message):
    with pytest.raises(RolloutError, match=message):
        fake(RolloutConfig(max_new_tokens=4)).generate(rows_of("a", group=2), step=0, **options)


def test_drafts_come_from_the_slot_then_its_siblings_newest_first():
    cache = cache_of()
    texts = {0: (10, 11), 1: (20, 21), 2: (30, 31)}
    for sample_index, tokens in texts.items():
        cache.put(
            "a", sample_index, Trajectory(tokens, key=sample_index, finish="length", version=0, step=sample_index)
        )
    rollout = fake(cache=cache)
    batch = rollout.generate(rows_of("a", "a", "b"), visit=1, step=7)
    own = [q.drafter and q.drafter.propose([], 9) for q in rollout.engine.asked]
    assert own == [[10, 11], [20, 21], []], "the first visit drafts from what the rows emit"
    assert batch.ages == [7, 6, None]
    new_slot = rollout.generate(rows_of("a"), visit=1, step=7, sample_indices=[5])
    assert rollout.engine.asked[0].drafter.propose([], 9) == [30, 31], "no text of its own: the newest sibling"
    assert new_slot.ages == [None]
    assert rollout.engine.asked[0].draft_logprobs is None


def test_lenient_drafts_the_slots_own_text_with_its_logprobs_only():
    cache = cache_of()
    cache.put("a", 0, Trajectory((10, 11), 0, "length", 0, 0, None, (-1.0, -2.0)))
    cache.put("a", 1, Trajectory((20, 21), 0, "length", 0, 0))
    rollout = fake(RolloutConfig(acceptance="lenient", max_new_tokens=8), cache)
    rollout.generate(rows_of("a", "a", "a"), visit=1, step=1)
    first, no_logprobs, nothing = rollout.engine.asked
    assert first.drafter.propose([], 9) == [10, 11]
    assert first.draft_logprobs == (-1.0, -2.0)
    assert no_logprobs.drafter is None
    assert nothing.drafter is None


def test_judged_drafts_from_all_texts_and_knows_and_stores_the_law_of_the_slots_own():
    cache = cache_of()
    cache.put("a", 0, Trajectory((10, 11), 0, "length", 0, 0, None, (-1.0, -2.0)))
    rollout = fake(RolloutConfig(acceptance="judged", max_new_tokens=4), cache)
    rows = rows_of("a", "a")
    batch = rollout.generate(rows, visit=1, step=1)
    own, sibling = rollout.engine.asked
    assert own.drafter.propose([], 9) == sibling.drafter.propose([], 9) == [10, 11]
    assert (own.draft_logprobs, sibling.draft_logprobs) == ((-1.0, -2.0), None)
    batch.completions[0].behaviour_logprobs = [-0.5, -3.0, -0.5, -0.5]
    rollout.store(rows, batch, step=1)
    assert cache.get("a", 0).logprobs == (-0.5, -3.0, -0.5, -0.5)


@pytest.mark.parametrize(
    ("config", "keeps", "replays"),
    [
        (RolloutConfig(), True, True),
        (RolloutConfig(acceptance="off"), False, True),
        (RolloutConfig(acceptance="lenient"), True, False),
        (RolloutConfig(acceptance="judged"), True, False),
        (RolloutConfig(acceptance="judged", sources=[]), False, True),
        (RolloutConfig(acceptance="routed"), False, True),
    ],
)
def test_what_a_law_keeps_and_whether_its_noise_may_be_replayed(config, keeps, replays):
    rollout, rows = fake(config, cache_of()), rows_of("a")
    first = rollout.generate(rows, visit=0, step=0)
    rollout.store(rows, first, step=0)
    assert rollout.generate(rows, visit=1, step=1).ages == [1 if keeps else None]
    config.replay = 1.0
    if replays:
        assert fake(config, cache_of()).generate(rows, visit=1, step=1).keys == first.keys
    else:  # judging replayed noise would be biased
        with pytest.raises(RolloutError, match=r"Try rollout\.replay=0"):
            fake(config, cache_of())


@pytest.mark.parametrize("acceptance", ["exact", "lenient", "off"])
def test_what_is_stored(acceptance):
    cache = cache_of()
    rollout = fake(RolloutConfig(acceptance=acceptance, max_new_tokens=4), cache)
    rows = rows_of("a", "b", group=2)
    batch = rollout.generate(rows, visit=0, step=5)
    before = batch.total_s
    rollout.engine.weight_version = 4  # it may have been updated since
    rollout.store(rows, batch, step=5, rewards=[1.0, None, 0.0, 0.5])
    if acceptance == "off":
        assert rollout.cache is None
        assert len(cache) == 0
        return
    for i, (row, sample_index, reward) in enumerate(zip(rows, [0, 1, 0, 1], [1.0, None, 0.0, 0.5], strict=True)):
        stored = cache.get(row.example_id, sample_index)
        assert list(stored.tokens) == batch.completions[i].tokens
        assert (stored.key, stored.finish, stored.version, stored.step) == (batch.keys[i], "length", 3, 5)
        assert stored.reward == reward
        assert stored.logprobs == ((-0.5,) * 4 if acceptance == "lenient" else None)
    assert batch.store_s > 0
    assert batch.total_s == pytest.approx(before + batch.store_s), "storing is charged"


def test_unchanged_rows_are_those_whose_stored_text_came_again():
    cache = cache_of()
    rollout = fake(RolloutConfig(max_new_tokens=4, replay=1.0), cache)
    rows = rows_of("a", "b", "c")
    first = rollout.generate(rows, visit=0, step=0)
    assert first.unchanged == [False] * 3, "nothing was stored"
    texts_now = [tuple(c.tokens) for c in first.completions]
    stored = [texts_now[0], texts_now[1][:3], (*texts_now[2][:3], 60)]  # the same, a prefix, a different last token
    for name, tokens in zip("abc", stored, strict=True):
        cache.put(name, 0, Trajectory(tokens, key=0, finish="length", version=0, step=0))
    assert rollout.generate(rows, visit=1, step=1).unchanged == [True, False, False]
    other_slots = rollout.generate(rows, visit=1, step=1, sample_indices=[1, 1, 1])
    assert other_slots.unchanged == [False] * 3, "a sibling's text is not the sample_index's own"


# The real engine over several visits ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def epochs(build_model):
    """Four versions of one policy, as after four epochs of training."""
    model, models = build_model("qwen3"), []
    generator = torch.Generator().manual_seed(2)
    for _ in range(4):
        models.append(copy.deepcopy(model))
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn(p.shape, generator=generator) * 0.04 * p.std())
    return models


def config_of(**settings) -> RolloutConfig:
    window = settings.pop("window", 8)
    return RolloutConfig(**{"max_new_tokens": 24, "draft_tokens": window, **settings})


def roll(models, plan, *, config=None, rows=None):
    """Visits 0, 1, ... with the weights of each epoch. `plan` maps (visit, config, rows) to another (config, rows)."""
    config, rows = config or config_of(), rows or rows_of(*"abcd", group=4)
    store, out = cache_of(), []
    for visit, model in enumerate(models):
        now, asked = plan(visit, config, rows) if plan else (config, rows)
        rollout = SpeculativeRollout(build_engine(EngineSpec(eos_ids=EOS, rollout=now), model), store, now, SEED)
        rollout.engine.update_weights(None, visit)
        batch = rollout.generate(asked, visit=visit, step=visit)
        rollout.store(asked, batch, step=visit)
        out.append((by_slot(asked, batch), batch))
    return out


def texts(visits) -> list[dict]:
    return [tokens for tokens, _ in visits]


@pytest.fixture(scope="module")
def straight(epochs):
    """The visits without anything special."""
    return roll(epochs, None)


def off(visit, config, rows):
    return replace(config, acceptance="off"), rows


def test_off_equals_exact_while_the_weights_change(epochs):
    config = config_of(replay=0.5)
    exact, plain = roll(epochs, None, config=config), roll(epochs, off, config=config)
    assert texts(exact) == texts(plain)
    for (_, e), (_, p) in zip(exact, plain, strict=True):
        assert e.keys == p.keys
        assert [c.finish for c in e.completions] == [c.finish for c in p.completions]
        for a, b in zip(e.completions, p.completions, strict=True):
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
            assert a.version == b.version
    reused = [sum(sum(c.reused) for c in batch.completions) for _, batch in exact]
    assert min(reused) > 0, "something was reused at every visit, in the first one from the group's own text"
    assert all(batch.stats.accepted < batch.stats.drafted for _, batch in exact[1:]), "and something was rejected"
    assert texts(exact)[0] != texts(exact)[1], "weights and keys do change the text"


@pytest.mark.slow
def test_other_weights_or_a_biased_rule_are_seen_by_the_same_comparison(epochs, straight):
    exact = straight[:2]
    assert texts(roll([epochs[0]] * 2, None)) != texts(exact), "stale weights"
    lenient = roll(epochs[:2], None, config=config_of(acceptance="lenient", lenience=1.5))
    assert texts(lenient) != texts(exact), "SPEC-RL as published"
    assert texts(lenient)[0] == texts(exact)[0], "which only starts with the second visit"


def test_shuffled_order_and_duplicates_change_nothing(epochs, straight):
    """Cases 13 and 14: trajectories are looked up by example and sample, not by batch index."""
    rng = random.Random(4)

    def shuffled(visit, config, rows):
        names = list(dict.fromkeys(r.example_id for r in rows))
        rng.shuffle(names)
        return config, [r for name in names for r in rows if r.example_id == name]

    mixed = roll(epochs, shuffled)
    assert texts(straight) == texts(mixed)
    assert [r.stats.accepted for _, r in straight] == [r.stats.accepted for _, r in mixed]

    same_prompt = [Row(name, (5, 6, 9)) for name in ("x", "x ", "X", "x") for _ in range(2)]
    visits = roll(epochs[:2], None, rows=same_prompt)
    assert visits[0][1].sample_indices == [0, 1, 0, 1, 0, 1, 2, 3], "a duplicate example goes on counting"
    for tokens, batch in visits:
        assert len(tokens) == 8, "no two rows share a sample_index"
        assert len({tuple(t) for t in tokens.values()}) > 4, "equal prompts, other noise"
        assert len(set(batch.keys)) == 8
    alone = roll(epochs[:2], None, rows=[Row("x ", (5, 6, 9))] * 2)
    for (tokens, _), (single, _) in zip(visits, alone, strict=True):
        assert {k: v for k, v in tokens.items() if k[0] == "x "} == single, "no cross-talk"


def test_group_size_may_change(epochs):
    """Case 15: group sizes 8 -> 4 -> 8 -> 8."""

    def resized(visit, config, rows):
        return config, rows_of("a", "b", group=[8, 4, 8, 8][visit])

    visits, plain = roll(epochs, resized), roll(epochs, lambda *a: (off(*a)[0], resized(*a)[1]))
    assert texts(visits) == texts(plain)
    assert [len(t) for t in texts(visits)] == [16, 8, 16, 16]
    _, batch = visits[2]
    assert batch.ages == [1] * 4 + [2] * 4 + [1] * 4 + [2] * 4, "samples that were left out keep their older text"
    assert batch.stats.accepted > 0


@pytest.mark.slow
def test_the_cap_may_shrink_and_grow(epochs):
    """Case 16: caps 64 -> 16 -> 128. A truncated response is continued and never treated as finished."""
    caps = [64, 16, 128]

    def recapped(visit, config, rows):
        return replace(config, max_new_tokens=caps[visit]), rows

    config = config_of(replay=1.0, window=200)
    visits = roll([epochs[0]] * 3, recapped, config=config)
    plain = roll([epochs[0]] * 3, lambda v, c, r: (replace(recapped(v, c, r)[0], acceptance="off"), r), config=config)
    assert texts(visits) == texts(plain)
    long, short, longer = texts(visits)
    for sample_index, tokens in longer.items():
        assert short[sample_index] == long[sample_index][:16]
        assert tokens[: len(long[sample_index])] == long[sample_index]
    finishes = [[c.finish for c in batch.completions] for _, batch in visits]
    assert "length" in finishes[1]
    grown = [c for c, f in zip(visits[2][1].completions, finishes[1], strict=True) if f == "length"]
    assert all(len(c.tokens) > 16 and all(c.reused[:16]) for c in grown)
    assert all(c.finish == "length" or c.tokens[-1] in EOS for _, batch in visits for c in batch.completions)


@pytest.mark.slow
def test_sampling_settings_may_change_between_visits(epochs, straight):
    """Case 20: old texts are only drafts, so a different distribution does not require different drafts."""
    laws = [{}, {"temperature": 0.6}, {"top_k": 4}, {"temperature": 0.0, "top_p": 0.7}]

    def relaxed(visit, config, rows):
        return replace(config, **laws[visit]), rows

    visits, plain = (
        roll(epochs, relaxed),
        roll(epochs, lambda v, c, r: (replace(relaxed(v, c, r)[0], acceptance="off"), r)),
    )
    assert texts(visits) == texts(plain)
    assert all(batch.stats.accepted > 0 for _, batch in visits[1:])
    assert texts(straight)[1] != texts(visits)[1]  # control: the distribution matters


def test_a_rule_that_trusts_its_drafts_is_seen_by_the_same_comparison(epochs, monkeypatch):
    def trusting(key, draft, drawn):
        tokens = [*draft.tokens, drawn.tokens[-1]]
        return Accepted(tokens, drawn.logprobs, drawn.logprobs, len(draft.tokens))

    monkeypatch.setattr("specrl.rollout.verify.exact", trusting)
    wrong = roll(epochs[:1], None)
    assert wrong[0][1].stats.accepted > 0
    monkeypatch.undo()
    assert texts(wrong) != texts(roll(epochs[:1], off)), "in the first epoch already"


def test_lenient_over_visits_uses_what_it_stored(epochs):
    config = config_of(acceptance="lenient", lenience=1e9)
    visits = roll(epochs, None, config=config)
    assert texts(visits) == [texts(visits)[0]] * 4, "at huge lenience the first text is reused for ever"
    for (_, before), (_, now) in pairwise(visits):
        assert all(all(c.reused) for c in now.completions)
        for a, b in zip(before.completions, now.completions, strict=True):
            assert b.behaviour_logprobs == pytest.approx(a.logprobs, abs=1e-6), "the policy that verified the text last"
