"""The learned router: its features, its decisions, and that it is tied to one pair of models."""

import math

import pytest
import torch

from specrl.rollout.lossy.arbitrage import FEATURES, GRID, MAX_SURPRISE, features, learned, load_learned
from specrl.rollout.lossy.pair import fingerprint, read_card, write_card
from specrl.rollout.lossy.router import Candidate, Step, decide
from specrl.rollout.types import RolloutError

WEIGHTS = [2.0, 0.0, -1.0, 0.0, 0.0, 0.0, -1.5]
PAIR = {"draft": "d", "policy": "p", "separators": ["\n"]}
CARD = {"kind": "arbitrage", "weights": WEIGHTS, "usual_gaps": [i / 100 for i in range(GRID)], **PAIR}


def wrote(*logprobs):
    """A draft step, which the policy has not read."""
    return Step("draft", [9] * len(logprobs), list(logprobs))


def candidate(step, *history):
    return Candidate(0, [5], history, step)


def test_features_by_hand():
    found = features(candidate(wrote(-0.1, -2.0, -0.6), wrote(-0.2), wrote(-3.0, -0.4)))
    assert found == pytest.approx([math.log1p(x) for x in (2.0, 0.9, 3.0, 1.2, 3, 3)])
    assert len(found) == len(FEATURES)
    first = features(candidate(wrote(-0.5)))
    assert first == pytest.approx([math.log1p(x) for x in (0.5, 0.5, 0, 0, 1, 0)]), "nothing before a first step"
    assert features(candidate(wrote(-math.inf)))[0] == math.log1p(MAX_SURPRISE)


def test_it_decides_before_any_pass_of_the_policy():
    assert not learned(WEIGHTS).needs
    read = wrote(-0.1, -6.0)
    read.policy_logprobs = [-9.0, -9.0]
    assert features(candidate(read)) == features(candidate(wrote(-0.1, -6.0)))


def test_a_surprising_step_is_escalated_unless_something_went_wrong_before():
    router = learned(WEIGHTS)
    doubted, sound = wrote(-0.1, -6.0), wrote(-0.1, -0.2)
    asked = [candidate(doubted), candidate(sound), candidate(doubted, wrote(-20.0)), candidate(doubted, wrote(-0.3))]
    assert decide(router, asked).escalate == [True, False, False, True]
    z = 2 * math.log(7) - 1.5
    assert router.score(asked)[0] == pytest.approx(1 / (1 + math.exp(-z)))


def test_a_saved_router_decides_as_before(tmp_path):
    write_card(tmp_path, CARD)
    loaded = load_learned(tmp_path, **PAIR, threshold=0.3)
    asked = [candidate(wrote(-1.0), wrote(-2.0))]
    assert loaded.score(asked) == learned(WEIGHTS).score(asked)
    assert (loaded.threshold, loaded.usual_gap) == (0.3, 0.06)


@pytest.mark.parametrize("damage", [{"weights": None}, {"weights": [1.0, 2.0]}, {"weights": "abc"}, {"usual_gaps": []}])
def test_damaged_numbers_are_refused(damage, tmp_path):
    write_card(tmp_path, CARD | damage)
    with pytest.raises(RolloutError, match=f"has {next(iter(damage))}=.*train it again"):
        load_learned(tmp_path, **PAIR)


@pytest.mark.parametrize("other", [{"draft": "x"}, {"policy": "x"}, {"separators": ["\n\n"]}])
def test_another_pair_is_refused(other, tmp_path):
    write_card(tmp_path, CARD)
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
