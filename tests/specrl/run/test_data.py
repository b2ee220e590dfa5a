import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from specrl.config.options import ConfigError
from specrl.config.schema import DatasetConfig
from specrl.run.data import Example, load_examples, to_dataset

ROWS = [{"question": f"What is {n} + {n}?", "answer": f"{n} + {n} = {2 * n}\n#### {2 * n}"} for n in range(20)]


def write(path: Path, rows: list) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def load(name, split="train", seed=0, **options) -> list[Example]:
    return load_examples(str(name), DatasetConfig(**options), split, seed)


def test_ids_come_from_content_and_duplicates_are_counted(tmp_path):
    first = load(write(tmp_path / "a.jsonl", [ROWS[0], ROWS[1], ROWS[0]]))
    second = load(write(tmp_path / "b.jsonl", [ROWS[2], ROWS[0], ROWS[0], ROWS[1]]))
    assert first[2].id == f"{first[0].id}#2"
    assert [e.id for e in second[1:]] == [first[0].id, first[2].id, first[1].id]
    other_answer = ROWS[0] | {"answer": "#### 5"}
    assert load(write(tmp_path / "c.jsonl", [other_answer]))[0].id != first[0].id


@pytest.mark.parametrize("column", ["id", "unique_id"])
def test_explicit_ids(tmp_path, column):
    rows = [{column: n} | row for n, row in enumerate(ROWS)]
    assert [e.id for e in load(write(tmp_path / "a.jsonl", rows))] == [str(n) for n in range(20)]
    clash = load(write(tmp_path / "b.jsonl", [{column: "x"} | row for row in ROWS]))
    assert len({e.id for e in clash}) == 20
    assert {len(e.id) for e in clash} == {24}, "an id column that names different contents alike is not used"
    copies = load(write(tmp_path / "c.jsonl", [rows[3], rows[3]]))
    assert [e.id for e in copies] == ["3", "3#2"]


def test_template_and_system_prompt_do_not_change_ids(tmp_path):
    name = write(tmp_path / "train.jsonl", ROWS)
    plain, framed = load(name), load(name, prompt_template="Q: {prompt}\nA: {x}", system_prompt="Be brief.")
    assert framed[1].prompt == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Q: What is 1 + 1?\nA: {x}"},
    ]
    assert plain[1].prompt == "What is 1 + 1?"
    chat = [{"role": "system", "content": "Mine."}, {"role": "user", "content": "one"}]
    (example,) = load(
        write(tmp_path / "chat.jsonl", [{"prompt": chat}]), system_prompt="A", prompt_template="<{prompt}>"
    )
    assert [message["content"] for message in example.prompt] == ["Mine.", "<one>"], "a chat keeps its system message"
    assert example.answer is None
    assert [e.id for e in plain] == [e.id for e in framed]


@pytest.mark.parametrize(
    ("value", "answer"),
    [
        ("so 1 + 1 = 2\n#### 2", "2"),
        ("####-1,234,567 \n", "-1234567"),
        ("#### Plan\nfirst we add", "#### Plan\nfirst we add"),
        (r"\boxed{1} or $x = \boxed{\frac{1}{2}}$.", r"1, \frac{1}{2}"),
        (r"\boxed{1} or rather $x = \boxed{2}$.", "2"),
        ("42", "42"),
        (4, "4"),
        (0, "0"),
        (2.50, "2.5"),
        (7.0, "7"),
        (3e16, "30000000000000000"),
        (0.00002, "0.00002"),
        (["2"], "2"),
        (["1", 3.0, None], "1, 3"),
        ([], None),
        (" ", None),
        (None, None),
        (float("nan"), None),
    ],
)
def test_answers_are_read_by_value(tmp_path, value, answer):
    rows = [{"question": "q?", "answer": "1"}, {"question": "p?", "answer": value}]
    assert load(write(tmp_path / "a.jsonl", rows))[1].answer == answer


def test_math_without_answer_column_takes_the_boxes_or_a_short_solution(tmp_path):
    solutions = ["\\boxed{1} then \\boxed{7}", "$\\frac{3}{2}$", "Add.\nThen take the half.", "x" * 101, None]
    rows = [{"problem": "p", "solution": solution} for solution in solutions]
    examples = load(write(tmp_path / "a.jsonl", rows))
    assert [e.answer for e in examples] == ["7", "$\\frac{3}{2}$", None, None, None]
    assert [e.fields["solution"] for e in examples] == solutions


def test_instruction_and_input_are_one_question(tmp_path):
    rows = [
        {"instruction": "Add.", "input": "2 and 3", "output": "5"},
        {"instruction": "Say 4.", "input": "", "output": 4},
    ]
    first, second = load(write(tmp_path / "a.jsonl", rows))
    assert (first.prompt, first.answer) == ("Add.\n\n2 and 3", "5")
    assert (second.prompt, second.answer) == ("Say 4.", "4")
    assert "input" not in first.fields
    assert load(write(tmp_path / "b.jsonl", [{"input": "2 + 2?", "target": "4"}]))[0].prompt == "2 + 2?"


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
@pytest.mark.parametrize("begins", [b"", b"\xef\xbb\xbf"])
def test_byte_order_marks_and_line_ends(tmp_path, begins, ends):
    rows = [{"question": "Wie viel ist 3 × 4?\u2028", "answer": "12"}, {"question": "b", "answer": "1"}]
    lines = "".join(json.dumps(row, ensure_ascii=False) + ends for row in rows)
    (tmp_path / "a.jsonl").write_bytes(begins + lines.encode())
    assert [e.prompt for e in load(tmp_path / "a.jsonl")] == [row["question"] for row in rows]


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def test_the_last_role_of_a_chat_decides(tmp_path):
    begun = [user("6*7?"), assistant("I add: ")]
    (example,) = load(write(tmp_path / "a.jsonl", [{"prompt": begun}]), prompt_template="Q: {prompt}")
    assert [m["content"] for m in example.prompt] == ["Q: 6*7?", "I add: "]
    solved = [{"messages": [user("1+1?"), assistant("2"), user("2+2?"), assistant("4")]}]
    (example,) = load(write(tmp_path / "b.jsonl", solved), prompt_column="messages", prompt_template="<{prompt}>")
    assert [m["content"] for m in example.prompt] == ["1+1?", "2", "<2+2?>"]


def test_parquet_shards_and_column_options(tmp_path):
    (tmp_path / "data").mkdir()
    for at in (0, 1):
        table = pyarrow.Table.from_pylist([{"Text": f"t{at}", "Gold": at, "kind": "k"}])
        pyarrow.parquet.write_table(table, tmp_path / "data" / f"train-0000{at}-of-00002.parquet")
    (tmp_path / "test.jsonl").write_text(json.dumps({"Text": "u", "Gold": 0.5}))
    columns = {"prompt_column": "Text", "answer_column": "Gold"}
    assert [(e.prompt, e.answer, e.fields) for e in load(tmp_path, **columns)] == [
        ("t0", "0", {"solution": None, "kind": "k"}),
        ("t1", "1", {"solution": None, "kind": "k"}),
    ]
    assert load(tmp_path, "test", **columns)[0].answer == "0.5"


def test_subsets_are_drawn_by_seed_nested_and_free_of_file_order(tmp_path):
    name = write(tmp_path / "train.jsonl", ROWS)
    small, large = load(name, train_size=5), load(name, train_size=9)
    assert len(small) == 5
    assert {e.id for e in small} < {e.id for e in large}
    assert small == load(name, train_size=5)
    assert {e.id for e in small} != {e.id for e in load(name, train_size=5, seed=1)}
    turned = load(write(tmp_path / "turned" / "train.jsonl", ROWS[::-1]), train_size=5)
    assert turned == small[::-1]


def test_slices_divide_one_file(tmp_path):
    name = write(tmp_path / "tasks.jsonl", ROWS)
    halves = [load(name, role, train_split="train[:90%]", test_split="train[90%:]") for role in ("train", "test")]
    assert [len(half) for half in halves] == [18, 2]
    assert halves[0] + halves[1] == load(name)
    assert len(load(name, train_split="train[-3:]")) == 3
    assert len(load(name, train_split="train[:13%]")) == 3, "2.6 rows are rounded, as `datasets` does"


def test_presets_and_hub_ids_go_through_load_dataset(monkeypatch):
    import datasets

    asked = []

    def fake(*args, **options):
        asked.append((*args, options))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", fake)
    assert load("gsm8k")[3].answer == "6"
    load("math500", "test")
    load("me/mine:small", train_split="train[:10%]")
    assert asked == [
        ("openai/gsm8k", "main", {"split": "train"}),
        ("HuggingFaceH4/MATH-500", None, {"split": "test"}),
        ("me/mine", "small", {"split": "train[:10%]"}),
    ]


def test_answers_of_the_large_math_sets(monkeypatch, tmp_path):
    import datasets

    row = {"prompt": "What is 2 + 2?", "solution": "4", "data_source": "math_dapo"}
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_list([row]))
    assert load("dapo_math")[0].answer == "4"
    nested = {"prompt": [{"role": "user", "content": "2 + 2?"}], "reward_model": {"ground_truth": "4", "style": "rule"}}
    (example,) = load(write(tmp_path / "verl.jsonl", [nested]))
    assert example.answer == "4"
    assert example.fields["reward_model"]["style"] == "rule"
    with pytest.raises(ConfigError, match=r"reward_model\.ground_truth"):
        load(write(tmp_path / "verl.jsonl", [nested]), answer_column="reward_model.answer")


def hub_failures():
    from datasets.exceptions import DatasetNotFoundError

    return [
        (ConnectionError("Couldn't"), "Cannot reach the hub for 'openai/gsm8k': this machine is offline. Use data="),
        (DatasetNotFoundError("gone"), "The hub has no data set 'openai/gsm8k', or it is private"),
        (ValueError('Unknown split.\nIt has "test".'), 'Unknown split. It has "test". Set dataset.train_split'),
    ]


@pytest.mark.parametrize(("failure", "message"), hub_failures())
def test_hub_failures_are_one_readable_line(monkeypatch, failure, message):
    def fail(*args, **options):
        raise failure

    monkeypatch.setattr("datasets.load_dataset", fail)
    with pytest.raises(ConfigError, match=message) as caught:
        load("gsm8k")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gsm8", {}, r"No data named 'gsm8'\. Did you mean 'gsm8k'\?"),
        ("{d}/trian.jsonl", {}, r"No file or directory .*trian\.jsonl\. Did you mean .*train\.jsonl\?"),
        ("{d}/empty.jsonl", {}, r"empty\.jsonl has no rows in its split 'train'"),
        ("{d}/torn.jsonl", {}, r"torn\.jsonl, line 2: not JSON"),
        ("{d}/list.jsonl", {}, r"list\.jsonl, line 1: must be an object with columns, not '3'"),
        ("{d}/notes.txt", {}, r"notes\.txt is no data file: its name ends in none of \.jsonl"),
        ("{d}/broken.parquet", {}, r"Cannot read .*broken\.parquet: "),
        ("{d}/train.jsonl", {"prompt_column": "qestion"}, r"no column 'qestion'\. Did you mean 'question'\? It has: "),
        ("{d}/odd.jsonl", {}, r"no column prompt or question.*It has: a, b\. Set dataset\.prompt_column"),
        ("{d}/gap.jsonl", {}, r"gap\.jsonl, line 2: 'question' must be text or a chat, not 'None'"),
        ("{d}/picture.jsonl", {}, r"picture\.jsonl, line 1: the content of each message .* not .*image"),
        ("{d}/parts.jsonl", {}, r"parts\.jsonl, line 1: .*style, value\. .*dataset\.answer_column=answer\.style"),
        ("{d}/asked.jsonl", {"prompt_template": "<{prompt}>"}, r"asked\.jsonl, line 1: the chat has no user message"),
        (
            "{d}/train.jsonl",
            {"train_size": 21},
            r"train_size=21, but .* has 20 rows there\. Try dataset\.train_size=20",
        ),
        ("{d}/train.jsonl", {"train_split": "test"}, r"serves as split 'train', not 'test'.*train\[90%:\]"),
        ("{d}", {"train_split": "validation"}, r"has no validation\.jsonl .*it holds .*train\.jsonl"),
        ("{d}", {"train_split": "train[5]"}, r"dataset\.train_split=train\[5\] is no split"),
    ],
)
def test_errors(tmp_path, name, options, message):
    write(tmp_path / "train.jsonl", ROWS)
    write(tmp_path / "empty.jsonl", [])
    write(tmp_path / "list.jsonl", [3])
    write(tmp_path / "odd.jsonl", [{"a": 1, "b": 2}])
    write(tmp_path / "picture.jsonl", [{"prompt": [user([{"type": "image"}])]}])
    write(tmp_path / "parts.jsonl", [{"prompt": "p", "answer": {"style": "rule", "value": 1}}])
    write(tmp_path / "asked.jsonl", [{"prompt": [{"role": "system", "content": "s"}]}])
    write(tmp_path / "gap.jsonl", [ROWS[0], {"answer": "1"}])
    (tmp_path / "torn.jsonl").write_text('{"question": "a"}\n{"quest')
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(ConfigError, match=message) as caught:
        load(name.format(d=tmp_path), **options)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_the_rows_of_trl_have_the_values_of_the_examples(tmp_path):
    rows = [{"prompt": "p", "answer": 1, "level": 2, "x": 1}, {"prompt": [user("q")], "level": "x", "x": 0.5}]
    examples = load(write(tmp_path / "a.jsonl", rows))
    for row, example in zip(to_dataset(examples), examples, strict=True):
        assert row == {"example_id": example.id, "prompt": example.prompt, "answer": example.answer} | example.fields
        assert [type(value) for value in row.values()][3:] == [type(value) for value in example.fields.values()]
