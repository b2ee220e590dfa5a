"""Every option of PPO reaches the formula that it names. Other files test the formulas."""

import math
from collections import Counter
from itertools import pairwise

import pytest
import torch

from specrl.trainers.ppo import objectives
from tests.runs import build_policy, differences, run

OPTIONS = {
    "config": "ppo_math",
    "trainer__max_steps": 4,
    "trainer__minibatches": 2,
    "trainer__clip": 0.1,
    "trainer__clip_high": 0.3,
    "trainer__gamma": 0.9,
    "trainer__gae_lambda": 0.5,
    "trainer__weight_decay": 0.03,
    "trainer__max_grad_norm": 0.25,
    "trainer__entropy_bonus": 0.7,
    "trainer__critic__learning_rate": 3e-3,
    "trainer__critic__clip": 0.15,
    "trainer__critic__loss_weight": 0.2,
    "trainer__beta": 0.05,
    "trainer__kl_penalty": "loss",
}


@pytest.fixture(scope="module")
def heard(tmp_path_factory):
    """heard[name]: the arguments of every call of a formula of trainers/ppo/objectives.py, and the run."""
    calls = {name: [] for name in ("gae", "policy_loss", "kl_estimate", "value_loss", "clip_grad_norm_")}

    def spied(name, function):
        def call(*args, **options):
            calls[name].append((*args, *options.values()))
            return function(*args, **options)

        return call

    def prepare(trainer):
        trainer.accelerator.clip_grad_norm_ = spied("clip_grad_norm_", trainer.accelerator.clip_grad_norm_)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("gae", "policy_loss", "kl_estimate", "value_loss"):
            patch.setattr(objectives, name, spied(name, getattr(objectives, name)))
        record = run(tmp_path_factory.mktemp("options"), prepare, **OPTIONS)
    return calls | {"run": record}


def test_discount_and_lambda_reach_the_advantages(heard):
    assert [args[3:] for args in heard["gae"]] == [(0.9, 0.5)] * 2


def test_clip_ranges_reach_the_losses(heard):
    assert len(heard["policy_loss"]) == len(heard["value_loss"]) == 4
    assert {args[3:] for args in heard["policy_loss"]} == {(0.1, 0.3)}
    assert {args[3] for args in heard["value_loss"]} == {0.15}


def test_the_kl_penalty_is_weighed_by_the_ratio_of_the_loss(heard):
    for (logp, old, *_), (of_kl, old_of_kl, _) in zip(heard["policy_loss"], heard["kl_estimate"], strict=True):
        assert torch.equal(logp, of_kl)
        assert torch.equal(old, old_of_kl)


def test_gradients_of_policy_and_critic_are_clipped(heard):
    assert [norm for _, norm in heard["clip_grad_norm_"]] == [0.25] * 8


def test_rates_and_decay_reach_the_optimiser(heard):
    policy, critic = heard["run"].trainer.optimizer.param_groups
    assert (policy["initial_lr"], critic["initial_lr"]) == (1e-3, 3e-3)
    assert policy["weight_decay"] == critic["weight_decay"] == 0.03


def test_the_loss_is_the_sum_of_its_parts_with_their_signs(heard):
    for log in heard["run"].trainer.state.log_history:
        assert log["entropy"] > 0
        parts = log["policy_loss"] - 0.7 * log["entropy"] + 0.2 * log["value_loss"] + 0.05 * log["kl"]
        assert log["loss"] == pytest.approx(parts, rel=1e-4)
    assert any(log["kl"] > 0 for log in heard["run"].trainer.state.log_history)


def test_prompts_come_in_another_order_every_epoch(tmp_path):
    record = run(tmp_path, config="ppo_math", trainer__epochs=3, rollout__max_new_tokens=8)
    epochs = [[step.ids for step in record.steps[e : e + 3]] for e in (0, 3, 6)]
    visited = [Counter(example for ids in epoch for example in ids) for epoch in epochs]
    assert all(a == b for a, b in pairwise(visited))
    assert len({str(epoch) for epoch in epochs}) == 3


def test_lenient_weights_are_folded_into_the_advantages(tmp_path):
    seen = []

    def prepare(trainer):
        training_step = trainer.training_step

        def listened(piece, *args):
            seen.append(piece)
            return training_step(piece, *args)

        trainer.training_step = listened

    options = {"rollout__acceptance": "lenient", "rollout__lenience": 2.0, "trainer__correction_cap": 1.5}
    options |= {"trainer__advantage": "rloo", "trainer__epochs": 2, "trainer__learning_rate": 1e-2}
    record = run(tmp_path, prepare, config="ppo_math", **options)
    log = record.trainer.state.log_history
    names = [f"sampling/importance_sampling_ratio/{kind}" for kind in ("min", "mean", "max")]
    low, mean, high = ([each[name] for each in log] for name in names)
    assert low[:3] == mean[:3] == high[:3] == [1.0] * 3, "the first epoch has no draft and is on-policy"
    assert all(a < b < c for a, b, c in zip(low[3:], mean[3:], high[3:], strict=True))

    def alike(piece):
        rows = zip(piece.advantages, piece.mask.bool(), strict=True)
        return all(math.isclose(a[m].min(), a[m].max(), abs_tol=1e-7) for a, m in rows if m.any())

    assert alike(seen[0]), "rloo gives every token of a response the same"
    assert not alike(seen[-1]), "weights of reused tokens differ"


@pytest.mark.slow
def test_a_policy_with_dropout_resumes_as_the_undisturbed_run(tmp_path):
    model = build_policy(tmp_path / "policy", attention_dropout=0.2)
    options = {"config": "ppo_math", "model": str(model), "trainer__epochs": 2, "rollout__max_new_tokens": 12}
    uninterrupted = run(tmp_path, name="whole", **options)
    first = run(tmp_path, name="cut", trainer__max_steps=4, trainer__save_every=4, **options)
    torch.manual_seed(1)  # another process's initial weights
    rest = run(tmp_path, name="cut", resume="auto", trainer__save_every=4, **options)
    assert differences(uninterrupted, first + rest) == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "dropout", lambda x, p, training=True: x)
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", _without_dropout)
        still = run(tmp_path, name="still", **options)
    assert "losses" in differences(uninterrupted, still), "control: dropout acts"


_ATTEND = torch.nn.functional.scaled_dot_product_attention


def _without_dropout(*args, dropout_p=0.0, **kwargs):
    return _ATTEND(*args, dropout_p=0.0, **kwargs)
