"""Prompts as a policy sees them, and that rewards get the same text in training and in evaluation."""

import json
import logging
import shutil

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from specrl.config.load import load as load_config
from specrl.config.options import ConfigError
from specrl.config.schema import DatasetConfig
from specrl.reward import loading
from specrl.rollout.speculative import SpeculativeRollout
from specrl.rollout.types import Completion, EngineStats
from specrl.run.accuracy import evaluate
from specrl.run.data import Example, load_examples
from specrl.run.policy import fingerprint, load_tokenizer
from specrl.run.prompts import Prompt, chat_template, check_lengths, render
from specrl.run.run_dir import data_digests
from tests.rewards import few_digits
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


TEXT = Example("b", "one two", None, {})
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "one"}]
A_CHAT = Example("a", MESSAGES, None, {}, "mine.jsonl, line 3")


def shown(example, template, **options) -> Prompt:
    return render(example, tiny_tokenizer(template), DatasetConfig(**options))


@pytest.mark.parametrize("when", ["auto", "on"])
def test_the_chat_template_is_around_texts_and_chats(when):
    chat = shown(A_CHAT, CHAT, chat_template=when)
    assert (chat.ids, chat.messages) == ([1, 3, 5, 6, 2, 7, 4], MESSAGES)
    assert chat.text == "<s> <system> be brief <user> one <bot>"
    text = shown(TEXT, CHAT, chat_template=when)
    assert (text.ids, text.text) == ([1, 2, 7, 8, 4], "<s> <user> one two <bot>")
    assert text.messages == [{"role": "user", "content": "one two"}]


def test_a_begun_answer_is_continued():
    begun = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two be"}]
    prompt = shown(Example("c", begun, None, {}), CHAT + "{% if not add_generation_prompt %} brief{% endif %}")
    assert prompt.text == "<s> <user> one <assistant> two be", "nothing of the template is after it"


def test_a_template_that_begins_with_the_first_token_gets_no_second_one():
    tokenizer = tiny_tokenizer(CHAT)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    assert tokenizer("one").input_ids == [1, 7], "plain text gets it"
    assert render(TEXT, tokenizer, DatasetConfig()).ids == [1, 2, 7, 8, 4]
    assert render(TEXT, tokenizer, DatasetConfig(chat_template="off")).ids == [1, 7, 8]


@pytest.mark.parametrize(("template", "when"), [(CHAT, "off"), (None, "off"), (None, "auto")])
def test_without_a_chat_template_prompts_are_plain_text(template, when):
    assert shown(TEXT, template, chat_template=when) == Prompt([7, 8], "one two", None, TEXT)
    joined = shown(A_CHAT, template, chat_template=when)
    assert joined == Prompt([5, 6, 7], "be brief\n\none", MESSAGES, A_CHAT), "messages are joined as text"


THINKING = CHAT + "{% if enable_thinking is defined and enable_thinking == false %} be{% endif %} {{ style }}"


def test_variables_reach_the_chat_template_as_json_or_text():
    def end(**settings):
        return shown(TEXT, THINKING, chat_template_kwargs=settings).text.partition("<bot>")[2]

    assert end() == " "
    assert end(enable_thinking="false") == " be "
    assert end(enable_thinking="true") == end(enable_thinking="no") == " ", "`no` is a text"
    assert end(style="brief") == " brief"
    assert end(style='["a", {"b": 1}]') == " ['a', {'b': 1}]"


@pytest.mark.parametrize(
    ("template", "options", "says"),
    [
        (None, {"chat_template": "on"}, ["dataset.chat_template=on", "Try dataset.chat_template=auto"]),
        (None, {"chat_template_kwargs": {"style": "x"}}, ["chat_template_kwargs={style: x}", "tokenizer has none"]),
        (THINKING, {"chat_template_kwargs": {"enable_thinkin": "false"}}, ["enable_thinkin", "'enable_thinking'"]),
        (THINKING, {"chat_template_kwargs": {"messages": "x"}}, ["sets messages"]),
        ("{{ raise_exception('no system') }}", {}, ["mine.jsonl, line 3: no system", "dataset.chat_template=off"]),
    ],
)
def test_a_chat_template_that_cannot_be_had_is_one_line(template, options, says):
    with pytest.raises(ConfigError) as caught:
        shown(A_CHAT, template, **options)
    assert all(part in str(caught.value) for part in says)
    assert "\n" not in str(caught.value)


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
        check_lengths(load(path, train_split="train[1:]"), tokenizer, DatasetConfig(max_prompt_tokens=5))
    assert check_lengths(load(path), tokenizer, DatasetConfig(max_prompt_tokens=9)) == 9, "what the message says"
    assert said == [], "transformers says nothing beside it"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "mine.parquet")
    examples = load(tmp_path / "mine.parquet", train_split="train[2:]")
    assert [e.source for e in examples] == [f"{tmp_path / 'mine.parquet'}, row {number}" for number in (3, 4)]


# What rewards see -----------------------------------------------------------------------------------------------------

SYSTEM = "Add and subtract."
MARKED = (
    "{% for m in messages %}{{ '<' + m['role'] + '> ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)


@pytest.fixture(scope="module")
def chatting(tmp_path_factory):
    """The folder of a policy whose tokenizer has a chat template."""
    folder = build_policy(tmp_path_factory.mktemp("chatting"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = MARKED
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def remembered(monkeypatch):
    """The arguments of every call of a reward that is loaded, which runs in this process."""
    calls = []

    def heard(prompt, completion, answer, messages=None) -> float:
        calls.append((prompt, messages))
        return few_digits(prompt, completion, answer)

    monkeypatch.setattr(loading, "load_reward", lambda *_: loading.FunctionReward(heard, "heard"))
    return calls


def options(chatting):
    return {"model": str(chatting), "dataset__system_prompt": SYSTEM}


def expected(settings, split) -> set[tuple[str, str]]:
    """Text and messages of each prompt, written down by hand."""
    plain = load_config(settings)
    plain.dataset.system_prompt = ""
    questions = [e.prompt for e in load_examples(plain.data, plain.dataset, split, plain.seed)]
    chats = [[{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}] for text in questions]
    return {
        (f"<system> {SYSTEM}\n<user> {text}\n<bot>", json.dumps(chat))
        for text, chat in zip(questions, chats, strict=True)
    }


def seen_by_rewards(remembered) -> set[tuple[str, str]]:
    return {(prompt, json.dumps(messages)) for prompt, messages in remembered}


def test_another_template_or_other_variables_are_another_data_set(chatting, tmp_path):
    def marks(model, **settings):
        config = load_config(words(tmp_path, model=str(model), **settings))
        tokenizer = load_tokenizer(config)
        data = data_digests(chat_template(tokenizer, config.dataset), train=[TEXT])
        return json.dumps(fingerprint(config, tokenizer)[0]), data["train"]

    other = shutil.copytree(chatting, tmp_path / "other")
    (other / "chat_template.jinja").write_text(f"{MARKED}!{{{{ m }}}}")
    caches, data = zip(
        marks(chatting),
        marks(chatting, dataset__chat_template="off"),
        marks(other),
        marks(other, dataset__chat_template_kwargs="{m: 1}"),
        strict=True,
    )
    assert len(set(caches)) == 4
    assert data[2] == data[3], "options are compared by themselves"
    assert len(set(data)) == 3
    assert data[1] == data_digests(train=[TEXT])["train"], "without a template it is the rows alone"
    assert marks(chatting) == marks(chatting, dataset__chat_template="on"), "the same prompts"


@pytest.mark.slow  # a run
def test_rewards_in_training_see_the_rendered_prompt(chatting, tmp_path, remembered):
    settings = {**SHORT, **options(chatting)}
    run(tmp_path, **settings)
    assert seen_by_rewards(remembered) == expected(words(tmp_path, **settings), "train")


def test_rewards_in_an_evaluation_see_the_rendered_prompt(chatting, tmp_path, remembered):
    class Engine:
        """Answers with one token."""

        def generate(self, requests):
            return [Completion([5], [0.0], [0.0], [False], "stop", 0, 1) for _ in requests], EngineStats()

    settings = words(tmp_path, **options(chatting))
    config = load_config(settings)
    examples = load_examples(config.data, config.dataset, "test", config.seed)
    rollout = SpeculativeRollout(Engine(), None, config.rollout, config.seed)
    rewards = loading.load_rewards(config.reward)
    evaluate(rollout, AutoTokenizer.from_pretrained(chatting), examples, rewards, config, samples=2)
    assert seen_by_rewards(remembered) == expected(settings, "test")
