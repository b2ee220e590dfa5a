"""Weights and optimiser moments are restored bit for bit, without pickle, and another model's are refused."""

import os
import pickle

import pytest
import torch
from safetensors import SafetensorError

from specrl.rollout.types import RolloutError
from specrl.trainers import snapshot


def build(seed: int, width: int = 3):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(2, width), torch.nn.Linear(width, 1))
    groups = [{"params": list(model[0].parameters()), "lr": 0.1}, {"params": list(model[1].parameters()), "lr": 0.01}]
    return model, torch.optim.AdamW(groups)


def steps(model, optimizer, count: int):
    for i in range(count):
        model(torch.full((4, 2), float(i))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def named(model):
    return dict(model.named_parameters())


def values(model):
    return {name: p.tolist() for name, p in model.named_parameters()}


def test_a_restored_run_equals_the_uninterrupted_one(tmp_path):
    uninterrupted, optimizer = build(0)
    steps(uninterrupted, optimizer, 3)
    snapshot.save(tmp_path, named(uninterrupted), optimizer, {"step": 3, "beta": 0.1 + 0.2})
    steps(uninterrupted, optimizer, 4)
    for forget in (False, True):
        other, fresh = build(1)
        assert snapshot.load(tmp_path, named(other), fresh) == {"step": 3, "beta": 0.1 + 0.2}
        if forget:
            fresh.state.clear()
        steps(other, fresh, 4)
        assert (values(other) == values(uninterrupted)) != forget, "control: without the moments it differs"


class Canary:
    """Unpickling it creates a file."""

    def __reduce__(self):
        return os.system, ('touch "$SPECRL_CANARY"',)


@pytest.mark.parametrize("file", [snapshot.WEIGHTS, snapshot.OPTIMIZER])
def test_a_foreign_pickle_is_refused_and_never_run(tmp_path, monkeypatch, file):
    monkeypatch.setenv("SPECRL_CANARY", str(tmp_path / "ran"))
    model, optimizer = build(0)
    steps(model, optimizer, 1)
    snapshot.save(tmp_path, named(model), optimizer, {"step": 1})
    for write in (torch.save, lambda canary, path: path.write_bytes(pickle.dumps(canary))):
        write(Canary(), tmp_path / file)
        with pytest.raises(SafetensorError):
            snapshot.load(tmp_path, named(model), optimizer)
    assert not (tmp_path / "ran").exists()
    pickle.loads(pickle.dumps(Canary()))
    assert (tmp_path / "ran").exists(), "control: it would have been seen"


def test_another_model_is_refused(tmp_path):
    model, optimizer = build(0)
    snapshot.save(tmp_path, named(model), optimizer, {})
    other, fresh = build(0, width=4)
    with pytest.raises(RolloutError, match=r"of another model: '0\.bias' is \(3,\) there and \(4,\) here"):
        snapshot.load(tmp_path, named(other), fresh)
    fewer = {name: p for name, p in named(model).items() if name != "0.bias"}
    with pytest.raises(RolloutError, match=r"'0\.bias' is \(3,\) there and absent here"):
        snapshot.load(tmp_path, fewer, optimizer)
