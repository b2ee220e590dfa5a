"""Draft trees in the transformers engine: several branches in one pass, and the output of plain decoding."""

import copy
import random
from dataclasses import dataclass

import pytest
import torch

import rollout.engines.rows as rows_module
import rollout.engines.transformers as engine_module
from rollout import tree
from rollout.budget import Budget, Plan
from rollout.cost import CostModel
from rollout.drafters.suffix import PromptTexts, SuffixDrafter
from rollout.engines import ragged
from rollout.engines.base import Sampling, Speculation
from rollout.engines.ragged import RaggedKV
from rollout.engines.rows import Row
from rollout.keys import derive_key
from rollout.types import Request
from tests.rollout.test_engine import (
    VOCAB,
    Script,
    all_wrong,
    corrupt,
    differing,
    drafts_of_every_quality,
    engine_of,
    prompts_and_caps,
    reference,
    requests_of,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass
class Bush:
    """Proposes several texts at the same positions; `limit` and `width` are ignored when `rude`."""

    texts: list[list[int]]
    rude: bool = False
    widest: int = 0

    def propose(self, tokens, limit):
        return self.texts[0][len(tokens) : len(tokens) + limit]

    def branches(self, tokens, limit, width):
        self.widest = max(self.widest, width)
        if self.rude:
            return [text[len(tokens) :] for text in self.texts]
        return [text[len(tokens) : len(tokens) + limit] for text in self.texts[:width]]


def bushes_of_every_quality(texts, seed=0) -> list:
    """One drafter per row: trees of all kinds, and some chains between them."""
    rng = random.Random(seed)
    kinds = [
        lambda t: Bush([all_wrong(t), t]),
        lambda t: Bush([corrupt(t, rng, 0.2) for _ in range(4)]),
        lambda t: Script(corrupt(t, rng, 0.2)),
        lambda t: Bush([[rng.randrange(VOCAB) for _ in range(40)] for _ in range(4)]),
        lambda t: Bush([t, t, t, t]),  # duplicates
        lambda t: Bush([[*t[:2], 1, *t[3:]], t, [1] * 40]),  # an EOS where the policy has none
        lambda t: Bush([all_wrong(t) + [5] * 100, t + [5] * 100, *[corrupt(t, rng, 0.5) for _ in range(9)]], rude=True),
        lambda t: Bush([[], t]),
        lambda t: Bush([t[:1], all_wrong(t), t[: len(t) // 2]]),
        lambda t: Bush([[*t[:3], VOCAB, *t[4:]], [*t[:1], -1], t]),  # ids that do not exist
        lambda t: Bush([t]),
        lambda t: Bush([[]]),
        lambda t: None,
        lambda t: Bush([[9, *t], *[[x, *t[1:]] for x in range(20, 26)]]),
    ]
    return [kinds[i % len(kinds)](list(text)) for i, text in enumerate(texts)]


@pytest.fixture(scope="module")
def golden(tiny):
    """golden(family): the model, 28 requests without drafts, and their reference responses."""
    done = {}

    def get(family: str):
        if family not in done:
            cases = prompts_and_caps(28)
            done[family] = tiny(family), cases, reference(tiny(family), requests_of(cases))
        return done[family]

    return get


# Identity -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "window", "branches"),
    [("qwen3", 1, 2), ("qwen2", 3, 8), ("llama", 16, 4), ("gpt2", 200, 3), ("mistral", 3, 8), ("mistral", 200, 3)],
)
def test_trees_of_any_quality_change_nothing(golden, family, window, branches):
    model, cases, want = golden(family)
    drafters = bushes_of_every_quality([t for t, _, _ in want])
    done, stats = engine_of(model, window=window, branches=branches).generate(requests_of(cases, drafters))
    assert differing(done, want) == []
    assert stats.forks > 0
    assert sum(sum(c.reused) for c in done) == stats.accepted
    _, path = engine_of(model, window=window).generate(requests_of(cases, drafters))
    assert path.forks == 0
    assert stats.accepted > path.accepted, "draws lay on further branches"
    assert stats.passes <= path.passes


@pytest.mark.parametrize(
    "settings",
    [
        {"tokens_per_pass": 1},
        {"tokens_per_pass": 40},
        {"rows_per_batch": 9, "tokens_per_pass": 11, "logits_mb": 0},
    ],
)
def test_memory_bounds_cut_trees_and_change_nothing(golden, settings, monkeypatch):
    model, cases, want = golden("qwen3")
    longest, layout = [], engine_module.Pass

    def spying(kv, first, starts, lengths, *rest):
        longest.append(sum(lengths))
        return layout(kv, first, starts, lengths, *rest)

    monkeypatch.setattr(engine_module, "Pass", spying)
    engine = engine_of(model, window=6, branches=4, tie_margin=0.0, **settings)
    done, _ = engine.generate(requests_of(cases, bushes_of_every_quality([t for t, _, _ in want])))
    assert differing(done, want) == []
    assert max(longest) <= max(settings.get("tokens_per_pass", 4096), 1 + 6), "a first branch is never cut"


def test_random_batches_mix_trees_and_chains(golden):
    model, cases, want = golden("llama")
    rng = random.Random(4)
    for trial in range(6):
        rows = rng.sample(range(len(cases)), rng.randint(1, len(cases)))
        texts = [t for t, _, _ in want]
        drafters = [
            rng.choice(pair)
            for pair in zip(bushes_of_every_quality(texts, trial), drafts_of_every_quality(texts, trial), strict=True)
        ]
        rng.shuffle(drafters)
        engine = engine_of(
            model,
            window=rng.choice([0, 1, 4, 40]),
            branches=rng.choice([2, 3, 50]),
            drafter=rng.choice([None, model]),
            rows_per_batch=rng.choice([3, 256]),
            tokens_per_pass=rng.choice([5, 30, 4096]),
        )
        requests = [requests_of(cases, drafters)[i] for i in rows]
        assert differing(engine.generate(requests)[0], [want[i] for i in rows]) == [], f"trial {trial}"


def test_texts_of_prompts_and_contexts_as_branches_change_nothing(golden, monkeypatch):
    """The real sources: rows of a group draft from each other, old texts have errors, and contexts were learnt."""
    model, cases, want = golden("llama")
    monkeypatch.setattr(CostModel, "fit", lambda self: (1.0, 0.0, 1e-4, 0.0))  # tokens cost little: chances are taken
    monkeypatch.setattr(Budget, "pays", lambda self: True)  # nor are they judged by measured time
    rng, texts = random.Random(7), [t for t, _, _ in want]
    engine, forks, heard = engine_of(model, contexts=True, branches=4), [], []
    branches = engine.contexts.branches
    monkeypatch.setattr(engine.contexts, "branches", lambda *args: heard.append(branches(*args)) or heard[-1])
    for epoch in range(3):
        stored = [corrupt(text, rng, 0.3) for text in texts] if epoch else []
        groups = {}
        for prompt, _ in cases:
            same = [old for (other, _), old in zip(cases, stored, strict=False) if other == prompt]
            groups[tuple(prompt)] = PromptTexts(same)
        drafters = [
            SuffixDrafter(groups[tuple(prompt)], stored[i] if epoch else None) for i, (prompt, _) in enumerate(cases)
        ]
        done, stats = engine.generate(requests_of(cases, drafters))
        assert differing(done, want) == []
        forks.append(stats.forks)
    assert min(forks[1:]) > 10
    assert any(heard), "the contexts were asked, and knew something"


def test_the_right_text_on_the_last_branch_is_one_pass(golden):
    model, cases, want = golden("gpt2")
    drafters = [Bush([all_wrong(t), corrupt(t, random.Random(0), 0.5), t]) for t, _, _ in want]
    done, stats = engine_of(model, window=200, branches=3).generate(requests_of(cases, drafters))
    assert differing(done, want) == []
    assert stats.passes == 1


def test_a_tree_under_a_cap_of_one_or_at_the_cap(tiny):
    model = tiny("qwen3")
    (text, _, _) = reference(model, requests_of([([8, 9], 12)]), Sampling(frozenset()))[0]
    eos = text[5]
    first = text.index(eos) + 1
    for cap in range(1, 13):
        bush = Bush([all_wrong(text), text[:first] + [3] * 9, text])
        engine = engine_of(model, Sampling(frozenset({eos})), window=16, branches=4)
        (c,), _ = engine.generate(requests_of([([8, 9], cap)], [bush]))
        assert c.tokens == text[: min(cap, first)]
        assert c.finish == ("stop" if cap >= first else "length")


def test_near_ties_are_decided_along_the_branch(golden):
    model, cases, want = golden("llama")
    engine = engine_of(model, window=5, branches=4, tie_margin=0.5)
    plain, _ = engine.generate(requests_of(cases))
    done, stats = engine.generate(requests_of(cases, bushes_of_every_quality([t for t, _, _ in want])))
    assert differing(done, plain) == []
    assert stats.ties > 20
    assert stats.forks > 0


def test_the_lenient_rule_verifies_its_one_text(tiny):
    prompt, bush = [5, 6], Bush([[9, 10, 11, 12], [13, 14, 15]])
    engine = engine_of(tiny("llama"), speculation=Speculation("lenient"), window=4, branches=4)
    request = Request(prompt, derive_key(1, "lenient", 0, 0), 8, bush, draft_logprobs=[-1e9] * 4)
    (c,), stats = engine.generate([request])
    assert c.tokens[:4] == [9, 10, 11, 12]
    assert bush.widest == stats.forks == 0


# Planted bugs: the same comparison must see them ----------------------------------------------------------------------


def speculate(model, cases, want) -> list:
    drafters = [
        Bush([corrupt(t, random.Random(i), 0.3), corrupt(t, random.Random(i + 99), 0.3)])
        for i, (t, _, _) in enumerate(want)
    ]
    return engine_of(model, window=8, branches=2).generate(requests_of(cases, drafters))[0]


def any_parent(draws, tokens, parents):
    path = []
    for i, token in enumerate(tokens):
        if token == draws[path[-1] + 1 if path else 0]:
            path.append(i)
    return path


@pytest.mark.parametrize(
    ("place", "name", "mutant"),
    [
        (tree, "ends", lambda parents: [len(parents) + 1] * (len(parents) + 1)),  # other branches are seen
        (tree, "depths", lambda parents: list(range(len(parents) + 1))),  # positions are places
        (RaggedKV, "move", lambda *ignored: None),  # an accepted branch stays where it was
        (rows_module, "depths", lambda parents: list(range(len(parents) + 1))),  # the noise of places, not positions
        (engine_module, "accept_tree", any_parent),
    ],
    ids=["mask", "positions", "compaction", "noise", "walk"],
)
@pytest.mark.parametrize("family", ["gpt2", "mistral"])
def test_planted_bugs_are_seen(golden, monkeypatch, family, place, name, mutant):
    model, cases, want = golden(family)
    assert differing(speculate(model, cases, want), want) == [], "the control"
    monkeypatch.setattr(place, name, mutant)
    assert differing(speculate(model, cases, want), want)


def test_a_sliding_window_that_counts_places_is_seen(golden, monkeypatch):
    """The window reaches back along the branch, past what other branches hold in between."""
    model, cases, want = golden("mistral")
    block = ragged.Block

    def by_place(*layout):
        *layout, width, trees = layout
        return block(*layout, width, trees and (torch.arange(width).expand_as(trees[1]), trees[1]))

    assert differing(speculate(model, cases, want), want) == [], "the control"
    monkeypatch.setattr(ragged, "Block", by_place)
    assert differing(speculate(model, cases, want), want)


# What is measured -----------------------------------------------------------------------------------------------------


def test_the_mass_that_branches_cover(tiny):
    """Three first tokens; behind the second one two more."""
    model, prompt = tiny("llama"), [5, 9, 30]
    request = Request(prompt, derive_key(2, "cover", 0, 0), 3)
    ((plain, _, _),) = reference(model, [request], Sampling(frozenset()))
    first, second = plain[:2]
    others = [(first + 1) % VOCAB, (first + 2) % VOCAB]
    request.drafter = Bush([[others[0], 4], [first, second], [first, (second + 1) % VOCAB], [others[1]]])
    engine = engine_of(model, Sampling(frozenset()), window=2, branches=4)
    _, stats = engine.generate([request])
    with torch.no_grad():
        logits = copy.deepcopy(model).eval()(input_ids=torch.tensor([[*prompt, first]])).logits[0, -2:]
    p = logits.softmax(-1)
    want = p[0, [first, *others]].sum() + p[1, [second, (second + 1) % VOCAB]].sum()
    assert stats.forks == 2
    assert stats.fork_mass == pytest.approx(want.item(), abs=1e-4)
    assert stats.drafted == 6
    (c,), ended = engine_of(model, Sampling(frozenset({first})), window=2, branches=4).generate([request])
    assert (c.tokens, ended.forks) == ([first], 1), "what lies behind an EOS is no position of the response"


def test_what_became_of_branches_is_learned_and_forgotten_with_the_weights(golden):
    model, cases, want = golden("llama")
    (prompt, _), (text, _, _) = max(zip(cases, want, strict=True), key=lambda pair: len(pair[1][0]))
    place = next(i for i, (t, _, _) in enumerate(want) if t == text)
    wrong = [t if at != 2 else (t + 1) % VOCAB for at, t in enumerate(text)]
    also = [t if at != 1 else (t + 1) % VOCAB for at, t in enumerate(text)]
    engine, drafts = engine_of(model, window=4, branches=3), []
    engine.budget.observe_draft = lambda *seen: drafts.append(seen)
    request = Request(prompt, derive_key(3, "engine", place, 0), len(text), Bush([wrong, also, text]))
    assert engine.generate([request])[0][0].tokens == text
    # the tree of the first pass: `also` parts at position 1 and is wrong, `text` parts at position 2 and is right
    assert drafts[0] == (("start", "custom"), 4, 2), "what the first branch alone would have brought"
    assert drafts[1][0] == ("diverged", "custom")
    start = Row(request, carried="custom")
    assert engine.branching.chance(start, False) == pytest.approx((9 + 3) / (10 + 4))
    assert engine.branching.chance(start, True) == pytest.approx((1 + 1) / (4 + 2))
    for _ in range(12):
        engine.branching.next_rollout()
    assert engine.branching.chance(start, True) == pytest.approx(1 / 4, abs=1e-3)


def test_branches_are_carried_only_where_they_pay(golden):
    model, cases, want = golden("llama")
    engine = engine_of(model, branches=4)

    def forks(needed):
        engine.budget.plan = lambda kinds, model, width: Plan(dict.fromkeys(kinds, 4), frozenset(), 1.0, needed=needed)
        drafters = [Bush([corrupt(t, random.Random(i), 0.3), t]) for i, (t, _, _) in enumerate(want)]
        done, stats = engine.generate(requests_of(cases, drafters))
        assert differing(done, want) == []
        return stats.forks, max(d.widest for d in drafters)

    assert forks(0.0)[0] > 10
    assert forks(1.0) == (0, 0), "not even asked for"


def test_one_branch_asks_for_no_others(golden):
    model, cases, want = golden("llama")
    drafters = [Bush([all_wrong(t), t]) for t, _, _ in want]
    _, stats = engine_of(model, window=4, branches=1).generate(requests_of(cases, drafters))
    assert max(d.widest for d in drafters) == stats.forks == 0
