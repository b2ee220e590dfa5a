"""The learned router: its features, its decisions, and that it is tied to one pair of models."""

import math

import pytest
import torch

from specrl.rollout.lossy.pair import fingerprint, read_card, write_card
from specrl.rollout.lossy.router import MAX_SURPRISE, Candidate, Step, decide, features, learned, load_learned
from specrl.rollout.types import RolloutError

WEIGHTS = [2.0, -1.0, -1.5]
PAIR = {"draft": "d", "policy": "p", "separators": ["\n"]}


def read(*logprobs):
    """A draft step that the policy has read."""
    return Step("draft", [9] * len(logprobs), policy_logprobs=list(logprobs))


def candidate(step, *history):
    return Candidate(0, [5], history, step)


def test_features_by_hand():
    found = features(candidate(read(-0.1, -2.0, -0.5), read(-0.2), read(-3.0, -0.0)))
    assert found == pytest.approx((math.log(3.0), math.log(4.0)))
    assert features(candidate(read(-0.5))) == pytest.approx((math.log(1.5), 0.0)), "a first step has nothing before it"
    assert features(candidate(read(-math.inf)))[0] == math.log1p(MAX_SURPRISE)


def test_a_doubted_step_is_escalated_unless_something_went_wrong_before():
    router = learned(WEIGHTS)
    doubted, sound = read(-0.1, -6.0), read(-0.1, -0.2)
    asked = [candidate(doubted), candidate(sound), candidate(doubted, read(-20.0)), candidate(doubted, read(-0.3))]
    assert decide(router, asked).escalate == [True, False, False, True]
    z = 2 * math.log(7) - 1.5
    assert router.score(asked)[0] == pytest.approx(1 / (1 + math.exp(-z)))


def test_scores_are_probabilities_and_the_threshold_is_monotone():
    candidates = [candidate(read(-(1.3**i)), read(-(1.1**i))) for i in range(40)]
    router = learned([*WEIGHTS[:2], 1e4]), learned(WEIGHTS)
    assert set(router[0].score(candidates)) == {1.0}, "no logit overflows"
    counts = []
    for router[1].threshold in (0.0, 0.25, 0.5, 0.75, 1.0):
        decision = decide(router[1], candidates)
        assert decision.faults == 0
        counts.append(sum(decision.escalate))
    assert counts == sorted(counts, reverse=True)
    assert (counts[0], counts[-1]) == (40, 0)
    assert 0 < counts[2] < 40


def test_nan_weights_are_a_fault():
    decision = decide(learned([math.nan, 0.0, 0.0]), [candidate(read(-1.0))])
    assert (decision.escalate, decision.faults) == ([True], 1)


def test_a_saved_router_decides_as_before(tmp_path):
    write_card(tmp_path, {"kind": "arbitrage", "weights": WEIGHTS, **PAIR})
    loaded = load_learned(tmp_path, **PAIR, threshold=0.3)
    asked = [candidate(read(-1.0), read(-2.0))]
    assert loaded.score(asked) == learned(WEIGHTS).score(asked)
    assert loaded.threshold == 0.3


@pytest.mark.parametrize("weights", [None, [1.0, 2.0], [1.0, 2.0, "x"], "abc"])
def test_damaged_weights_are_refused(weights, tmp_path):
    write_card(tmp_path, {"kind": "arbitrage", "weights": weights, **PAIR})
    with pytest.raises(RolloutError, match="not two and a bias"):
        load_learned(tmp_path, **PAIR)


@pytest.mark.parametrize("other", [{"draft": "x"}, {"policy": "x"}, {"separators": ["\n\n"]}])
def test_another_pair_is_refused(other, tmp_path):
    write_card(tmp_path, {"kind": "arbitrage", "weights": WEIGHTS, **PAIR})
    with pytest.raises(RolloutError, match=f"trained for another {next(iter(other))}"):
        load_learned(tmp_path, **{**PAIR, **other})


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
