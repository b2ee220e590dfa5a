"""Whether drafts pay for a policy: the formulas by hand, the policies' readings on a small model, and the command."""

import json
import math

import pytest
import torch

from specrl.bench import Reading, Result, Timing, best_speedup, command, read, step
from specrl.rollout.config import RolloutConfig
from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.speculative import SpeculativeRollout
from specrl.rollout.types import Row
from tests.engines import local

ROWS = [Row(name, prompt) for name, prompt in (("a", (5, 6, 7)), ("b", (8, 9))) for _ in range(2)]
SAMPLING = SamplingParams(frozenset({1}), temperature=0.8, top_k=12)


@pytest.fixture
def old(build_model):
    """A model and its responses to ROWS by plain decoding."""
    model = build_model().eval()
    config = RolloutConfig(acceptance="off", max_new_tokens=24)
    return model, SpeculativeRollout(local(model, SAMPLING), None, config, seed=0).generate(ROWS, visit=0, step=0)


@pytest.mark.parametrize(
    ("p", "price", "speedup"),
    [
        (0.5, 0.25, 1.5 / 1.25),  # a second token would give 1.75 / 1.5
        (0.9, 0.2, max(sum(0.9**i for i in range(k + 1)) / (1 + 0.2 * k) for k in range(40))),
        (0.3, 0.39, 1.0),  # a token of SmolLM2's old text on two cores
    ],
)
def test_the_best_length_by_hand(p, price, speedup):
    assert best_speedup(p, price) == pytest.approx(speedup)


def test_the_policy_that_wrote_the_text_draws_it_again_under_its_keys_only(old):
    model, batch = old
    reading = read(model, SAMPLING, ROWS, batch)
    logprobs = [logprob for c in batch.completions for logprob in c.logprobs]
    assert reading.tokens == len(logprobs)
    assert reading.same_key == 1.0
    assert reading.fresh == pytest.approx(sum(map(math.exp, logprobs)) / len(logprobs), rel=1e-4)
    assert 0 < reading.entropy < math.log(SAMPLING.top_k)
    batch.keys = [key + 1 for key in batch.keys]
    assert read(model, SAMPLING, ROWS, batch).same_key < 0.9, "planted: the noise of other keys"


def test_a_greedy_policy_repeats_its_text_with_any_noise(build_model):
    model = build_model().eval()
    greedy = SamplingParams(frozenset({1}), temperature=0.0)
    config = RolloutConfig(acceptance="off", max_new_tokens=8, temperature=0.0)
    batch = SpeculativeRollout(local(model, greedy), None, config, seed=0).generate(ROWS, visit=0, step=0)
    reading = read(model, greedy, ROWS, batch)
    assert (reading.fresh, reading.same_key) == (1.0, 1.0)


def test_the_step_is_the_first_of_adamw(old):
    model, batch = old
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    for sign, row, c in zip((1, -1, 1, -1), ROWS, batch.completions, strict=True):
        ids = torch.tensor([[*row.prompt, *c.tokens]])
        logprobs = model(ids).logits[0, len(row.prompt) - 1 : -1].log_softmax(-1)
        (-sign * logprobs.gather(-1, torch.tensor(c.tokens)[:, None]).mean()).backward()
    optimizer.step()
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(before[name])
    step(model, ROWS, batch, 1e-3)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.detach(), expected[name], rtol=0, atol=2e-6)
        assert not torch.equal(weight, before[name])


@pytest.mark.parametrize(
    ("old", "coupled", "said"),
    [
        ((2.8, 2.3, 3.1), (2.9, 2.5, 3.2), "2.80x as fast."),
        ((1.2, 1.1, 1.3), (2.5, 2.1, 2.9), "with text under the same key 2.50x: it comes from rollouts ahead"),
        ((1.06, 1.04, 1.08), (2.2, 2.0, 2.4), "Old text does not pay, text under the same key does (2.20x)"),
        ((0.99, 0.97, 1.0), (1.0, 0.9, 1.1), "It does not pay here."),
    ],
)
def test_the_advice_follows_the_whole_interval(old, coupled, said):
    timings = [Timing("", 0.5, 0.5, 1.0, 1.0, *ratios, 4, 8, 9, 9, 0, 10) for ratios in (old, coupled)]
    assert said in Result(Reading(10, 1.0, 0.5, 0.9), 0.3, timings).advice()


# The command ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def mine(tmp_path):
    """A config with prompts of its own."""
    lines = [json.dumps({"question": f"How many are {n} and {n}?", "answer": str(2 * n)}) for n in range(6)]
    (tmp_path / "mine.jsonl").write_text("\n".join(lines))
    (tmp_path / "mine.yaml").write_text(
        f"data: {tmp_path / 'mine.jsonl'}\nrollout:\n  group_size: 2\n  max_new_tokens: 12\n"
        "trainer:\n  learning_rate: 1e-2\n"
    )
    return tmp_path / "mine.yaml"


@pytest.mark.slow
def test_the_newer_policy_is_a_step_further_unless_the_old_one_is_given(mine, tmp_path):
    def figures(*words):
        out = tmp_path / "out.json"
        assert command([f"config={mine}", "rows=4", "repeats=1", f"out={out}", *words]) == 0
        return json.loads(out.read_text())

    same = figures("old_model=tiny")
    assert same["reading"]["same_key"] == 1.0
    assert same["timings"][1]["reused"] > 0.8, "all but the last token of each row"
    assert 0 < same["price"] < 1
    assert figures()["reading"]["same_key"] < 1.0
    assert [timing["differing_rows"] for timing in same["timings"]] == [0, 0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rows=14"], "Try rows=12"),
        (["rows=3"], "Try rows=4."),
        (["rollout.acceptance=lenient"], "Add rollout.acceptance=exact."),
        (["cluster.num_workers=2"], "Add cluster.num_workers=0."),
    ],
)
def test_what_it_cannot_time_is_one_line(mine, words, message, capsys):
    assert command([f"config={mine}", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
