"""The math reward: which answers count, quick comparison, math-verify in a worker, hostile text, real data."""

import json
import os
import signal
import time
from contextlib import closing
from pathlib import Path

import pytest

from specrl.reward.answers import boxes, final_text, marked_answer
from specrl.reward.base import Sample
from specrl.reward.config import RewardConfig
from specrl.reward.math import CANARY, MathReward, make_checker
from specrl.reward.set import RewardSet
from specrl.reward.spelling import normal_number
from specrl.reward.worker import answer as worker_answer

DATA = Path(__file__).parents[2].parent / "shared/data"
HOSTILE = [r"\boxed{9^{9^{9^{9}}}}", r"\boxed{(x+1)^{100000}}", r"\boxed{\sum_{n=1}^{10^{9}} \frac{1}{n}}"]


@pytest.fixture(scope="module")
def reward():
    reward = MathReward(RewardConfig(timeout_s=10))
    yield reward
    reward.close()


@pytest.fixture
def no_worker():
    """A reward that must decide by text alone: its worker cannot start."""
    reward = MathReward()
    reward.pool.close()
    return reward


def score(reward, completion, answer, prompt="p"):
    (value,) = reward([Sample(prompt, completion, answer)])
    return None if isinstance(value, Exception) else value


def rows(name: str, count: int) -> list[dict]:
    path = DATA / name
    if not path.exists():
        reason = f"{name} is not among the shared data; looked in {DATA}"
        print(reason)
        pytest.skip(reason)
    lines = path.read_text().splitlines()
    return [json.loads(line) for line in lines[:: len(lines) // count][:count]]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so\n#### 18", "18"),
        ("#### 18 dollars per day.", "18 dollars per day."),
        ("#### The answer is 18", "The answer is 18"),
        ("#### 5 #### 6", "6"),
        ("#### 5\n####  \n", "5"),
        ("#### 5\n#### Check\nIt is.", "5"),
        ("#### Step 2\nIt is 5.", None),
        ("#### A triangle\nhas 3 sides", None),
        ("##### 5", None),
        (r"\boxed{5} then #### 6", "5"),
        (r"#### 5 and \boxed{6}", "6"),
        (r"\boxed{1} \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{1}, then \boxed{2}", "2"),
        (r"$\boxed{1}$, $\boxed{2}$ and $y = \boxed{4}$.", "1, 2, 4"),
        (r"\boxed{\text{of } \boxed{3}, \boxed{4}}", r"\text{of } \boxed{3}, \boxed{4}"),
        (r"the largest is $\boxed 6$.", "6"),
        (r"\fbox{3}", "3"),
        (r"\boxed{5} and \boxed{6", "5"),
        (r"\boxed{6", None),
        (r"\boxed{}", ""),
        ("the answer is 18", None),
        ("", None),
    ],
)
def test_marked_answer(text, answer):
    assert marked_answer(text) == answer


def test_extraction_takes_linear_time(no_worker):
    for unit in [
        *("\\boxed{", "}", "{", "\\{", "####", "#### ", "#### 5 ", "\\fbox {", " ", "\\boxed{1}, ", "5 ", "5,"),
        *("\\text{", "$", "**", "\\(", "answer ", "is ", "<think>", "</think>", "1/", "\\ ", "~", "(", "5 a"),
    ]:
        start = time.thread_time()
        score(no_worker, "#### " + unit * 20_000, "Monday")
        score(no_worker, "\\boxed{" + unit * 400 + "}", "Monday")
        assert time.thread_time() - start < 2, unit
    (box,) = boxes(r"\boxed{" * 1000 + "}" * 1000)
    assert box[0] == 0


TAGS = "<think>", "</think>"


@pytest.mark.parametrize(
    ("prompt", "completion", "rest"),
    [
        ("q", "5", "5"),
        ("q", "<think>5?</think>6", "6"),
        ("q", "5?</think>6", "6"),
        ("q", "<think>5?</think>6</think>7", "7"),
        ("q", "<think>5?</think>6<think>7", ""),
        ("q", "<think>5?", ""),
        ("q <think>\n", "5?", ""),
        ("q <think>\n", "5?</think>6", "6"),
        ("Write <think> first.", "5", "5"),
    ],
)
def test_thoughts_are_no_answer(prompt, completion, rest):
    assert final_text(prompt, completion, TAGS) == rest
    assert final_text(prompt, completion, []) == completion
    other = completion.replace("think>", "reason>")
    assert final_text(prompt.replace("think>", "reason>"), other, ["<reason>", "</reason>"]) == rest


def test_a_draft_in_thoughts_scores_nothing(no_worker):
    completion = r"<think>Maybe \boxed{7}?</think> No. The answer is \boxed{8}."
    assert score(no_worker, completion, "8") == 1.0
    assert score(no_worker, completion.partition(" No.")[0], "7") == 0.0
    assert score(no_worker, r"Maybe \boxed{7}?", "7", prompt="What? <think>") == 0.0
    planted = MathReward(RewardConfig(thinking_tags=[]))
    planted.pool.close()
    assert score(planted, completion.partition(" No.")[0], "7") == 1.0


@pytest.mark.parametrize(
    "spelling", ["1234", "1,234", "1234.0", "$1,234", r"\$1234.00", "+1234", "01234", r"1,\!234", "1234."]
)
def test_spellings_of_one_number(no_worker, spelling):
    assert normal_number(spelling) == "1234"
    assert score(no_worker, f"#### {spelling}", "so <<1+1233=1234>>\n#### 1,234") == 1.0
    assert score(no_worker, rf"\boxed{{{spelling}}}", "1234") == 1.0


def test_quick_wrong_answers_never_reach_the_worker(no_worker):
    for completion in (
        "#### 19",
        r"\boxed{180}",
        r"#### 18 so \boxed{20}",
        "no idea",
        r"\boxed{}",
        "#### " + "9" * 5000,
    ):
        assert score(no_worker, completion, "#### 18") == 0.0


@pytest.mark.parametrize(
    ("completion", "reference", "value"),
    [
        (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
        ("#### 14/3", r"\frac{14}{3}", 1.0),
        (r"\boxed{18 \text{ dollars}}", "18", 1.0),
        (r"\boxed{x = 18}", "18", 1.0),
        (r"\boxed{-q + p}", "p - q", 1.0),
        (r"\boxed{7, 5, 3}", "3, 5, 7", 1.0),
        (r"\boxed{x \in [2, 8]}", "[2,8]", 1.0),
        (r"\boxed{[1,2)\cup(3,4]}", r"[1,2) \cup (3, 4]", 1.0),
        (r"\boxed{Evelyn}", r"\text{Evelyn}", 1.0),
        (r"The answer is $\frac{14}{3}$.", r"\frac{14}{3}", 1.0),
        ("word " * 200 + "The answer is 18.", "18", 1.0),
        (r"\boxed{q - p}", "p - q", 0.0),
        (r"\boxed{[3,4]}", "(3,4]", 0.0),
        ("#### 18 or 20", "18", 0.0),
        (r"#### 5} \boxed{18", "18", 0.0),
        ("#### 18 million", "18", 0.0),
        (r"\boxed{\notacommand{!}}", "18", 0.0),
        ("I get 18, no, 20.", "18", 0.0),
        ("I get 18, no, 20.", "20", 1.0),
        # several boxes, mixed numbers, letters, times, words
        (r"$x=\boxed{2}$ or $x=\boxed{9}$", "2, 9", 1.0),
        (r"$x=\boxed{2}$ or $x=\boxed{9}$", "9", 0.0),
        (r"\boxed{3 1/4}", r"\frac{13}{4}", 1.0),
        (r"\boxed{3 1/4}", r"\frac{1}{4}", 0.0),
        (r"\boxed{\textbf{(B)}\ 7}", "B", 1.0),
        (r"\boxed{\text{Bat}}", "B", 0.0),
        ("The answer is (B).", "B", 1.0),
        ("So it is:\n(B) 7", "C", 0.0),
        (r"\boxed{7{:}15\text{ AM}}", "7:15 AM", 1.0),
        (r"\boxed{7:15 \text{ PM}}", "7:15 AM", 0.0),
        (r"\boxed{\text{No solution}}", "no solution", 1.0),
        ("There is no solution.", "no solution", 1.0),
        ("The day is not Monday.", "Monday", 0.0),
        ("Not **Monday** but **Sunday**.", "Sunday", 1.0),
        # a variable is no unit, and a unit no variable
        (r"\boxed{\frac{w}{4}}", r"\frac{1}{4}w", 1.0),
        (r"\boxed{\frac{1}{4}}", r"\frac{1}{4}w", 0.0),
        (r"\boxed{4m}", "4s", 0.0),
        ("#### 4 m", "4", 1.0),
        (r"\boxed{4\sqrt{2}\text{ cm}}", r"4\sqrt{2}", 1.0),
        (r"\boxed{4\sqrt{3}\text{ cm}}", r"4\sqrt{2}", 0.0),
        # powers of ten in words
        ("#### 3 million", "3000000", 1.0),
        ("It costs 3 million dollars.", "3", 0.0),
        ("It costs 3 million dollars.", "3,000,000", 1.0),
        # small numbers are not rounded to zero
        (r"\boxed{\frac{1}{28!}}", r"\frac{1}{27!}", 0.0),
        (r"\boxed{2 \cdot 10^{-7}}", "0.0000003", 0.0),
        (r"\boxed{0.333333}", r"\frac{1}{3}", 1.0),
        # dots are an element of their own
        (r"\boxed{1, 2, \dots, 9}", r"1, 2, \ldots, 9", 1.0),
        (r"\boxed{1, 3, \ldots, 9}", r"1, 2, \ldots, 9", 0.0),
        # units, signs and spaces of numbers
        ("#### **The final answer is: 18**", "18", 1.0),
        (r"\boxed{\text{18 pens}}", "18", 1.0),
        ("#### 18 km/h", "18", 1.0),
        (r"\boxed{18\,\mathrm{cm}^2}", "18", 1.0),
        ("#### €18", "18", 1.0),
        ("#### 18元", "18", 1.0),
        ("#### 18 (eighteen)", "18", 1.0),
        ("#### - 18", "-18", 1.0),
        ("#### -0.0", "0", 1.0),
        ("#### 18 000", "18000", 1.0),
        ("#### 18 hundred", "1800", 1.0),
        ("#### 18 dozen", "18", 0.0),
        (r"\boxed{1.8 \text{ million}}", "1800000", 1.0),
        (r"\boxed{60°}", r"60^\circ", 1.0),
        # headings are no answers
        ("#### Step 3\nThe answer is 18.", "18", 1.0),
        ("#### Step 3\nThe answer is 18.", "3", 0.0),
        ("The product is \\boxed{18}.\n\n#### 3. Check", "18", 1.0),
    ],
)
def test_math_verify_decides_the_rest(reward, completion, reference, value):
    assert score(reward, completion, reference) == value


SENTENCE = "Ben pays 3 dollars in all"


@pytest.mark.parametrize("reference", [None, "", "  ", "}{", "????", "x" * 1001, SENTENCE, "9. It is so."])
def test_without_a_usable_reference_there_is_no_score(reward, reference):
    (flaw,) = reward.check([Sample("p", "", reference)])
    assert isinstance(flaw, Exception)
    rewards = RewardSet([reward])
    assert rewards.score([Sample("p", r"\boxed{3}", reference)]).total == [None]


@pytest.mark.parametrize(
    "reference", ["3", "1,000", r"\frac{1}{3}", "x+1", "C", "Monday", "no solution", "6:00 PM", "(1, 2]"]
)
def test_a_usable_reference_equals_itself(reward, reference):
    assert reward.check([Sample("p", "ignored", reference)]) == [None]
    assert score(reward, rf"\boxed{{{reference}}}", reference) == 1.0


def test_equal_comparisons_are_made_once(reward, monkeypatch):
    requested = []
    monkeypatch.setattr(reward.pool, "map", lambda payloads: requested.extend(payloads) or [True] * len(payloads))
    assert reward([Sample("p", r"\boxed{\frac12}", "0.5")] * 8 + [Sample("p", "#### 1/2", "0.5")]) == [1.0] * 9
    assert len(requested) == 2


@pytest.fixture
def checker(monkeypatch):
    """math-verify's handler in this process, with a `verify` to be replaced."""
    import math_verify

    replaced, real = {}, math_verify.verify
    monkeypatch.setattr(math_verify, "verify", lambda *pair, **options: replaced.get("by", real)(*pair, **options))
    return make_checker(), replaced


@pytest.mark.parametrize(("error", "reply"), [(MemoryError, "memory"), (RecursionError, None)])
def test_out_of_memory_while_comparing_is_no_wrong_answer(checker, error, reply):
    handler, replaced = checker

    def full(*pair, **options):
        raise error

    replaced["by"] = full
    answered = worker_answer(handler, json.dumps(CANARY._asdict()).encode())
    assert (answered.get("kind"), answered.get("value")) == ((reply, None) if reply else (None, False))


def test_every_request_starts_with_the_same_state_of_sympys_generator(checker):
    from sympy.core.random import rng

    handler, replaced = checker
    numbers = []

    def draw(*pair, **options):
        numbers.append(rng.random())
        return True

    replaced["by"] = draw
    for disturbed in range(3):
        rng.seed(disturbed + 1)
        handler(CANARY._asdict())
    assert len(numbers) == 3
    assert len({*numbers}) == 1


@pytest.mark.slow
def test_two_answers_too_hard_to_check_do_not_end_the_run():
    rewards = RewardSet([MathReward(RewardConfig(timeout_s=1))])
    step = [Sample(f"p{i % 4}", HOSTILE[2] if i < 2 else "#### 5", f"{5 + i % 4}") for i in range(32)]
    try:
        result = rewards.score(step)
        assert (result.timeouts, result.over_limit) == ({"math": 2}, {"math": 2})
        assert result.total == [None, None, *[float(i % 4 == 0) for i in range(2, 32)]]
    finally:
        rewards.close()


@pytest.mark.slow
def test_a_stalled_worker_is_never_a_wrong_answer():
    """Also where an answer that is over the limit gets 0."""
    reward = MathReward(RewardConfig(timeout_s=1))
    rewards = RewardSet([reward], on_limit="zero")
    right, hard = Sample("p", r"\boxed{\frac12}", "0.5"), Sample("p", HOSTILE[2], "18")
    try:
        reward.pool.start()
        (pid,) = reward.pool.pids()
        os.kill(pid, signal.SIGSTOP)
        assert rewards.score([right]).total == [1.0]
        assert rewards.score([hard]).total == [0.0]
    finally:
        rewards.close()


@pytest.mark.slow
def test_a_reward_that_turns_timeouts_into_zero_is_caught():
    """Hostile text is masked at its deadline, unless the reward has this planted fault."""

    class Zero:
        name = "math"

        def __call__(self, samples):
            return [0.0 if isinstance(outcome, Exception) else outcome for outcome in reward(samples)]

    reward = MathReward(RewardConfig(timeout_s=0.5))
    with closing(reward):
        for rewards, masked in ((RewardSet([reward]), True), (RewardSet([Zero()]), False)):
            result = rewards.score([Sample("p", HOSTILE[1], "18")])
            assert (result.total == [None] and result.timeouts == {"math": 1}) == masked


def test_every_reference_equals_itself_boxed(no_worker):
    gsm8k = [(row["question"], row["answer"].rpartition("#### ")[2]) for row in rows("gsm8k/test.jsonl", 1319)]
    math500 = [(row["problem"], row["answer"]) for row in rows("math500/test.jsonl", 500)]
    boxed = [Sample(question, rf"\boxed{{{answer}}}", answer) for question, answer in gsm8k + math500]
    assert no_worker(boxed) == [1.0] * 1819


def test_every_reference_of_math500_can_be_read(reward):
    samples = [Sample(row["problem"], "", row["answer"]) for row in rows("math500/test.jsonl", 500)]
    assert reward.check(samples) == [None] * 500


def test_math500_solutions_score_one_and_others_zero(reward):
    data = rows("math500/test.jsonl", 60)
    right = reward([Sample(row["problem"], row["solution"], row["answer"]) for row in data])
    assert right == [1.0] * 60
    wrong = reward([Sample(row["problem"], r"\boxed{-98765.4321}", row["answer"]) for row in data])
    assert wrong == [0.0] * 60
