"""The part that all trainers share: samples, storing, rejected batches, weights, metrics."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import specrl.trainers.rollouts
from specrl.rollout.cache.memory import Fingerprint, TrajectoryCache
from specrl.rollout.config import RolloutConfig
from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.engines.local.engine import TransformersEngine
from specrl.rollout.reduction import mean
from specrl.rollout.speculative import SpeculativeRollout
from specrl.rollout.types import Completion, RolloutBatch, RolloutError
from specrl.trainers.config import TrainerConfig
from specrl.trainers.rollouts import Rollouts
from specrl.trainers.scored import check_batch
from specrl.trainers.setup import Setup

GOOD = Completion([1, 2], [-0.5, -0.5], [-0.5, -0.5], [False, True], "stop", 3, 1)
CURRENT = replace(GOOD, version=7)


class Source(SpeculativeRollout):
    """A scripted source of responses. Each row gets `response`, and the calls are recorded."""

    def __init__(self, config, engine, response=CURRENT, cache=None):
        super().__init__(engine, cache, config, seed=0)
        self.response, self.calls = response, []

    def generate(self, rows, *, visit, step, sample_indices, domain="rollout"):
        self.calls.append(([row.example_id for row in rows], visit, step, sample_indices))
        n = len(rows)
        return RolloutBatch(
            [self.response] * n, sample_indices, [0] * n, [None] * n, [False] * n, visits=visit, total_s=1.0
        )

    def plain(self, rows, keys):
        n = len(rows)
        return RolloutBatch([self.response] * n, [0] * n, list(keys), [None] * n, [False] * n, total_s=1.0)


class Engine:
    own_weights, weight_version = False, 0

    def __init__(self):
        self.versions = []

    def update_weights(self, weights, version, probe=None):
        self.versions.append(version)


def ones(rows, responses):
    return [1.0] * len(rows), {}


def made(rank=0, config=None, engine=None, policy=None, score=ones, state=None, trainer=None, **source) -> Rollouts:
    """Rollouts of process `rank`, at step 7 unless `state` has another."""
    accelerator = SimpleNamespace(
        process_index=rank, num_processes=1, device=torch.device("cpu"), distributed_type="NO", state=None
    )
    source = Source(config or RolloutConfig(group_size=4), engine or Engine(), **source)
    setup = Setup(
        score=score,
        render=lambda row: [5, 6],
        dataset=[{"example_id": "e0"}],
        make_rollout=lambda policy: source,
        rollout=source.config,
        trainer=trainer or TrainerConfig(),
    )
    state, policy = state or SimpleNamespace(global_step=7, epoch=2.5), policy or SimpleNamespace(dtype=torch.float32)
    return Rollouts(setup, accelerator, lambda: policy, lambda: state)


def test_rows_get_sample_indices_across_processes():
    second = made(rank=1)
    got = second.collect([{"example_id": f"e{i // 4}"} for i in range(6, 12)])
    ((ids, _, step, sample_indices),) = second.source.calls
    assert (step, sample_indices) == (7, [2, 3, 0, 1, 2, 3]), "a group over two processes has each sample_index once"
    assert ids == ["e1", "e1", "e2", "e2", "e2", "e2"]
    assert {row.prompt for row in got.rows} == {(5, 6)}
    assert second.engine.versions == [7], "the engine has the current weights"
    assert (second.train_batch, second.sampled_batch, second.batch_is_current) == (got, got, True)
    assert got.rewards == [1.0] * 6


def test_a_batch_is_stored_with_its_rewards_and_the_cache_reported():
    cache = TrajectoryCache(Fingerprint())
    storing = made(cache=cache, score=lambda rows, responses: ([None, 0.5], {}))
    storing.collect([{"example_id": "e0"}, {"example_id": "e0"}])
    metrics, batch = storing.finish(), storing.sampled_batch.batch
    assert [
        (cache.get("e0", sample_index).tokens, cache.get("e0", sample_index).reward) for sample_index in (0, 1)
    ] == [
        ((1, 2), None),
        ((1, 2), 0.5),
    ], "a reward that failed is unknown"
    assert metrics["cache/entries"] == 2
    assert metrics["timing_s/store"] == batch.store_s > 0
    assert metrics["timing_s/gen"] == batch.total_s > 1.0, "storing is charged to the rollout"


def test_a_share_of_all_tokens_counts_the_tokens_of_processes_without_that_source(monkeypatch):
    rollouts = made()
    rollouts.collect([{"example_id": "e0"}] * 2)
    # in the other process a draft model drafted
    monkeypatch.setattr(specrl.trainers.rollouts, "gather_object", lambda sources: [*sources, "model"])
    here = rollouts.finish()["spec/reused_model"]
    assert here == 0.0
    assert here.beside(mean(3, 4)) == 3 / (4 + 4), "the two responses here have 4 tokens, none of them drafted so"


@pytest.mark.parametrize(("buffer", "expected"), [(0, 1.0), (2, 0.5)])
def test_overlong_responses_are_punished_and_failures_stay_failures(buffer, expected):
    def score(rows, responses):
        return [1.0, None], {}

    config = RolloutConfig(group_size=4, max_new_tokens=3)
    trainer = TrainerConfig(overlong_buffer=buffer)
    got = made(config=config, trainer=trainer, score=score).collect([{"example_id": "e0"}] * 2)
    assert got.rewards == [expected, None], "2 of 3 tokens, of which the last 2 cost half each"
    assert got.unpenalised_rewards == [1.0, None]


def test_fresh_rows_of_the_reuse_gap_are_punished_as_replayed_ones_are(build_model):
    engine = Engine()
    engine.own_weights = True
    config = RolloutConfig(group_size=4, max_new_tokens=3, measure_every=1, replay=0.5)
    options = {"engine": engine, "policy": build_model("llama"), "trainer": TrainerConfig(overlong_buffer=2)}
    replaying = made(config=config, **options)
    replaying.collect([{"example_id": "e0"}])
    replaying.sampled_batch.batch.replayed = [True]
    assert replaying.finish()["spec/reuse_gap"] == 0.0, "the same text for the same prompt"


def test_control_steps_compare_a_shared_engine_with_the_policy(build_model):
    """Plain decoding uses the same code path as drafts, so control rows cannot detect an error in that path."""
    model = build_model("qwen3")
    engine = TransformersEngine(model, SamplingParams(frozenset()))
    shared = made(config=RolloutConfig(group_size=4, measure_every=2), engine=engine, policy=model)
    shared.collect([{"example_id": "e0"}])
    shared.finish()
    assert shared.finish()["spec/speedup"] == 1.0
    model.register_forward_hook(lambda module, args, out: out | {"logits": out.logits / 1.05})
    assert "spec/speedup" not in shared.finish(), "on control steps only"
    with pytest.raises(RolloutError, match=r"weight version 7 .* does not compute what the trainer's model computes"):
        shared.finish()


@pytest.mark.parametrize(
    ("completions", "message"),
    [
        ([GOOD], "returned 1 responses for 2 rows"),
        ([GOOD, replace(GOOD, tokens=[], logprobs=[], behaviour_logprobs=[], reused=[])], "row 1: 0 tokens"),
        ([replace(GOOD, logprobs=[-0.5]), GOOD], "row 0: 2 tokens, 1 log-probs"),
        ([GOOD, replace(GOOD, reused=[])], "malformed response for row 1"),
        ([GOOD, replace(GOOD, version=2)], "returned row 1 by weight version 2 at version 3"),
    ],
)
def test_malformed_engine_results_are_refused(completions, message):
    n = len(completions)
    check_batch(RolloutBatch([GOOD, GOOD], [0, 1], [0, 0], [None] * 2, [False] * 2), 2, 3)
    with pytest.raises(RolloutError, match=message):
        check_batch(RolloutBatch(completions, list(range(n)), [0] * n, [None] * n, [False] * n), 2, 3)


def test_an_engine_with_weights_of_its_own_gets_each_version_once(build_model):
    engine, state = Engine(), SimpleNamespace(global_step=7, epoch=0.0)
    engine.own_weights = True
    copying = made(engine=engine, policy=build_model("llama"), state=state)
    copying.sync()
    copying.sync()
    state.global_step = 8
    copying.sync()
    assert engine.versions == [7, 8]


def test_importance_with_every_response_masked():
    masked = made(config=RolloutConfig(acceptance="lenient", group_size=4))
    masked.collect([{"example_id": "e0"}])
    weights = masked.importance(torch.tensor([[-0.5, -0.5]]), torch.zeros(1, 2), None)
    assert weights.tolist() == [[1.0, 1.0]]
    assert not any("importance" in name for name in masked.finish())
