"""The paired benchmark: what its numbers are of, with a scripted clock; and a training config under it."""

import json
import time
from types import SimpleNamespace

import pytest

from benchmarks.paired import Bench, PairConfig, command, options, prepare
from benchmarks.research import never_slower
from specrl.config.load import load
from specrl.rollout.build import build_engine
from specrl.rollout.config import RolloutConfig
from specrl.rollout.drafting.budget import Budget
from specrl.rollout.engines.local.engine import TransformersEngine
from specrl.rollout.types import Completion, EngineStats, Row


class ScriptedEngine:
    """Answers each call with one token a row, after the next of its scripted seconds."""

    own_weights, weight_version = True, 0

    def __init__(self, clock, plain, specrl):
        self.clock, self.left = clock, {True: list(plain), False: list(specrl)}

    def generate(self, requests):
        self.clock.now += self.left[requests[0].plain].pop(0)
        return [Completion([7], [-0.5], [-0.5], [False], "length", 0, 1) for _ in requests], EngineStats()

    def update_weights(self, weights, version):
        self.weight_version = version


@pytest.fixture
def scripted(monkeypatch, tiny):
    """scripted(plain, specrl): a bench of three repeats whose rollouts take these seconds."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)

    def make(plain, specrl) -> Bench:
        engine = ScriptedEngine(clock, plain, specrl)
        monkeypatch.setattr("specrl.rollout.build.build_engine", lambda *_: engine)
        rows = [Row("a", (5, 6))] * 2
        config = PairConfig(rollout=RolloutConfig(group_size=2), repeats=3)
        return Bench(tiny("llama"), frozenset({1}), config, rows, {}, {})

    return make


def test_the_speedup_is_the_median_of_the_paired_ratios(scripted):
    # The old text takes 5 s, then come a warm-up of 9 s against 1 s, and the pairs 8:2, 6:2 and 2:2.
    case = scripted(plain=[5, 9, 8, 6, 2], specrl=[1, 2, 2, 2]).time_pairs("case", replay=0.0)
    assert case.speedup == 3.0, "neither the best pair, 4, nor the last, 1"
    assert case.speedup_range == (1.0, 4.0)
    assert (case.plain_s, case.specrl_s) == (6.0, 2.0)
    assert (case.differing_rows, case.rows) == (0, 2)


def test_where_the_first_pair_counts_both_engines_have_rolled_out_before(monkeypatch):
    """An engine's first rollout takes up to 13 % longer, with drafts and without."""
    bench, _ = prepare(options("rows=8", "rollout.max_new_tokens=4", "repeats=1"))
    rolled, warm = set(), []
    generate, together = TransformersEngine.generate, Bench.together

    def generating(engine, requests):
        rolled.add(id(engine))
        return generate(engine, requests)

    def pairing(bench, *rollouts):
        warm.append({id(bench.engine), id(bench.plain_engine)} <= rolled)
        return together(bench, *rollouts)

    monkeypatch.setattr(TransformersEngine, "generate", generating)
    monkeypatch.setattr(Bench, "together", pairing)
    never_slower.measure(bench, "useless")
    assert warm == [True]


def test_a_pair_makes_a_pass_each_in_turn(monkeypatch):
    bench, _ = prepare(options("rows=8", "rollout.max_new_tokens=8", "rollout.draft_tokens=1"))
    stage = bench.rollout(None)
    passes, observe_pass = [], Budget.observe_pass

    def recorded(budget, *args, **kwargs):
        passes.append(budget is bench.engine.drafting.budget)
        observe_pass(budget, *args, **kwargs)

    monkeypatch.setattr(Budget, "observe_pass", recorded)
    for plain_first in (True, False):
        passes.clear()
        plain, drafted = bench.pair(stage, 0.0, plain_first)
        assert [c.tokens for c in plain.completions] == [c.tokens for c in drafted.completions]
        assert passes[:6] == [not plain_first, plain_first] * 3
        assert plain.stats.drafted == 0


# A training config ----------------------------------------------------------------------------------------------------


@pytest.fixture
def mine(tmp_path):
    """A config with prompts of its own, and the policy that config=NAME names."""
    lines = [json.dumps({"question": f"How many are {n} and {n}?", "answer": str(2 * n)}) for n in range(6)]
    (tmp_path / "mine.jsonl").write_text("\n".join(lines))
    (tmp_path / "mine.yaml").write_text(
        f"data: {tmp_path / 'mine.jsonl'}\nrollout:\n  group_size: 2\n  temperature: 0.5\n  max_new_tokens: 6\n"
    )
    return tmp_path / "mine.yaml"


@pytest.mark.long
def test_a_config_brings_its_prompts_its_engines_and_its_sampling(mine, tmp_path, monkeypatch, capsys):
    """One engine drafts in all cases, and one decodes plainly."""
    built, out = [], tmp_path / "out.json"

    def build(*arguments):
        built.append(build_engine(*arguments))
        return built[-1]

    monkeypatch.setattr("specrl.rollout.build.build_engine", build)
    words = [f"config={mine}", "rows=4", "repeats=1", "rollout.top_k=3", f"out={out}"]
    assert command(words) == 0
    assert "4 rows, tiny, fp32, transformers" in capsys.readouterr().out
    result = json.loads(out.read_text())
    assert [(case["name"], case["rows"], case["differing_rows"]) for case in result["cases"]] == [
        ("fresh noise", 4, 0),
        ("replayed noise", 4, 0),
        ("same policy, replayed", 4, 0),
        ("texts cut at random", 4, 0),
        ("useless drafts", 4, 0),
    ]
    bench, tokenizer = prepare(load(words, PairConfig, training=False))
    assert len(built) == 2, "none before it is asked for"
    assert bench.engine is bench.engine is built[2]
    assert " many" in tokenizer.decode(bench.rows[0].prompt), "the file's question"
    assert (len(bench.rows), len({row.example_id for row in bench.rows})) == (4, 2)
    rollout = bench.spec.rollout
    assert (rollout.temperature, rollout.top_k, rollout.max_new_tokens) == (0.5, 3, 6)


def test_without_a_config_it_benches_as_many_problems_as_the_rows_take():
    config = options("rows=520", "data=arithmetic:hard")
    bench, _ = prepare(config)
    assert (config.model, len({row.example_id for row in bench.rows})) == ("tiny", 65)
    assert all("/hard/" in row.example_id for row in bench.rows)
