import json
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specrl.config import load as cli
from specrl.results.records import read_records
from specrl.reward.set import RewardResult
from specrl.rollout.reduction import Metric, merged
from specrl.run.data import Example
from specrl.run.lora import adapter
from specrl.run.prompts import Prompt
from specrl.run.run import scorer
from specrl.tiny import load_tiny
from tests.runs import SHORT, Watch, policy, run, words

EVERY_STEP = {
    *("step", "time", "loss", "grad_norm", "learning_rate", "epoch", "reward", "reward_std", "frac_reward_zero_std"),
    *("entropy", "num_tokens", "rewards/digits/mean", "reward/failed", "reward/timeouts", "reward/over_limit"),
    *(f"completions/{kind}_length" for kind in ("min", "mean", "max")),
    "completions/clipped_ratio",
    *(f"timing_s/{part}" for part in ("step", "gen", "lookup", "store", "prefill", "draft", "verify", "decode")),
    *("timing_s/reward", "timing_s/update"),
    *("spec/hit_rate", "spec/reused_ratio", "spec/full_reuse_ratio", "spec/reused_tokens", "spec/new_tokens"),
    *("spec/passes_per_row", "spec/passes_max", "spec/forward_tokens", "spec/ties", "spec/tried_s"),
    "perf/throughput",
    *("cache/size_mb", "cache/entries", "cache/examples", "cache/evictions", "cache/dropped", "cache/skipped"),
    *("cache/quarantined", "cache/write_errors"),
    *("sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max"),
}
WITH_DRAFTS = {"spec/draft_age", "spec/draft_acceptance_rate"}
CONTROL = {"spec/speedup", "spec/plain_s", "spec/control_mismatches", "timing_s/control"}
CONTROL |= {"spec/compared_tokens", "spec/flips_per_1k"}


@pytest.fixture(scope="module")
def watch():
    return Watch()


@pytest.fixture(scope="module")
def finished(tmp_path_factory, watch):
    """A run with everything on, and what it recorded."""
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("finished")
    options = {
        "rollout__replay": 1,
        "rollout__measure_every": 2,
        "trainer__epochs": 2,
        "trainer__eval_prompts": 8,
        "trainer__eval_every": 4,
        "trainer__log_completions_every": 3,
        "trainer__save_every": 4,
        "report__plots": "true",
    }
    return folder / "run", run(folder, watch, report=True, **options)


def records(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_run_directory(finished):
    folder, _ = finished
    names = ["checkpoints", "completions", "config.yaml", "digests.jsonl", "environment.json", "evaluations"]
    names += ["metrics.jsonl", "model", "report.json", "report.md", "report.png", "run.lock", "trajectories"]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert sorted(p.name for p in (folder / "checkpoints").glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-6"]
    assert sorted(p.name for p in (folder / "completions").iterdir()) == [f"step_{step}.parquet" for step in (1, 3, 6)]
    assert (folder / "report.png").read_bytes()[:4] == b"\x89PNG"
    assert "# " in (folder / "report.md").read_text()
    assert (
        json.loads((folder / "environment.json").read_text())
        == json.loads((folder / "report.json").read_text())["environment"]
    )


def test_metrics_have_one_line_per_step_with_every_key(finished, watch):
    lines = records(finished[0])
    trained = [line for line in lines if "loss" in line]
    assert [line["step"] for line in trained] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines if "eval/reward" in line] == [0, 4, 6]
    for line in trained:
        assert line.keys() >= EVERY_STEP
        watch.check(line)
        assert line["spec/reused_tokens"] + line["spec/new_tokens"] == sum(
            map(len, finished[1].steps[line["step"] - 1].tokens)
        )
    assert all(line.keys() >= WITH_DRAFTS for line in trained[3:])
    assert not any("spec/draft_age" in line for line in trained[:3]), "no prompt has an old text yet"
    assert [line.keys() >= CONTROL for line in trained] == [False, True] * 3
    assert ["spec/reuse_gap" in line for line in trained] == [False, False, False, True, False, True]
    assert ["timing_s/cache_save" in line for line in trained] == [False] * 4 + [True, False], "of the step before"
    times = [line["time"] for line in trained]
    assert times == sorted(times)


def test_rewards_in_the_metrics_are_those_of_the_responses(finished):
    folder, record = finished
    for line, step in zip([line for line in records(folder) if "loss" in line], record.steps, strict=True):
        assert line["reward"] == pytest.approx(sum(step.rewards) / len(step.rewards))
        assert line["rewards/digits/mean"] == pytest.approx(line["reward"])
        assert line["completions/mean_length"] == pytest.approx(sum(map(len, step.tokens)) / len(step.tokens))


@pytest.mark.slow
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_nothing_is_learned_where_every_group_is_alike(tmp_path, capsys, scale):
    options = {"trainer__scale_rewards": scale, "reward__functions": "[tests.rewards:by_prompt]"}
    run(tmp_path, **SHORT | {"trainer__epochs": 3, "dataset__train_size": 6, "trainer__prompts_per_step": 3}, **options)
    assert {line["frac_reward_zero_std"] for line in records(tmp_path / "run") if "loss" in line} == {1.0}
    assert "Nothing is learned" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_a_run_that_learns_nothing_says_so_and_keeps_its_first_and_last_responses(tmp_path, capsys):
    rare = {"trainer__log_completions_every": 64}
    run(tmp_path, **SHORT | {"trainer__epochs": 3}, **rare, reward__functions="[tests.rewards:nothing]")
    kept = tmp_path / "run" / "completions"
    assert sorted(path.name for path in kept.iterdir()) == ["step_1.parquet", "step_6.parquet"]
    assert set(pq.read_table(kept / "step_1.parquet").to_pydict()["reward"]) == {0.0}
    assert [line["loss"] for line in records(tmp_path / "run")] == [0.0] * 6
    text = " ".join(capsys.readouterr().out.split())
    assert text.count("Nothing is learned: in the last 5 rollouts") == 1
    assert text.index("Step 5/6") < text.index("Nothing is learned") < text.index("Step 6/6")


def test_completions_are_readable_and_complete(finished):
    folder, record = finished
    table = pq.read_table(folder / "completions" / "step_6.parquet").to_pydict()
    step, tokenizer = record.steps[5], AutoTokenizer.from_pretrained(policy())
    assert list(zip(table["example_id"], table["sample_index"], strict=True)) == step.rows
    assert table["completion"] == tokenizer.batch_decode(step.tokens, skip_special_tokens=True)
    assert (table["reward"], table["finish"]) == (step.rewards, step.finish)
    assert table["tokens"] == step.tokens
    assert table["versions"] == [[step.step] * len(tokens) for tokens in step.tokens]
    assert table["reused_tokens"] == [sum(reused) for reused in step.reused]
    assert all("How many" in prompt for prompt in table["prompt"])


def test_the_model_loads_with_the_auto_classes_and_is_the_trained_one(finished):
    folder, record = finished
    model = AutoModelForCausalLM.from_pretrained(folder / "model", local_files_only=True)
    AutoTokenizer.from_pretrained(folder / "model", local_files_only=True)
    weights, first = record.weights, AutoModelForCausalLM.from_pretrained(policy()).state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert not all(torch.equal(tensor, first[name]) for name, tensor in model.state_dict().items())


def test_the_trained_model_can_be_trained_again(finished, tmp_path):
    folder, _ = finished
    more = run(
        tmp_path, model=folder / "model", rollout__cache__start_from=folder / "trajectories", trainer__max_steps=1
    )
    assert more.steps[0].metrics["spec/hit_rate"] == 1


@pytest.mark.slow
def test_a_finished_run_resumes_to_nothing_and_a_longer_one_goes_on(tmp_path):
    run(tmp_path, trainer__epochs=1)
    before = records(tmp_path / "run")
    assert run(tmp_path, trainer__epochs=1, resume="auto").steps == []
    assert records(tmp_path / "run") == before
    more = run(tmp_path, trainer__epochs=2, resume="auto")
    assert [step.step for step in more.steps] == [3, 4, 5]
    assert [line["step"] for line in records(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("options", "prompts", "expected"),
    [
        ({"trainer__epochs": 3}, 12, 9),
        ({"trainer__epochs": 3}, 15, 9),
        ({"trainer__epochs": 2, "trainer__updates_per_rollout": 2}, 12, 12),
        ({"trainer__epochs": 3, "trainer__max_steps": 5}, 12, 5),
        ({"trainer__epochs": 1, "trainer__max_steps": 5}, 12, 5),
    ],
)
def test_steps(tmp_path, options, prompts, expected):
    assert cli.load(words(tmp_path, **options)).trainer.total_steps(prompts) == expected


@pytest.mark.slow
def test_a_crash_before_the_first_checkpoint_leaves_each_step_once_after_the_resume(tmp_path, monkeypatch):
    options = {"trainer__max_steps": 4, "trainer__eval_prompts": 2}

    def crash(trainer):
        finish, done = trainer.rollouts.finish, iter(range(2))
        trainer.rollouts.finish = lambda: finish() if next(done, None) is not None else 1 / 0

    with pytest.raises(ZeroDivisionError):
        run(tmp_path, prepare=crash, **options)
    (tmp_path / "run" / "metrics.jsonl").open("a").write('{"step": 3, "rew')
    assert [line["step"] for line in read_records(tmp_path / "run" / "metrics.jsonl")[0]] == [0, 1, 2]
    run(tmp_path, resume="auto", **options)
    lines = records(tmp_path / "run")
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4]
    assert [line["step"] for line in lines if "eval/reward" in line] == [0, 4]


@pytest.mark.slow
def test_off_for_a_while_and_back_goes_on_with_an_empty_cache(tmp_path):
    whole = run(tmp_path, name="whole", trainer__max_steps=6)
    run(tmp_path, trainer__max_steps=2)
    run(tmp_path, trainer__max_steps=4, rollout__acceptance="off", resume="auto")
    rest = run(tmp_path, trainer__max_steps=6, resume="auto")
    assert [step.tokens for step in rest.steps] == [step.tokens for step in whole.steps[4:]]
    assert rest.steps[0].metrics["spec/hit_rate"] == 0


def test_scorer_hands_over_the_columns_and_counts_failures():
    from specrl.reward.set import RewardSet

    class Echo:
        name = "echo"

        def __call__(self, samples):
            self.samples = samples
            return [None, 2.0, 4.0]

    echo = Echo()
    tokenizer = AutoTokenizer.from_pretrained(policy())
    example = Example("e", "p", None, {"level": 3, "share": 0.5, "tests": [1, "2"]})
    prompts = {"e": Prompt([5], "the prompt", None, example)}
    score = scorer(RewardSet([echo], [0.5]), tokenizer, prompts)
    rows = [{"prompt": "p", "example_id": "e"}] * 3
    totals, metrics = score(rows, [tokenizer(text).input_ids for text in "789"])
    assert totals == [None, 1.0, 2.0]
    counts = {"reward/failed": 1, "reward/timeouts": 0, "reward/over_limit": 0, "reward/reused_ratio": 0}
    assert metrics == {**counts, "rewards/echo/mean": 3.0}
    assert [s.completion for s in echo.samples] == ["7", "8", "9"]
    assert (echo.samples[0].prompt, echo.samples[0].answer) == ("the prompt", None)
    assert echo.samples[0].fields is example.fields, "as an evaluation has them, no type of a table between"


@pytest.mark.parametrize("how", [Metric.later, Metric.beside])
def test_scores_of_parts_of_a_batch_are_counted_as_those_of_the_whole(how):
    def result(rows: int, per_row: int) -> RewardResult:
        parts = {"a": [None, *range(1, rows)], "b": [per_row] * rows}
        total = [None if value is None else value + per_row for value in parts["a"]]
        counts = {"timeouts": per_row, "over_limit": per_row + 1, "reused": per_row + 2}
        return RewardResult(total, parts, **{name: {"a": n, "b": 2} for name, n in counts.items()})

    def metrics(*results: RewardResult) -> dict[str, Metric]:
        rewards = SimpleNamespace(score=lambda samples: results[0])
        rows = [{"example_id": "e"}] * len(results[0].total)
        tokenizer = SimpleNamespace(batch_decode=lambda ids, **_: [""] * len(ids))
        prompt = Prompt([5], "p", None, Example("e", "p", None, {}))
        return scorer(rewards, tokenizer, {"e": prompt})(rows, [[1]] * len(rows))[1]

    few, many = result(2, 1), result(5, 3)
    both = RewardResult(few.total + many.total, {name: few.parts[name] + many.parts[name] for name in "ab"})
    for name in ("timeouts", "over_limit", "reused"):
        one, other = getattr(few, name), getattr(many, name)
        getattr(both, name).update({key: one[key] + other[key] for key in one})
    whole = metrics(both)
    assert merged([metrics(few), metrics(many)], how) == pytest.approx(whole)
    assert all(whole[name] != metrics(few)[name] for name in whole if name != "reward/failed"), "power"


def test_options_of_lora_reach_the_adapter(tmp_path):
    options = cli.load(words(tmp_path, lora__rank=8, lora__alpha=16, lora__targets="[q_proj]")).lora
    made = adapter(options, load_tiny()[0])
    assert (made.r, made.lora_alpha, made.target_modules) == (8, 16.0, {"q_proj"})


@pytest.mark.slow  # a run
def test_prompts_of_one_token_still_check_the_weights_of_the_engine(tmp_path):
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps({"question": str(n), "answer": "1"}) + "\n" for n in range(4)))
    probes = []

    def listen(trainer):
        real = trainer.rollouts.engine.score
        trainer.rollouts.engine.score = lambda tokens: probes.append(len(tokens)) or real(tokens)

    done = run(tmp_path, listen, **SHORT | {"dataset__train_size": 0}, data=data, rollout__measure_every=1)
    assert len(done.steps) == 4
    assert probes
    assert min(probes) > 1, "the first token of a prompt has no log-prob"
