"""Co-training: the drafter follows a moving policy, is measured before it learns, and never harms a run.

The oracle computes agreement row by row with full forward passes. The policy turns towards another one.
"""

import copy
import logging
import math
from functools import cache

import pytest
import torch

from specrl.drafter import shortened
from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.engines.local.engine import TransformersEngine
from specrl.rollout.engines.local.head import Head
from specrl.rollout.keys import derive_key
from specrl.rollout.noise import keyed_sample
from specrl.rollout.types import Request, RolloutError
from specrl.trainers.config import DrafterConfig
from specrl.trainers.cotraining import distil
from specrl.trainers.cotraining.distil import forward_kl
from specrl.trainers.cotraining.trainer import DrafterTrainer
from tests.engines import local

ROWS, CAP = 12, 24
SAMPLING = SamplingParams(frozenset([1, 7]))
SETTINGS = {"learning_rate": 1e-2, "share": 1.0}
KINDS = ["model", "head"]


class Moving:
    """A policy whose matrices turn towards another one's by `speed` radians a step, and its rollouts.

    A straight line would pass through flat distributions, with which any drafter that knows the common tokens agrees.
    """

    def __init__(self, build_model, speed=0.015, scale=8.0):
        self.policy, self.speed = build_model("llama", 0, scale=scale), speed
        self.start = copy.deepcopy(self.policy.state_dict())
        self.end = build_model("llama", 9, scale=scale).state_dict()
        self.engine = TransformersEngine(self.policy, SAMPLING)

    def rollout(self, version):
        with torch.no_grad():
            for name, weight in self.policy.state_dict().items():
                share = 0.0 if weight.dim() == 1 else self.speed * version
                weight.copy_(math.cos(share) * self.start[name] + math.sin(share) * self.end[name])
        requests = [Request([3 + i // 4, 5, 9], derive_key(0, "moving", i, version), CAP) for i in range(ROWS)]
        done, _ = self.engine.generate(requests)
        return [(r.prompt, c.tokens) for r, c in zip(requests, done, strict=True)], [r.key for r in requests]


def follow(moving, trainer, steps):
    """Metrics of a run in which every rollout is observed and learned from."""
    return [turn(moving, trainer, version) for version in steps]


def update(policy, rows):
    """The forward pass of an update, on rows that are padded on both sides."""
    before = max(len(prompt) for prompt, _ in rows)
    after = max(len(response) for _, response in rows)
    ids = [[0] * (before - len(p)) + [*p, *r] + [0] * (after - len(r)) for p, r in rows]
    mask = [[0] * (before - len(p)) + [1] * (len(p) + len(r)) + [0] * (after - len(r)) for p, r in rows]
    return policy.train()(input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask))


def turn(moving, trainer, version):
    rows, _ = moving.rollout(version)
    trainer.observe(rows)
    update(moving.policy, rows)
    return trainer.step()


def drafter_of(policy, kind="model"):
    with torch.random.fork_rng():
        return shortened(policy, 1) if kind == "model" else Head.of(policy)


def trainer_of(moving, kind="model", **options):
    return DrafterTrainer(
        drafter_of(moving.policy, kind), moving.policy, DrafterConfig(**{**SETTINGS, **options}), SAMPLING, seed=3
    )


@torch.no_grad()
def full_logits(model, prompt, response):
    """Logits [T, V] that predict the response, by the model's forward pass on the text alone."""
    model = copy.deepcopy(model).eval()
    return model(input_ids=torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]


def late(run, last=6):
    """The agreement of the last steps of a run."""
    return sum(metrics["drafter/agreement"] for metrics in run[-last:]) / last


@pytest.fixture(scope="module")
def untrained(build_model):
    """untrained(kind): the same run in which the drafter stays as it is."""

    @cache
    def get(kind="model"):
        moving = Moving(build_model)
        return follow(moving, trainer_of(moving, kind, learning_rate=0.0), range(24))

    return get


def weights_of(model):
    return [p.detach().clone() for p in model.parameters()]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# Following ------------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(("kind", "gain"), [("model", 0.1), ("head", 0.04)])
def test_co_training_follows_a_moving_policy(build_model, untrained, kind, gain):
    """On rollouts not yet learned from, agreement is above that of the initial drafter (steps 18 to 23)."""
    moving = Moving(build_model)
    run, still = follow(moving, trainer_of(moving, kind), range(24)), untrained(kind)
    assert late(run) > late(still) + gain
    assert run[0]["drafter/agreement"] == still[0]["drafter/agreement"], "before the first update"


@pytest.mark.long
@pytest.mark.parametrize(("wrong", "gain"), [("sign", 0.0), ("tokens", 0.0), ("positions", 0.08)])
def test_a_wrong_objective_teaches_no_more_than_frequencies(build_model, untrained, monkeypatch, wrong, gain):
    """Controls of the test above. The distributions at other positions still reveal which tokens are common."""

    def planted(student, teacher):
        if wrong == "sign":
            return -forward_kl(student, teacher)
        generator = torch.Generator().manual_seed(0)
        n, vocab = teacher.shape
        order = torch.randperm(vocab if wrong == "tokens" else n, generator=generator)
        return forward_kl(student, teacher[:, order] if wrong == "tokens" else teacher[order])

    monkeypatch.setattr(distil, "forward_kl", planted)
    moving = Moving(build_model)
    run = follow(moving, trainer_of(moving), range(24))
    assert late(run) < late(untrained()) + gain


@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_is_left_as_it_was(build_model, kind):
    """The same holds for its gradients: a head reads and writes through layers of the policy."""
    moving = Moving(build_model)
    trainer = trainer_of(moving, kind)
    rows, _ = moving.rollout(0)
    before, rng, drafter = weights_of(moving.policy), torch.get_rng_state(), weights_of(trainer.drafter)
    trainer.observe(rows)
    update(moving.policy, rows).logits.square().mean().backward()
    gradients = [p.grad.clone() for p in moving.policy.parameters()]
    trainer.step()
    assert same(before, weights_of(moving.policy))
    assert same(gradients, [p.grad for p in moving.policy.parameters()])
    assert torch.equal(rng, torch.get_rng_state()), "the run's random numbers are not used"
    assert moving.policy.training
    assert not same(drafter, weights_of(trainer.drafter))  # control: the drafter was trained


def drafting(moving, drafter):
    return local(moving.policy, SAMPLING, drafter=drafter, window=4)


def passes(moving, engine, version):
    """Row passes of a rollout with a model's drafts, whose texts equal plain decoding's."""
    rows, keys = moving.rollout(version)
    done, _ = engine.generate([Request(prompt, key, CAP) for (prompt, _), key in zip(rows, keys, strict=True)])
    assert [c.tokens for c in done] == [response for _, response in rows]
    return sum(c.passes for c in done)


def test_rollouts_stay_exact_while_the_drafter_diverges(build_model):
    moving = Moving(build_model)
    trainer = trainer_of(moving)
    engine = drafting(moving, trainer.drafter)
    initial = passes(moving, engine, 2)
    follow(moving, trainer, range(2))
    with torch.no_grad():
        trainer.drafter.lm_head.weight[:] = torch.nan
    assert passes(moving, engine, 2) > initial, "control: nothing it drafts is of use"
    assert turn(moving, trainer, 2)["drafter/active"] == 0.0


# Measuring ------------------------------------------------------------------------------------------------------------


def agreement_by_hand(drafter, policy, rows, trainer):
    """Agreement of a draft model over all rows, one by one, with the trainer's keys."""
    agreed = []
    for i, (prompt, response) in enumerate(rows):
        at = torch.arange(len(response))
        key = torch.tensor(derive_key(3, "drafter", i, trainer.progress.rounds, "agreement")).expand(len(at))
        q, p = (full_logits(model, prompt, response) for model in (drafter, policy))
        agreed += (keyed_sample(q, key, at)[0] == keyed_sample(p, key, at)[0]).tolist()
    return sum(agreed) / len(agreed)


def test_agreement_is_measured_before_the_round(build_model):
    moving = Moving(build_model)
    trainer = trainer_of(moving)
    follow(moving, trainer, range(2))
    rows, _ = moving.rollout(2)
    before = copy.deepcopy(trainer.drafter)
    trainer.observe(rows)
    update(moving.policy, rows)
    assert same(weights_of(before), weights_of(trainer.drafter)), "observing changes no weight"
    agreement = trainer.step()["drafter/agreement"]
    assert agreement == pytest.approx(agreement_by_hand(before, moving.policy, rows, trainer), abs=1e-5)
    leaked = agreement_by_hand(trainer.drafter, moving.policy, rows, trainer)
    assert agreement != pytest.approx(leaked, abs=0.01)  # control: after the round the number differs


def test_minibatches_bring_their_texts_each(build_model):
    moving = Moving(build_model)
    trainer, learned = trainer_of(moving), []
    for version in range(2):
        rows, _ = moving.rollout(version)
        trainer.observe(rows)
        for part in (rows[:4], rows[4:8], rows[8:], rows[:4]):  # the last one: another epoch over the same data
            update(moving.policy, part)
            learned.append(trainer.step().get("drafter/tokens", 0))
        assert sum(learned[-4:]) == sum(len(response) for _, response in rows)
        assert learned[-1] == 0


# Stopping -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_divergence_ends_co_training_and_keeps_the_drafter(build_model, monkeypatch, caplog, where):
    moving = Moving(build_model)
    trainer = trainer_of(moving)
    follow(moving, trainer, range(2))
    before = weights_of(trainer.drafter)

    def planted(student, teacher):
        return forward_kl(student, teacher) * (torch.nan if where == "loss" else 1.0)

    monkeypatch.setattr(distil, "forward_kl", planted)
    if where == "gradient":
        monkeypatch.setattr(distil, "clip_grad_norm_", lambda *args: torch.tensor(torch.inf))
    metrics = turn(moving, trainer, 2)
    assert same(before, weights_of(trainer.drafter))
    assert metrics["drafter/active"] == 0.0
    assert "diverged" in trainer.progress.off
    assert "learning_rate" in trainer.progress.off
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    ended = turn(moving, trainer, 3)
    assert ended.keys() == {"drafter/active", "timing_s/drafter"}
    assert ended["drafter/active"] == 0.0
    assert same(before, weights_of(trainer.drafter))
    assert len(caplog.records) == 1, "said once"


# Rejected options -----------------------------------------------------------------------------------------------------


def test_another_vocabulary_is_refused(build_model):
    with pytest.raises(RolloutError, match="50 tokens and the policy 61"):
        DrafterTrainer(build_model("qwen3", vocab=50), build_model("llama"), DrafterConfig(), SAMPLING)


def test_a_lora_policy_teaches_with_its_adapters(build_model, monkeypatch):
    peft = pytest.importorskip("peft")
    base = build_model("llama")
    plain = copy.deepcopy(base)
    policy = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, p in policy.named_parameters():
            if "lora_B" in name:
                p.fill_(0.3)
    trainer, seen = DrafterTrainer(shortened(plain, 1), policy, DrafterConfig(**SETTINGS), SAMPLING), []
    monkeypatch.setattr(distil, "forward_kl", lambda q, p: (seen.append(p), forward_kl(q, p))[1])
    row = ((3, 4, 5), (9, 8, 7, 6))
    trainer.observe([row])
    update(policy, [row])
    trainer.step()
    assert torch.allclose(seen[0], full_logits(policy, *row), atol=1e-4)
    assert not torch.allclose(seen[0], full_logits(plain, *row), atol=1e-2)  # control


# Several processes ----------------------------------------------------------------------------------------------------

TEXTS = [[(range(3, 9), range(9 + n, 30 + n)) for n in range(4)], [(range(5, 9), range(20, 41))]]
"""Of two rounds, in the second of which only the first process has one."""
PROGRAM = """
import json, sys
from pathlib import Path
import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard
from tests.models import random_model
from tests.trainers.cotraining.test_drafter import drafter_of, taught

distributed.init_process_group("gloo")
rank, reduce, found = distributed.get_rank(), distributed.all_reduce, {}
policy = random_model("llama")
drafters = {"model": drafter_of(policy), "model, not averaged": drafter_of(policy)}
for layer in policy.model.layers:
    fully_shard(layer)
fully_shard(policy.model.embed_tokens)
fully_shard([policy.model.norm, policy.lm_head], reshard_after_forward=False)
fully_shard(policy)
drafters["head"] = drafter_of(policy, "head")
found = {kind: taught(drafters[kind], policy, rank, 2) for kind in ("model", "head")}
distributed.all_reduce = lambda tensor: reduce(tensor) if tensor.dtype == torch.float64 else None
found["model, not averaged"] = taught(drafters["model, not averaged"], policy, rank, 2)
Path(sys.argv[1], f"rank{rank}.json").write_text(json.dumps(found))
distributed.destroy_process_group()
"""


def taught(drafter, policy, rank=0, processes=1):
    """The losses and the weights of a drafter that learns from TEXTS; each process has every `processes`-th."""
    distil.OWN_SHARE = 0.0  # what a head reads in later passes is random otherwise
    trainer = DrafterTrainer(
        drafter, policy, DrafterConfig(**SETTINGS | {"learning_rate": 1e-3}), SAMPLING, processes=processes
    )
    losses = []
    for texts in TEXTS:
        trainer.observe(texts[rank::processes])
        for prompt, response in texts:
            policy.train()(input_ids=torch.tensor([[*prompt, *response]])).logits.square().mean().backward()
        losses.append(trainer.step().get("drafter/loss"))
    return {"losses": losses, "weights": [p.double().abs().sum().item() for p in drafter.parameters()]}


@pytest.mark.long
def test_two_processes_of_a_sharded_policy_teach_as_one_does(build_model, tmp_path, monkeypatch):
    """Gradients are averaged over the tokens of both, so that their drafters stay the same."""
    from tests.runs import by_two_processes  # it imports a trainer, and the processes import this file

    monkeypatch.setattr(distil, "OWN_SHARE", distil.OWN_SHARE)  # `taught` changes it
    (first, second), _ = by_two_processes(tmp_path, PROGRAM, 120)
    for kind in KINDS:
        policy = build_model("llama")
        alone = taught(drafter_of(policy, kind), policy)
        assert first[kind]["weights"] == second[kind]["weights"] == pytest.approx(alone["weights"], abs=1e-5)
        assert second[kind]["losses"][1] is None, "control: it has no text"
        losses = [(first[kind]["losses"][0] + second[kind]["losses"][0]) / 2, first[kind]["losses"][1]]
        assert losses == pytest.approx(alone["losses"], rel=1e-5)
    apart = [ours["model, not averaged"]["weights"] for ours in (first, second)]
    assert apart[0] != apart[1], "planted fault"
    assert apart[0] != pytest.approx(first["model"]["weights"], abs=1e-3)
