"""Loading, combining and distrusting rewards: no failure becomes a number."""

import datetime
import math
import textwrap
from contextlib import closing

import pytest

from specrl.reward.base import RewardError, Sample, checked_outcomes
from specrl.reward.config import RewardConfig
from specrl.reward.loading import FunctionReward, check, load_reward, load_rewards
from specrl.reward.pool import WorkerError
from specrl.reward.set import RewardSet

PLUG_INS = """
    import time

    def length(prompt, completion, answer, **fields):
        return len(completion) * fields.get("scale", 1)

    def named_only(prompt, completion, answer, scale):
        return scale

    def bad(prompt, completion, answer):
        values = {"none": None, "nan": float("nan"), "inf": float("-inf"), "text": "1.0", "list": [1.0]}
        return values.get(completion, 1.0)

    def raising(prompt, completion, answer):
        if completion == "poison":
            raise LookupError("no such record")
        return 1.0

    def hanging(prompt, completion, answer):
        while completion == "poison":
            pass
        return 1.0

    def misnamed(completion, **_):
        return 1.0

    class Batch:
        name = "batch"

        def __call__(self, samples):
            return [float(len(sample.completion)) for sample in samples]

    class Needy(Batch):
        def __init__(self, judge):
            pass

    batch = Batch()
    number = 3
"""


@pytest.fixture
def plug_ins(tmp_path, monkeypatch):
    """Modules with rewards of a user."""
    (tmp_path / "reward_plug_ins.py").write_text(textwrap.dedent(PLUG_INS))
    (tmp_path / "reward_broken_plug_in.py").write_text("import a_package_that_is_not_there\n")
    (tmp_path / "reward_leaving_plug_in.py").write_text("import sys\nsys.exit('usage:\\n  plug-in')\n")
    monkeypatch.syspath_prepend(str(tmp_path))


class Listed:
    """A reward that returns what a function of the samples says."""

    def __init__(self, function, name="listed"):
        self.name = name
        self.function = function

    def __call__(self, samples):
        return self.function(samples)


def samples(*completions, prompt="p"):
    return [Sample(prompt, completion) for completion in completions]


POISONED = samples("poison", "a", "b")


def prompts(count, completion="c"):
    return [Sample(f"prompt {i}", completion) for i in range(count)]


def test_weights_and_parts():
    ones, twos = Listed(lambda s: [1] * len(s), "ones"), Listed(lambda s: [2.0] * len(s), "twos")
    result = RewardSet([ones, twos], [1.0, -0.25]).score(samples("a", "b"))
    assert result.total == [0.5, 0.5]
    assert result.parts == {"ones": [1.0, 1.0], "twos": [2.0, 2.0]}
    assert RewardSet([ones, twos]).score(samples("a")).total == [3.0]
    assert RewardSet([ones]).score([]).total == []


def test_a_failed_part_masks_the_row_unless_its_weight_is_zero():
    ones, none = Listed(lambda s: [1.0] * len(s), "ones"), Listed(lambda s: [None, 5.0], "none")
    result = RewardSet([ones, none], [1.0, 1.0]).score(samples("a", "b"))
    assert result.total == [None, 6.0]
    assert result.parts == {"ones": [1.0, 1.0], "none": [None, 5.0]}
    assert RewardSet([ones, none], [1.0, 0.0]).score(samples("a", "b")).total == [1.0, 1.0]


def raise_for_poison(batch):
    if any(sample.completion == "poison" for sample in batch):
        raise LookupError("no such record")
    return [1.0] * len(batch)


def masked(result, rows) -> bool:
    """The first row has no score; the others have 1.0."""
    return result.total == [None] + [1.0] * (rows - 1)


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, 1e300, "0.0", [1.0], TimeoutError("slow")])
def test_a_bad_score_masks_its_own_row(bad):
    result = RewardSet([Listed(lambda s: [bad if x.completion == "poison" else 1.0 for x in s])]).score(POISONED)
    assert masked(result, 3)
    assert result.parts["listed"][0] is None


@pytest.mark.parametrize("function", [raise_for_poison, lambda s: [1.0 for x in s if x.completion != "poison"]])
def test_a_batch_that_fails_is_scored_row_by_row(function):
    assert masked(RewardSet([Listed(function)]).score(POISONED), 3)


def test_a_reward_that_turns_failures_into_zero_is_caught():
    assert not masked(RewardSet([Listed(lambda s: [0.0, 1.0, 1.0])]).score(POISONED), 3)


@pytest.mark.parametrize("returned", ["11", {0: 1.0, 1: 1.0}, None, 1.0, {1.0, 2.0}, iter([1.0, 1.0])])
def test_a_whole_batch_of_the_wrong_kind_is_masked(returned):
    assert RewardSet([Listed(lambda s: returned)]).score(samples("a", "b")).total == [None, None]


def test_number_types_are_accepted():
    import numpy
    import torch

    values = [True, 2, numpy.float32(0.5), torch.tensor(0.25)]
    assert checked_outcomes(Listed(lambda s: values), samples(*"abcd")) == [1.0, 2.0, 0.5, 0.25]
    assert checked_outcomes(Listed(lambda s: torch.ones(2)), samples(*"ab")) == [1.0, 1.0]
    assert all(type(value) is float for value in checked_outcomes(Listed(lambda s: values), samples(*"abcd")))


def test_a_broken_reward_stops_with_its_first_traceback():
    rewards = RewardSet([Listed(raise_for_poison)])
    batch = prompts(30) + prompts(4, completion="poison")
    assert rewards.score(batch).total == [1.0] * 30 + [None] * 4, "one step does not decide"
    with pytest.raises(RewardError) as caught:
        rewards.score(batch)
    message = str(caught.value)
    assert "'listed' gave no score for 8 of the last 68 rows" in message
    assert "in raise_for_poison" in message
    assert "LookupError: no such record" in message


def test_a_reward_error_stops_at_once():
    def no_service(batch):
        raise RewardError("the judge is down")

    with pytest.raises(RewardError, match="judge is down"):
        RewardSet([Listed(no_service)]).score(samples("a", "b"))


LOADING_ERRORS = [
    ("mth", "unknown reward 'mth'. Known: code, format, math"),
    ("nothing_here:f", "module 'nothing_here' cannot be imported: .*PYTHONPATH"),
    ("reward_broken_plug_in:f", "cannot be imported: ModuleNotFoundError: .*a_package_that_is_not_there"),
    ("reward_plug_ins:lenght", "no attribute 'lenght'"),
    ("reward_plug_ins:number", "must be callable, but it is int 3"),
    ("reward_plug_ins:Needy", "cannot be created without arguments.*judge"),
    ("reward_leaving_plug_in:f", "cannot be imported: SystemExit: usage: plug-in"),
    ("reward_plug_ins:misnamed", r"must take \(prompt, completion, answer, \*\*fields\): too many positional"),
]


@pytest.mark.parametrize(("spec", "words"), LOADING_ERRORS)
def test_loading_errors_say_why(plug_ins, spec, words):
    with pytest.raises(RewardError, match=words):
        load_reward(spec)
    with pytest.raises(RewardError, match=words) as caught:
        check(RewardConfig(["math", spec]))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("functions", "weights", "words"),
    [
        (["math", "math"], [], "has a name twice"),
        (["reward_plug_ins:Batch", "reward_plug_ins:batch"], [], "has a name twice.*batch"),
        (["math"], [0.0], "not all be zero"),
        (["math", "format"], [1.0], r"reward\.weights=\[1\.0\].*Try reward\.weights=\[1\.0,1\.0\]"),
    ],
)
def test_rewards_that_do_not_add_up_are_found_without_loading_them(plug_ins, functions, weights, words):
    with pytest.raises(RewardError, match=words):
        check(RewardConfig(functions, weights))


@pytest.mark.parametrize(
    ("spec", "name", "expected"),
    [("length", "length", [3.0, 4.0]), ("Batch", "batch", [3.0, 2.0]), ("batch", "batch", [3.0, 2.0])],
)
def test_user_rewards(plug_ins, spec, name, expected):
    with closing(load_rewards(RewardConfig([f"reward_plug_ins:{spec}"]))) as rewards:
        result = rewards.score([Sample("p", "abc"), Sample("p", "ab", "x", {"scale": 2, "other": None})])
        assert result.parts == {name: expected}


def test_a_function_gets_the_columns_it_names_and_others_need_not_be_json(plug_ins):
    fields = {"scale": 7, "when": datetime.date(2026, 1, 1), "raw": b"x"}
    with closing(load_reward("reward_plug_ins:named_only")) as reward:
        assert reward([Sample("p", "c", None, fields)]) == [7.0]
        assert isinstance(reward([Sample("p", "c")])[0], WorkerError)
    assert FunctionReward(lambda *texts: 1.0, "any")([Sample("p", "c", None, {"scale": 7})]) == [1.0]
    own = FunctionReward(lambda prompt, completion, answer, messages: messages, "own")
    assert own([Sample("p", "c", None, {"messages": 7}, [])]) == [7], "the data's column, not those of the chat"


def test_columns_that_a_function_needs_are_looked_for_before_the_run(plug_ins):
    config = RewardConfig(["reward_plug_ins:named_only"])
    check(config, ["scale", "other"])
    check(config)
    check(RewardConfig(["reward_plug_ins:length", "reward_plug_ins:batch"]), ["other"])
    with pytest.raises(RewardError, match="needs the column 'scale', which the data does not have"):
        check(config, ["other"])


class Choosy(Listed):
    """A reward that cannot score some rows, and would give them 1."""

    def __init__(self):
        super().__init__(lambda batch: [1.0] * len(batch))
        self.checked = []

    def check(self, batch):
        self.checked += [sample.answer for sample in batch]
        return [None if sample.answer else ValueError("no answer") for sample in batch]


def test_rows_that_cannot_be_scored_have_no_score_and_are_checked_once():
    reward = Choosy()
    rewards = RewardSet([reward])
    batch = [Sample("p", text, answer) for text in ("x", "y") for answer in ("1", "2", "")]
    for _ in range(2):
        assert rewards.score(batch).total == [1.0, 1.0, None] * 2
    assert reward.checked == ["1", "2", "", ""], "a flaw may have passed, a sound row stays sound"


def test_failures_of_user_functions_are_masked_and_give_their_traceback(plug_ins):
    with closing(RewardSet([load_reward("reward_plug_ins:bad")])) as rewards:
        result = rewards.score(samples("good", "none", "nan", "inf", "text", "list"))
        assert result.total == [1.0] + [None] * 5
    with closing(RewardSet([load_reward("reward_plug_ins:raising")])) as rewards:
        assert masked(rewards.score(samples("poison", "a")), 2)
        assert 'raise LookupError("no such record")' in rewards.first_failure


def test_a_hanging_function_is_killed_and_the_next_call_works(plug_ins):
    reward = load_reward("reward_plug_ins:hanging", RewardConfig(timeout_s=0.5))
    with closing(RewardSet([reward])) as rewards:
        result = rewards.score(POISONED)
        assert masked(result, 3)
        assert result.timeouts == {"hanging": 1}
        assert rewards.score(samples("a")).total == [1.0]


def test_built_in_rewards_load_from_the_configuration():
    with closing(load_rewards(RewardConfig(["math", "format"], [1.0, 0.1]))) as rewards:
        result = rewards.score([Sample("p", "#### 18", "18"), Sample("p", "#### 20", "18"), Sample("p", "?", "18")])
        assert result.total == pytest.approx([1.1, 0.1, 0.0])
