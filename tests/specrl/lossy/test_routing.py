"""Routing in a run: values of steps, the oracle, training a router, using it, and refusing what is not right."""

import json
import math
from dataclasses import replace

import pytest
import torch

from specrl.config import load as cli
from specrl.evaluate import EvaluateConfig
from specrl.evaluate import main as evaluate
from specrl.lossy import routing
from specrl.lossy.fit import Record, usual_gaps
from specrl.lossy.pair import load_pair
from specrl.lossy.routing import StepValues, advantage, collect, prefix
from specrl.reward.set import RewardSet
from specrl.rollout.keys import derive_key
from specrl.rollout.lossy.arbitrage import FEATURES
from specrl.rollout.lossy.router import Candidate, Step, by_advantage, decide
from specrl.rollout.types import Request
from specrl.run.data import load_examples
from specrl.run.prompts import seen
from specrl.train_router import TrainRouterConfig
from specrl.train_router import main as train_router
from tests import runs
from tests.rewards import digits

pytestmark = pytest.mark.long  # commands on a pair of models


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    return runs.build_policy(tmp_path_factory.mktemp("draft"), seed=1)


def words(folder, draft, *more):
    """A small routed command; every mark of the random texts ends a step."""
    return runs.command(
        folder,
        *more,
        rollout__acceptance="off",
        rollout__drafter=draft,
        rollout__routed__separators=r"[' ', ',', '=', ':', '\n']",
        rollout__routed__max_step_tokens=20,
    )


@pytest.fixture(scope="module")
def pair(draft, tmp_path_factory):
    return load_pair(cli.load(words(tmp_path_factory.mktemp("pair"), draft), TrainRouterConfig, training=False))


@pytest.fixture(scope="module")
def examples(pair):
    return load_examples(pair.config.data, pair.config.dataset, "test", 0)


@pytest.fixture(scope="module")
def rewards():
    class Digits:
        name = "digits"

        def __call__(self, samples):
            return [None if "coins" in s.completion else digits("", s.completion, None) for s in samples]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specrl.reward.set.FAILED_SHARE", 1)
        yield RewardSet([Digits()])


def candidates(pair, examples, seed=0):
    """Two different steps for every example."""
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randint(3, len(pair.tokenizer), (len(examples), 2, 4), generator=generator).tolist()
    return [
        Candidate(
            i, pair.tokenizer(e.prompt).input_ids, [], Step("draft", a, end="separator"), Step("policy", b, end="eos")
        )
        for i, (e, (a, b)) in enumerate(zip(examples, draws, strict=True))
    ]


def test_a_value_is_the_mean_reward_of_plain_continuations(pair, examples, rewards):
    values, plain = StepValues(pair, rewards, 3, seed=0), pair.plain(pair.policy)
    begun = seen(examples, [""] * len(examples), pair.tokenizer, pair.config.dataset)
    asked = [prefix(c, c.step, s, pair.tokenizer) for c, s in zip(candidates(pair, examples), begun, strict=True)]
    found = values(asked)
    for p, value in zip(asked, found, strict=True):
        cap = pair.config.rollout.max_new_tokens
        done, _ = plain.generate([Request(p.tokens, derive_key(0, "value", i, 0), cap) for i in range(3)])
        texts = pair.tokenizer.batch_decode([c.tokens for c in done], skip_special_tokens=True)
        scored = rewards.score([replace(p.sample, completion=p.sample.completion + text) for text in texts]).total
        kept = [s for s in scored if s is not None]
        assert value == pytest.approx(sum(kept) / len(kept)) if kept else math.isnan(value)
    before = values.decoded
    assert values(asked) == pytest.approx(found, nan_ok=True)
    assert values.decoded == before, "a prefix is valued once"


def test_the_oracle_never_escalates_without_an_advantage(pair, examples, rewards):
    oracle = by_advantage(advantage(pair, StepValues(pair, rewards, 3, 0), examples))
    gains = oracle.score(candidates(pair, examples))
    decision = decide(oracle, candidates(pair, examples))
    assert decision.escalate == [not gain <= 0 for gain in gains], "NaN goes to the policy, as a fault"
    assert decision.faults == sum(map(math.isnan, gains))
    assert any(gain > 0 for gain in gains)
    assert any(gain <= 0 for gain in gains)


@pytest.fixture(scope="module")
def values(pair, rewards):
    return StepValues(pair, rewards, 2, seed=0)


@pytest.fixture(scope="module")
def collected(pair, examples, values):
    return collect(pair, values, examples[:4])


def test_both_walks_are_recorded(pair, values, examples, collected, monkeypatch):
    alone = {}
    for walk, threshold in routing.WALKS.items():
        monkeypatch.setattr(routing, "WALKS", {walk: threshold})
        alone[walk] = steps(collect(pair, values, examples[:4]))
        monkeypatch.undo()
    assert alone["draft"] - alone["oracle"], "the draft's walk goes on with its own step"
    assert alone["oracle"] - alone["draft"], "the oracle's goes on with the policy's"
    assert alone["oracle"] & alone["draft"], "both begin with the same step"
    assert steps(collected) == alone["draft"] | alone["oracle"]
    assert len(collected) == len(steps(collected)), "no step is there twice"


def steps(records):
    """The records by what rounding in other batches does not change."""
    return {(r.problem, *(round(value, 2) for value in (*r.draft_logprobs, *r.policy_logprobs))) for r in records}


def test_the_router_is_trained_on_what_it_will_see(collected):
    """Every value enters by the draft's log-probs: a first step has nothing before it, a later one has."""
    largest, before, length = (FEATURES.index(name) for name in ("step max", "history max", "history tokens"))
    assert all(r.features[largest] == pytest.approx(math.log1p(-min(r.draft_logprobs))) for r in collected)
    assert all(r.features[before] == 0 for r in collected if not r.features[length])
    assert any(r.features[before] > 0 for r in collected)


def test_the_usual_gap_by_hand():
    made = [((-1.0, -1.0), (-2.0, -1.5)), ((-0.5,), (-3.0,))]
    records = [Record(0, (), 0.0, draft, policy) for draft, policy in made]
    assert usual_gaps([0.2, 0.7], records, 3) == [0.0, 1.5 / 2, 4.0 / 3]


@pytest.fixture(scope="module")
def trained(draft, tmp_path_factory):
    """A router of the pair, by the command."""
    folder = tmp_path_factory.mktemp("router")
    more = [f"out={folder / 'router'}", "continuations=2", "dataset.train_size=12"]
    assert cli.run(train_router, words(folder, draft, *more), TrainRouterConfig, training=False) == 0
    return folder / "router"


def test_the_card_of_a_router_says_how_it_did(trained):
    card = json.loads((trained / "router.json").read_text())
    report = card["report"]
    assert report["steps"] > 12
    assert 0 < report["with_gain"] < report["steps"]
    assert len(card["weights"]) == len(FEATURES) + 1
    assert 0 <= report["roc_auc"] <= 1
    assert card["separators"] == [" ", ",", "=", ":", "\n"], "texts, not token ids"


def run_evaluate(folder, draft, capsys, *more):
    code = cli.run(evaluate, words(folder, draft, "samples=2", *more), EvaluateConfig, training=False)
    out, err = capsys.readouterr()
    return code, json.loads(out) if code == 0 else err


def test_evaluation_with_a_router_reports_its_cost(trained, draft, tmp_path, capsys):
    options = ["rollout.acceptance=routed", "rollout.routed.by=arbitrage", f"rollout.trained={trained}"]
    code, all_policy = run_evaluate(tmp_path, draft, capsys, *options, "rollout.routed.threshold=0")
    assert code == 0
    assert all_policy["eval/policy_tokens_ratio"] == 1.0
    _, plain = run_evaluate(tmp_path, draft, capsys, "rollout.drafter=")
    same = ("eval/reward", "eval/mean_length")
    assert {k: all_policy[k] for k in same} == {k: plain[k] for k in same}, "every step was escalated"
    code, some = run_evaluate(tmp_path, draft, capsys, *options, "rollout.routed.threshold=1")
    assert code == 0
    assert some["eval/policy_tokens_ratio"] < 1


def test_a_router_of_another_pair_is_refused(trained, tmp_path, capsys):
    other = runs.build_policy(tmp_path / "other", seed=2)
    options = ["rollout.acceptance=routed", "rollout.routed.by=arbitrage", f"rollout.trained={trained}"]
    code, err = run_evaluate(tmp_path, other, capsys, *options)
    assert code == 3
    assert "was trained for another draft" in err
    assert err.count("\n") == 1


def routed(draft) -> dict:
    """Options of a run of one epoch."""
    return {
        "rollout__acceptance": "routed",
        "rollout__sources": "[]",
        "rollout__drafter": draft,
        "rollout__routed__threshold": 4.0,
        "rollout__routed__separators": "[' ', ',', '=', ':']",
        "trainer__epochs": 1,
    }


@pytest.mark.parametrize("correction", ["none", "sequence_truncate"])
def test_grpo_trains_on_text_that_the_draft_wrote(correction, draft, tmp_path):
    record = runs.run(tmp_path, trainer__correction=correction, **routed(draft))
    first = record.steps[0].metrics
    assert 0 < record.steps[0].reuse < 1
    assert first["spec/behaviour_kl"] > 0
    assert "spec/escalated_ratio" in first
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    ratio = lines[-1]["sampling/importance_sampling_ratio/mean"]
    assert (ratio == 1.0) == (correction == "none")


@pytest.mark.long
def test_workers_train_on_drafted_text_as_one_process(draft, tmp_path):
    """Each worker has a policy, a draft model and what decides about its text; the policy changes at every step.

    The loss takes the engine's log-probs, which another batch rounds otherwise in the last bits.
    """
    options = runs.SHORT | routed(draft)
    alone = runs.run(tmp_path / "alone", **options)
    workers = runs.run(tmp_path / "workers", cluster__num_workers=2, **options)
    assert {*runs.differences(workers, alone)} <= {"losses", "weights"}
    assert workers.losses == pytest.approx(alone.losses, abs=1e-4)
    assert 0 < alone.steps[-1].reuse < 1
