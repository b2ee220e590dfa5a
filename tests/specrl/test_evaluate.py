import json
from dataclasses import dataclass, replace
from itertools import combinations

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.tiny_policy import build_tokenizer
from specrl import evaluate as evaluate_command
from specrl.config.load import load, run, save
from specrl.config.schema import Config
from specrl.evaluate import EvaluateConfig, main, serving
from specrl.evaluate import command as command_line
from specrl.results.records import EVALUATION_COST, load_run
from specrl.reward.set import RewardSet
from specrl.rollout.build import build_engine
from specrl.rollout.cache.memory import Fingerprint, TrajectoryCache
from specrl.rollout.config import RolloutConfig
from specrl.rollout.engines.base import EngineSpec
from specrl.rollout.keys import derive_key
from specrl.rollout.speculative import SpeculativeRollout
from specrl.rollout.types import Completion, EngineStats, Request, Row
from specrl.run.accuracy import evaluate, pass_at_k
from specrl.run.data import Example
from tests import runs
from tests.runs import SHORT, policy
from tests.runs import run as train_run


@pytest.mark.parametrize(
    ("n", "correct", "k", "expected"),
    [
        (1, 0, 1, 0.0),
        (2, 1, 2, 1.0),
        (4, 2, 2, 5 / 6),  # of the 6 pairs only the pair of wrong ones fails
        (10, 3, 5, 1 - 21 / 252),  # C(7, 5) / C(10, 5), Chen et al. 2021
    ],
)
def test_pass_at_k(n, correct, k, expected):
    assert pass_at_k(n, correct, k) == pytest.approx(expected)
    drawn = [any(i < correct for i in chosen) for chosen in combinations(range(n), k)]
    assert sum(drawn) / len(drawn) == pytest.approx(expected), "by counting all draws of k"


@pytest.fixture
def trained(tmp_path):
    """The directory of a run with a config of its own, and a model folder."""
    (tmp_path / "mine" / "model").mkdir(parents=True)
    made = Config(name="mine", output_dir=str(tmp_path), seed=3)
    made.dataset.train_size = made.dataset.test_size = 5
    save(made)
    return tmp_path / "mine"


def test_run_brings_its_config_and_its_model(trained, monkeypatch):
    asked = []
    monkeypatch.setattr(evaluate_command, "main", asked.append)
    assert command_line([f"run={trained}", "samples=2"]) == 0
    assert command_line([f"run={trained}", "model=tiny"]) == 0
    model = str(trained / "model")
    assert [(c.model, c.seed, c.dataset.test_size) for c in asked] == [(model, 3, 5), ("tiny", 3, 5)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run=no-such-run"], "No run at no-such-run."),
        (["run={}", "config=grpo_math"], "run=DIR brings its own config."),
        (["run={}"], "has no model: a run writes it when it ends. Give model=PATH too"),
        (["path={}", "config=grpo_math"], "Unknown option 'path'."),
    ],
)
def test_mistakes_with_run_are_one_line(trained, capsys, words, message):
    (trained / "model").rmdir()
    assert command_line([word.format(trained) for word in words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@dataclass
class Scripted:
    """An engine whose responses are scripted by key, and a reward that reads them."""

    answers: dict[int, int]
    """Noise key -> response token."""
    weight_version: int = 0

    def generate(self, requests):
        self.requests = requests
        tokens = [self.answers[r.key] for r in requests]
        return [self.respond(token) for token in tokens], EngineStats()

    @staticmethod
    def respond(token):
        return Completion([token, 1], [0.0, 0.0], [0.0, 0.0], [False] * 2, "stop", 0, 2)


class Digit:
    """The digit that was said; 9 cannot be scored."""

    name, verifiable = "digit", True

    def __call__(self, samples):
        return [None if s.completion == "9" else float(s.completion) for s in samples]


def assess(script: list[str], weights=(), *others):
    """`script`: for each example one digit per sample."""
    tokenizer = build_tokenizer()
    examples = [Example(f"e{i}", f"Tom has {i} apples.", "3", {}) for i in range(len(script))]
    answers = {
        derive_key(5, example.id, i, 0, "eval"): tokenizer.convert_tokens_to_ids(digit)
        for example, digits in zip(examples, script, strict=True)
        for i, digit in enumerate(digits)
    }
    engine, rewards = Scripted(answers), RewardSet([Digit(), *others], weights)
    config = Config(seed=5, rollout=RolloutConfig(max_new_tokens=7))
    rollout = SpeculativeRollout(engine, None, config.rollout, config.seed)
    metrics = evaluate(rollout, tokenizer, examples, rewards, config, len(script[0]))
    return {name: value for name, value in metrics.items() if name not in EVALUATION_COST}, engine


def test_metrics_by_hand():
    metrics, engine = assess(["1000", "1100"])
    assert metrics == {
        "eval/reward": 3 / 8,
        "eval/mean_length": 2.0,
        "eval/failed": 0,
        "eval/pass@1": (1 / 4 + 2 / 4) / 2,
        "eval/pass@2": (1 / 2 + 5 / 6) / 2,
        "eval/pass@4": 1.0,
    }
    assert {r.max_new_tokens for r in engine.requests} == {7}
    assert all(r.drafter is None for r in engine.requests), "the first evaluation drafts nothing"
    assert len({r.key for r in engine.requests}) == 8


def test_only_a_full_score_is_right(monkeypatch):
    assert assess(["2100"])[0]["eval/pass@1"] == 0.5, "or more, as some rewards give for a better proof"
    assert assess(["11"], weights=[0.1])[0]["eval/pass@1"] == 1.0
    scored = Digit.__call__
    monkeypatch.setattr(Digit, "__call__", lambda self, samples: [score / 2 for score in scored(self, samples)])
    metrics, _ = assess(["1211"])
    assert (metrics["eval/reward"], metrics["eval/pass@1"]) == (5 / 8, 1 / 4)


def test_failures_are_left_out_and_never_zeros():
    metrics, _ = assess(["1990", "1111"])
    assert metrics["eval/failed"] == 2
    assert metrics["eval/reward"] == 5 / 6
    assert metrics["eval/pass@1"] == (1 / 2 + 1) / 2
    assert metrics["eval/pass@2"] == 1.0
    assert metrics["eval/pass@4"] == 1.0, "a prompt with two scored responses says nothing about four"


def test_when_nothing_can_be_scored_there_is_no_number():
    assert assess(["99", "99"])[0] == {"eval/failed": 4, "eval/mean_length": 2.0}


def test_the_length_is_that_of_what_the_policy_sampled(monkeypatch):
    """Tokens of tools are in a conversation too."""
    respond = Scripted.respond
    monkeypatch.setattr(Scripted, "respond", lambda self, token: replace(respond(token), mask=[1, 0]))
    assert assess(["11"])[0]["eval/mean_length"] == 1.0


class Length:
    """A reward that is 1 for every response, right or wrong."""

    name = "length"

    def __call__(self, samples):
        return [1.0 for _ in samples]


class Nothing(Length):
    """A reward that never has a score."""

    def __call__(self, samples):
        return [None for _ in samples]


@pytest.mark.parametrize("weights", [[4.0, 1.0], [0.5, 1.0], [0.0, 1.0]])
def test_pass_at_k_is_that_of_the_verifiable_reward_whatever_the_total(weights):
    metrics, _ = assess(["1000", "0000"], weights, Length())
    assert metrics["eval/reward"] == weights[0] / 8 + 1.0
    assert (metrics["eval/pass@1"], metrics["eval/pass@4"]) == (1 / 8, 1 / 2)
    assert assess(["1000", "0000"], weights, Nothing())[0]["eval/pass@4"] == 1 / 2, "another reward that failed"


def test_without_a_verifiable_reward_there_is_no_pass_at_k(monkeypatch):
    monkeypatch.setattr(Digit, "verifiable", False)
    metrics, _ = assess(["1000"])
    assert metrics["eval/reward"] == 1 / 4
    assert not [name for name in metrics if "pass" in name]


def command(tmp_path, capsys, *more):
    code = run(main, runs.command(tmp_path, *more), schema=EvaluateConfig, training=False)
    return code, *capsys.readouterr()


def test_the_command_prints_json_and_writes_nothing(tmp_path, capsys):
    code, out, _ = command(tmp_path, capsys, "samples=2")
    result = json.loads(out)
    assert (code, result["prompts"], result["samples"]) == (0, 8, 2)
    figures = {"eval/reward", "eval/mean_length", "eval/failed"}
    counts = {name for name in EVALUATION_COST if not name.endswith("_s")}
    assert result.keys() == {"model", "prompts", "samples", *figures, *counts}, (
        "shares of digits are not right or wrong"
    )
    assert list(tmp_path.iterdir()) == []
    assert json.loads(command(tmp_path, capsys, "samples=2")[1]) == result, "the same policy gives the same numbers"


def test_the_command_has_no_accuracy_when_nothing_could_be_scored(tmp_path, capsys):
    none = ["reward.functions=[tests.rewards:unscored]", "samples=1"]
    code, out, err = command(tmp_path, capsys, *none)
    assert code == 3
    assert json.loads(out)["eval/failed"] == 8
    assert "eval/reward" not in out
    assert "none of the 8 responses" in err
    assert "the reward returned None (no score)" in err


# Drafts from the last evaluation --------------------------------------------------------------------------------------


def evaluated(rollout, samples=2):
    """The metrics of an evaluation of four prompts, and its responses by key."""
    done = {}
    generate = rollout.engine.generate

    def seen(requests):
        completions, stats = generate(requests)
        done.update({r.key: c.tokens for r, c in zip(requests, completions, strict=True)})
        return completions, stats

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollout.engine, "generate", seen)
        tokenizer = build_tokenizer()
        examples = [Example(f"e{i}", f"Tom has {i} apples.", "3", {}) for i in range(4)]
        config = Config(rollout=rollout.config)
        return evaluate(rollout, tokenizer, examples, RewardSet([Digits()]), config, samples), done


class Digits:
    name, verifiable = "digits", False

    def __call__(self, samples):
        return [float(sum(map(str.isdigit, sample.completion))) for sample in samples]


def evaluating(acceptance="exact"):
    model = AutoModelForCausalLM.from_pretrained(policy())
    ends = frozenset(model.generation_config.eos_token_id)
    config = RolloutConfig(acceptance=acceptance, max_new_tokens=24, draft_tokens=8)
    engine = build_engine(EngineSpec(eos_ids=ends, rollout=config), model)
    return model, SpeculativeRollout(engine, None, config, 0, TrajectoryCache(Fingerprint()))


def step_of(model, rollout):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1e-3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    rollout.engine.update_weights(None, rollout.engine.weight_version + 1)


def test_an_evaluation_drafts_from_the_last_one_and_samples_what_plain_decoding_does():
    model, rollout = evaluating()
    first, _ = evaluated(rollout)
    step_of(model, rollout)
    second, tokens = evaluated(rollout)
    plain = SpeculativeRollout(rollout.engine, None, RolloutConfig(acceptance="off", max_new_tokens=24), 0)
    _, expected = evaluated(plain)
    assert tokens == expected
    assert (first["eval/hit_rate"], second["eval/hit_rate"]) == (0, 1)
    assert second["eval/passes_per_row"] < first["eval/passes_per_row"] / 2
    assert second["eval/unchanged_ratio"] > 0.5


def test_control_texts_of_other_keys_are_no_texts_of_the_last_evaluation():
    """Planted: each text is stored for the sample beside its own. It is an old text as any other then."""
    _, rollout = evaluating()
    evaluated(rollout)
    swapped = [(f"e{i}", 1 - s, rollout.evaluations.get(f"e{i}", s)) for i in range(4) for s in range(2)]
    rows = [Row("e0", (5, 6)), Row("e0", (5, 6))]
    sources = []
    for entries in ([], swapped):
        rollout.evaluations.put_many(entries)
        batch = rollout.generate(rows, visit=0, step=0, domain="eval")
        sources.append("evaluation" in batch.stats.sources)
    assert sources == [True, False]


@pytest.mark.slow
def test_a_run_keeps_its_evaluations_for_resumes_and_for_the_command(tmp_path, capsys):
    options = {"trainer__eval_prompts": 4, "trainer__eval_every": 2, "trainer__save_every": 2, **SHORT}
    whole = train_run(tmp_path, **options)
    records = load_run(whole.folder).evals
    assert [record["step"] for record in records] == [0, 2, 4]
    assert [record["eval/hit_rate"] for record in records] == [0, 1, 1]
    plain = load_run(train_run(tmp_path, name="off", rollout__acceptance="off", **options).folder).evals
    quality = ["eval/reward", "eval/mean_length"]
    assert [[r[key] for key in quality] for r in records] == [[r[key] for key in quality] for r in plain]
    assert plain[1]["eval/passes_per_row"] == plain[1]["eval/mean_length"], "plain decoding takes a pass a token"
    options |= {"name": "resumed"}
    train_run(tmp_path, trainer__max_steps=2, **options)
    resumed = load_run(train_run(tmp_path, resume="auto", **options).folder).evals
    assert resumed[-1]["eval/hit_rate"] == 1
    assert resumed[-1]["eval/passes_per_row"] < plain[-1]["eval/passes_per_row"]
    capsys.readouterr()
    assert command_line([f"run={whole.folder}", "samples=4"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["eval/hit_rate"], printed["eval/unchanged_ratio"]) == (0.5, 0.5), "4 of 8 prompts were evaluated"


def test_a_run_with_workers_is_served_in_this_process():
    config = load(["config=grpo_math", "cluster.num_workers=2", "cluster.gpus_per_worker=1", "device=cpu"])
    with serving(config) as served:
        request = Request([5, 6, 7], 1, 3)
        assert served.model.device.type == "cpu"
        assert len(served.engine.generate([request])[0][0].tokens) > 0
