"""Prompts as a policy sees them, and that every reward gets the same text: in training, evaluation and judge mining."""

import importlib
import json
import logging

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from reward.base import Sample
from reward.config import RewardConfig
from reward.loading import load_rewards
from rollout.types import Completion, EngineStats
from specrl.config.load import load as load_config
from specrl.config.options import ConfigError
from specrl.config.schema import DatasetConfig
from specrl.lossy.judging import Drafted, mismatches
from specrl.lossy.pair import load_pair
from specrl.run.accuracy import evaluate
from specrl.run.data import Example, load_examples
from specrl.run.prompts import Prompt, check_lengths, render, seen
from tests.runs import SHORT, build_policy, run, words


def tiny_tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    words = ["?", "<s>", "<user>", "<system>", "<bot>", "be", "brief", "one", "two"]
    raw = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="?"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="?")
    tokenizer.chat_template = template
    return tokenizer


CHAT = (
    "<s>{% for m in messages %} <{{ m['role'] }}> {{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %} <bot>{% endif %}"
)


def test_render_uses_the_chat_template_for_messages_only():
    chat = Example("a", [{"role": "system", "content": "be brief"}, {"role": "user", "content": "one"}], None, {})
    text = Example("b", "one two", None, {})
    assert render(chat, tiny_tokenizer(CHAT)).ids == [1, 3, 5, 6, 2, 7, 4]
    assert render(text, tiny_tokenizer(CHAT)).ids == [7, 8]
    assert render(chat, tiny_tokenizer()).ids == [5, 6, 7], "without a template the messages are joined as text"


def test_check_lengths_refuses_with_count_longest_and_key():
    examples = [Example(f"e{n}", "one " * n, None, {}) for n in range(1, 6)]
    check_lengths(examples, tiny_tokenizer(), max_prompt_tokens=5, room=5)
    with pytest.raises(ConfigError, match=r"2 of 5 .* 3 tokens \(dataset\.max_prompt_tokens\); .* 5 \(example e5\)"):
        check_lengths(examples, tiny_tokenizer(), max_prompt_tokens=3)
    with pytest.raises(ConfigError, match=r"1 of 5 .* more than 4 tokens \(the model's context .* Lower rollout"):
        check_lengths(examples, tiny_tokenizer(), max_prompt_tokens=9, room=4)


def write(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def load(name, **options):
    return load_examples(str(name), DatasetConfig(**options), "train", 0)


def test_a_prompt_that_is_too_long_is_found_in_its_file(tmp_path, monkeypatch):
    rows = [{"question": "one " * n} for n in (1, 2, 9, 9)]
    path = write(tmp_path / "mine.jsonl", rows)
    tokenizer, said = tiny_tokenizer(), []
    tokenizer.model_max_length = 5
    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [handler := logging.Handler()])
    handler.emit = said.append
    with pytest.raises(ConfigError, match=rf"2 of 3 prompts .* the longest has 9 \({path}, line 3\)"):
        check_lengths(load(path, train_split="train[1:]"), tokenizer, max_prompt_tokens=5)
    assert said == [], "transformers says nothing beside it"
    (tmp_path / "mine.json").write_text(json.dumps(rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "mine.parquet")
    for name in ("mine.json", "mine.parquet"):
        assert [e.place for e in load(tmp_path / name, train_split="train[2:]")] == [
            f"{tmp_path / name}, row {at}" for at in (3, 4)
        ]


# What rewards see -----------------------------------------------------------------------------------------------------

SYSTEM = "Add and subtract."
MARKED = (
    "{% for m in messages %}{{ '<' + m['role'] + '> ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)
HEARD: list[tuple] = []


def heard(prompt, completion, answer, messages=None) -> float:
    """A reward that remembers what it was given."""
    HEARD.append((prompt, messages))
    return float(sum(c.isdigit() for c in completion) < 6)


@pytest.fixture(scope="module")
def chatting(tmp_path_factory):
    """The folder of a policy whose tokenizer has a chat template."""
    folder = build_policy(tmp_path_factory.mktemp("chatting"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = MARKED
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def remembered():
    """What `heard` was given, wherever it was called from: rewards are imported by name."""
    found = importlib.import_module("tests.specrl.run.test_prompts").HEARD
    found.clear()
    return found


def options(chatting):
    return {
        "model": str(chatting),
        "dataset__system_prompt": SYSTEM,
        "reward__functions": "[tests.specrl.run.test_prompts:heard]",
    }


def expected(given, split) -> set[tuple[str, str]]:
    """Text and messages of each prompt, written down by hand."""
    plain = load_config(given)
    plain.dataset.system_prompt = ""
    questions = [e.prompt for e in load_examples(plain.data, plain.dataset, split, plain.seed)]
    chats = [[{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}] for text in questions]
    return {
        (f"<system> {SYSTEM}\n<user> {text}\n<bot>", json.dumps(chat))
        for text, chat in zip(questions, chats, strict=True)
    }


def told(remembered) -> set[tuple[str, str]]:
    return {(prompt, json.dumps(messages)) for prompt, messages in remembered}


@pytest.mark.slow  # a run
def test_rewards_in_training_see_the_rendered_prompt(chatting, tmp_path, remembered):
    given = {**SHORT, **options(chatting)}
    run(tmp_path, **given)
    assert told(remembered) == expected(words(tmp_path, **given), "train")


def test_rewards_in_an_evaluation_see_the_rendered_prompt(chatting, tmp_path, remembered):
    class Engine:
        """Answers with one token."""

        def generate(self, requests):
            return [Completion([5], [0.0], [0.0], [False], "stop", 0, 1) for _ in requests], EngineStats()

    given = words(tmp_path, **options(chatting))
    config = load_config(given)
    examples = load_examples(config.data, config.dataset, "test", config.seed)
    evaluate(
        Engine(), AutoTokenizer.from_pretrained(chatting), examples, load_rewards(config.reward), config, samples=2
    )
    assert told(remembered) == expected(given, "test")


@pytest.mark.slow  # responses of a model, several for each prompt
def test_rewards_in_judge_mining_see_the_rendered_prompt(chatting, tmp_path, remembered):
    given = words(tmp_path, **SHORT, **options(chatting), rollout__law="off", rollout__drafter="layers=1")
    config = load_config(given)
    examples = load_examples(config.data, config.dataset, "train", config.seed)
    drafts = [Drafted(example, i) for i, example in enumerate(examples)]
    mismatches(load_pair(config), drafts, load_rewards(config.reward), 2)
    assert told(remembered) == expected(given, "train")


def test_a_plain_prompt_reaches_rewards_as_it_is_and_has_no_messages():
    (sample,) = seen([Example("a", "one two", "3", {"level": 1})], ["two"], tiny_tokenizer(CHAT))
    assert sample == Sample("one two", "two", "3", {"level": 1}, messages=None)


@pytest.mark.parametrize("isolate", [False, True])
def test_messages_are_a_column_of_their_own_unless_the_data_has_one(isolate, tmp_path, monkeypatch):
    (tmp_path / "roles.py").write_text(
        "def last(prompt, completion, answer, messages): return float(messages[-1]['content'] if messages else -1)"
    )
    monkeypatch.syspath_prepend(tmp_path)
    chat = Prompt([1], "<user> 4", [{"role": "user", "content": "4"}])
    plain = Prompt([1], "4", None)
    rewards = load_rewards(RewardConfig(functions=["roles:last"], isolate_user=isolate))
    own = {"messages": [{"content": "7"}]}
    asked = [chat.sample("", None, {}), plain.sample("", None, {}), chat.sample("", None, own)]
    assert rewards.score(asked).total == [4.0, -1.0, 7.0]
    rewards.close()
