"""The ablation of draft sources: what it compares, and that it refuses to compare different texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import ablation
from specrl.config.load import load
from specrl.drafter import shortened
from specrl.rollout import verify
from specrl.tiny import load_tiny

pytestmark = pytest.mark.long


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Options of an ablation over eight short rows and two regimes."""
    monkeypatch.setattr(ablation, "SIZES", (1, 8, 64))
    monkeypatch.setattr(ablation, "WINDOWS", (8,))
    monkeypatch.setattr(ablation, "REGIMES", {"first epoch": None, "little drift": 0.02})
    shortened(load_tiny()[0], 2).save_pretrained(tmp_path / "short")
    words = [
        "config=grpo_math",
        "rows=8",
        "repeats=1",
        f"out={tmp_path / 'out.json'}",
        f"drafters=[{tmp_path / 'short'}]",
    ]
    return load([*words, "rollout.max_new_tokens=24"], ablation.AblationConfig, training=False)


def test_every_method_is_measured_in_every_regime_and_size(small):
    assert ablation.main(small) == 0
    lines = json.loads(Path(small.out).read_text())["lines"]
    methods = ["plain", *ablation.STEPS, "+ short", "window 8"]
    assert [line["method"] for line in lines] == methods * 4
    found = {(line["rows"], line["regime"], line["method"]): line for line in lines}
    plain = [line for line in lines if line["method"] == "plain"]
    assert all(line["reused"] == 0 and line["speedup"] == 1 and line["passes_max"] == 24 for line in plain)
    assert found[8, "first epoch", "prefix"]["reused"] == 0, "no prompt has an old text"
    assert found[8, "little drift", "window 8"]["reused"] > 0.5


def test_other_texts_than_plain_decodings_end_it(small, monkeypatch):
    monkeypatch.setattr(verify, "accept_exact", lambda draws, draft: len(draft))
    with pytest.raises(SystemExit, match="sampled other tokens than plain decoding"):
        ablation.main(small)
