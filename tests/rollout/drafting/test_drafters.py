"""SuffixDrafter: where it searches for the next tokens. Drafts never change outputs, so these tests concern quality."""

import pickle
import random
from itertools import chain
from operator import eq

import cloudpickle
import pytest

from specrl.rollout.drafting import suffix as suffix_of
from specrl.rollout.drafting.draft import Draft, ask, ask_all
from specrl.rollout.drafting.ngrams import NGrams, token_ids
from specrl.rollout.drafting.suffix import PromptTexts, SuffixDrafter
from specrl.rollout.sections import SOURCES
from specrl.rollout.types import Request

OLD = list(range(100, 160))
POSITIONS = ("prefix", "position")


def drafter_of(own, *others, sources=SOURCES) -> SuffixDrafter:
    return SuffixDrafter(PromptTexts([own, *others], sources), own)


def emit(truths, drafters, limit: int = 8) -> list[tuple[int, int]]:
    """Calls drafters as an engine does for one batch. Returns passes and accepted draft tokens of each response."""
    at, passes, stood = ([0] * len(truths) for _ in range(3))
    while going := [i for i, truth in enumerate(truths) if at[i] < len(truth)]:
        drafts = {i: list(drafters[i].propose(truths[i][: at[i]], limit)) for i in going}
        for i, draft in drafts.items():
            assert len(draft) <= limit
            rest, n = truths[i][at[i] :], 0
            while n < min(len(draft), len(rest)) and draft[n] == rest[n]:
                n += 1
            passes[i], stood[i], at[i] = passes[i] + 1, stood[i] + n, min(at[i] + n + 1, len(truths[i]))
            if at[i] == len(truths[i]):
                drafters[i].propose(truths[i], 0)
    return list(zip(passes, stood, strict=True))


def accepted(drafter, truth, limit: int = 8) -> tuple[int, int]:
    return emit([truth], [drafter], limit)[0]


# The sample's old text ------------------------------------------------------------------------------------------------


def test_continues_at_the_same_positions():
    drafter = drafter_of(OLD)
    assert drafter.propose([], 5) == OLD[:5]
    assert drafter.propose(OLD[:5], 3) == OLD[5:8]
    assert drafter.source == "prefix"
    assert drafter.propose(OLD[:59], 8) == OLD[59:]
    assert drafter.propose(OLD, 8) == [], "at the end there is nothing to guess"
    assert drafter.propose([*OLD, 7], 8) == []
    assert accepted(drafter_of(OLD), OLD) == (7, 54)


def test_a_substitution_goes_on_at_the_same_positions_at_once():
    truth = [*OLD[:20], 7, *OLD[21:]]
    drafter = drafter_of(OLD)
    drafter.propose(truth[:16], 8)
    assert drafter.propose(truth[:21], 4) == OLD[21:25]
    assert drafter.source == "position"
    assert accepted(drafter_of(OLD), truth)[1] >= 50


@pytest.mark.parametrize(
    ("truth", "at", "expected"),
    [
        pytest.param([*OLD[:20], 7, 8, *OLD[20:]], 26, OLD[24:28], id="insertion"),
        pytest.param([*OLD[:20], *OLD[23:]], 26, OLD[29:33], id="deletion"),
        pytest.param(OLD[10:], 4, OLD[14:18], id="late start"),
    ],
)
def test_shifted_text_is_picked_up_again(truth, at, expected):
    drafter = drafter_of(OLD)
    for n in range(at):
        drafter.propose(truth[:n], 4)
    assert drafter.propose(truth[:at], 4) == expected
    assert drafter.source == "earlier"
    passes, stood = accepted(drafter_of(OLD), truth)
    assert stood > len(truth) * 0.7
    blind_passes, blind = accepted(drafter_of(OLD, sources=POSITIONS), truth)
    assert blind < stood  # control: the position never changes
    assert blind_passes > passes


def test_a_substitution_soon_after_an_insertion_goes_on_in_the_same_text():
    drafter = drafter_of(OLD, [50, OLD[1], 7, 55])
    truth = [1, 2, 3, *OLD[:2], 7]
    for n in range(len(truth)):
        drafter.propose(truth[:n], 4)
    assert drafter.propose(truth, 4) == OLD[3:7], "two tokens of the text were equal, and none precede its start"


# Which text is followed -----------------------------------------------------------------------------------------------


def test_the_longest_suffix_wins_and_among_equals_the_newest():
    phrase, longer = [1, 2, 3, 4], [5, 6, 7, 8, 1, 2, 3, 4]
    newest, older = [50, *phrase, 11], [60, *phrase, 12]
    assert SuffixDrafter(PromptTexts([newest, older])).propose([70, 70, *phrase], 1) == [11]
    assert SuffixDrafter(PromptTexts([older, newest])).propose([70, 70, *phrase], 1) == [12]
    assert SuffixDrafter(PromptTexts([newest, older, [*longer, 13]])).propose([70, 70, *longer], 1) == [13]
    twice = [*phrase, 14, *OLD, *phrase, 15]
    assert SuffixDrafter(PromptTexts([twice])).propose([70, 70, *phrase], 1) == [15], "the last place within a text"
    texts = PromptTexts([newest])
    running = SuffixDrafter(texts)
    running.propose([80, *phrase, 16], 1)
    row = SuffixDrafter(texts)
    assert row.propose([70, 70, *phrase], 1) == [16], "what was emitted in this rollout is newer than what is stored"
    assert row.source == "group"


def test_the_prompt_is_copied_from():
    """If that source is enabled: numbers of a question that occur in no other text."""
    prompt, truth = [*range(50), 7, 8, 9], [60, 61, *range(20, 40), 62, *range(5, 12)]
    assert accepted(SuffixDrafter(PromptTexts(prompt=prompt)), truth)[1] > 20
    drafter = SuffixDrafter(PromptTexts(prompt=prompt))
    assert drafter.propose(truth[:5], 3) == [23, 24, 25]
    assert drafter.source == "prompt"
    without = tuple(source for source in SOURCES if source != "prompt")
    assert accepted(SuffixDrafter(PromptTexts((), without, prompt)), truth)[1] == 0


@pytest.mark.parametrize(
    ("sources", "want"),
    [
        (("prefix",), {"prefix"}),
        (("prefix", "position"), {"prefix", "position"}),
        (("prefix", "earlier"), {"prefix", "earlier"}),
        (("prefix", "prompt"), {"prefix", "prompt"}),
        (("group",), {"group"}),
        (SOURCES, set(SOURCES)),
    ],
)
def test_only_the_named_sources_draft(sources, want):
    rng, found = random.Random(0), set()
    for _ in range(60):
        olds = [[rng.randrange(12) for _ in range(40)] for _ in range(3)]
        truths = [[rng.choice([t, t, t, rng.randrange(12)]) for t in old] for old in olds]
        texts = PromptTexts(olds, sources, [rng.randrange(12) for _ in range(40)])
        drafters = [SuffixDrafter(texts, old) for old in olds]
        for n in range(40):
            for drafter, truth in zip(drafters, truths, strict=True):
                if drafter.propose(truth[:n], 3):
                    found.add(drafter.source)
    assert found == want


# A group in one rollout -----------------------------------------------------------------------------------------------


def test_a_pickled_group_shares_its_texts_and_a_cut_one_does_not():
    texts = PromptTexts([OLD])
    drafters = [SuffixDrafter(texts, OLD) for _ in range(4)]
    together = pickle.loads(pickle.dumps(drafters))
    together[0].propose([1, 2, 3, 4], 0)
    together[1].propose([1, 2], 0)
    assert together[3].propose([9, 9, 1, 2], 2) == [3, 4]
    apart = [pickle.loads(pickle.dumps(d)) for d in drafters]
    apart[0].propose([1, 2, 3, 4], 0)
    assert apart[3].propose([9, 9, 1, 2], 2) != [3, 4]


def test_the_index_does_not_travel():
    old = list(range(1000))
    request = Request([1], 0, 2000, SuffixDrafter(PromptTexts([old]), old))
    bare = pickle.dumps(request)
    index = NGrams(2000)
    index.add([(index.group(), 0, token_ids(old), 0)])
    assert len(pickle.dumps(index)) > 5 * len(bare), "control: it is large"
    assert request.drafter.propose([1, 2, 3, 4], 2) == [5, 6]
    assert request.drafter.texts.index is not None, "control: it was built"
    for dumps in (pickle.dumps, cloudpickle.dumps):
        sent = dumps(request)
        assert len(sent) < len(bare) + 100
        assert NGrams.__name__.encode() not in sent
        assert pickle.loads(sent).drafter.propose([1, 2, 9, 20, 21, 22, 23], 2) == [24, 25], "it is built again there"


# Batches of rows ------------------------------------------------------------------------------------------------------


def rollout_of(rng: random.Random, prompts: int) -> tuple[list[SuffixDrafter], list[list[int]]]:
    """Drafters of some prompts with three rows each, and the rows' final texts."""
    drafters, truths = [], []
    for _ in range(prompts):
        olds = [[rng.randrange(15) for _ in range(50)] for _ in range(3)]
        texts = PromptTexts(olds)
        drafters += [SuffixDrafter(texts, old) for old in olds]
        parts = [olds[rng.randrange(3)][rng.randrange(30) :][:20] for _ in range(9)]  # also written by siblings
        truths += [[*old[:12], *chain.from_iterable(rng.sample(parts, 4))] for old in olds]
    return drafters, truths


def test_rows_that_are_asked_together_get_what_each_gets_alone():
    """All rows add their tokens before any of them searches, so a single row is called after the others were added."""
    together, truths = rollout_of(random.Random(4), prompts=5)
    alone, _ = rollout_of(random.Random(4), prompts=5)
    rng, sources, same, searches = random.Random(5), set(), 0, 0
    for at in range(0, 90, 5):
        texts, limits = [truth[:at] for truth in truths], [rng.randrange(9) for _ in truths]
        for drafter, tokens in zip(alone, texts, strict=True):
            drafter.propose(tokens, 0)
        expected = [drafter.propose(*asked) for drafter, *asked in zip(alone, texts, limits, strict=True)]
        found = [proposed.tolist() for proposed in suffix_of.propose(together, texts, limits)]
        sources |= {drafter.source for drafter in together}
        same += sum(map(eq, found, expected))
        searches += len(found)
    assert same > 0.99 * searches, "collisions differ"
    assert sources > {"position", "earlier", "group"}
    assert len({id(drafter.texts.index) for drafter in together}) == 1, "prompts share an index"
    assert len({id(drafter.texts.index) for drafter in alone}) == 5


class Odd:
    def __init__(self, *tokens):
        self.tokens = tokens

    def propose(self, tokens, limit):
        return self.tokens[:limit]


def test_all_rows_get_what_each_is_asked_for():
    drafters = [Odd(1, 2, 3), None, drafter_of(OLD), Odd(4, 99, 5), drafter_of([3, -1, 5]), drafter_of([2**40])]
    asked = ask_all(drafters, [[]] * 6, [2, 2, 2, 3, 3, 3], 50 + OLD[-1])
    assert [Draft([*draft.tokens], draft.source) for draft in asked] == [
        Draft([1, 2], "custom"),
        Draft([]),
        Draft(OLD[:2], "prefix"),
        Draft([4, 99, 5], "custom"),
        Draft([3], "prefix"),
        Draft([], "prefix"),
    ]
    assert ask_all([drafter_of(OLD)], [[]], [0], 500) == [Draft()]
    assert ask_all([drafter_of([5, 6, 7])], [[]], [3], 6) == [ask(drafter_of([5, 6, 7]), [], 3, 6)]


def test_texts_of_other_prompts_are_out_of_reach():
    texts, other = PromptTexts([OLD]), PromptTexts()
    SuffixDrafter(texts, OLD).propose([1, 2, 3, 4], 4)
    row = SuffixDrafter(other)
    assert row.propose([1, 2], 4) == []
    assert row.propose(OLD[:4], 4) == []
    assert SuffixDrafter(texts).propose([1, 2], 1) == [3]  # control: the same prompt
