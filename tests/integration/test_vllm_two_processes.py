"""A GRPO run of two CPU processes under FSDP 2 with a vLLM in each: one training, whatever is drafted.

Each process gathers the whole weights, in step with the other, for an engine of its own.
"""

import json

import pytest

from tests.integration import test_sharded as sharded
from tests.integration.test_two_processes import PROGRAM
from tests.runs import SHORT, build_policy, by_two_processes, run, words

pytest.importorskip("vllm", reason="needs the vllm extra")
pytestmark = pytest.mark.long
OPTIONS = SHORT | {
    "config": "grpo_math_vllm",
    "rollout__kv_cache_mb": 64,
    "rollout__draft_tokens": 8,
    "rollout__measure_every": 2,
    "trainer__eval_prompts": 4,
    "trainer__save_every": 2,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """With heads of a size that vLLM's attention knows."""
    return build_policy(tmp_path_factory.mktemp("policy"), head_dim=32)


@pytest.fixture(scope="module")
def launched(tmp_path_factory, model):
    """launched[name]: what both processes report of a run."""
    folder = tmp_path_factory.mktemp("two")
    plan = [("exact", {}), ("off", {"name": "off", "rollout__acceptance": "off", "rollout__measure_every": 0})]
    commands = [(name, words(folder, model=model, **OPTIONS | options)) for name, options in plan]
    (folder / "runs.json").write_text(json.dumps(commands))
    sharding, _, _ = sharded.PROGRAM.partition("import specrl")
    reports, _ = by_two_processes(folder, sharding + PROGRAM, 420, **sharded.FSDP_2)
    return {name: [report[name] for report in reports] for name, _ in plan}


def test_it_is_the_run_without_speculation(launched):
    for a, b in zip(launched["exact"], launched["off"], strict=True):
        for x, y in zip(a["steps"], b["steps"], strict=True):
            assert (x["rows"], x["tokens"], x["rewards"]) == (y["rows"], y["tokens"], y["rewards"])
        assert a["losses"] == b["losses"]
        assert a["weights"] == b["weights"]


def test_both_draft_with_what_either_has_stored(launched):
    first, second = launched["exact"]
    assert first["cache"] == second["cache"]
    assert first["weights"] != second["weights"], "control: they hold parts"
    for report in (first, second):
        assert [step["metrics"]["spec/hit_rate"] for step in report["steps"]] == [0, 0, 1, 1]
        assert all(step["reuse"] > 0.03 for step in report["steps"][2:])
        measured = [step["metrics"]["spec/control_mismatches"] for step in report["steps"][1::2]]
        assert measured == [0, 0]


def test_two_processes_roll_out_what_one_does(launched, model, tmp_path):
    first, second = launched["exact"]
    alone = run(tmp_path, model=model, **OPTIONS)
    for a, b, whole in zip(first["steps"], second["steps"], alone.steps, strict=True):
        halves = {tuple(row): text for s in (a, b) for row, text in zip(s["rows"], s["tokens"], strict=True)}
        assert len(a["rows"]) == len(b["rows"]) == len(whole.rows) // 2
        if whole.step == 0:  # later weights differ by the rounding of sums
            assert halves == dict(zip(whole.rows, whole.tokens, strict=True))
        assert halves.keys() == set(whole.rows)
