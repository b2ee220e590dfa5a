"""Refits of a judge: it follows a policy that moves, within bounds, and goes on after a resume as if undisturbed."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout.routers.judge import JudgeHead
from rollout.routers.pair import fingerprint
from rollout.types import RolloutError, Row
from tests.runs import differences, policy, run
from trainers.judge import Labels, roc_auc
from trainers.judge_refit import KEPT, ROWS, STATE, JudgeRefit

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 8
TEXTS = [Row(f"e{i}", (1, 2)) for i in range(40)], [(3, 4)] * 40


def moved(age, count=400, seed=0):
    """Mismatches of a policy whose states turn as it ages: what tells the classes apart moves on by one axis."""
    generator = torch.Generator().manual_seed(100 * age + seed)
    hidden = torch.randn(count, WIDTH, generator=generator)
    important = hidden[:, age % WIDTH] + 0.3 * torch.randn(count, generator=generator) > 0
    return Labels(hidden, important, torch.randint(10**6, (count,), generator=generator))


class Mines:
    """A miner of `moved`, which ages by one at every call."""

    def __init__(self, age=0):
        self.age, self.asked = age, []

    def __call__(self, prompts, problems, propose, score, most):
        self.asked.append((len(prompts), most))
        self.age += 1
        return moved(self.age - 1)


def refits(every=1, age=0):
    return JudgeRefit(JudgeHead(torch.zeros(WIDTH), 0.0, 0.0), Mines(age), lambda rows, texts: [], every)


def area(judge, labels):
    return roc_auc(judge.importance(labels.hidden).tolist(), labels.important.tolist())


def test_a_refit_judge_knows_the_new_policy_and_a_stale_one_does_not():
    stale, fresh = refits(every=100), refits()
    for _ in range(4):
        stale.step(*TEXTS)
        metrics = fresh.step(*TEXTS)
    assert area(stale.judge, moved(0, seed=1)) > 0.9, "it was good once"
    now = moved(3, seed=1)
    assert area(fresh.judge, now) > area(stale.judge, now) + 0.1
    assert area(stale.judge, now) < 0.6
    assert metrics["judge/labels"] == KEPT
    assert 0 < fresh.judge.threshold < 1


def test_mining_is_bounded_and_runs_when_it_is_due():
    refit = refits(every=3)
    got = [bool(refit.step(*TEXTS)) for _ in range(7)]
    assert got == [True, False, False, True, False, False, True]
    assert all(rows == ROWS and most <= 8 for rows, most in refit._miner.asked)


def test_without_old_texts_or_with_one_kind_of_label_the_judge_stays():
    refit = refits()
    before = refit.judge.weight
    assert refit.step(TEXTS[0], [None] * 40) == {}
    refit._miner = lambda *_: Labels(torch.randn(9, WIDTH), torch.ones(9, dtype=torch.bool), torch.arange(9))
    assert "judge/roc_auc" not in refit.step(*TEXTS)
    assert refit.judge.weight is before


def test_a_restored_refit_goes_on_as_the_undisturbed_one(tmp_path):
    whole = refits(every=2)
    for _ in range(4):
        whole.step(*TEXTS)
    whole.save(tmp_path)
    resumed, forgetful = refits(every=2, age=2), refits(every=2, age=2)
    resumed.load(tmp_path)
    for refit in (whole, resumed, forgetful):
        refit.step(*TEXTS)
    assert torch.equal(resumed.judge.weight, whole.judge.weight)
    assert (resumed.judge.bias, resumed.judge.threshold) == (whole.judge.bias, whole.judge.threshold)
    assert not torch.equal(forgetful.judge.weight, whole.judge.weight), "control: the state matters"


def test_a_state_that_cannot_be_used_is_one_sentence(tmp_path):
    with pytest.raises(RolloutError, match="cannot be read"):
        refits().load(tmp_path)
    other = JudgeRefit(JudgeHead(torch.zeros(3), 0.0, 0.0), Mines(), lambda rows, texts: [], 1)
    other.save(tmp_path)
    with pytest.raises(RolloutError, match="of states of 3 numbers, the policy's have 8"):
        refits().load(tmp_path)
    (tmp_path / STATE).write_bytes(b"damaged")
    with pytest.raises(RolloutError, match="cannot be read"):
        refits().load(tmp_path)


# --- a run


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    """A judged run whose judge, drawn at random, is refit at every rollout."""
    folder = tmp_path_factory.mktemp("judge")
    model = AutoModelForCausalLM.from_pretrained(policy())
    weight = torch.randn(model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    JudgeHead(weight, 0.0, 0.5).save(folder, {"policy": fingerprint(model)})
    return {
        "rollout__acceptance": "judged",
        "rollout__router__kind": "judge",
        "rollout__router__path": folder,
        "rollout__router__refit_every": 1,
        "reward__functions": "[tests.specrl.test_train_judge:thirds]",
    }


def test_a_judged_run_with_refits_resumes_bit_for_bit(options, tmp_path):
    laws = []

    def listen(trainer):
        importance = trainer.collector.importance

        def heard(drawn, mask, own):
            laws.extend(trainer.collector.last.batch.completions)
            return importance(drawn, mask, own)

        trainer.collector.importance = heard

    whole = run(tmp_path, listen, name="whole", **options)
    lines = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert sum("judge/roc_auc" in line for line in lines) >= 3
    old = [b for c in laws for b, p, reused in zip(c.behaviour_logprobs, c.logprobs, c.reused, strict=True) if b != p]
    assert len(old) > 20, "text stands whose law is an older policy's"
    assert all(b == b for c in laws for b in c.behaviour_logprobs)
    first = run(tmp_path, name="cut", trainer__max_steps=5, trainer__save_every=5, **options)
    second = run(tmp_path, name="cut", trainer__save_every=5, resume="auto", **options)
    assert differences(whole, first + second) == []
