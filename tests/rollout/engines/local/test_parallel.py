"""Drafts from one pass: what masks answer, that they change no token, and that a pass is priced as one."""

import copy

import pytest
import torch

from rollout.drafting.budget import Budget, Plan
from rollout.drafting.chain import Chain, DraftModelRecord
from rollout.drafting.drafting import Drafting
from rollout.engines.base import Sampling
from rollout.engines.local.drafter import ModelDrafter
from rollout.engines.local.engine import TransformersEngine
from rollout.engines.local.parallel import ParallelDrafter, model_drafter
from rollout.keys import derive_key
from rollout.noise import keyed_draw
from rollout.types import Request
from rollout.verify import exact

MASK, K = 0, 4
SAMPLING = Sampling(frozenset({1}))


@pytest.fixture
def policy(build_model):
    return build_model("llama")


def masked(model, depth: int = K):
    """The model as a parallel drafter; its masks are as it was initialised."""
    made = copy.deepcopy(model)
    made.config.pard_token, made.config.parallel_drafts = MASK, depth
    return made


def requests(n: int = 8, cap: int = 20) -> list[Request]:
    return [Request((5, 9 + i % 3, *range(20, 20 + i)), derive_key(3, "parallel", i, 0), cap - i) for i in range(n)]


def proposed(drafter, texts, room, most: int = 0) -> tuple[list[list[int]], Chain]:
    budget = Budget()
    budget.drafter.at_once = drafter.at_once
    chain = Chain(budget.drafter, 0.0, 1e-3, [1] * len(texts), most)
    with drafter.inference():
        return drafter.propose(texts, room, chain, budget), chain


def test_masks_answer_with_the_policys_noise(policy):
    asked, text = requests(3), [[30, 31, 32], [], [33, 34]]
    drafter = ParallelDrafter(masked(policy), SAMPLING)
    drafter.open(asked, 3)
    drafter.admit({0: [], 1: [], 2: []})
    for _ in range(2):  # the masks of the first time are forgotten
        drafts, chain = proposed(drafter, dict(enumerate(text)), [9, 9, 2])
        for i, (request, tokens) in enumerate(zip(asked, text, strict=True)):
            ids = [*request.prompt, *tokens] + [MASK] * (K - 1)
            with torch.inference_mode():
                logits = policy(input_ids=torch.tensor([ids])).logits[0, -K:].float()
            at = torch.arange(len(tokens), len(tokens) + K)
            want, logprobs, *_ = keyed_draw(logits, torch.full((K,), request.key), at)
            most = 2 if i == 2 else K
            assert drafts[i] == want.tolist()[:most]
            assert chain.logprobs[i] == pytest.approx(logprobs.tolist()[:most], abs=1e-4)
        text = [[*tokens, 40 + i] for i, tokens in enumerate(text)]
    behind = ModelDrafter(policy, SAMPLING)
    behind.open(asked, 3)
    behind.admit({0: [], 1: [], 2: []})
    assert proposed(behind, dict(enumerate(text)), [9, 9, 2], K)[0] != drafts, "control: a chain has seen its drafts"


@pytest.mark.parametrize("window", [0, 3])
def test_it_changes_no_token(policy, window):
    plain, _ = TransformersEngine(policy, SAMPLING).generate(requests())
    drafter = ParallelDrafter(masked(policy), SAMPLING)
    engine = TransformersEngine(policy, SAMPLING, exact, Drafting(Budget(window), None, drafter))
    for _ in range(2):
        done, stats = engine.generate(requests())
        assert [(c.tokens, c.finish) for c in done] == [(c.tokens, c.finish) for c in plain]
    if window:
        drafted, stood = stats.sources["model"]
        assert 0 < stood < drafted
        assert sum(c.passes for c in done) < sum(c.passes for c in plain), "the first draft is the policy's own"


def test_a_saved_model_says_how_it_drafts(policy, tmp_path):
    masked(policy).save_pretrained(tmp_path)
    loaded = type(policy).from_pretrained(tmp_path)
    assert type(model_drafter(loaded, SAMPLING)) is ParallelDrafter
    assert model_drafter(loaded, SAMPLING).at_once == K
    assert type(model_drafter(policy, SAMPLING)) is ModelDrafter


def record(at_once: int) -> DraftModelRecord:
    made = DraftModelRecord()
    made.at_once = at_once
    made.calibrate([(1, 1.02), (64, 2.28)], 1)  # 1 s a pass and 20 ms a token
    return made


def test_one_pass_is_priced_whatever_it_drafts():
    assert record(8).seconds(1, 8) < 1.5 < 8 < record(0).seconds(1, 8)
    assert record(8).seconds(4, 0) == record(0).seconds(4, 0) == 0


def test_a_chain_from_one_pass_goes_on_where_another_pass_would_not_pay():
    drafts = {}
    for at_once in (0, 8):
        chain = Chain(record(at_once), 0.85, 1e-3, [1])
        while chain.going and len(chain.logprobs[0]) < 8:
            chain.step([-0.2], [20])
        drafts[at_once] = len(chain.logprobs[0])
    assert drafts[8] == 8
    assert drafts[0] < 3
    assert not Chain(record(8), 50.0, 1e-3, [1]).going, "control: one pass can be too dear"


def test_a_token_that_is_not_carried_counts_by_its_chance():
    promise = {}
    for at_once in (0, 8):
        made = DraftModelRecord()
        made.at_once = at_once
        made.calibrate([(1, 1e-5), (64, 2e-5)], 1)
        assert Chain(made, 500.0, 1e-3, [1] * 20).step([-1.2] * 20, [20] * 20) == [], "too doubtful to be verified"
        promise[at_once] = made.promise()
    assert promise[0] == pytest.approx(0.3)  # a pass of its own was for nothing
    assert promise[8] > 0.4


def test_a_budget_hands_rows_to_it_that_it_keeps_from_a_chain():
    handed = {}
    for at_once in (0, 8):
        budget = Budget()
        budget.calibrate([(1, 1.01), (64, 1.64)], 1, 1)
        budget.drafter = record(at_once)
        plan: Plan = budget.plan([None], model=True)
        handed[at_once] = bool(plan.handed)
    assert handed == {0: False, 8: True}
