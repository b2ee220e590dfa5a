"""ReuseRollouts in a plain GRPOTrainer: only the time changes, noise is new, and TRL's options hold or are rejected."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator, DistributedType
from datasets import Dataset, IterableDataset
from transformers import ProcessorMixin

import specrl.trainers.grpo.trainer  # noqa: F401 (silences TRL's remarks at import)
from specrl.rollout.cache.memory import Fingerprint, TrajectoryCache, load
from specrl.rollout.config import RolloutConfig
from specrl.rollout.keys import Visits
from specrl.rollout.sections import CacheConfig
from specrl.rollout.speculative import SpeculativeRollout
from specrl.rollout.types import RolloutError
from specrl.tiny import load_tiny
from specrl.trainers.grpo.hook import STATE, ReuseRollouts
from tests.runs import by_two_processes

A, B = "Tom has 3 apples and buys 4 more. How many has he?", "Ann had 9 pens and lost 2. How many are left?"
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ style }}"


@dataclass
class Call:
    """TRL's arguments of one rollout."""

    step: int
    training: bool
    tokens: list[list[int]]
    keys: list[int]
    visits: list[int]
    reused: int


@dataclass
class Run:
    """A GRPOTrainer's run with ReuseRollouts."""

    trainer: object
    reuse: ReuseRollouts
    calls: list[Call] = field(default_factory=list)

    @property
    def keys(self) -> list[int]:
        return [key for call in self.calls for key in call.keys]

    @property
    def training(self) -> list[Call]:
        return [call for call in self.calls if call.training]

    def logged(self, name: str) -> list[float]:
        return [log[name] for log in self.trainer.state.log_history if name in log]


def make(folder, config=None, data=(A, B), tokenizer=None, evaluated=(), **options) -> Run:
    """A script with the three lines. One prompt a batch unless `per_device_train_batch_size` is set."""
    from trl import GRPOConfig, GRPOTrainer

    model, default_tokenizer = load_tiny()
    options = {
        "num_generations": 4,
        "per_device_train_batch_size": 4,
        "max_completion_length": 16,
        "learning_rate": 1e-4,
        "shuffle_dataset": False,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        **options,
    }
    args = GRPOConfig(str(folder), **options)
    reuse = ReuseRollouts(args, config)
    run = Run(None, reuse)

    def rollout(prompts, trainer):
        out = reuse(prompts, trainer)
        last, step = reuse.last, trainer.state.global_step
        reused = sum(sum(c.reused) for c in last.completions)
        run.calls.append(Call(step, trainer.model.training, out["completion_ids"], last.keys, last.visits, reused))
        return out

    run.trainer = GRPOTrainer(
        model,
        reward_funcs=lambda completions, **_: [float(len(str(c)) % 7) for c in completions],
        args=args,
        train_dataset=data if isinstance(data, IterableDataset) else _dataset(data),
        eval_dataset=_dataset(evaluated) if evaluated else None,
        processing_class=tokenizer or default_tokenizer,
        rollout_func=rollout,
    )
    return run


def _dataset(prompts):
    return Dataset.from_list([{"prompt": prompt} for prompt in prompts])


def train(folder, config=None, resume=None, **options) -> Run:
    run = make(folder, config, **options)
    run.trainer.train(resume_from_checkpoint=resume)
    return run


# The script of a user whose data repeats prompts: every other batch and evaluation ask for A.
SCRIPT = {
    "data": [A, B, A, B],
    "evaluated": [A, A, B, B],
    "num_train_epochs": 3,
    "eval_strategy": "steps",
    "eval_steps": 3,
    "num_generations_eval": 2,
    "per_device_eval_batch_size": 4,
    "save_strategy": "steps",
    "save_steps": 6,
}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A complete run of that script, and its output directory."""
    return train(tmp_path_factory.mktemp("whole"), **SCRIPT)


@pytest.fixture(scope="module")
def idle(tmp_path_factory):
    """A trainer that has not been trained."""
    return make(tmp_path_factory.mktemp("idle")).trainer


# No effect but on time -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_reuse_changes_nothing_but_time(uninterrupted, tmp_path):
    plain = train(tmp_path, RolloutConfig(acceptance="off"), **SCRIPT)
    assert [call.tokens for call in uninterrupted.calls] == [call.tokens for call in plain.calls]
    assert uninterrupted.logged("loss") == plain.logged("loss")
    assert len(plain.logged("loss")) == 12
    weights = plain.trainer.model.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in uninterrupted.trainer.model.state_dict().items())
    assert all(call.reused > 0 for call in uninterrupted.training[2:])
    assert not any(call.reused for call in plain.calls)


@pytest.mark.slow
def test_under_autocast_the_engine_computes_as_the_trainer_does(uninterrupted, tmp_path):
    seen = []
    run = make(tmp_path, max_steps=1, bf16=True)
    head = run.trainer.model.lm_head
    head.register_forward_pre_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    run.trainer.train()
    assert seen
    assert all(seen), "TRL's default: fp32 weights, bf16 passes"
    assert run.calls[0].keys == uninterrupted.calls[0].keys


# Noise -----------------------------------------------------------------------------------------------------------


def repeated(*runs: Run) -> int:
    """Rows whose key another row had: their noise is the same, so their response is too while the weights allow it."""
    keys = [key for run in runs for key in run.keys]
    return len(keys) - len(set(keys))


@pytest.mark.slow
def test_no_noise_is_drawn_twice(uninterrupted):
    assert [call.training for call in uninterrupted.calls].count(False) == 8, "four evaluations of two batches"
    assert len(uninterrupted.calls) == 12 + 8
    assert repeated(uninterrupted) == 0
    assert [call.visits[0] for call in uninterrupted.training] == [n // 2 for n in range(12)], "A and B by turns"


def by_epoch(monkeypatch):
    calls = itertools.count()
    monkeypatch.setattr(Visits, "next", lambda self, ids: [next(calls) // 4] * len(ids))


def one_domain(monkeypatch):
    generate = SpeculativeRollout.generate
    monkeypatch.setattr(SpeculativeRollout, "generate", lambda *args, domain, **rest: generate(*args, **rest))


@pytest.mark.slow
@pytest.mark.parametrize("fault", [by_epoch, one_domain])
def test_control_repeated_noise_is_seen(fault, monkeypatch, tmp_path):
    fault(monkeypatch)
    assert repeated(train(tmp_path, **SCRIPT | {"num_train_epochs": 1, "save_strategy": "no"})) > 0


@pytest.mark.slow
def test_training_again_samples_with_new_noise(tmp_path):
    run = train(tmp_path, max_steps=2)
    run.trainer.train()
    assert len(run.keys) == 16
    assert repeated(run) == 0


# Evaluation ------------------------------------------------------------------------------------------------------


def saved(folder: Path) -> TrajectoryCache:
    tokenizer = load_tiny()[1]
    return load(folder / "specrl", Fingerprint(), len(tokenizer), [tokenizer.eos_token_id])


def visits_in(folder: Path) -> dict:
    return json.loads((folder / "trainer_state.json").read_text())["stateful_callbacks"][STATE]


@pytest.mark.slow
def test_evaluation_stores_nothing(uninterrupted):
    folder = Path(uninterrupted.trainer.args.output_dir) / "checkpoint-6"
    names = visits_in(folder)["rollout"]
    assert list(names.values()) == [3, 3]
    stored = [text for name in names for text in saved(folder).siblings(name)]
    trained = {key for call in uninterrupted.training[4:6] for key in call.keys}
    assert {trajectory.key for trajectory in stored} == trained
    assert list(visits_in(folder)["evaluation"].values()) == [2, 2], "evaluation counts its own visits"


@pytest.mark.slow
def test_metrics_are_in_trls_log(uninterrupted):
    expected = [call.reused / sum(map(len, call.tokens)) for call in uninterrupted.training]
    assert uninterrupted.logged("spec/reused_ratio") == pytest.approx(expected, rel=1e-5)
    assert len(uninterrupted.logged("timing_s/gen")) == 12
    assert len(uninterrupted.logged("eval_spec/reused_ratio")) == 4
    assert max(uninterrupted.logged("spec/draft_acceptance_rate")) <= 1


# Two processes ---------------------------------------------------------------------------------------------------

PROGRAM = """
import json, os, sys
from tests.trainers.grpo.test_hook import SCRIPT, train
halved = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "ddp_backend": "gloo"}
run = train(sys.argv[1], **SCRIPT | halved)
result = {"keys": run.keys, "reused": run.logged("spec/reused_ratio")}
print(json.dumps(result), file=open(f"{sys.argv[1]}/rank{os.environ['RANK']}.json", "w"))
"""


@pytest.mark.long
def test_two_processes_sample_what_one_does(uninterrupted, tmp_path):
    """Started as by torchrun. Each has half of every group."""
    (first, second), _ = by_two_processes(tmp_path, PROGRAM, 600)
    assert sorted(first["keys"] + second["keys"]) == sorted(uninterrupted.keys)
    assert first["reused"] == second["reused"], "the mean over both"


# Resumed ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_resumed_script_goes_on_as_if_undisturbed(uninterrupted, tmp_path):
    shutil.copytree(Path(uninterrupted.trainer.args.output_dir) / "checkpoint-6", tmp_path / "checkpoint-6")
    rest = train(tmp_path, **SCRIPT, resume=True)
    later = [call for call in uninterrupted.calls if call.step > 6 or (call.step == 6 and call.training)]
    assert [call.keys for call in rest.calls] == [call.keys for call in later]
    assert rest.calls[0].reused > 0, "the checkpoint holds what to draft from"


@pytest.fixture(scope="module")
def accumulated(tmp_path_factory):
    """Two rollouts in each of two optimiser steps, all of A, with a checkpoint at the end."""
    return train(tmp_path_factory.mktemp("accumulated"), **ACCUMULATED, max_steps=2)


ACCUMULATED = {
    "data": [A] * 8,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 1,
    "save_strategy": "steps",
    "save_steps": 2,
}


@pytest.mark.slow
def test_a_checkpoint_of_another_directory_brings_its_visits(accumulated, tmp_path):
    checkpoint = Path(accumulated.trainer.args.output_dir) / "checkpoint-2"
    rest = train(tmp_path, **ACCUMULATED, max_steps=3, resume=checkpoint)  # its directory has no checkpoint-2
    assert [call.visits[0] for call in accumulated.calls + rest.calls] == [0, 1, 2, 3, 4, 5]
    assert repeated(accumulated, rest) == 0


@pytest.mark.slow
def test_control_forgotten_visits_repeat_noise(accumulated, tmp_path):
    checkpoint = shutil.copytree(Path(accumulated.trainer.args.output_dir) / "checkpoint-2", tmp_path / "checkpoint-2")
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    del state["stateful_callbacks"][STATE]
    (checkpoint / "trainer_state.json").write_text(json.dumps(state))
    assert repeated(accumulated, train(tmp_path, **ACCUMULATED, max_steps=3, resume=checkpoint)) > 0


# TRL's behaviour -------------------------------------------------------------------------------------------------


def test_prompts_are_rendered_as_trl_does(tmp_path):
    _, tokenizer = load_tiny()
    tokenizer.chat_template = TEMPLATE
    trainer = make(tmp_path, tokenizer=tokenizer, chat_template_kwargs={"style": " loud"}).trainer
    reuse = ReuseRollouts(trainer.args)
    texts = reuse([A, B, A], trainer)["prompt_ids"]
    assert texts == [tokenizer(text)["input_ids"] for text in (A, B, A)]
    chats = reuse([[{"role": "user", "content": text}] for text in (A, B)], trainer)["prompt_ids"]
    assert chats == [tokenizer(text + " loud")["input_ids"] for text in (A, B)]


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("use_transformers_continuous_batching", True, "Use use_transformers_continuous_batching=False"),
        ("generation_kwargs", "{'top_p': 1}", "generation_kwargs=.*Use a dict"),
        ("cache_implementation", "static", "cache_implementation='static'.*Use cache_implementation=None"),
        ("generation_kwargs", {"no_repeat_ngram_size": 2}, r"generation_kwargs\.no_repeat_ngram_size=2.*Set it to 0"),
        ("generation_kwargs", {"temperature": 0.5}, r"generation_kwargs\.temperature=0\.5.*Set it to 1\.0"),
        ("generation_kwargs", {"max_new_tokens": 3}, r"generation_kwargs\.max_new_tokens=3.*Set it to"),
        ("generation_kwargs", {"do_sample": False}, r"generation_kwargs\.do_sample=False.*Set it to True"),
        ("generation_kwargs", {"eos_token_id": 4}, r"generation_kwargs\.eos_token_id=4.*Set it to None"),
        ("min_p", 0.5, "min_p=0.5.*temperature, top_k and top_p alone. Use min_p=None"),
        ("repetition_penalty", 5.0, "repetition_penalty=5.0.*Use repetition_penalty=1"),
        ("top_k", -1, "top_k=-1.*Use top_k=0"),
        ("top_k", None, "top_k=None.*Use top_k=0"),
    ],
)
def test_options_of_trl_that_it_cannot_obey_are_refused(option, value, words, idle, monkeypatch):
    monkeypatch.setattr(idle.args, option, value)
    refused(idle, words)


@pytest.mark.parametrize(("mode", "near"), [("colocate", ""), ("server", " cluster.num_workers=1")])
def test_arguments_are_checked_before_there_is_a_trainer_and_at_the_first_rollout(mode, near, idle, monkeypatch):
    reuse = ReuseRollouts(idle.args)
    monkeypatch.setattr(idle.args, "use_vllm", True)
    monkeypatch.setattr(idle.args, "vllm_mode", mode)
    for refuse in (lambda: ReuseRollouts(idle.args), lambda: reuse([A], idle)):
        with pytest.raises(RolloutError, match=f"use_vllm=True .*rollout.engine=vllm{near}$"):
            refuse()


class Processor(ProcessorMixin):
    """Replaces the processor of a model with images."""

    def __init__(self):
        pass


def add(a: int, b: int) -> int:
    """Adds two numbers."""


@pytest.mark.parametrize(
    ("attribute", "value", "words"),
    [
        ("tools", [add], r"tools=\[add\]"),
        ("environment_factories", {None: object}, "environment_factory"),
        ("processing_class", Processor(), "processing_class=Processor"),
    ],
)
def test_what_takes_more_than_text_and_one_turn_is_refused(attribute, value, words, idle, monkeypatch):
    monkeypatch.setattr(idle, attribute, value)
    refused(idle, words)


@pytest.mark.parametrize(
    ("name", "value", "neutral"),
    [
        ("num_beams", 3, 1),
        ("no_repeat_ngram_size", 3, 0),
        ("repetition_penalty", 1.1, 1.0),
        ("forced_eos_token_id", 0, None),
        ("stop_strings", ["x"], None),
        ("not_known_yet", 3, None),
    ],
)
def test_a_generation_config_by_which_trl_would_sample_otherwise_is_refused(name, value, neutral, idle, monkeypatch):
    monkeypatch.setattr(idle.generation_config, name, None, raising=False)
    monkeypatch.setattr(idle.model.generation_config, name, value, raising=False)
    refused(idle, rf"model\.generation_config\.{name}={re.escape(repr(value))}.*Set it to {neutral!r}$")
    setattr(idle.model.generation_config, name, neutral)
    assert ReuseRollouts(idle.args)([A], idle)["completion_ids"]


def test_what_trl_sets_itself_is_not_inherited(idle, monkeypatch):
    """Qwen2.5 has a repetition penalty and top_k, which TRL's options replace."""
    for name, value in {"repetition_penalty": 1.1, "top_k": 20, "top_p": 0.8, "temperature": 0.7}.items():
        monkeypatch.setattr(idle.model.generation_config, name, value)
    assert ReuseRollouts(idle.args)([A], idle)["completion_ids"]


def test_a_generation_config_of_the_trainer_that_was_changed_is_refused(idle, monkeypatch):
    monkeypatch.setattr(idle.generation_config, "temperature", 0.25)
    refused(idle, r"trainer\.generation_config\.temperature=0\.25.*Set it to 1\.0")


def test_a_model_in_parts_is_refused_before_a_pass_that_the_others_do_not_take(idle, monkeypatch):
    monkeypatch.setattr(Accelerator, "distributed_type", DistributedType.FSDP)
    refused(idle, "FSDP 1 leaves no process a whole model")


def refused(trainer, words: str) -> None:
    with pytest.raises(RolloutError, match=words) as error:
        ReuseRollouts(trainer.args)([A], trainer)
    assert "\n" not in str(error.value)


def test_control_values_that_ask_for_nothing_are_taken(idle, monkeypatch):
    nothing = {"num_beams": 1, "use_cache": False, "temperature": idle.args.temperature, "suppress_tokens": None}
    for name, value in {"min_p": 0.0, "generation_kwargs": nothing, "repetition_penalty": 1.0}.items():
        monkeypatch.setattr(idle.args, name, value)
    assert len(ReuseRollouts(idle.args)([A], idle)["completion_ids"]) == 1


@pytest.mark.slow
def test_each_trainer_has_its_own(idle, uninterrupted):
    with pytest.raises(RolloutError, match="give each one its own"):
        uninterrupted.reuse([A], idle)


def test_unsupported_options_of_reuse_are_refused(idle):
    lossy = [RolloutConfig(acceptance=rule) for rule in ("lenient", "judged", "routed")]
    started = RolloutConfig(cache=CacheConfig(start_from="elsewhere"))
    for config in (RolloutConfig(engine="vllm"), *lossy, started):
        with pytest.raises(RolloutError, match=r"python -m specrl\.train"):
            ReuseRollouts(idle.args, config)
