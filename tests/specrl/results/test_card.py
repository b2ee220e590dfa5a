"""The model card repeats the report and names nothing of this machine."""

import dataclasses
import json

import pytest
import yaml

from specrl.config.load import load, save
from specrl.config.schema import Config
from specrl.results.card import LOCAL, card, settings
from specrl.results.report import write_report

STEPS = [
    {"step": n, "epoch": n / 8, "timing_s/gen": 1.0, "spec/plain_s": 2.0, "reward": 0.5, "spec/reuse_gap": 0.02}
    for n in range(1, 17)
]


@pytest.fixture
def report(tmp_path):
    save(Config(name="first", output_dir=str(tmp_path)))
    (tmp_path / "first" / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in STEPS))
    return write_report(tmp_path / "first", plots=False)


def configured(**options) -> Config:
    config = Config(name="first", **options)
    config.rollout.replay, config.trainer.epochs, config.dataset.system_prompt = 0.5, 8, "costs ${5}"
    return config


def test_the_card_has_the_claims_of_the_report(report):
    text = str(card(configured(), report))
    for part in (*report.summary["measured"]["claims"], report.summary["rule"], "reuse gap: 0.020", "saved as float32"):
        assert part in text


def test_the_settings_in_the_card_repeat_the_run(tmp_path):
    config = configured(seed=3, output_dir="/elsewhere")
    config.trainer.prompts_per_step, config.dataset.train_size, config.dataset.test_size = 4, 64, 8
    (tmp_path / "run.yaml").write_text(settings(config))
    again = load([f"config={tmp_path / 'run.yaml'}"])
    before, after = (
        {key: value for key, value in dataclasses.asdict(each).items() if key not in LOCAL} for each in (config, again)
    )
    assert before == after
    assert "elsewhere" not in settings(config)


@pytest.mark.parametrize(
    ("model", "data", "base", "datasets"),
    [
        ("Qwen/Qwen2.5-1.5B-Instruct", "gsm8k", "Qwen/Qwen2.5-1.5B-Instruct", ["openai/gsm8k"]),
        ("tiny", "arithmetic", None, None),
        ("/home/alice/models/qwen", "/home/alice/sums.jsonl", None, None),
    ],
)
def test_only_what_is_on_the_hub_is_linked(model, data, base, datasets, report):
    text = str(card(configured(model=model, data=data), report))
    metadata = yaml.safe_load(text.split("---\n")[1])
    assert (metadata.get("base_model"), metadata.get("datasets")) == (base, datasets)
    assert "alice" not in text
