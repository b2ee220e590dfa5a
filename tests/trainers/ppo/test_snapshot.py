"""Weights and optimiser moments are restored bit for bit, without pickle, and anything else is rejected."""

import os
import pickle

import pytest
import torch

from specrl.rollout.types import RolloutError
from specrl.trainers.ppo import snapshot


def build(seed: int, width: int = 3):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(2, width), torch.nn.Linear(width, 1))
    model[0].bias.requires_grad_(False)
    groups = [{"params": list(model[0].parameters()), "lr": 0.1}, {"params": list(model[1].parameters()), "lr": 0.01}]
    return model, torch.optim.AdamW(groups)


def steps(model, optimizer, count: int):
    for i in range(count):
        model(torch.full((4, 2), float(i))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(model):
    return {name: p.tolist() for name, p in model.named_parameters()}


def test_going_on_is_the_same_as_never_having_stopped(tmp_path):
    whole, optimizer = build(0)
    steps(whole, optimizer, 3)
    snapshot.save(tmp_path, whole, optimizer, {"step": 3, "beta": 0.1 + 0.2})
    steps(whole, optimizer, 4)
    other, fresh = build(1)
    other[0].bias.data = whole[0].bias.data  # not trained, so not saved
    assert snapshot.load(tmp_path, other, fresh) == {"step": 3, "beta": 0.1 + 0.2}
    steps(other, fresh, 4)
    assert weights(other) == weights(whole)


def test_control_without_the_moments_it_is_not(tmp_path):
    whole, optimizer = build(0)
    steps(whole, optimizer, 3)
    snapshot.save(tmp_path, whole, optimizer, {})
    steps(whole, optimizer, 4)
    other, fresh = build(1)
    other[0].bias.data = whole[0].bias.data
    snapshot.load(tmp_path, other, fresh)
    fresh.state.clear()
    steps(other, fresh, 4)
    assert weights(other) != weights(whole)


def test_the_files_hold_tensors_and_json_only(tmp_path):
    model, optimizer = build(0)
    steps(model, optimizer, 1)
    snapshot.save(tmp_path, model, optimizer, {})
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "optimizer.safetensors",
        "progress.json",
        "trained.safetensors",
    ]
    for path in tmp_path.glob("*.safetensors"):
        assert path.read_bytes()[8:9] == b"{", "a header of JSON"


def damage(path, change):
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("trained.safetensors", lambda data: data[: len(data) // 2]),
        ("optimizer.safetensors", lambda data: b"\x80\x04" + data),
        ("progress.json", lambda data: data[:-2]),
    ],
)
def test_damaged_files_are_refused(tmp_path, file, change):
    model, optimizer = build(0)
    steps(model, optimizer, 1)
    snapshot.save(tmp_path, model, optimizer, {"step": 1})
    damage(tmp_path / file, change)
    with pytest.raises(RolloutError, match=r"cannot be read: .*Remove it to resume from an older one"):
        snapshot.load(tmp_path, model, optimizer)


class Canary:
    """Unpickling it creates a file."""

    def __reduce__(self):
        return os.system, ('touch "$SPECRL_CANARY"',)


@pytest.mark.parametrize("file", [snapshot.WEIGHTS, snapshot.OPTIMIZER])
@pytest.mark.parametrize("write", [torch.save, lambda what, path: path.write_bytes(pickle.dumps(what))])
def test_a_foreign_pickle_is_refused_and_never_run(tmp_path, monkeypatch, file, write):
    monkeypatch.setenv("SPECRL_CANARY", str(tmp_path / "ran"))
    model, optimizer = build(0)
    steps(model, optimizer, 1)
    snapshot.save(tmp_path, model, optimizer, {"step": 1})
    write(Canary(), tmp_path / file)
    with pytest.raises(RolloutError, match="cannot be read: "):
        snapshot.load(tmp_path, model, optimizer)
    assert not (tmp_path / "ran").exists()
    pickle.loads(pickle.dumps(Canary()))
    assert (tmp_path / "ran").exists(), "it would have been seen"


def test_another_model_is_refused(tmp_path):
    model, optimizer = build(0)
    snapshot.save(tmp_path, model, optimizer, {})
    with pytest.raises(RolloutError, match=r"of another model: the two differ in '0\.weight'"):
        snapshot.load(tmp_path, *build(0, width=4))
    other, fresh = build(0)
    other[0].bias.requires_grad_(True)
    with pytest.raises(RolloutError, match=r"differ in '0.bias'"):
        snapshot.load(tmp_path, other, fresh)
