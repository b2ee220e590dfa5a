"""One run on two CPU processes: one cache in both, and the same training as without speculation."""

import json
import signal
from pathlib import Path

import pytest

from specrl.results.records import read_records
from tests.runs import SPARE_VLLM, by_two_processes, policy, run, start_two_processes, words

pytestmark = pytest.mark.long
OPTIONS = {"rollout__replay": 0.5, "trainer__epochs": 2, "trainer__save_every": 4, "trainer__eval_prompts": 4}
PPO = {"config": "ppo_math", "trainer__updates_per_rollout": 2, "trainer__beta": 0.05, "trainer__eval_prompts": 0}
DAPO = {"config": "dapo_math", "trainer__overlong_buffer": 0, "trainer__prompts_per_step": 3}
DAPO |= {"reward__functions": "[tests.rewards:sixth]", "trainer__eval_prompts": 0}  # its groups cross the processes
SLOW = {"rollout__measure_every": 1, "rollout__replay": 0, "trainer__epochs": 1}

# What each process does: the runs NAME=COMMAND LINE of a JSON file, one after the other; it reports on each what it
# rolled out and holds at the end. "exact" writes its report, too.
PROGRAM = """
import json, os, sys, time
from contextlib import nullcontext
from pathlib import Path
import tests.runs as runs
import specrl.run.run
import specrl.train
from specrl.config import load as config
from specrl.run.data import load_examples
from tests.engines import Spare

build, build_engine = specrl.run.run.build_trainer, specrl.run.run.build_engine

def slow(*args):
    engine = build_engine(*args)
    generate = engine.generate

    def late(*asked):
        time.sleep(int(os.environ["RANK"]))
        return generate(*asked)

    engine.generate = late
    return engine

def recorded(name, words):
    record, spare = runs.Recording(), lambda spec, *_: Spare(build_engine(spec))
    specrl.run.run.build_engine = spare if "ahead" in name else slow if name == "slow" else build_engine

    def listened(*args):
        record.trainer = build(*args)
        runs.listen(record.trainer, record)
        return record.trainer

    specrl.run.run.build_trainer = listened
    with nullcontext() if name == "exact" else runs.unreported():
        if config.run(specrl.train.main, words):
            raise SystemExit(1)
    cache = record.trainer.rollouts.source.cache
    options = config.load(words)
    ids = sorted(example.id for example in load_examples(options.data, options.dataset, "train", options.seed))
    held = [(e, s, cache.get(e, s)) for e in ids for s in range(4) if cache and cache.get(e, s)]
    names = ("step", "rows", "tokens", "rewards", "metrics", "reuse")
    return {
        "steps": [{name: getattr(step, name) for name in names} for step in record.steps],
        "cache": [[e, s, t.tokens, t.key, t.reward, t.step] for e, s, t in held],
        "weights": {name: tensor.double().sum().item() for name, tensor in record.weights.items()},
        "losses": record.losses,
    }

folder = Path(sys.argv[1])
found = {name: recorded(name, words) for name, words in json.loads((folder / "runs.json").read_text())}
(folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))
"""

# The command line of a run, whose second process is killed while it generates for the first time after checkpoint-4.
DYING = """
import os, signal, sys
from pathlib import Path
import specrl.run.run
import specrl.train
from specrl.config import load as config

build_engine, words = specrl.run.run.build_engine, sys.argv[1:]
marker = config.run_dir(config.load(words)) / "checkpoints" / "checkpoint-4" / "specrl.json"

def dying(*args):
    engine = build_engine(*args)
    generate = engine.generate

    def generated(*asked):
        if os.environ["RANK"] == "1" and marker.exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return generate(*asked)

    engine.generate = generated
    return engine

specrl.run.run.build_engine = dying
raise SystemExit(config.run(specrl.train.main, words))
"""


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """launched[name]: what both processes report of a run. They are started as torchrun starts them."""
    folder = tmp_path_factory.mktemp("two")
    plan = [
        ("exact", {}),
        ("off", {"name": "off", "rollout__acceptance": "off"}),
        ("ahead", {"name": "ahead"}),
        ("first", {"name": "cut", "trainer__max_steps": 4}),  # ends in the middle of an epoch
        ("rest", {"name": "cut", "resume": "auto"}),
        ("dapo", DAPO | {"name": "dapo"}),
        ("ppo", PPO | {"name": "ppo"}),
        ("slow", SLOW | {"name": "slow", "rollout__fill": 64}),
        ("plain", SLOW | {"name": "plain", "rollout__acceptance": "off"}),
    ]
    commands = [(name, words(folder, model=policy(), **OPTIONS | options)) for name, options in plan]
    (folder / "runs.json").write_text(json.dumps(commands))
    reports, _ = by_two_processes(folder, SPARE_VLLM + PROGRAM, 420)
    return {"folder": folder, **{name: [report[name] for report in reports] for name, _ in plan}}


def test_both_took_part_and_end_with_the_same_weights_and_the_same_cache(launched):
    first, second = launched["exact"]
    assert len(first["steps"]) == len(second["steps"]) == 6
    for a, b in zip(first["steps"], second["steps"], strict=True):
        rows = [tuple(row) for row in a["rows"] + b["rows"]]
        assert len(rows) == len(set(rows)) == 16, "each row of the step in one of the processes"
    owners = [
        {row[0]: rank for rank in (0, 1) for s in launched["exact"][rank]["steps"][e : e + 3] for row in s["rows"]}
        for e in (0, 3)
    ]
    assert any(owners[0][example] != owners[1][example] for example in owners[0]), "examples move between processes"
    assert first["cache"] == second["cache"]
    assert first["weights"] == second["weights"]
    assert len(first["cache"]) == 12 * 4
    assert {entry[5] for entry in first["cache"]} == {3, 4, 5}
    for report in (first, second):
        assert [step["metrics"]["spec/hit_rate"] for step in report["steps"]] == [0] * 3 + [1] * 3
        assert all(step["reuse"] > 0.1 for step in report["steps"][3:])


@pytest.mark.parametrize(("name", "off"), [("exact", "off"), ("ahead", "off"), ("slow", "plain")])
def test_it_is_the_run_without_speculation(launched, name, off):
    """With a drafter that is trained: test_sharded.py."""
    for a, b in zip(launched[name], launched[off], strict=True):
        for x, y in zip(a["steps"], b["steps"], strict=True):
            assert (x["rows"], x["tokens"], x["rewards"]) == (y["rows"], y["tokens"], y["rewards"])
        assert a["losses"] == b["losses"]
        assert a["weights"] == b["weights"]


def test_each_process_knows_the_rows_that_come_to_it(launched):
    for report in launched["ahead"]:
        assert all(step["metrics"]["spec/ahead_done_ratio"] == 1 for step in report["steps"][1:])


def test_a_process_that_is_done_goes_on_with_the_next_batch_until_all_are(launched):
    """One of them sleeps for long enough to end all rows of the next batch, the other waits for nobody."""
    first, second = ([step["metrics"] for step in report["steps"][1:]] for report in launched["slow"])
    assert [step["spec/ahead_done_ratio"] for step in first] == [1] * len(first)
    assert min(step["spec/ahead_done_ratio"] for step in second) < 1


def test_reported_seconds_are_those_of_the_slowest_process(launched):
    """One of them sleeps before it generates; what each measured of itself is the truth."""
    lines = read_records(launched["folder"] / "slow" / "metrics.jsonl")[0]
    lines = [line for line in lines if "loss" in line]
    first, second = ([step["metrics"] for step in report["steps"]] for report in launched["slow"])
    assert len(lines) == len(first) == 3
    for line, a, b in zip(lines, first, second, strict=True):
        gen, plain = (max(a[key], b[key]) for key in ("timing_s/gen", "spec/plain_s"))
        assert (line["timing_s/gen"], line["spec/plain_s"]) == (gen, plain)
        assert line["spec/speedup"] == pytest.approx(plain / gen)
        assert line["timing_s/gen"] > 0.3, "the planted sleep"
        assert line["spec/speedup"] != pytest.approx((a["spec/speedup"] + b["spec/speedup"]) / 2), "power"
        assert 0 < line["timing_s/update"] < line["timing_s/step"]


def test_one_process_writes_the_run(launched):
    run = launched["folder"] / "run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 7))
    assert [line["step"] for line in lines if "eval/reward" in line] == [0, 6], "evaluated once, not once a process"
    assert not any(line["cache/write_errors"] for line in lines if "loss" in line)
    names = {path.name for path in run.iterdir()}
    assert {"config.yaml", "metrics.jsonl", "model", "trajectories", "checkpoints", "report.md"} <= names
    assert sorted(p.name for p in (run / "checkpoints").glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-6"]


def test_a_resumed_run_is_the_uninterrupted_run(launched):
    for whole, a, b in zip(*(launched[name] for name in ("exact", "first", "rest")), strict=True):
        assert (len(a["steps"]), len(b["steps"])) == (4, 2)
        steps = a["steps"] + b["steps"]
        assert [step["rows"] for step in steps] == [step["rows"] for step in whole["steps"]]
        assert [step["tokens"] for step in steps] == [step["tokens"] for step in whole["steps"]]
        assert a["losses"] + b["losses"] == whole["losses"]
        assert b["weights"] == whole["weights"]


def test_both_replace_the_same_groups_as_one_process_would(launched, tmp_path):
    first, second = launched["dapo"]
    alone = run(tmp_path, **OPTIONS | DAPO)
    a, b, whole = first["steps"][0], second["steps"][0], alone.steps[0]
    assert [tuple(row) for row in a["rows"][:6] + b["rows"][:6]] == whole.rows[:12]
    rows = [tuple(row) for row in a["rows"] + b["rows"]]
    texts = dict(zip(rows, a["tokens"] + b["tokens"], strict=True))
    assert texts == dict(zip(whole.rows, whole.tokens, strict=True)), "the same further prompts, in halves"
    assert len(rows) == len(set(rows)) > 12
    for x, y in zip(first["steps"], second["steps"], strict=True):
        assert len(x["rows"]) == len(y["rows"]), "each process rolls out half of the further prompts"
    assert first["weights"] == second["weights"]
    walked = same_metrics(launched["folder"] / "dapo", tmp_path / "run")
    assert {"rewards/sixth/mean", "refill/prompts", "cache/entries", "spec/hit_rate"} <= walked


def same_metrics(two: Path, one: Path, but: tuple[str, ...] = ()) -> set[str]:
    """Asserts that two processes report of each step what one does, whose rows it has; returns the keys.

    Left out is what the clock decides, and what drafts do: they come from the texts that a process has begun.
    """
    others = ("timing_s/", "perf/", "step_time", "time", "spec/", "cache/size", "cache/write", *but)
    stored = {"spec/hit_rate", "spec/full_reuse_ratio", "spec/draft_age"}
    walked = set()
    records = [read_records(folder / "metrics.jsonl")[0] for folder in (two, one)]
    for a, b in zip(*records, strict=True):
        keys = {key for key in a.keys() | b.keys() if key in stored or not key.startswith(others)}
        for key in keys:
            assert a.get(key) == pytest.approx(b.get(key), rel=1e-3, abs=1e-4), (a["step"], key)
        walked |= keys
    return walked


def test_ppo_on_two_processes_is_ppo_on_one(launched, tmp_path):
    """The same tokens, advantages over all rows and gradients; sums round differently, no more."""
    first, second = launched["ppo"]
    alone = run(tmp_path, **OPTIONS | PPO)
    for a, b, whole in zip(first["steps"], second["steps"], alone.steps, strict=True):
        assert [tuple(row) for row in a["rows"] + b["rows"]] == whole.rows
        assert a["tokens"] + b["tokens"] == whole.tokens
    losses = [(x + y) / 2 for x, y in zip(first["losses"], second["losses"], strict=True)]
    assert losses == pytest.approx(alone.losses, abs=1e-4)
    assert losses != pytest.approx([loss * 2 for loss in alone.losses], abs=1e-4), "a process's own count would show"
    assert first["weights"] == second["weights"]
    for key, tensor in alone.weights.items():
        assert first["weights"][key] == pytest.approx(tensor.double().sum().item(), abs=1e-2)
    walked = same_metrics(launched["folder"] / "ppo", tmp_path / "run")
    assert {"spec/full_reuse_ratio", "sampling/sampling_logp_difference/max", "kl"} <= walked


def test_a_process_that_is_killed_ends_the_other_and_the_run_resumes(launched, tmp_path):
    """The other one, whose passes take rows of the next batch, waits for it in a sum."""
    options = words(tmp_path, model=policy(), **OPTIONS | {"rollout__fill": 64})
    processes = start_two_processes(SPARE_VLLM + DYING, options)
    (error, _), _ = (process.communicate(timeout=300) for process in processes)
    assert processes[1].returncode == -signal.SIGKILL
    assert processes[0].returncode not in (0, -signal.SIGKILL), error[-3000:]
    (tmp_path / "runs.json").write_text(json.dumps([("rest", [*options, "resume=auto"])]))
    reports, _ = by_two_processes(tmp_path, SPARE_VLLM + PROGRAM, 300)
    for whole, report in zip(launched["exact"], reports, strict=True):
        rest = report["rest"]
        assert [step["tokens"] for step in rest["steps"]] == [step["tokens"] for step in whole["steps"][4:]]
        assert rest["weights"] == whole["weights"]
