"""The recipe of a draft model: which weights it starts from, that distilling raises agreement, what it writes."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from specrl import drafter
from specrl.config import load as cli
from specrl.config.options import ConfigError
from specrl.drafter import (
    DrafterOptions,
    agreement,
    distil,
    main,
    quantise,
    sample,
    shortened,
    untrained,
    without_drafter,
)
from specrl.rollout.config import RolloutConfig
from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.engines.local.engine import TransformersEngine
from specrl.rollout.engines.local.head import Head
from specrl.rollout.keys import derive_key
from specrl.rollout.types import Request
from specrl.run.tasks import arithmetic
from specrl.tiny import load_tiny
from tests.engines import local

SMALL = DrafterOptions(out="", layers=1, steps=60, batch=8, rollout=RolloutConfig(max_new_tokens=96))


TINY = "prompts=16", "steps=2", "batch=8", "rollout.max_new_tokens=16", "device=cpu"


def command(*words: str) -> int:
    return cli.run(main, words, DrafterOptions, training=False, words=without_drafter)


@pytest.fixture(scope="module")
def policy():
    return load_tiny()


@pytest.fixture(scope="module")
def sampled(policy):
    """Texts and their keys."""
    model, tokenizer = policy
    prompts = [tokenizer(p.prompt).input_ids for p in arithmetic("train", 80, 0, "easy")]
    return sample(model, frozenset([tokenizer.eos_token_id]), prompts, SMALL)


@pytest.fixture(scope="module")
def texts(sampled):
    return sampled[0]


@pytest.fixture(scope="module")
def held_out(sampled):
    return [column[64:] for column in sampled]


@pytest.fixture(scope="module")
def distilled(policy, texts):
    student = shortened(policy[0], 1)
    distil(policy[0], student, texts[:64], SMALL)
    return student


def test_a_short_copy_has_the_first_layers_and_the_last(policy):
    model = policy[0]
    student = shortened(model, 3)
    for ours, theirs in ((0, 0), (1, 1), (2, 7)):
        pairs = zip(student.model.layers[ours].parameters(), model.model.layers[theirs].parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    assert torch.equal(student.model.embed_tokens.weight, model.model.embed_tokens.weight)
    assert torch.equal(student.model.norm.weight, model.model.norm.weight)
    assert student.config.num_hidden_layers == len(student.config.layer_types) == 3
    assert model.config.num_hidden_layers == len(model.model.layers) == 8, "the policy kept its own"
    with torch.no_grad():
        student.model.norm.weight.zero_()
    assert model.model.norm.weight.any(), "nothing is shared"


@pytest.mark.parametrize("layers", [0, 8, 9])
def test_layers_out_of_range_are_refused(policy, layers):
    with pytest.raises(ConfigError, match=rf"layers={layers}: .* has 1 to 7 layers"):
        shortened(policy[0], layers)


@pytest.mark.slow
def test_responses_are_the_policys_own_draws(policy, sampled):
    (model, tokenizer), (texts, keys) = policy, sampled
    requests = [Request(t.prompt, key, SMALL.rollout.max_new_tokens) for t, key in zip(texts[:8], keys, strict=False)]
    done, _ = TransformersEngine(model, SamplingParams(frozenset([tokenizer.eos_token_id]))).generate(requests)
    assert [tuple(c.tokens) for c in done] == [t.response for t in texts[:8]]
    assert keys[3] == derive_key(SMALL.seed, "drafter", 3, 0)
    assert len(set(keys)) == len(texts)


@pytest.mark.slow
def test_distilling_raises_agreement_on_new_prompts(policy, held_out, distilled):
    model = policy[0]
    before = agreement(model, shortened(model, 1), *held_out)
    after = agreement(model, distilled, *held_out)
    print(f"before {before}, after {after}")
    assert after > before + 0.15
    assert agreement(model, model, *held_out) == 1.0
    texts, keys = held_out
    other_noise = [~key for key in keys]
    assert agreement(model, model, texts, other_noise) < 1.0, "control: with other noise the policy samples otherwise"


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"kind": "head"}, {"select": "adaspec"}], ids=["head", "adaspec"])
def test_other_recipes_raise_it_too(policy, texts, held_out, options):
    model, options = policy[0], replace(SMALL, learning_rate=5e-3, **options)
    torch.manual_seed(0)
    student = untrained(model, options)
    before = agreement(model, copy.deepcopy(student), *held_out)
    distil(model, student, texts[:64], options)
    after = agreement(model, student, *held_out)
    print(f"before {before}, after {after}")
    assert after > before + 0.15
    assert all(p.grad is None for p in model.parameters())


def test_a_head_with_layers_or_bits_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="kind=head has one layer and no rounded weights, not layers=2 and bits=0"):
        main(DrafterOptions(out=str(tmp_path / "draft"), kind="head", layers=2))


@pytest.mark.slow
def test_distilling_on_shuffled_targets_does_not(policy, texts, held_out):
    """The planted wrong rule: every response is predicted from another prompt's positions."""
    model, student = policy[0], shortened(policy[0], 1)
    wrong = copy.deepcopy(model)
    with torch.no_grad():
        wrong.lm_head.weight = torch.nn.Parameter(wrong.lm_head.weight.roll(7, 0))
    distil(wrong, student, texts[:64], replace(SMALL, steps=30))
    assert agreement(model, student, *held_out) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["model", "head"])
def test_the_command_writes_what_drafts(policy, tmp_path, kind):
    out = tmp_path / "drafter"
    assert command(f"out={out}", f"kind={kind}", "data=arithmetic:easy", *TINY) == 0
    assert not list(out.rglob("*.bin"))
    student = AutoModelForCausalLM.from_pretrained(out) if kind == "model" else Head.load(out, policy[0])
    requests = [Request(policy[1](p.prompt).input_ids, i, 12) for i, p in enumerate(arithmetic("test", 4, 0, "easy"))]
    plain, drafting = (local(policy[0], SamplingParams(frozenset([1])), window=3, drafter=d) for d in (None, student))
    assert [c.tokens for c in plain.generate(requests)[0]] == [c.tokens for c in drafting.generate(requests)[0]]
    assert drafting.generate(requests)[1].sources["model"][0] > 0


@pytest.mark.parametrize("name", ["judge_math", "arbitrage_math", "reasoning_math"])
def test_the_config_of_a_run_that_will_use_it_is_taken(name):
    options = cli.load(without_drafter([f"config={name}", "out=new"]), DrafterOptions)
    run = cli.load([f"config={name}"])
    assert (options.model, options.data, options.dataset) == (run.model, run.data, run.dataset)
    assert (options.rollout.drafter, options.rollout.max_new_tokens) == ("", run.rollout.max_new_tokens)


@pytest.mark.slow
def test_one_file_is_enough_and_prompts_are_those_of_the_run(tmp_path, monkeypatch):
    data = tmp_path / "mine.jsonl"
    data.write_text("".join(json.dumps({"question": f"{n} + 1 ="}) + "\n" for n in range(5)))
    asked = []
    real = drafter.sample
    monkeypatch.setattr(drafter, "sample", lambda policy, eos, prompts, options: asked.append(prompts) or real(
        policy, eos, prompts, options))  # fmt: skip
    words = f"data={data}", "dataset.prompt_template=Q: {prompt}", f"out={tmp_path / 'made'}", *TINY
    assert command(*words) == 0
    assert [len(prompts) for prompts in asked] == [3, 2], "to learn from, and to test on"
    tokenizer = load_tiny()[1]
    assert sorted([*asked[0], *asked[1]]) == sorted(tokenizer(f"Q: {n} + 1 =").input_ids for n in range(5))
    data.write_text(json.dumps({"question": "1 + 1 ="}))
    assert command(*words, f"out={tmp_path / 'other'}") == 2


def test_a_missing_or_used_directory_is_one_line(tmp_path, capsys):
    assert command() == 2
    assert "error: out is missing" in capsys.readouterr().err
    (tmp_path / "file").write_text("x")
    assert command(f"out={tmp_path}") == 2
    assert "holds files already" in capsys.readouterr().err


def test_quantised_weights_take_few_values_and_one_bit_is_refused(build_model, tmp_path):
    model = build_model("qwen3", 0)
    before = copy.deepcopy(model.state_dict())
    quantise(model, bits=3)
    for name, weight in model.state_dict().items():
        layer = ".layers." in name and weight.dim() == 2
        assert torch.equal(weight, before[name]) != layer, "the layers' matrices and nothing else"
        if layer:
            assert max(row.unique().numel() for row in weight) <= 7
            step = before[name].abs().amax(1, keepdim=True) / 3
            assert ((weight - before[name]).abs() <= step / 2 + 1e-6).all()
    with pytest.raises(ConfigError, match="Take bits=2 or more"):
        main(DrafterOptions(out=str(tmp_path / "draft"), bits=1))
