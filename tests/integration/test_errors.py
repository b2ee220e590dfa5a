"""What a user can get wrong: one `error:` line, a documented exit code, no traceback, and nothing lost."""

import json
import shutil

import pytest

import specrl.train
from specrl.config import load as cli
from specrl.config.load import RUN_ERROR, USAGE_ERROR
from specrl.reward import loading
from tests.rewards import digits
from tests.runs import build_policy, policy, recorded, run, words

ONE = {"trainer__max_steps": 1}


@pytest.fixture
def refuse(capsys):
    """refuse(words) -> the one error line and the exit code of a run that must not start or go on."""

    def attempt(argv: list[str]) -> tuple[str, int]:
        capsys.readouterr()
        code = cli.run(specrl.train.main, argv)
        lines = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("error: ")]
        assert len(errors) == 1, lines
        assert not any("Traceback" in line for line in lines)
        return errors[0], code

    return attempt


def rows(path, count, text="What is {n} + {n}?"):
    path.write_text("\n".join(json.dumps({"question": text.format(n=n), "answer": str(2 * n)}) for n in range(count)))
    return path


CASES = [
    ({"rollout__replya": 1}, "rollout.replya", "rollout.replay"),
    ({"model": "{d}/torn"}, "torn", "cannot be loaded"),
    ({"model": "{d}/small"}, "tokenizer=", "20"),
    ({"device": "cuda:77"}, "device=cuda:77", "device="),
    ({"output_dir": "{d}/few.jsonl"}, "output_dir=", "Not a directory"),
    ({"output_dir": "/proc/nowhere"}, "output_dir=/proc/nowhere", "cannot be written"),
]
"""Options, what the error names, and the reason or the nearest right value that it gives. More: test_preflight.py."""


@pytest.fixture(scope="module")
def things(tmp_path_factory):
    """A folder with data files and policies, good and bad."""
    folder = tmp_path_factory.mktemp("things")
    rows(folder / "train.jsonl", 12)
    rows(folder / "few.jsonl", 3)
    shutil.copytree(policy(), folder / "torn")
    weights = folder / "torn" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    build_policy(folder / "small", vocab_size=20)
    return folder


@pytest.mark.parametrize(("options", "named", "suggested"), CASES)
def test_bad_input_is_one_line(tmp_path, things, refuse, options, named, suggested):
    options = {key: value.format(d=things) if isinstance(value, str) else value for key, value in options.items()}
    text, code = refuse(words(tmp_path, **(ONE | options)))
    assert code == USAGE_ERROR
    assert named in text
    assert suggested in text
    assert not (tmp_path / "run" / "config.yaml").exists(), "the name stays free"


def snapshot(folder) -> dict:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_used_name_is_refused_and_its_files_stay(tmp_path, refuse):
    began = {"trainer__max_steps": 1, "trainer__lr_schedule": "linear"}
    run(tmp_path, **began)
    before = snapshot(tmp_path)
    for changes, parts in (
        ({}, ("name=", "resume=auto")),
        ({"resume": "auto", "seed": 4, "trainer__learning_rate": 0.5}, ("seed: 0 -> 4", "0.001 -> 0.5")),
        ({"resume": "auto", "trainer__max_steps": 2}, ("trainer.max_steps: 1 -> 2", "trainer.lr_schedule=constant")),
    ):
        text, code = refuse(words(tmp_path, **began | changes))
        assert code == USAGE_ERROR
        assert all(part in text for part in parts)
    assert snapshot(tmp_path) == before


def test_where_the_stored_text_decides_a_damaged_cache_counts_like_weights(tmp_path, refuse):
    lenient = {"rollout__acceptance": "lenient", "trainer__max_steps": 2}
    run(tmp_path, **lenient)
    path = tmp_path / "run" / "checkpoints" / "checkpoint-2" / "trajectories" / "trajectories.parquet"
    path.write_bytes(path.read_bytes()[:-9])
    text, code = refuse(words(tmp_path, resume="auto", **lenient))
    assert (code, "trajectories/trajectories.parquet has " in text) == (RUN_ERROR, True)


def test_other_data_is_refused_on_resume(tmp_path, refuse):
    data = rows(tmp_path / "train.jsonl", 12)
    options = {"data": data, "dataset__train_size": 0, "trainer__max_steps": 2}
    run(tmp_path, **options)
    rows(data, 12, text="What is {n} - {n}?")
    text, code = refuse(words(tmp_path, resume="auto", **options | {"trainer__max_steps": 4}))
    assert code == USAGE_ERROR
    assert f"data={data}" in text
    rows(data, 12)
    assert len(run(tmp_path, resume="auto", **options | {"trainer__max_steps": 3}).steps) == 1


def flip(path):
    """Changes one bit in the middle of the tokens."""
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)


@pytest.mark.slow
def test_a_damaged_cache_in_a_checkpoint_costs_only_its_drafts(tmp_path, caplog):
    uninterrupted = recorded()
    first = run(tmp_path, trainer__max_steps=4)
    flip(tmp_path / "run" / "checkpoints" / "checkpoint-4" / "trajectories" / "trajectories.parquet")
    rest = run(tmp_path, resume="auto", trainer__max_steps=6)
    assert [s.tokens for s in (first + rest).steps] == [s.tokens for s in uninterrupted.steps[:6]]
    assert rest.steps[0].metrics["spec/hit_rate"] == 0
    assert rest.steps[0].metrics["cache/quarantined"] == 1
    assert "trajectories/trajectories.parquet" in caplog.text, "the file is named"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    return folder, run(folder, trainer__epochs=2)


@pytest.mark.slow
def test_the_cache_of_an_earlier_run(finished, tmp_path):
    """It gives drafts from the first step on, and gives way to the new run's own text."""
    folder, earlier = finished
    four, texts = {"trainer__max_steps": 4}, {"rollout__cache__start_from": folder / "run" / "trajectories"}
    plain = run(tmp_path, name="plain", seed=7, rollout__acceptance="off", **four)
    record = run(tmp_path, seed=7, **texts, **four)
    assert [s.tokens for s in record.steps] == [s.tokens for s in plain.steps]
    same = run(tmp_path, name="same", rollout__replay=1, **texts, **four)
    assert all(step.metrics["spec/hit_rate"] == 1 for step in same.steps)
    assert same.steps[0].tokens == earlier.steps[0].tokens, "the same policy with the same noise"
    assert same.steps[0].reuse > 0.2
    short = run(tmp_path, name="short", **texts, **ONE)
    cache = short.trainer.rollouts.source.cache
    for step in short.steps:
        for (example, sample_index), tokens in zip(step.rows, step.tokens, strict=True):
            assert list(cache.get(example, sample_index).tokens) == tokens, (
                "the newer text is kept, although the old run counted further"
            )
    assert all(step.metrics["spec/draft_age"] >= 0 for step in same.steps)


@pytest.mark.slow
def test_the_cache_of_another_tokenizer_is_refused(finished, tmp_path, refuse):
    other = build_policy(tmp_path / "other")
    data = json.loads((other / "tokenizer.json").read_text())
    vocabulary = data["model"]["vocab"]
    vocabulary["Tom"], vocabulary["Ben"] = vocabulary["Ben"], vocabulary["Tom"]
    (other / "tokenizer.json").write_text(json.dumps(data))
    source = finished[0] / "run" / "trajectories"
    before = snapshot(source)
    text, code = refuse(words(tmp_path, **ONE, model=other, rollout__cache__start_from=source))
    assert code == RUN_ERROR
    assert "tokenizer" in text
    assert snapshot(source) == before


def test_the_cache_of_another_model(finished, tmp_path, refuse):
    """Its texts are good drafts, but the log-probs that the lenient rule compares are those of another model."""
    other, source = build_policy(tmp_path / "other", seed=5), finished[0] / "run" / "trajectories"
    plain = run(tmp_path, name="plain", model=other, rollout__acceptance="off", **ONE)
    exact = run(tmp_path, name="exact", model=other, rollout__cache__start_from=source, **ONE)
    assert exact.steps[0].tokens == plain.steps[0].tokens
    text, code = refuse(
        words(tmp_path, **ONE, model=other, rollout__cache__start_from=source, rollout__acceptance="lenient")
    )
    assert code == RUN_ERROR
    assert "model" in text


def test_another_data_set_is_refused(finished, tmp_path, things, refuse):
    source = finished[0] / "run" / "trajectories"
    data = things / "train.jsonl"
    text, code = refuse(words(tmp_path, **ONE, data=data, rollout__cache__start_from=source))
    assert code == RUN_ERROR
    assert "'arithmetic:easy'" in text


@pytest.mark.slow
def test_a_reward_that_breaks_stops_the_run_and_keeps_what_is_done(tmp_path, capsys, monkeypatch):
    calls = iter(range(10**6))

    def breaking(prompt, completion, answer):
        return digits(prompt, completion, answer) if next(calls) < 48 else 1 / 0

    with monkeypatch.context() as patch:
        patch.setattr(loading, "load_reward", lambda *_: loading.FunctionReward(breaking, "digits"))
        code = cli.run(specrl.train.main, words(tmp_path, trainer__save_every=1))
    first, *traceback = capsys.readouterr().err.splitlines()
    assert code == RUN_ERROR
    assert first.startswith("error: ")
    assert "'digits'" in first
    assert "16 of the last 64 rows" in first
    assert traceback[-1] == "ZeroDivisionError: division by zero", "the user's own traceback explains it"
    assert not any(line.startswith("error:") for line in traceback)
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").glob("checkpoint-*")) == [
        "checkpoint-2",
        "checkpoint-3",
    ]
    rest = run(tmp_path, trainer__save_every=1, resume="auto")
    assert [step.step for step in rest.steps] == [3, 4, 5, 6, 7, 8]
