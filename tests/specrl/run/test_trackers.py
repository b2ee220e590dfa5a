"""`report.trackers`: every step of a run reaches the tracker; what is missing is named."""

import json
import sys

import pytest

from specrl.config.load import load
from specrl.config.options import ConfigError
from tests.runs import run, words

WRITER = """
class SummaryWriter:
    calls = []
    def __init__(self, log_dir): self.calls.append(("log_dir", log_dir, 0))
    def add_text(self, key, text, step=0): self.calls.append((key, text, step))
    def add_scalar(self, key, value, step): self.calls.append((key, value, step))
    def flush(self): pass
    def close(self): pass
"""


@pytest.fixture
def tensorboard(tmp_path, monkeypatch):
    """Packages of that name which only remember their calls: (key, value, step) each time."""
    for name, code in (("tensorboard", ""), ("tensorboardX", WRITER)):  # an empty one, so that torch gives way to X
        (tmp_path / "packages" / name).mkdir(parents=True)
        (tmp_path / "packages" / name / "__init__.py").write_text(code)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    yield lambda: sys.modules["tensorboardX"].SummaryWriter.calls
    for name in ("tensorboard", "tensorboardX"):
        sys.modules.pop(name, None)


def test_every_step_reaches_the_tracker(tensorboard, tmp_path):
    run(tmp_path, name="mine", trainer__max_steps=2, report__trackers="[tensorboard]")
    logged = {(key, step): value for key, value, step in tensorboard()}
    assert json.loads(logged["args", 0])["run_name"] == "mine"
    assert logged["log_dir", 0].startswith(str(tmp_path / "mine"))
    lines = [json.loads(line) for line in (tmp_path / "mine" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        for key in ("reward", "loss", "spec/reused_ratio", "timing_s/gen"):
            assert logged[f"train/{key}", line["step"]] == line[key]


@pytest.mark.parametrize(
    ("trackers", "message"),
    [
        ("[tensorbord]", r"'tensorbord', which is none of tensorboard, trackio, wandb\. Did you mean tensorboard\?"),
        ("[wandb]", r"report\.trackers=\[wandb\] needs wandb\. Install it with: pip install wandb"),
    ],
)
def test_what_is_missing_is_named_before_the_run(trackers, message, tmp_path, monkeypatch):
    monkeypatch.setattr("specrl.config.rules.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=message):
        load(words(tmp_path, report__trackers=trackers))
