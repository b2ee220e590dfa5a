"""The learned router: what it reads, how it is read out, and that it serves one pair only."""

import copy

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from rollout.routers.arbitrage import ArbitrageRouter, class_logits, encode
from rollout.routers.base import decide
from rollout.routers.pair import fingerprint, read_card, write_card
from rollout.steps import Candidate, Step
from rollout.types import RolloutError

pytestmark = pytest.mark.usefixtures("one_thread")

TAGS = {"draft": [50], "policy": [51, 52]}
PAIR = {"draft": "d", "policy": "p", "separators": ["\n"]}


@pytest.fixture(scope="module")
def model(tiny):
    config = copy.deepcopy(tiny("qwen3").config)
    config.num_labels = 2
    with torch.random.fork_rng():
        torch.manual_seed(0)
        found = AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        for p in found.parameters():
            if p.dim() > 1:
                p.mul_(15)
    return found.eval()


def test_the_input_tags_every_step_with_its_writer():
    history = [Step("policy", [10, 11]), Step("draft", [12])]
    assert encode(Candidate(0, [5, 6], history, Step("draft", [13])), TAGS) == [5, 6, 51, 52, 10, 11, 50, 12, 50, 13]


def test_read_out_is_at_the_last_token_whatever_the_padding(model):
    inputs = [[5, 6, 7], [8] * 9, [1]]
    alone = torch.cat([class_logits(model, [ids]) for ids in inputs])
    assert torch.allclose(class_logits(model, inputs), alone, atol=1e-4)
    shorter = class_logits(model, [ids[:-1] or [2] for ids in inputs])
    assert not torch.allclose(shorter, alone, atol=1e-2), "another last token reads otherwise"


def test_scores_are_probabilities_and_the_threshold_is_monotone(model):
    candidates = [Candidate(i, [5 + i, 9], [], Step("draft", [20 + i])) for i in range(40)]
    router = ArbitrageRouter(model, TAGS)
    scores = router.score(candidates)
    assert all(0 <= score <= 1 for score in scores)
    assert max(scores) - min(scores) > 0.1
    counts = []
    for router.threshold in (0.0, 0.25, 0.5, 0.75, 1.0):
        decision = decide(router, candidates)
        assert decision.faults == 0
        counts.append(sum(decision.escalate))
    assert counts == sorted(counts, reverse=True)
    assert (counts[0], counts[-1]) == (40, 0)


def test_a_classifier_with_nan_weights_is_a_fault(model):
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.score.weight.fill_(torch.nan)
    decision = decide(ArbitrageRouter(broken, TAGS), [Candidate(0, [5], [], Step("draft", [9]))])
    assert (decision.escalate, decision.faults) == ([True], 1)


def test_a_saved_router_decides_as_before(model, tmp_path):
    model.save_pretrained(tmp_path)
    write_card(tmp_path, {"kind": "arbitrage", "tags": TAGS, **PAIR})
    loaded = ArbitrageRouter.load(tmp_path, **PAIR, threshold=0.3)
    candidates = [Candidate(0, [5, 9], [], Step("draft", [20]))]
    assert loaded.score(candidates) == pytest.approx(ArbitrageRouter(model, TAGS).score(candidates), abs=1e-5)
    assert loaded.threshold == 0.3


@pytest.mark.parametrize("other", [{"draft": "x"}, {"policy": "x"}, {"separators": ["\n\n"]}])
def test_another_pair_is_refused(other, tmp_path):
    write_card(tmp_path, {"kind": "arbitrage", "tags": TAGS, **PAIR})
    with pytest.raises(RolloutError, match=f"trained for another {next(iter(other))}"):
        ArbitrageRouter.load(tmp_path, **{**PAIR, **other})


def test_what_is_no_router_is_refused(tmp_path):
    with pytest.raises(RolloutError, match="holds no router"):
        read_card(tmp_path, "arbitrage")
    (tmp_path / "router.json").write_text("{")
    with pytest.raises(RolloutError, match="holds no router"):
        read_card(tmp_path, "arbitrage")
    write_card(tmp_path, {"kind": "judge"})
    with pytest.raises(RolloutError, match="of kind 'judge', not 'arbitrage'"):
        read_card(tmp_path, "arbitrage")


def test_a_fingerprint_tells_models_apart_and_updates_too(build_model):
    first, again, other = build_model("qwen3", 0), build_model("qwen3", 0), build_model("qwen3", 1)
    assert fingerprint(first) == fingerprint(again) != fingerprint(other)
    with torch.no_grad():
        for weight in again.parameters():
            weight.add_(1e-3)
    assert fingerprint(first) != fingerprint(again)
