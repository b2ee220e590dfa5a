"""PPO: speculation and resuming change no result, and masks are respected."""

import shutil
from math import isfinite

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainerCallback

from specrl.trainers.ppo.objectives import rloo
from specrl.trainers.ppo.trainer import STATE
from tests.runs import SHORT, Recording, differences, logs, recorded, run
from tests.trainers.grpo.test_grpo import tap

PER_EPOCH = 3
DIFFERENCE = "sampling/sampling_logp_difference/max"
slow = pytest.mark.slow


BASE = {"config": "ppo_math", "rollout__replay": 0.5, "trainer__epochs": 2, "trainer__minibatches": 2}


def ppo(folder, prepare=lambda trainer: None, **options) -> Recording:
    """A small PPO run: two optimiser steps per rollout, 3 rollouts an epoch."""
    return run(folder, prepare, **BASE | options)


def runs(**options) -> Recording:
    """The recording of such a run, cached."""
    return recorded(**BASE | options)


# Speculation on and off ----------------------------------------------------------------------------------------------

VARIANTS = {  # options that cannot hide each other's faults share a run
    "head": {},
    "separate critic, kl, passes": {
        "trainer__critic__model": "separate",
        "trainer__beta": 0.05,
        "trainer__updates_per_rollout": 2,
        "trainer__rows_per_pass": 4,
        "trainer__entropy_bonus": 0.01,
    },
    "reinforce++, one response, adapters": {
        "trainer__advantage": "reinforce_plus_plus",
        "trainer__beta": 0.05,
        "rollout__group_size": 1,
        "lora__rank": 4,
    },
}
CRITIC = "separate critic, kl, passes"


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "head" else slow) for name in VARIANTS])
def test_the_exact_run_is_the_plain_run(name):
    exact, off = (runs(rollout__acceptance=rule, **VARIANTS[name]) for rule in ("exact", "off"))
    assert differences(exact, off) == []
    assert len(exact.steps) == 2 * PER_EPOCH
    assert len(exact.losses) == 2 * PER_EPOCH * {CRITIC: 8}.get(name, 2)
    later = exact.steps[PER_EPOCH:]
    assert sum(step.reuse for step in later) / len(later) > 0.1 > 0 == sum(step.reuse for step in off.steps)
    assert all(step.metrics["spec/draft_acceptance_rate"] < 1 for step in later), "some drafts were rejected"
    assert {f for step in exact.steps for f in step.finish} == {"stop", "length"}
    before = AutoModelForCausalLM.from_pretrained(exact.trainer.model.config.name_or_path).state_dict()
    assert all(not torch.equal(before[n], w) for n, w in exact.weights.items() if n in before)
    assert all(map(isfinite, exact.losses))


def test_control_stale_log_probs_are_seen(tmp_path):
    def plant(trainer):
        generate = trainer.rollouts.engine.generate

        def wrong(requests):
            completions, stats = generate(requests)
            for c in completions:
                c.logprobs = [x - 0.25 for x in c.logprobs]
            return completions, stats

        trainer.rollouts.engine.generate = wrong

    assert logs(ppo(tmp_path, plant, trainer__max_steps=2))[0][DIFFERENCE] == pytest.approx(0.25, abs=1e-3)


# Interrupted and resumed ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_run(tmp_path):
    """Acceptance estimates choose between texts and are not restored, so each row has only one text here."""
    options = VARIANTS[CRITIC] | {"trainer__updates_per_rollout": 1, "trainer__lr_schedule": "linear"}
    options |= {"trainer__save_every": 8, "rollout__sources": "[prefix]"}
    full = ppo(tmp_path, **options)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "checkpoint-12")
    rest = ppo(tmp_path, resume="auto", **options)
    expected = Recording(full.trainer, full.folder, full.steps[4:], full.losses[-len(rest.losses) :])
    assert len(rest.losses) * 3 == len(full.losses)
    assert differences(expected, rest) == []
    assert [s.reused for s in rest.steps] == [s.reused for s in expected.steps], "the cache was resumed as well"
    timed = ("timing_s/", "perf/", "spec/plain_s", "spec/tried_s", "step_time")
    for a, b in zip(logs(full)[8:], logs(rest)[8:], strict=True):
        assert {k: v for k, v in a.items() if not k.startswith(timed)} == {
            k: v for k, v in b.items() if not k.startswith(timed)
        }


def test_control_a_forgotten_optimiser_is_seen(tmp_path):
    options = {**SHORT, "trainer__save_every": 6}
    full = ppo(tmp_path, **options)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "checkpoint-8")
    rest = ppo(tmp_path, lambda trainer: trainer.add_callback(Forget()), resume="auto", **options)
    assert "weights" in differences(Recording(full.trainer, full.folder, full.steps[3:], full.losses[6:]), rest)


class Forget(TrainerCallback):
    def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
        optimizer.state.clear()


# Masks ----------------------------------------------------------------------------------------------------------------


def gradients(trainer, inputs) -> dict[str, torch.Tensor]:
    trainer.model.zero_grad()
    trainer._compute_loss(trainer.model, inputs).backward()
    return {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}


def test_padding_and_rows_left_out_have_no_influence(tmp_path):
    found, options = [], {"trainer__minibatches": 1, "trainer__beta": 0.1}
    trainer = ppo(tmp_path, tap(found), trainer__max_steps=1, **options).trainer
    (inputs,) = found
    inputs["completion_mask"][3] = 0  # a row without a reward
    mask = inputs["completion_mask"].bool()
    noise = torch.Generator().manual_seed(0)
    names = ("old_per_token_logps", "advantages", "ref_per_token_logps", "old_values", "returns")
    spoiled = {name: torch.where(mask, inputs[name], torch.randn(mask.shape, generator=noise)) for name in names} | {
        "completion_ids": inputs["completion_ids"].clone()
    }
    spoiled["completion_ids"][3] = 7
    assert (~mask).sum() > 40
    base, same = gradients(trainer, inputs), gradients(trainer, inputs | spoiled)
    assert any("critic" in name for name in base)
    assert all(torch.equal(base[name], same[name]) for name in base)
    planted = gradients(trainer, inputs | spoiled | {"completion_mask": torch.ones_like(inputs["completion_mask"])})
    assert not all(torch.equal(base[name], grad) for name, grad in planted.items()), "without the mask"


def test_failed_rewards_are_masked(tmp_path, monkeypatch):
    monkeypatch.setattr("specrl.reward.set.FAILED_SHARE", 1)
    reward = {"reward__functions": "[tests.rewards:some_digits]"}
    reward |= {"trainer__advantage": "rloo", "trainer__minibatches": 1, "trainer__max_steps": 1}
    found = []
    record = ppo(tmp_path, tap(found), **reward)
    rewards, inputs = record.steps[-1].rewards, found[-1]
    assert 1 < rewards.count(None) < 16, "never a zero"
    left_out = [i for i, r in enumerate(rewards) if r is None]
    assert inputs["completion_mask"][left_out].sum() == inputs["advantages"][left_out].abs().sum() == 0
    assert inputs["num_items_in_batch"] == inputs["completion_mask"].sum(), "no denominator counts them"
    for i in range(0, 16, 4):
        group = [r for r in rewards[i : i + 4] if r is not None]
        for r, advantages in zip(rewards[i : i + 4], inputs["advantages"][i : i + 4], strict=True):
            if r is not None and len(group) > 1:
                want = r - (sum(group) - r) / (len(group) - 1)
                assert advantages[0].item() == pytest.approx(want, abs=1e-6)
    assert all(map(isfinite, record.losses))


@pytest.mark.parametrize("advantage", ["gae", "rloo"])
def test_truncated_responses_that_are_left_out_are_still_in_the_baseline(tmp_path, advantage):
    """The others' advantages are those of a run that trains on all rows, as in GRPO."""
    options = {"trainer__minibatches": 1, "trainer__advantage": advantage, "trainer__max_steps": 1}
    found = []
    for masked in (False, True):
        record = ppo(tmp_path, tap(found), name=f"{masked}", trainer__mask_truncated=masked, **options)
    all_rows, part = found
    ended = torch.tensor([f == "stop" for f in record.steps[0].finish])
    assert 0 < ended.sum() < len(ended)
    assert torch.equal(all_rows["advantages"][ended], part["advantages"][ended])
    assert (all_rows["completion_mask"].sum(-1) > 0).all(), "without the option all are trained on"
    assert torch.equal(part["completion_mask"], all_rows["completion_mask"] * ended[:, None])
    assert part["num_items_in_batch"] == part["completion_mask"].sum()
    if advantage == "rloo":  # planted fault: a baseline of only the responses that ended
        rewards = torch.tensor(record.steps[0].rewards).masked_fill(~ended, torch.nan)
        assert not torch.allclose(rloo(rewards, 4)[ended], part["advantages"][ended, 0], atol=1e-3)


# Options --------------------------------------------------------------------------------------------------------------


@slow
def test_the_critic_learns_what_a_response_is_worth(tmp_path):
    """For a policy that does not change and repeats itself."""
    options = {"trainer__learning_rate": 0, "rollout__replay": 1, "trainer__prompts_per_step": 12}
    critic = {"trainer__critic__model": "separate", "trainer__critic__learning_rate": 1e-3}
    record = ppo(tmp_path, trainer__epochs=8, trainer__updates_per_rollout=2, **options, **critic)
    explained = [log["value/explained_variance"] for log in logs(record) if "value/mean" in log]
    assert explained[0] == pytest.approx(0, abs=1e-6), "it begins with 0 everywhere"
    assert explained[-3:] == sorted(explained[-3:])
    assert explained[-1] > 0.1


def test_the_critic_is_in_checkpoints_and_not_in_the_model(tmp_path):
    record = ppo(tmp_path, trainer__critic__model="separate", trainer__max_steps=2)
    critic = record.trainer.critic.state_dict()
    saved = load_file(record.folder / "checkpoints" / "checkpoint-2" / STATE)
    assert saved.keys() == critic.keys()
    assert all(torch.equal(saved[name], weight) for name, weight in critic.items())
    for folder in ("model", "checkpoints/checkpoint-2"):
        assert not any("critic" in name for name in load_file(record.folder / folder / "model.safetensors"))


def test_bf16_and_gradient_checkpointing_run(tmp_path):
    record = ppo(tmp_path, trainer__max_steps=4, trainer__precision="bf16", trainer__gradient_checkpointing="true")
    assert (record.trainer.model.dtype, record.trainer.rollouts.engine.model.dtype) == (torch.float32, torch.bfloat16)
    assert record.trainer.critic.head.weight.dtype == torch.float32
    assert all(map(isfinite, record.losses))
