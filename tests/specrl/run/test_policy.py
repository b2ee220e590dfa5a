import json
import shutil

import pytest
import torch

from specrl.config.load import load
from specrl.config.options import ConfigError
from specrl.run.lora import check_targets
from specrl.run.policy import device, engine_spec, fingerprint, load_policy, rollout_dtype, trained_dtype
from tests.runs import build_policy, policy, words


def configure(folder, **options):
    return load(words("out", model=folder, **options))


@pytest.fixture
def variant(tmp_path):
    """variant(file=changes) -> a copy of the policy with keys of its JSON files changed, None removing them."""

    def make(name="variant", **files):
        folder = tmp_path / name
        shutil.copytree(policy(), folder)
        for file, changes in files.items():
            path = folder / f"{file}.json"
            data = json.loads(path.read_text()) | changes
            path.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))
        return folder

    return make


def test_model_tokenizer_and_every_id_that_ends_a_response():
    model, tokenizer, eos_ids = load_policy(configure(policy()))
    assert model.dtype == torch.float32
    assert model.device.type == "cpu"
    assert tokenizer.padding_side == "left"
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<pad>", "<eos>")
    assert eos_ids == set(tokenizer.convert_tokens_to_ids(["<eos>", "?", "."]))


@pytest.mark.parametrize(
    ("declared", "expected"), [(1, {1}), ([1, 9], {1, 9}), ([9], {1, 9}), (0, {0, 1}), (None, {1})]
)
def test_eos_ids_are_the_models_and_the_tokenizers(variant, declared, expected):
    folder = variant(generation_config={"eos_token_id": declared}, config={"eos_token_id": declared})
    assert load_policy(configure(folder))[2] == expected


def test_without_any_eos_no_response_could_end(variant):
    none = {"eos_token_id": None}
    folder = variant(config=none, generation_config=none, tokenizer_config={"eos_token": None})
    with pytest.raises(ConfigError, match="names no EOS token"):
        load_policy(configure(folder))


@pytest.mark.parametrize(
    ("options", "trained", "rolled_out"),
    [
        ({}, "float32", "float32"),
        ({"trainer__precision": "bf16"}, "float32", "bfloat16"),
        ({"trainer__precision": "bf16", "lora__rank": 4}, "bfloat16", "bfloat16"),
        ({"trainer__precision": "pure_bf16"}, "bfloat16", "bfloat16"),
    ],
)
def test_trained_weights_are_float32_unless_asked_otherwise(options, trained, rolled_out):
    config = configure(policy(), **options)
    assert (trained_dtype(config), rollout_dtype(config)) == (trained, rolled_out)
    assert load_policy(config, trained)[0].dtype == getattr(torch, trained)
    assert engine_spec(config, frozenset()).dtype == rolled_out


def test_the_tokenizer_must_belong_to_the_model(tmp_path):
    small = build_policy(tmp_path / "small", vocab_size=20)
    with pytest.raises(ConfigError, match=r"tokens but model=.*small knows 20") as caught:
        load_policy(configure(small))
    assert "\n" not in str(caught.value)
    big = build_policy(tmp_path / "big", vocab_size=128)
    assert load_policy(configure(big))[0].config.vocab_size == 128, "spare rows of the embedding are usual"


@pytest.fixture
def gpus(monkeypatch):
    """gpus(count, **environment): a machine with so many GPUs, and what torchrun tells a process."""

    def pretend(count, **environment):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, str(value))

    return pretend


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_every_process_of_a_machine_has_a_gpu_of_its_own(gpus, name):
    gpus(4)
    assert str(device(configure(policy(), device=name))) == "cuda"
    devices = set()
    for rank in range(4):
        gpus(4, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=4)
        devices.add(str(device(configure(policy(), device=name))))
    assert devices == {"cuda:0", "cuda:1", "cuda:2", "cuda:3"}
    gpus(1, LOCAL_RANK=3, LOCAL_WORLD_SIZE=4)  # a launcher that shows each process its own GPU only
    assert str(device(configure(policy(), device=name))) == "cuda:0"


def test_one_gpu_for_all_processes_is_refused(gpus):
    gpus(4, LOCAL_RANK=0, LOCAL_WORLD_SIZE=1)
    assert str(device(configure(policy(), device="cuda:2"))) == "cuda:2"
    with pytest.raises(ConfigError, match=r"^device=cuda:4: PyTorch sees 4 GPUs here, from cuda:0 on\. Use device="):
        device(configure(policy(), device="cuda:4"))
    gpus(4, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2)
    with pytest.raises(ConfigError, match=r"^device=cuda:2 puts all processes of this machine on one GPU\. Use dev"):
        device(configure(policy(), device="cuda:2"))


def test_a_misspelt_layer_is_refused_with_the_names_of_the_layers(tiny):
    layers = "q_proj, k_proj, o_proj, up_proj, v_proj, gate_proj, down_proj, lm_head"
    with pytest.raises(ConfigError) as caught:
        check_targets(["v_proj", "qproj"], tiny("qwen3"))
    assert "no layer 'qproj'. Its linear layers: q_proj, " in str(caught.value)
    assert all(layer in str(caught.value) for layer in layers.split(", "))
    with pytest.raises(ConfigError, match=r"no layer 'q_proj'\. Its linear layers: c_proj, "):
        check_targets(["q_proj"], tiny("gpt2"))
    for targets in ([], ["q_proj"], ["self_attn.o_proj", "lm_head"]):
        check_targets(targets, tiny("qwen3"))


def test_code_of_a_model_folder_never_runs(variant, tmp_path):
    """Remote code runs only when it is asked for."""
    canary = tmp_path / "canary"
    auto = {"AutoModelForCausalLM": "evil.Model", "AutoConfig": "evil.Config"}
    folder = variant(config={"auto_map": auto, "model_type": "evil"})
    (folder / "evil.py").write_text(f"open({str(canary)!r}, 'w').close()\nraise SystemExit")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_policy(configure(folder))
    assert not canary.exists()


def marks(folder, **options):
    config = configure(folder, **options)
    return fingerprint(config, load_policy(config)[1])


def test_identity_follows_tokenizer_template_and_data_but_not_the_model_size(variant, tmp_path):
    identity, sampling = marks(policy())
    wide = build_policy(tmp_path / "wide", hidden_size=64)
    assert marks(wide)[0] == identity
    assert marks(wide)[1] != sampling
    assert marks(variant("renamed", tokenizer_config={"model_max_length": 9}))[0] == identity
    templated = variant("templated", tokenizer_config={"chat_template": "{{ messages }}"})
    vocabulary = json.loads((policy() / "tokenizer.json").read_text())["model"]["vocab"]
    vocabulary["Tom"], vocabulary["Ben"] = vocabulary["Ben"], vocabulary["Tom"]
    swapped = variant("swapped")
    path = swapped / "tokenizer.json"
    data = json.loads(path.read_text())
    data["model"]["vocab"] = vocabulary
    path.write_text(json.dumps(data))
    others = [
        marks(templated)[0],
        marks(swapped)[0],
        marks(policy(), dataset__prompt_template="Q: {prompt}")[0],
        marks(policy(), dataset__system_prompt="Be brief.")[0],
        marks(policy(), data="gsm8k")[0],
    ]
    assert all(other != identity for other in others)
    assert len({json.dumps(other) for other in others}) == len(others)


def test_the_sampling_params_follow_model_and_sampling():
    identity, sampling = marks(policy())
    changed = marks(policy(), rollout__temperature=0.5, rollout__top_p=0.5, rollout__top_k=1)
    assert changed[0] == identity
    assert {name for name in sampling if sampling[name] != changed[1][name]} == {"temperature", "top_p", "top_k"}
