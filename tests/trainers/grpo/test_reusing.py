"""reusing(GRPOTrainer), single turns: only the time changes, noise is new, and TRL's options hold or are refused."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from accelerate import Accelerator, DistributedType
from datasets import Dataset
from peft import LoraConfig, PromptTuningConfig
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from specrl import reusing
from specrl.rollout.cache.memory import Fingerprint, TrajectoryCache, load
from specrl.rollout.config import RolloutConfig
from specrl.rollout.engines.local.head import Head
from specrl.rollout.keys import Visits
from specrl.rollout.sections import CacheConfig
from specrl.rollout.speculative import SpeculativeRollout
from specrl.rollout.types import RolloutError
from specrl.tiny import load_tiny
from specrl.trainers.grpo.limits import check_args
from specrl.trainers.grpo.reuse import STATE, Reuse
from specrl.trainers.tools import ToolResults
from tests.runs import by_two_processes
from tests.trainers.grpo.scripts import A, B, Batch, Run, assert_equal, make, make_conversations, tell, train

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
def uninterrupted(tmp_path_factory) -> Run:
    """A complete run of that script."""
    return train(tmp_path_factory.mktemp("whole"), **SCRIPT)


@pytest.fixture
def idle(tmp_path) -> Run:
    """A trainer that has not been trained."""
    return make(tmp_path)


# No effect but on time -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_reuse_changes_nothing_but_time(uninterrupted, tmp_path):
    plain = train(tmp_path, RolloutConfig(acceptance="off"), **SCRIPT)
    assert_equal(uninterrupted, plain)
    assert len(plain.logged("loss")) == 12
    assert all(batch.accepted > 0 for batch in uninterrupted.training[2:])
    assert not any(batch.accepted for batch in plain.batches)


@pytest.mark.slow
def test_rloo_and_adapters_too(tmp_path):
    runs = []
    for acceptance in ("exact", "off"):
        adapters = LoraConfig(target_modules=["q_proj", "v_proj"], r=4)
        options = {"kind": "rloo", "peft_config": adapters, "num_train_epochs": 3, "learning_rate": 1e-2}
        runs.append(train(tmp_path / acceptance, RolloutConfig(acceptance=acceptance), **options))
    assert_equal(*runs)
    assert runs[0].batches[-1].accepted > 0


@pytest.mark.slow
def test_under_autocast_the_engine_computes_as_the_trainer_does(uninterrupted, tmp_path):
    seen = []
    run = make(tmp_path, max_steps=1, bf16=True)
    head = run.trainer.model.lm_head
    head.register_forward_pre_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    run.trainer.train()
    assert seen
    assert all(seen), "TRL's default: fp32 weights, bf16 passes"
    assert run.batches[0].keys == uninterrupted.batches[0].keys


# The next batch ---------------------------------------------------------------------------------------------------

FILL = RolloutConfig(fill=64)
SHAPES = {
    "shuffled, three epochs": {"data": [A, B, "1 + 1", "2 + 3 ="], "shuffle_dataset": True},
    "two updates a batch": {"num_iterations": 2},
    "two batches an update": {"gradient_accumulation_steps": 2, "steps_per_generation": 1},
    "two steps a batch": {"per_device_train_batch_size": 2, "steps_per_generation": 2},
}


@pytest.mark.slow
def test_rows_of_the_next_batch_change_nothing(uninterrupted, tmp_path):
    filled = train(tmp_path, FILL, **SCRIPT)
    assert_equal(uninterrupted, filled)
    assert len(filled.logged("spec/ahead_ratio")) == 12
    assert sum(filled.logged("spec/ahead_ratio")) > 3


@pytest.mark.slow
def test_rows_of_the_next_batch_are_kept_through_the_turns_of_this_one(tmp_path):
    plain, filled = (
        train(tmp_path, config, None, make_conversations, num_train_epochs=2)
        for config in (RolloutConfig(acceptance="off"), FILL)
    )
    assert_equal(plain, filled)
    assert len(filled.training[0].turns) > 1
    assert all(filled.training[1].turns[0].batch.ahead)


@pytest.fixture
def announced(monkeypatch) -> list[list[tuple[str, int, int]]]:
    """(example id, sample index, visit) of the rows of every announcement."""
    seen = []
    announce = SpeculativeRollout.announce

    def noted(rollout, rows, *, visit, sample_indices):
        seen.append(list(zip([row.example_id for row in rows], sample_indices, visit, strict=True)))
        announce(rollout, rows, visit=visit, sample_indices=sample_indices)

    monkeypatch.setattr(SpeculativeRollout, "announce", noted)
    return seen


def asked(run: Run) -> list[list[tuple[str, int, int]]]:
    """The same of the batches that were generated."""
    turns = [batch.turns[0] for batch in run.training]
    return [
        list(zip([row.example_id for row in turn.rows], turn.batch.sample_indices, turn.batch.visits, strict=True))
        for turn in turns
    ]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_the_next_batch_is_the_one_that_was_announced(shape, announced, tmp_path):
    run = train(tmp_path, FILL, **{"num_train_epochs": 3, **SHAPES[shape]})
    batches = asked(run)
    assert len(batches) > 2
    assert announced == [*batches[1:], []], "nothing follows the last"
    assert run.training[0].turns[0].batch.stats.ahead_tokens > 0
    assert all(run.training[1].turns[0].batch.ahead)


@pytest.mark.slow
def test_the_next_batch_is_known_after_a_resume_too(announced, tmp_path):
    options = {**SHAPES["shuffled, three epochs"], "num_train_epochs": 3, "save_strategy": "steps", "save_steps": 2}
    whole = train(tmp_path / "whole", FILL, **options)
    announced.clear()
    rest = train(tmp_path / "rest", FILL, **options, resume=tmp_path / "whole" / "checkpoint-6")
    batches = asked(rest)
    assert len(batches) == len(asked(whole)) - 6 > 2
    assert announced == [*batches[1:], []]


@pytest.mark.slow
def test_a_streamed_dataset_has_no_known_next_batch_and_says_so(announced, tmp_path, caplog):
    streamed = Dataset.from_list([{"prompt": prompt} for prompt in (A, B) * 2]).to_iterable_dataset()
    train(tmp_path, FILL, data=streamed, max_steps=2)
    assert announced == []
    assert caplog.text.count("Rollouts ahead: off, because a dataset that is streamed") == 1


# Noise -----------------------------------------------------------------------------------------------------------


def repeated(*runs: Run) -> int:
    """Rows whose key another row had: their noise is the same, so their response is too while the weights allow it."""
    keys = [key for run in runs for key in run.keys]
    return len(keys) - len(set(keys))


@pytest.mark.slow
def test_no_noise_is_drawn_twice(uninterrupted):
    assert [batch.training for batch in uninterrupted.batches].count(False) == 8, "four evaluations of two batches"
    assert len(uninterrupted.batches) == 12 + 8
    training = [key for batch in uninterrupted.training for key in batch.keys]
    evaluation = [key for batch in evaluations(uninterrupted) for key in batch.keys]
    assert len(set(training)) == len(training)
    assert not {*training} & {*evaluation}
    assert evaluation == evaluation[:8] * 4, "every evaluation has the same noise"
    assert [batch.visits[0] for batch in uninterrupted.training] == [n // 2 for n in range(12)], "A and B by turns"


def evaluations(run: Run) -> list[Batch]:
    return [batch for batch in run.batches if not batch.training]


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
    run = train(tmp_path, **SCRIPT | {"num_train_epochs": 1, "save_strategy": "no"})
    evaluated = [key for batch in evaluations(run)[:2] for key in batch.keys]
    training = [key for batch in run.training for key in batch.keys]
    assert len({*training, *evaluated}) < len(training) + len(evaluated)


@pytest.mark.slow
def test_training_again_samples_with_new_noise(tmp_path):
    run = train(tmp_path, max_steps=2)
    run.trainer.train()
    assert len(run.keys) == 16
    assert repeated(run) == 0


# Evaluation ------------------------------------------------------------------------------------------------------


def saved(folder: Path, name: str = "specrl") -> TrajectoryCache:
    tokenizer = load_tiny()[1]
    return load(folder / name, Fingerprint(), len(tokenizer), [tokenizer.eos_token_id])


def visits_in(folder: Path) -> dict:
    return json.loads((folder / "trainer_state.json").read_text())["stateful_callbacks"][STATE]["visits"]


@pytest.mark.slow
def test_evaluations_draft_from_the_last_one_and_leave_training_alone(uninterrupted):
    folder = Path(uninterrupted.trainer.args.output_dir) / "checkpoint-6"
    names = visits_in(folder)["rollout"]
    assert list(names.values()) == [3, 3]
    stored = [text for name in names for text in saved(folder).siblings(name)]
    trained = {key for batch in uninterrupted.training[4:6] for key in batch.keys}
    assert {trajectory.key for trajectory in stored} == trained
    evaluated = evaluations(uninterrupted)
    kept = saved(folder, "specrl/evaluations")
    texts = {trajectory.key: [*trajectory.tokens] for name in names for trajectory in kept.siblings(name)}
    assert texts == {key: tokens for b in evaluated[2:4] for key, tokens in zip(b.keys, b.tokens, strict=True)}
    accepted = [batch.turns[0].batch.stats.sources.get("evaluation", (0, 0))[1] for batch in evaluated]
    assert accepted[:2] == [0, 0]
    assert min(accepted[2:]) > 0
    assert len(uninterrupted.logged("eval_spec/reused_ratio")) == 4


@pytest.mark.slow
def test_control_a_draft_that_is_not_verified_ends_a_control_step(monkeypatch, tmp_path):
    generate = SpeculativeRollout.generate

    def damaged(*args, **options):
        batch = generate(*args, **options)
        batch.completions[0].tokens[0] += 1
        return batch

    monkeypatch.setattr(SpeculativeRollout, "generate", damaged)
    with pytest.raises(RolloutError, match="from token 0 on"):
        train(tmp_path, RolloutConfig(measure_every=1), max_steps=1)


# Two processes ---------------------------------------------------------------------------------------------------

PROGRAM = """
import json, os, sys
from tests.trainers.grpo.test_reusing import FILL, SCRIPT, train
halved = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "ddp_backend": "gloo"}
run = train(sys.argv[1], FILL, **SCRIPT | halved)
result = {"keys": run.keys, "reused": run.logged("spec/reused_ratio")}
result["ahead"] = [all(batch.turns[0].batch.ahead) for batch in run.training[1:]]
print(json.dumps(result), file=open(f"{sys.argv[1]}/rank{os.environ['RANK']}.json", "w"))
"""


@pytest.mark.long
def test_two_processes_sample_what_one_does(uninterrupted, tmp_path):
    """Started as by torchrun. Each has half of every group."""
    (first, second), _ = by_two_processes(tmp_path, PROGRAM, 600)
    assert sorted(first["keys"] + second["keys"]) == sorted(uninterrupted.keys)
    assert first["reused"] == second["reused"], "the share of all rows"
    for each in (first, second):
        assert sum(each["ahead"]) > len(each["ahead"]) / 2, "it began the rows that came to it"


# Resumed ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def accumulated(tmp_path_factory) -> Run:
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
    assert [batch.visits[0] for batch in accumulated.batches + rest.batches] == [0, 1, 2, 3, 4, 5]
    assert repeated(accumulated, rest) == 0


@pytest.mark.slow
def test_control_forgotten_visits_repeat_noise(accumulated, tmp_path):
    checkpoint = shutil.copytree(Path(accumulated.trainer.args.output_dir) / "checkpoint-2", tmp_path / "checkpoint-2")
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    del state["stateful_callbacks"][STATE]
    (checkpoint / "trainer_state.json").write_text(json.dumps(state))
    assert repeated(accumulated, train(tmp_path, **ACCUMULATED, max_steps=3, resume=checkpoint)) > 0


# What TRL's options ask for ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        (
            "generation_kwargs",
            {"no_repeat_ngram_size": 2},
            r"generation_kwargs\.no_repeat_ngram_size=2.*Leave it out",
        ),
        ("generation_kwargs", {"temperature": 0.5}, r"generation_kwargs\.temperature=0\.5.*Use temperature=0\.5 there"),
        (
            "generation_kwargs",
            {"eos_token_id": 4},
            r"generation_kwargs\.eos_token_id=4.*model\.generation_config\.eos_token_id=4",
        ),
        ("min_p", 0.5, "min_p=0.5.*temperature, top_k and top_p alone. Leave it out"),
        ("repetition_penalty", 5.0, "repetition_penalty=5.0.*set it to 1.0"),
        ("temperature", 0.0, "temperature=0.0.*Use temperature=1.0"),
        ("top_k", None, "top_k=None: expected a whole number"),
        ("top_k", -1, "top_k=-1 must be at least 0"),
    ],
)
def test_options_of_trl_that_it_cannot_obey_are_refused(option, value, words, idle, monkeypatch):
    monkeypatch.setattr(idle.trainer.args, option, value)
    refused(idle, words)


def of_model(model, folder, **options):
    """A reusing trainer with a model of one's own, and the embedded policy's tokenizer."""
    args = GRPOConfig(str(folder), use_cpu=True, bf16=False, report_to=[], max_completion_length=16)
    data = Dataset.from_list([{"prompt": A}])
    return reusing(GRPOTrainer)(
        model, args=args, reward_funcs=len, processing_class=load_tiny()[1], train_dataset=data, **options
    )


VOCABULARY = len(load_tiny()[1])
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2} | {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


def test_models_that_it_cannot_sample_from_are_refused_in_the_constructor(tmp_path):
    foreign = AutoModelForCausalLM.from_config(transformers.Gemma2Config(**SIZES))
    with pytest.raises(RolloutError, match=r"reusing\(\) cannot sample from this model: .*Train it with TRL alone"):
        of_model(foreign, tmp_path)


def test_prompt_tuning_is_refused(tmp_path):
    tuned = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(RolloutError, match=r"adapters that learn a prompt.*use LoRA instead"):
        of_model(load_tiny()[0], tmp_path, peft_config=tuned)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_dropout_that_only_trl_samples_with_is_said_once(dropout, tmp_path, caplog):
    adapters = LoraConfig(task_type="CAUSAL_LM", r=2, lora_dropout=dropout, target_modules="all-linear")
    of_model(load_tiny()[0], tmp_path, peft_config=adapters)
    assert caplog.text.count("samples without, as in evaluation") == (dropout > 0)


@pytest.mark.slow
def test_a_draft_model_changes_nothing_but_time(tmp_path):
    model, _ = load_tiny()
    Head.of(model).save_pretrained(tmp_path / "head")
    drafting = train(tmp_path / "exact", RolloutConfig(drafter=str(tmp_path / "head"), sources=["position"]))
    assert_equal(drafting, train(tmp_path / "off", RolloutConfig(acceptance="off")))
    assert any(turn.batch.stats.sources.get("model", (0, 0))[0] for batch in drafting.batches for turn in batch.turns)


def test_several_turns_on_a_server_need_one_process(idle, monkeypatch):
    for name, value in {"use_vllm": True, "vllm_mode": "server"}.items():
        monkeypatch.setattr(idle.trainer.args, name, value)
    monkeypatch.setattr(type(idle.trainer.args), "world_size", 2)
    check_args(idle.trainer.args, {}, RolloutConfig())
    with pytest.raises(RolloutError, match=r"tools.*Use vllm_mode='colocate'"):
        check_args(idle.trainer.args, {"tools": [tell]}, RolloutConfig())


VLLM = {"use_vllm": True}
DRAFTER = RolloutConfig(drafter="head-of-mine")


@pytest.mark.parametrize(
    ("args", "given", "config", "words"),
    [
        (VLLM | {"generation_kwargs": {"n": 2}}, {}, None, r"generation_kwargs\.n=2.*Leave"),
        (VLLM | {"vllm_structured_outputs_regex": "a+"}, {}, None, "vllm_structured_outputs_regex='a.'.*Leave"),
        (VLLM | {"vllm_mode": "colocate", "vllm_tensor_parallel_size": 2}, {}, None, "vllm_tensor_parallel_size=1"),
        (VLLM | {"vllm_mode": "colocate"}, {}, DRAFTER, r"drafter='head-of-mine'.*use_vllm=False"),
        (VLLM | {"vllm_mode": "server"}, {}, DRAFTER, r"drafter='head-of-mine'.*use_vllm=False"),
        (VLLM | {"vllm_mode": "server"}, {}, RolloutConfig(fill=64), r"fill=64.*vllm_mode='colocate'"),
        ({}, {"rollout_func": lambda prompts, trainer: {}}, None, "rollout_func"),
    ],
)
def test_what_it_cannot_serve_is_refused_before_a_model_is_loaded(args, given, config, words, tmp_path):
    args = GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, **args)
    with pytest.raises(RolloutError, match=words):
        reusing(GRPOTrainer, config)("no-such-model", args=args, reward_funcs=len, **given)


@pytest.mark.parametrize(
    ("name", "value", "neutral"),
    [
        ("num_beams", 3, 1),
        ("stop_strings", ["x"], None),
        ("not_known_yet", 3, None),
    ],
)
def test_a_generation_config_by_which_trl_would_sample_otherwise_is_refused(name, value, neutral, idle, monkeypatch):
    monkeypatch.setattr(idle.trainer.generation_config, name, None, raising=False)
    monkeypatch.setattr(idle.trainer.model.generation_config, name, value, raising=False)
    refused(idle, rf"model\.generation_config\.{name}={re.escape(repr(value))}.*set it to {neutral!r}$")
    setattr(idle.trainer.model.generation_config, name, neutral)
    taken(idle)


def test_a_generation_config_of_the_trainer_that_was_changed_is_refused(idle, monkeypatch):
    monkeypatch.setattr(idle.trainer.generation_config, "temperature", 0.25)
    refused(idle, r"trainer\.generation_config\.temperature=0\.25.*Use temperature=0\.25 there")


def test_a_model_in_parts_is_refused_before_a_pass_that_the_others_do_not_take(idle, monkeypatch):
    monkeypatch.setattr(Accelerator, "distributed_type", DistributedType.FSDP)
    refused(idle, "FSDP 1 leaves no process a whole model")


def refused(run: Run, words: str) -> None:
    with pytest.raises(RolloutError, match=words) as error:
        taken(run)
    assert "\n" not in str(error.value)


def taken(run: Run) -> None:
    """What is done once the trainer has been built."""
    Reuse(run.trainer, RolloutConfig(), ToolResults())


def test_control_values_that_ask_for_nothing_are_taken(idle, monkeypatch):
    args = idle.trainer.args
    nothing = {"num_beams": 1, "use_cache": False, "temperature": args.temperature, "suppress_tokens": None}
    for name, value in {"generation_kwargs": nothing, "repetition_penalty": 1.0}.items():
        monkeypatch.setattr(args, name, value)
    replaced = {"repetition_penalty": 1.1, "top_k": 20, "top_p": 0.8, "temperature": 0.7}  # by TRL's options
    for name, value in {"output_attentions": False, **replaced}.items():
        monkeypatch.setattr(idle.trainer.model.generation_config, name, value)
    taken(idle)


def test_images_are_refused(idle):
    with pytest.raises(RolloutError, match="images"):
        idle.trainer._generate_single_turn([[1]], [object()], {}, 1)


def test_unsupported_options_of_reuse_are_refused():
    lossy = [RolloutConfig(acceptance=rule) for rule in ("lenient", "judged", "routed")]
    started = RolloutConfig(cache=CacheConfig(start_from="elsewhere"))
    for config in (RolloutConfig(engine="vllm"), *lossy, started):
        with pytest.raises(RolloutError, match=r"python -m specrl\.train"):
            reusing(GRPOTrainer, config)


@pytest.mark.slow
def test_a_twin_changes_nothing_but_time(tmp_path):
    """A second script with another learning rate drafts from the log of the first, and from its own in a restart."""
    kept = RolloutConfig(cache=CacheConfig(log=True))
    one_epoch = {"num_train_epochs": 1, "gradient_accumulation_steps": 2, "steps_per_generation": 1}
    train(tmp_path / "a", kept, **one_epoch)
    without = train(tmp_path / "without", learning_rate=2e-4, **one_epoch)
    twin = RolloutConfig(twin=str(tmp_path / "a"))
    with_twin = train(tmp_path / "with", twin, learning_rate=2e-4, **one_epoch)
    again = train(tmp_path / "a", kept, **one_epoch)
    assert_equal(without, with_twin)
    assert with_twin.logged("spec/twin_hit_rate") == [1.0] * len(with_twin.logged("loss"))
    assert again.logged("spec/twin_unchanged_ratio") == [1.0] * len(again.logged("loss"))
    assert sum(batch.accepted for batch in with_twin.batches) > sum(batch.accepted for batch in without.batches)
    assert len(list((tmp_path / "a" / "texts").iterdir())) == len(again.batches), "each batch has its file"


# TRL's methods -----------------------------------------------------------------------------------------------------


class Overriding(GRPOTrainer):
    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
        raise AssertionError


class WithoutSeam(GRPOTrainer):
    def _generate(self, prompts):
        return [], [], [], [], None, {}, None, []


def test_a_method_of_the_users_own_is_not_ignored():
    with pytest.raises(RolloutError, match="Overriding overrides _generate_single_turn"):
        reusing(Overriding)


def test_another_trl_is_refused_with_the_version_that_works(monkeypatch):
    monkeypatch.setattr("specrl.trainers.grpo.limits.version", lambda name: "1.17.0")
    with pytest.raises(RolloutError, match=r"this is trl 1\.17\.0. Install trl==1\.16\.0$"):
        reusing(GRPOTrainer)


def test_a_trl_that_generates_elsewhere_is_refused_at_its_first_batch(tmp_path):
    model, tokenizer = load_tiny()
    args = GRPOConfig(str(tmp_path), use_cpu=True, bf16=False)
    data = Dataset.from_list([{"prompt": A}])
    trainer = reusing(WithoutSeam)(model, reward_funcs=len, args=args, train_dataset=data, processing_class=tokenizer)
    with pytest.raises(RolloutError, match=r"trl==1\.16\.0"):
        trainer._generate([A])
