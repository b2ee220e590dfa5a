"""What all trainers share around their update: slots, refused batches, importance weights, metrics over processes."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rollout.config import RolloutConfig
from rollout.engines.base import Sampling
from rollout.engines.transformers import TransformersEngine
from rollout.types import Completion, RolloutBatch, RolloutError, Row
from trainers.collector import Collector, Setup, check_batch
from trainers.config import TrainerConfig
from trainers.metrics import reduce_metric
from trainers.refill import Scored

GOOD = Completion([1, 2], [-0.5, -0.5], [-0.5, -0.5], [False, True], "stop", 3, 1)


class Engine:
    own_weights, weight_version = False, 0

    def __init__(self):
        self.versions = []

    def generate(self, requests):
        raise AssertionError("the stage is replaced")

    def update_weights(self, weights, version, probe=None):
        self.versions.append(version)


def collector(
    rank: int = 0,
    rollout: RolloutConfig | None = None,
    trainer: TrainerConfig | None = None,
    engine=None,
    policy=None,
) -> Collector:
    accelerator = SimpleNamespace(process_index=rank, num_processes=1, device=torch.device("cpu"))
    setup = Setup(
        score=lambda rows, texts: ([1.0] * len(rows), {}),
        render=lambda row: [5, 6],
        make_engine=None,
        cache=None,
        rollout=rollout or RolloutConfig(group_size=4),
        trainer=trainer or TrainerConfig(),
        seed=0,
    )
    state, policy = SimpleNamespace(global_step=7, epoch=2.5), policy or SimpleNamespace(dtype=torch.float32)
    texts = SimpleNamespace(batch_decode=lambda ids, **_: ["text"] * len(ids))
    rows = [{"example_id": "e0"}]
    return Collector(engine or Engine(), setup, accelerator, lambda: policy, lambda: state, texts, rows)


def test_rows_become_slots_across_processes():
    seen, second = {}, collector(rank=1)

    def generate(rows, *, step, slots):
        seen.update(step=step, slots=slots)
        done = Completion([1, 2], [-0.5, -0.5], [-0.5, -0.5], [False, False], "length", step, 2)
        return RolloutBatch([done] * len(rows), slots, [0] * len(rows), [None] * len(rows), [False] * len(rows))

    second.stage.generate = generate
    got = second.collect([{"example_id": f"e{i // 4}"} for i in range(6, 12)])
    assert seen == {"step": 7, "slots": [2, 3, 0, 1, 2, 3]}, "a group over two processes has each slot once"
    assert [row.example_id for row in got.rows] == ["e1", "e1", "e2", "e2", "e2", "e2"]
    assert {row.prompt for row in got.rows} == {(5, 6)}
    assert second.stage.rollout.engine.versions == [7], "the engine has the current weights"
    assert (second.last, second.batch_is_current) == (got, True)
    assert got.rewards == [1.0] * 6


def test_control_steps_compare_a_shared_engine_with_the_policy(build_model):
    """Plain decoding takes the same path as drafts do, so control rows cannot tell that it has become a wrong one."""
    model = build_model("qwen3")
    shared = collector(engine=TransformersEngine(model, Sampling(frozenset()), window=3), policy=model)
    shared.stage = SimpleNamespace(
        rollout=shared.stage.rollout,
        measured=True,
        generate=lambda rows, step, slots: RolloutBatch([replace(GOOD, version=7)], slots, [0], [None], [False]),
        finish=lambda *rows, **step: {"a": 1.0},
    )
    shared.collect([{"example_id": "e0"}])
    assert shared.finish()["a"] == 1.0
    model.register_forward_hook(lambda module, args, out: out | {"logits": out.logits / 1.05})
    with pytest.raises(RolloutError, match=r"weight version 7 .* does not compute what the trainer's model computes"):
        shared.finish()
    shared.stage.measured = False
    assert shared.finish()["a"] == 1.0, "on control steps only"


@pytest.mark.parametrize(
    ("completions", "message"),
    [
        ([GOOD], "returned 1 responses for 2 rows"),
        ([GOOD, replace(GOOD, tokens=[], logprobs=[], behaviour_logprobs=[], reused=[])], "row 1: 0 tokens"),
        ([replace(GOOD, logprobs=[-0.5]), GOOD], "row 0: 2 tokens, 1 log-probs"),
        ([GOOD, replace(GOOD, behaviour_logprobs=[-0.5] * 3)], "malformed response for row 1"),
        ([GOOD, replace(GOOD, reused=[])], "malformed response for row 1"),
        ([GOOD, replace(GOOD, version=2)], "returned row 1 by weight version 2 at version 3"),
        ([replace(GOOD, version=4), GOOD], "returned row 0 by weight version 4 at version 3"),
    ],
)
def test_malformed_engine_results_are_refused(completions, message):
    n = len(completions)
    check_batch(RolloutBatch([GOOD, GOOD], [0, 1], [0, 0], [None] * 2, [False] * 2), 2, 3)
    lost = Completion([], [], [], [], "length", 0, 0, failure="its worker died")
    check_batch(RolloutBatch([GOOD, lost], [0, 1], [0, 0], [None] * 2, [False] * 2), 2, 3)
    with pytest.raises(RolloutError, match=message):
        check_batch(RolloutBatch(completions, list(range(n)), [0] * n, [None] * n, [False] * n), 2, 3)


def test_an_engine_that_does_not_follow_the_policy_is_refused():
    """An engine of one's own that takes the new version and goes on with the old weights' texts."""
    stale = collector()

    def generate(rows, *, step, slots):
        done = [replace(GOOD, version=6)] * len(rows)
        return RolloutBatch(done, slots, [0] * len(rows), [None] * len(rows), [False] * len(rows))

    stale.stage.generate = generate
    with pytest.raises(RolloutError, match="row 0 by weight version 6 at version 7"):
        stale.collect([{"example_id": "e0"}])


def test_importance_with_every_response_masked():
    masked = collector(rollout=RolloutConfig(law="lenient"))
    masked.last = Scored([{}], [Row("e", (5,))], RolloutBatch([GOOD], [0], [0], [None], [False]), [None])
    weights = masked.importance(torch.tensor([[-0.5, -0.5]]), torch.zeros(1, 2), own=None)
    assert weights.tolist() == [[1.0, 1.0]]
    assert masked._metrics == {}


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("spec/new_tokens", [1.0, 2.0], 3.0),
        ("timing_s/gen", [1.0, 2.0], 2.0),
        ("spec/passes_max", [4.0, 2.0], 4.0),
        ("sampling/importance_sampling_ratio/max", [1.5, torch.nan], 1.5),
        ("sampling/importance_sampling_ratio/min", [0.5, torch.nan], 0.5),
        ("reward", [1.0, 2.0], 1.5),
        ("spec/draft_age", [torch.nan, 3.0], 3.0),
    ],
)
def test_one_number_from_all_processes(name, values, expected):
    assert reduce_metric(name, torch.tensor(values)) == expected
