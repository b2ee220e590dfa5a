"""The interface to TRL: configuration, sampler, rows and samples, log-probs, advantages, and rejected options."""

import math
from dataclasses import replace
from math import isfinite
from pathlib import Path
from statistics import mean, stdev

import pytest
import torch
from transformers import AutoModelForCausalLM, TrainerCallback

import specrl.trainers.grpo.trainer as grpo
from specrl.rollout.config import RolloutConfig
from specrl.rollout.types import RolloutError
from specrl.trainers.config import TrainerConfig
from specrl.trainers.grpo.arguments import grpo_config
from specrl.trainers.grpo.trainer import EpochRepeatSampler
from tests.runs import differences, logs, policy, run

DIFFERENCE = "sampling/sampling_logp_difference/max"


def rewritten(trainer, change):
    """Lets `change(out)` read and modify the loss's input from each rollout, before TRL shuffles the rows."""
    generate = trainer._generate_and_score_completions  # TRL's name

    def changed(inputs):
        out = generate(inputs)
        change(out)
        return out

    trainer._generate_and_score_completions = changed


def test_the_reference_policy_is_of_the_run_s_revision(tmp_path, monkeypatch):
    """TRL loads it by name."""
    loaded: list[dict] = []

    def load(name, **options):
        loaded.append(options)
        return AutoModelForCausalLM.from_pretrained(name)

    monkeypatch.setattr("trl.trainer.grpo_trainer.create_model_from_path", load)
    run(tmp_path, revision="v2", trainer__beta=0.1, trainer__max_steps=1)
    assert [options["revision"] for options in loaded] == ["v2"]


def tap(outputs: list):
    """Collects the loss's input from each rollout."""
    return lambda trainer: rewritten(trainer, lambda out: outputs.append(dict(out)))


def log_probs(trainer, out: dict) -> torch.Tensor:
    """The policy's log-probs [B, T] of the responses, by TRL's forward pass."""
    ids, mask = (torch.cat([out[f"prompt_{n}"], out[f"completion_{n}"]], dim=1) for n in ("ids", "mask"))
    with torch.no_grad():
        return grpo.GRPOTrainer._get_per_token_logps_and_entropies(
            trainer, trainer.model, ids, mask, out["completion_ids"].shape[1], len(ids)
        )[0]


def of_updates(trainer) -> list[torch.Tensor]:
    """Collects the log-probs of passes with gradients."""
    one_pass, collected = trainer._get_per_token_logps_and_entropies, []

    def kept(*args, **kwargs):
        result = one_pass(*args, **kwargs)
        if result[0].requires_grad:
            collected.append(result[0].detach())
        return result

    trainer._get_per_token_logps_and_entropies = kept
    return collected


def configure(trainer=None, rollout=None, **more):
    options = {"output_dir": Path("out"), "seed": 3, "cpu": True, "world": 1, "trackers": [], **more}
    return grpo_config(
        replace(TrainerConfig(), **{"prompts_per_step": 4} | (trainer or {})),
        replace(RolloutConfig(), **{"group_size": 4} | (rollout or {})),
        **options,
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1, "steps_per_generation": 1}),
        ({"trainer": {"rows_per_pass": 8}}, {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}),
        ({"trainer": {"rows_per_pass": 8}}, {"steps_per_generation": 2, "generation_batch_size": 16}),
        ({"world": 2, "trainer": {"rows_per_pass": 2}}, {"per_device_train_batch_size": 2, "steps_per_generation": 4}),
        ({"rollout": {"temperature": 0.7, "top_p": 0.9, "top_k": 5}}, {"temperature": 0.7, "top_p": 0.9, "top_k": 5}),
        (
            {"trainer": {"weight_decay": 0.1, "lr_schedule": "cosine", "warmup_steps": 7}},
            {"weight_decay": 0.1, "lr_scheduler_type": "cosine", "warmup_steps": 7},
        ),
        (
            {"trainer": {"epochs": 5, "updates_per_rollout": 3}},
            {"num_train_epochs": 5, "max_steps": -1, "num_iterations": 3},
        ),
        ({"trainer": {"max_steps": 9, "save_every": 6}}, {"max_steps": 9, "save_steps": 6, "save_total_limit": None}),
        ({"trainer": {"algorithm": "dapo"}}, {"epsilon": 0.2, "epsilon_high": 0.28, "loss_type": "dapo"}),
        ({}, {"loss_type": "grpo", "beta": 0.0, "scale_rewards": "group", "importance_sampling_level": "token"}),
        ({"trainer": {"loss": "dr_grpo", "beta": 0.04}}, {"loss_type": "dr_grpo", "beta": 0.04}),
        (
            {"trainer": {"scale_rewards": "none", "mask_truncated": True, "max_grad_norm": 0.3}},
            {"scale_rewards": "none", "mask_truncated_completions": True, "max_grad_norm": 0.3},
        ),
        (
            {"trainer": {"algorithm": "ppo", "minibatches": 2, "entropy_bonus": 0.1, "mask_truncated": True}},
            {"steps_per_generation": 2, "loss_type": "dapo", "entropy_coef": 0.1, "mask_truncated_completions": False},
        ),
        ({"trainer": {"ratio": "sequence"}}, {"importance_sampling_level": "sequence", "epsilon": 3e-4}),
    ],
)
def test_options_become_trl_arguments(options, expected):
    args = configure(**options)
    assert {name: getattr(args, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("per_pass", "world", "remedy"),
    [
        (10, 2, "Use trainer.rows_per_pass=8"),
        (32, 2, "Use trainer.rows_per_pass=16"),
        (0, 3, "Use a number of processes that divides 32"),
    ],
)
def test_rows_that_cannot_be_split_are_refused(per_pass, world, remedy):
    with pytest.raises(RolloutError, match=f"32 rows .* {world} processes .*{remedy}"):
        configure({"rows_per_pass": per_pass}, {"group_size": 8}, world=world)


def test_the_order_depends_on_seed_and_epoch_only():
    def make(epochs, seed=0):
        shape = {"mini_repeat_count": 2, "batch_size": 3, "repeat_count": 2}
        return EpochRepeatSampler(list("abcdefg"), **shape, seed=seed, epoch=iter(epochs).__next__)

    running = make(range(4))
    epochs = [list(running) for _ in range(4)]
    assert [list(make([epoch])) for epoch in range(4)] == epochs, "a resumed run sees what it would have seen"
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert list(make([0], seed=1)) != epochs[0]
    for epoch in epochs:
        assert len(epoch) == 2 * (2 * 3 * 2), "the incomplete last batch is left out"
        assert epoch[:6] == epoch[6:12], "a batch is repeated as a whole"
        assert epoch[0::2] == epoch[1::2], "a prompt's rows stand side by side"


# Log-probs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "from_engine"),
    [({}, False), ({"trainer__old_logprobs": "engine"}, True), ({"rollout__acceptance": "lenient"}, True)],
)
def test_old_log_probs_come_from_the_engine_only_when_asked(tmp_path, options, from_engine):
    outputs = []
    run(tmp_path, tap(outputs), trainer__max_steps=1, **options)
    (out,) = outputs
    assert ("old_per_token_logps" in out) == from_engine
    if from_engine:
        assert torch.equal(out["old_per_token_logps"], out["sampling_per_token_logps"])


@pytest.fixture
def passes(monkeypatch):
    """The rows of every log-prob pass, by whether it has gradients."""
    seen, one_pass = [], grpo.GRPOTrainer._get_per_token_logps_and_entropies

    def counted(self, model, ids, *args, **kwargs):
        seen.append(("update" if torch.is_grad_enabled() else "extra", len(ids)))
        return one_pass(self, model, ids, *args, **kwargs)

    monkeypatch.setattr(grpo.GRPOTrainer, "_get_per_token_logps_and_entropies", counted)
    return seen


TWICE = {"trainer__updates_per_rollout": 2, "trainer__max_steps": 2}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"trainer__max_steps": 1}, [("update", 16)]),
        (TWICE, [("update", 16)] * 2),
        ({**TWICE, "trainer__rows_per_pass": 8}, [("update", 8)] * 4),
        ({**TWICE, "trainer__old_logprobs": "engine"}, [("update", 16)] * 2),
        ({**TWICE, "rollout__acceptance": "lenient"}, [("update", 16)] * 2),
        ({**TWICE, "trainer__beta": 0.1}, [("extra", 16)] + [("update", 16)] * 2),
    ],
)
def test_no_pass_is_made_for_old_log_probs(tmp_path, passes, options, expected):
    run(tmp_path, **options)
    assert passes == expected


def test_one_pass_is_made_to_weigh_an_engine_with_other_numerics(tmp_path, passes):
    def distrust(trainer):
        trainer.rollouts.source.config.engine = "vllm"

    run(tmp_path, distrust, **TWICE)
    assert passes == [("extra", 16)] + [("update", 16)] * 2


def test_the_first_update_gives_the_old_log_probs_of_the_others(tmp_path):
    """They equal those of a separate pass before the updates up to rounding. Without them the run differs."""
    recomputed, used = [], []

    def watch(trainer):
        compute_loss, logps = trainer._compute_loss, of_updates(trainer)

        def before(out):
            texts = map(tuple, out["completion_ids"].tolist())
            recomputed.append(dict(zip(texts, log_probs(trainer, out), strict=True)))

        def loss(model, inputs):
            value = compute_loss(model, inputs)
            gap = (logps[-1] - inputs["old_per_token_logps"])[inputs["completion_mask"].bool()].abs().max()
            mask = inputs["completion_mask"]
            wanted = torch.stack([recomputed[-1][tuple(ids)] for ids in inputs["completion_ids"].tolist()])
            used.append((((inputs["old_per_token_logps"] - wanted) * mask).abs().max().item(), gap.item()))
            return value

        rewritten(trainer, before)
        trainer._compute_loss = loss

    options = {"trainer__updates_per_rollout": 2, "trainer__max_steps": 4, "trainer__rows_per_pass": 8}
    right = run(tmp_path, watch, name="right", **options)
    assert len(used) == 8
    assert max(difference for difference, _ in used) < 1e-5
    assert [gap == 0 for _, gap in used] == [True, True, False, False] * 2
    assert [DIFFERENCE in log for log in logs(right)] == [True, False] * 2, "later updates have other weights"

    def forget(trainer):
        compute_loss = trainer._compute_loss

        def loss(model, inputs):
            value = compute_loss(model, inputs)
            inputs.pop("old_per_token_logps", None)
            return value

        trainer._compute_loss = loss

    assert "losses" in differences(right, run(tmp_path, forget, name="forgotten", **options))


def watch_gaps(gaps: dict):
    """Differences of trainer and engine log-probs, for reused and for new tokens."""

    def prepare(trainer):
        compute_loss, logps = trainer._compute_loss, of_updates(trainer)

        def marked(out):
            out["reused"] = torch.zeros_like(out["completion_mask"])
            for i, c in enumerate(trainer.rollouts.train_batch.batch.completions):
                out["reused"][i, : len(c.tokens)] = torch.tensor(c.reused)

        def compared(model, inputs):
            loss = compute_loss(model, inputs)
            gap, mask = (logps[-1] - inputs["sampling_per_token_logps"]).abs(), inputs["completion_mask"].bool()
            gaps["reused"] += gap[mask & inputs["reused"].bool()].tolist()
            gaps["new"] += gap[mask & ~inputs["reused"].bool()].tolist()
            return loss

        rewritten(trainer, marked)
        trainer._compute_loss = compared

    return prepare


def test_reused_and_new_tokens_are_on_policy(tmp_path):
    """D6: the log-probs of a batch are the current policy's, whatever the source of a token."""
    gaps = {"reused": [], "new": []}
    record = run(tmp_path, watch_gaps(gaps), rollout__replay=0.5, rollout__temperature=0.8)
    assert len(gaps["reused"]) > 300
    assert len(gaps["new"]) > 300
    assert max(gaps["reused"]) <= 1e-4
    assert max(gaps["new"]) <= 1e-4
    logged = [log[DIFFERENCE] for log in logs(record)]
    assert len(logged) == 9
    assert max(logged) == pytest.approx(max(gaps["reused"] + gaps["new"]))
    assert all("sampling/importance_sampling_ratio/mean" not in log for log in logs(record))


def test_wrong_log_probs_are_seen(tmp_path):
    """Control of the test above: stale log-probs, planted in the second epoch, change the metric."""

    def plant(trainer):
        generate = trainer.rollouts.engine.generate

        def wrong(requests):
            completions, stats = generate(requests)
            if trainer.state.global_step >= 3:
                for c in completions:
                    c.logprobs = [x - 0.25 * r for x, r in zip(c.logprobs, c.reused, strict=True)]
            return completions, stats

        trainer.rollouts.engine.generate = wrong

    record = run(tmp_path, plant, trainer__max_steps=4, rollout__replay=1)
    assert [log[DIFFERENCE] > 0.2 for log in logs(record)] == [False] * 3 + [True]


def test_lenient_weights_are_folded_into_the_advantages(tmp_path):
    outputs = []
    options = {"rollout__acceptance": "lenient", "rollout__lenience": 2.0, "trainer__correction_cap": 1.5}
    record = run(tmp_path, tap(outputs), trainer__epochs=2, trainer__learning_rate=1e-2, **options)
    assert all(out["advantages"].shape == out["completion_ids"].shape for out in outputs)
    names = [f"sampling/importance_sampling_ratio/{kind}" for kind in ("min", "mean", "max")]
    low, middle, high = ([log[name] for log in logs(record)] for name in names)
    assert low[:3] == middle[:3] == high[:3] == [1.0] * 3, "the first epoch has no draft and is on-policy"
    assert all(a < b < c for a, b, c in zip(low[3:], middle[3:], high[3:], strict=True))
    assert max(high) == 1.5
    fresh, later = outputs[0]["advantages"], outputs[-1]["advantages"]
    assert (fresh == fresh[:, :1]).all()
    assert not (later == later[:, :1]).all()
    assert sum(step.reuse for step in record.steps) > 0


def test_an_engine_with_other_numerics_is_corrected(tmp_path):
    """Its tokens are weighted by the trainer's probability over the engine's. Tokens of an equal engine are not."""

    def shift(trainer):
        trainer.rollouts.source.config.engine = "vllm"  # makes the trainer distrust the log-probs
        generate = trainer.rollouts.engine.generate

        def shifted(requests):
            completions, stats = generate(requests)
            for c in completions:
                c.logprobs = [x - 0.1 for x in c.logprobs]
            return completions, stats

        trainer.rollouts.engine.generate = shifted

    outputs, plain = [], []
    record = run(tmp_path, lambda t: (shift(t), tap(outputs)(t)), trainer__max_steps=1, name="shifted")
    run(tmp_path, tap(plain), trainer__max_steps=1, name="plain")
    (out,), (base,) = outputs, plain
    ratio = out["advantages"] / base["advantages"][:, None]
    mask = out["completion_mask"].bool() & (base["advantages"] != 0)[:, None]
    assert ratio[mask].min().item() == pytest.approx(math.exp(0.1), rel=1e-3)
    assert ratio[mask].max().item() == pytest.approx(math.exp(0.1), rel=1e-3)
    assert "old_per_token_logps" in out
    (log,) = logs(record)
    assert log["sampling/importance_sampling_ratio/mean"] == pytest.approx(math.exp(0.1), rel=1e-3)
    assert log[DIFFERENCE] == pytest.approx(0.1, abs=1e-3)


# Rewards --------------------------------------------------------------------------------------------------------------


def expected_advantages(rewards: list, group: int = 4) -> list[float]:
    """(r - mean) / (std + 1e-4) over the scored responses of a group, and zero for the others."""
    advantages = []
    for i in range(0, len(rewards), group):
        scored = [r for r in rewards[i : i + group] if r is not None]
        spread = stdev(scored) if len(scored) > 1 else 0.0
        advantages += [0.0 if r is None else (r - mean(scored)) / (spread + 1e-4) for r in rewards[i : i + group]]
    return advantages


@pytest.mark.parametrize("reward", ["some_digits", "no_score_for_some_prompts"])
def test_failed_rewards_leave_their_group(tmp_path, monkeypatch, reward):
    """Rows, and whole groups, without a reward."""
    monkeypatch.setattr("specrl.reward.set.FAILED_SHARE", 1)
    outputs = []
    options = {"reward__functions": f"[tests.rewards:{reward}]"}
    record = run(tmp_path, tap(outputs), trainer__max_steps=3, **options)
    groups = [step.rewards[i : i + 4] for step in record.steps for i in range(0, 16, 4)]
    assert any(group == [None] * 4 for group in groups) == (reward != "some_digits")
    for step, out, log in zip(record.steps, outputs, logs(record), strict=True):
        failed = [i for i, r in enumerate(step.rewards) if r is None]
        assert len(failed) < 16
        assert log["reward/failed"] == len(failed)
        assert all(out["advantages"][i] == 0 for i in failed)
        assert out["advantages"].tolist() == pytest.approx(expected_advantages(step.rewards), abs=1e-3)
        assert log["reward"] == pytest.approx(mean(r for r in step.rewards if r is not None))
    assert any(None in step.rewards for step in record.steps)
    assert all(map(isfinite, record.losses))
    as_zero = [expected_advantages([r or 0.0 for r in step.rewards]) for step in record.steps]
    if reward == "some_digits":
        assert as_zero != [pytest.approx(out["advantages"].tolist(), abs=1e-3) for out in outputs], "never a zero"


class Gradients(TrainerCallback):
    """Relative errors of every optimiser step's gradient compared with that of `losses(model)`, in plain torch."""

    def __init__(self, losses):
        self.losses, self.errors = losses, []

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        parameters = [p for p in model.parameters() if p.requires_grad]
        got = torch.cat([p.grad.flatten() for p in parameters])
        with torch.enable_grad():
            gradients = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in self.losses(model)]
        wanted = [torch.cat([part.flatten() for part in gradient]) for gradient in gradients]
        self.errors.append([((got - want).norm() / want.norm()).item() for want in wanted])


def plain_log_probs(model, row, tokens) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([[*row.prompt, *tokens]])).logits[0, len(row.prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]


def plain_loss(model, initial, got, kind, beta, counts, weighs=lambda ratio: ratio) -> torch.Tensor:
    """GRPO's loss of one rollout at the weights that sampled it: rows whose reward `counts`, divided by all of them.

    `weighs(ratio)` is the weight of the KL estimate: with the ratio its gradient is that of KL(policy, initial).
    """
    rows = []
    advantages = expected_advantages(got.rewards)
    for row, c, reward, advantage in zip(got.rows, got.batch.completions, got.rewards, advantages, strict=True):
        if counts(reward):
            logp = plain_log_probs(model, row, c.tokens)
            gap = plain_log_probs(initial, row, c.tokens).detach() - logp
            ratio = (logp - logp.detach()).exp()
            rows.append(weighs(ratio) * beta * (gap.exp() - 1 - gap) - ratio * advantage)
    everyone = [len(c.tokens) for c in got.batch.completions]
    if kind == "grpo":
        return sum(row.mean() for row in rows) / len(everyone)
    tokens = len(everyone) * 28 if kind == "dr_grpo" else sum(everyone)
    return sum(row.sum() for row in rows) / tokens


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "dapo"])
def test_rows_without_a_reward_have_no_gradient(tmp_path, monkeypatch, kind):
    """Planted faults: they stay in the KL penalty; a KL estimate without the ratio."""
    monkeypatch.setattr("specrl.reward.set.FAILED_SHARE", 1)
    initial, held = AutoModelForCausalLM.from_pretrained(policy()), []

    def losses(model):
        def scored(reward):
            return reward is not None

        for faults in ([scored], [lambda reward: True], [scored, torch.ones_like]):
            yield plain_loss(model, initial, held[0].train_batch, kind, 0.5, *faults)

    gradients = Gradients(losses)
    options = {"reward__functions": "[tests.rewards:some_digits]", "trainer__loss": kind}
    options |= {"trainer__beta": 0.5, "trainer__rows_per_pass": 4, "trainer__max_grad_norm": 1e9}
    options |= {"trainer__max_steps": 3, "trainer__learning_rate": 1e-2}
    record = run(tmp_path, lambda t: (held.append(t.rollouts), t.add_callback(gradients)), **options)
    assert all(0 < step.rewards.count(None) < 16 for step in record.steps)
    assert max(right for right, *_ in gradients.errors) < 1e-5
    planted = [error for _, *errors in gradients.errors[1:] for error in errors]
    assert min(planted) > 0.01, "where the policy has left the initial one"
