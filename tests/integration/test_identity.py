"""The promise: a training run with speculation is the run without it, bit for bit, through every update and resume."""

import copy
import json
import shutil

import pytest
import torch

from specrl.rollout.build import build_engine
from specrl.rollout.engines.base import EngineSpec
from specrl.rollout.engines.local import sampler
from specrl.rollout.noise import keyed_sample
from tests.runs import SHORT, Recording, differences, recorded, run

PER_EPOCH = 3
pytestmark = pytest.mark.slow


def pair(**options) -> tuple[Recording, Recording]:
    return recorded(rollout__acceptance="off", **options), recorded(rollout__acceptance="exact", **options)


# Speculation on and off ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replay", [0, 0.5, 1])
def test_the_exact_run_is_the_plain_run(replay):
    off, exact = pair(rollout__replay=replay)
    assert differences(off, exact) == []
    assert len(exact.steps) == len(exact.losses) == 3 * PER_EPOCH


@pytest.mark.parametrize("replay", [0, 0.5, 1])
def test_it_was_not_compared_vacuously(replay):
    off, exact = pair(rollout__replay=replay)
    later = exact.steps[PER_EPOCH:]
    assert all(step.reuse == 0 for step in off.steps)
    assert all(step.metrics["spec/hit_rate"] == 0 for step in exact.steps[:PER_EPOCH])
    assert sum(step.reuse for step in exact.steps[:PER_EPOCH]) > 0, "the first epoch drafts from the group's own text"
    assert sum(step.reuse for step in later) / len(later) > 0.2
    assert all(step.reuse > 0 for step in later)
    assert all(step.metrics["spec/hit_rate"] == 1 for step in later)
    assert all(step.metrics["spec/draft_acceptance_rate"] < 1 for step in later), "some drafts were rejected"
    assert any(all(row) for step in later for row in step.reused) or replay < 1, "some responses were reused completely"
    assert {f for step in exact.steps for f in step.finish} == {"stop", "length"}
    assert len({len(t) for step in exact.steps for t in step.tokens}) > 10, "ragged lengths"
    assert any(step.rewards[0] != r for step in exact.steps for r in step.rewards), "some signal"
    epochs = [exact.steps[i : i + PER_EPOCH] for i in (0, PER_EPOCH, 2 * PER_EPOCH)]
    assert [step.ids for step in epochs[0]] != [step.ids for step in epochs[1]], "the order is shuffled every epoch"
    texts = [
        {row: tokens for step in epoch for row, tokens in zip(step.rows, step.tokens, strict=True)} for epoch in epochs
    ]
    assert len(texts[0]) == 12 * 4
    changed = sum(texts[0][row] != texts[1][row] for row in texts[0])
    assert changed > len(texts[0]) // 4, "weights and noise changed the text"


VARIANTS = {  # options that cannot hide each other's faults share a run
    "accumulation, adapters, kl": {"trainer__rows_per_pass": 4, "lora__rank": 4, "trainer__beta": 0.05},
    "two updates, narrow sampling, small passes": {
        "trainer__updates_per_rollout": 2,
        "rollout__temperature": 0.7,
        "rollout__top_p": 0.9,
        "rollout__top_k": 20,
        "rollout__rows_per_batch": 5,
        "rollout__tokens_per_pass": 40,
    },
    "dapo, measured budget": {
        "config": "dapo_math",
        "trainer__overlong_buffer": 8,
        "trainer__mask_truncated": "true",
        "rollout__draft_tokens": 0,
    },
}
MANY = {"rollout__replay": 0.5, **SHORT}
DYNAMIC = {"config": "dapo_math", "trainer__overlong_buffer": 0, "reward__functions": "[tests.rewards:sixth]"}
DYNAMIC |= {"rollout__replay": 0.5, "trainer__epochs": 2}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_are_identical_too(name):
    off, exact = pair(**MANY, **VARIANTS[name])
    assert differences(off, exact) == []
    assert any(step.reuse > 0.1 for step in exact.steps[2:]) or "measured budget" in name
    assert len(exact.losses) == (4 if "measured budget" in name else 8), "of 4 rollouts"


def test_groups_without_variance_are_replaced(tmp_path):
    plain, uninterrupted = pair(**DYNAMIC)
    assert differences(plain, uninterrupted) == []
    logs = [json.loads(line) for line in (uninterrupted.folder / "metrics.jsonl").read_text().splitlines()]
    assert sum(log["refill/prompts"] for log in logs) > 5
    assert all(log["frac_reward_zero_std"] == log["refill/left_ratio"] < 1 for log in logs)
    for step, log in zip(uninterrupted.steps, logs, strict=True):
        assert len(step.ids) == 16 + 4 * log["refill/prompts"], "what was rolled out is stored and charged"
        assert len(set(step.rows)) == len(step.rows)
        assert log["reward"] == pytest.approx(sum(step.rewards[:16]) / 16), "of the prompts that were sampled"
    fresh = recorded(rollout__acceptance="exact", **DYNAMIC | {"rollout__replay": 0})
    keys = [key for step in fresh.steps for key in step.keys]
    assert len(set(keys)) == len(keys), "prompts that were asked for in between are visited with fresh noise, too"
    first, second = interrupted(tmp_path, 4, **DYNAMIC)
    assert differences(uninterrupted, first + second) == [], "visits are part of the checkpoint"


def test_variants_are_not_the_same_run():
    """The comparison sees what an option does to the losses."""
    one, two = (recorded(rollout__acceptance="exact", **MANY, **VARIANTS[name]) for name in list(VARIANTS)[:2])
    assert {"losses", "weights"} <= set(differences(one, two))


def test_engine_log_probs_change_losses_by_rounding_only():
    off, exact = pair(**MANY, trainer__old_logprobs="engine")
    assert [step.tokens for step in off.steps] == [step.tokens for step in exact.steps]
    assert [step.rewards for step in off.steps] == [step.rewards for step in exact.steps]
    assert off.losses == pytest.approx(exact.losses, abs=1e-5)
    for name, tensor in off.weights.items():
        torch.testing.assert_close(tensor, exact.weights[name], rtol=0, atol=1e-5)


def test_control_steps_change_nothing():
    silent = recorded(rollout__acceptance="exact", rollout__replay=0.5)
    measured = recorded(rollout__acceptance="exact", rollout__replay=0.5, rollout__measure_every=2)
    assert differences(silent, measured) == []
    assert [s.metrics.get("spec/control_mismatches") for s in measured.steps[1::2]] == [0] * 4


FILLED = {
    "dapo, refills": DYNAMIC,
    "ppo": {"config": "ppo_math", **MANY},
    "two updates, small passes": MANY | VARIANTS["two updates, narrow sampling, small passes"],
    "evaluations and control steps between": {
        "trainer__eval_every": 1,
        "trainer__eval_prompts": 2,
        "rollout__measure_every": 2,
        **MANY,
    },
}


@pytest.mark.parametrize("name", FILLED)
def test_rows_of_the_next_batch_in_the_passes_of_this_one_change_nothing(name):
    """Other numbers of rows: tests/rollout/workers/test_rollouts_ahead.py."""
    off = recorded(rollout__acceptance="off", **FILLED[name])
    filled = recorded(rollout__acceptance="exact", rollout__fill=150, **FILLED[name])
    assert differences(off, filled) == []
    ahead = [step.metrics for step in filled.steps if step.metrics["spec/ahead_ratio"] > 0]
    assert len(ahead) >= len(filled.steps) // 2
    assert any(step["spec/ahead_unchanged_ratio"] < step["spec/ahead_done_ratio"] for step in ahead), "drift was seen"


# Interrupted and resumed ---------------------------------------------------------------------------------------------


def interrupted(folder, at: int, *, lost: str = "", **options) -> tuple[Recording, Recording]:
    """A run that ends after step `at` with a checkpoint, and the run that goes on from it.

    Args: lost: what of the checkpoint is lost in between.
    """
    first = run(folder, trainer__max_steps=at, trainer__save_every=at, **options)
    if lost:
        shutil.rmtree(first.folder / "checkpoints" / f"checkpoint-{at}" / lost)
    return first, run(folder, trainer__save_every=at, resume="auto", **options)


def test_a_resumed_run_is_the_uninterrupted_run(tmp_path):
    """What drafts were worth is not resumed, and decides between texts: here are none to choose from."""
    options = {"rollout__replay": 0.5, "rollout__sources": "[prefix]"}
    uninterrupted = recorded(rollout__acceptance="exact", **options)
    first, second = interrupted(tmp_path, 4, **options)
    assert differences(uninterrupted, first + second) == []
    assert [s.reused for s in second.steps] == [s.reused for s in uninterrupted.steps[4:]], "the cache is resumed too"


def test_losing_the_cache_changes_no_token(tmp_path):
    uninterrupted = recorded(rollout__acceptance="exact", rollout__replay=0.5)
    first, second = interrupted(tmp_path, 4, rollout__replay=0.5, lost="trajectories")
    assert differences(uninterrupted, first + second) == []
    assert all(s.metrics["spec/hit_rate"] == 0 for s in second.steps[:2])
    assert sum(s.reuse for s in second.steps[:2]) < sum(s.reuse for s in uninterrupted.steps[4:6]) / 2
    assert second.steps[-1].reuse > 0, "the cache fills again"


@pytest.mark.parametrize(("name", "at"), [(name, at) for name, at in zip(VARIANTS, (3, 6, 3), strict=True)])
def test_variants_resume_too(tmp_path, name, at):
    """Kept log-probs of the reference are lost with the process and computed anew to the last bit, and so on."""
    options = MANY | VARIANTS[name]
    first, second = interrupted(tmp_path, at, **options)
    assert differences(recorded(rollout__acceptance="exact", **options), first + second) == []


# Negative controls: each fault must be seen ---------------------------------------------------------------------------


FIVE = {"trainer__max_steps": 5}


@pytest.fixture
def plain():
    return recorded(rollout__acceptance="off", rollout__replay=0)


def tokens_differ(plain: Recording, faulty: Recording) -> bool:
    """Only later epochs draft, so only they can show a fault of speculation; the faulty run may be the shorter one."""
    steps = list(zip(plain.steps, faulty.steps, strict=False))
    assert len(steps) == 5
    assert all(a.ids == b.ids for a, b in steps)
    return any(a.tokens != b.tokens for a, b in steps)


def test_control_noise_of_the_pass(tmp_path, monkeypatch):
    """Noise drawn per pass, as an ordinary sampler does, so that the tokens of a pass decide what is sampled."""
    passes = iter(range(10**9))

    def per_pass(logits, keys, *args, **sampling):
        return keyed_sample(logits, keys + next(passes), *args, **sampling)

    monkeypatch.setattr(sampler, "keyed_sample", per_pass)
    off = run(tmp_path, name="off", rollout__acceptance="off", **FIVE)
    assert tokens_differ(off, run(tmp_path, name="exact", **FIVE))


def test_control_stale_weights(plain, tmp_path):
    """The engine keeps the weights it began with."""

    def sabotage(trainer):
        frozen = copy.deepcopy(trainer.accelerator.unwrap_model(trainer.model))
        frozen.__dict__.pop("forward", None)  # which the trainer hung on the original, whose weights it has
        spec = EngineSpec(eos_ids=trainer.rollouts.engine.sampling.eos_ids, rollout=trainer.rollouts.source.config)
        trainer.rollouts.source.engine = build_engine(spec, frozen)

    faulty = run(tmp_path, sabotage, **FIVE)
    assert plain.steps[0].tokens == faulty.steps[0].tokens, "the first rollout has the right weights"
    assert tokens_differ(plain, faulty)
    gaps = [log["sampling/sampling_logp_difference/max"] for log in faulty.trainer.state.log_history if "loss" in log]
    assert gaps[0] < 1e-4 < 1e-2 < gaps[-1], "and the log-prob check sees it too"
