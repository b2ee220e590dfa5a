"""Every option of PPO reaches the formula that it names. Other files test the formulas."""

import pytest
import torch
from trl import GRPOTrainer

from specrl.trainers.ppo import objectives
from tests.runs import build_policy, differences, logs, run
from tests.trainers.grpo.test_grpo import tap
from tests.trainers.ppo.test_ppo import gradients

OPTIONS = {
    "config": "ppo_math",
    "trainer__max_steps": 4,
    "trainer__rows_per_pass": 4,
    "trainer__clip": 0.1,
    "trainer__clip_high": 0.3,
    "trainer__gamma": 0.9,
    "trainer__gae_lambda": 0.5,
    "trainer__weight_decay": 0.03,
    "trainer__max_grad_norm": 0.25,
    "trainer__entropy_bonus": 0.7,
    "trainer__critic__learning_rate": 3e-3,
    "trainer__critic__loss_weight": 0.2,
    "trainer__beta": 0.05,
}


@pytest.fixture(scope="module")
def heard(tmp_path_factory):
    """heard[name]: the arguments of every call of a formula of trainers/ppo/objectives.py, and the run."""
    calls = {name: [] for name in ("token_rewards", "gae", "value_loss", "clip_grad_norm_")}

    def spied(name, function):
        def call(*args, **options):
            calls[name].append((*args, *options.values()))
            return function(*args, **options)

        return call

    def prepare(trainer):
        trainer.accelerator.clip_grad_norm_ = spied("clip_grad_norm_", trainer.accelerator.clip_grad_norm_)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("token_rewards", "gae", "value_loss"):
            patch.setattr(objectives, name, spied(name, getattr(objectives, name)))
        record = run(tmp_path_factory.mktemp("options"), prepare, **OPTIONS)
    return calls | {"run": record}


def test_every_option_reaches_its_formula(heard):
    assert [args[3:] for args in heard["gae"]] == [(0.9, 0.5)] * 4
    assert [args[3] for args in heard["token_rewards"]] == [0.05] * 4
    args = heard["run"].trainer.args
    assert (args.epsilon, args.epsilon_high, args.entropy_coef, args.loss_type) == (0.1, 0.3, 0.7, "dapo")
    assert len(heard["value_loss"]) == 16
    *policy, critic = heard["run"].trainer.optimizer.param_groups
    assert {group["initial_lr"] for group in policy} == {1e-3}
    assert (critic["initial_lr"], critic["weight_decay"], len(critic["params"])) == (3e-3, 0.03, 2)
    assert [norm for _, norm in heard["clip_grad_norm_"]] == [0.25] * 8


def test_the_loss_is_the_policys_and_the_critics(heard):
    for log in logs(heard["run"]):
        assert log["loss"] == pytest.approx(log["policy_loss"] + 0.2 * log["value_loss"], rel=1e-4)
        assert log["value_loss"] > 0
    assert any(log["kl"] > 0 for log in logs(heard["run"]))


def test_the_critics_part_of_the_loss_is_the_same_in_minibatches(tmp_path):
    still = {"config": "ppo_math", "trainer__learning_rate": 0, "trainer__critic__learning_rate": 0}

    def part(minibatches):
        record = run(
            tmp_path, name=f"{minibatches}", trainer__minibatches=minibatches, trainer__max_steps=minibatches, **still
        )
        return sum(log["loss"] - log["policy_loss"] for log in logs(record)) / minibatches

    assert part(2) == pytest.approx(part(1), rel=1e-3) != 0


def test_policy_and_critic_are_clipped_each_by_itself(tmp_path):
    """The weight of a separate critic's loss changes nothing in the policy's step."""
    options = {"config": "ppo_math", "trainer__max_steps": 1, "trainer__critic__model": "separate"}

    def policy(name, weight, prepare=lambda trainer: None):
        record = run(tmp_path, prepare, name=name, trainer__critic__loss_weight=weight, **options)
        return [tensor for key, tensor in record.weights.items() if "critic" not in key]

    def together(trainer):
        trainer._clip_grad_norm = lambda model: GRPOTrainer._clip_grad_norm(trainer, model)

    light, heavy = policy("light", 0.1), policy("heavy", 100)
    assert all(map(torch.equal, light, heavy))
    assert not all(map(torch.equal, light, policy("together", 100, together)))


def test_the_kl_penalty_is_in_the_rewards(tmp_path):
    found, options = [], {"trainer__beta": 0.5, "trainer__max_steps": 1}
    trainer = run(tmp_path, tap(found), config="ppo_math", **options).trainer
    spoiled = found[0] | {"ref_per_token_logps": found[0]["ref_per_token_logps"] - 1}
    base, other = gradients(trainer, found[0]), gradients(trainer, spoiled)
    assert all(torch.equal(base[name], other[name]) for name in base), "and not in the loss too"
    assert trainer.beta == 0.5


@pytest.mark.slow
def test_a_policy_with_dropout_resumes_as_the_undisturbed_run(tmp_path):
    model = build_policy(tmp_path / "policy", attention_dropout=0.2)
    options = {"config": "ppo_math", "model": str(model), "trainer__epochs": 2, "rollout__max_new_tokens": 12}
    uninterrupted = run(tmp_path, name="whole", **options)
    first = run(tmp_path, name="cut", trainer__max_steps=4, trainer__save_every=4, **options)
    torch.manual_seed(1)  # another process's initial weights
    rest = run(tmp_path, name="cut", resume="auto", trainer__save_every=4, **options)
    assert differences(uninterrupted, first + rest) == []
    still = run(tmp_path, name="still", **options | {"model": str(build_policy(tmp_path / "still-policy"))})
    assert "losses" in differences(uninterrupted, still), "control: dropout acts"
