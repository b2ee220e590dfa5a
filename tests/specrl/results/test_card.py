"""The model card says what a reader has to know and nothing of this machine."""

import dataclasses

import pytest
import yaml

from specrl.config.load import load
from specrl.config.schema import Config
from specrl.results.card import PLACE, card, settings

SUMMARY = {
    "rule": "exact, replay=0.5: the tokens plain decoding draws with the same keys",
    "steps": 128,
    "measured": {
        "title": "Measured on 16 control steps of 128",
        "claims": ["Speedup of the rollout, all these steps: 2.39x (95 % interval 2.11x to 2.67x)"],
    },
    "reward": {"first": 0.55, "last": 0.9, "window": "mean of an epoch"},
    "eval": [{"step": 0, "eval/reward": 0.5}, {"step": 128, "eval/reward": 0.75}],
    "reuse": {"reused_ratio": 0.97, "reuse_gap": 0.029},
    "flips": {"told": "in bfloat16 3 of 1,000 tokens come out otherwise than in plain decoding (3 rows)"},
    "notes": ["1 response got no reward and took no part in the update."],
    "environment": {"cpu": "Abacus", "cores": 2, "gpus": [], "versions": {"specrl": "0.1.0", "torch": "2.13.0"}},
}


def config(**options) -> Config:
    made = Config(name="first", **options)
    made.rollout.replay, made.trainer.epochs, made.dataset.system_prompt = 0.5, 8, "costs ${5}"
    return made


def front(text: str) -> dict:
    return yaml.safe_load(text.split("---\n")[1])


def test_the_card_tells_how_the_rollouts_were_accelerated():
    text = card(config(), SUMMARY)
    for part in (
        "- rollout rule: exact, replay=0.5",
        "- Measured on 16 control steps of 128, net:\n  - Speedup of the rollout, all these steps: 2.39x (95 %",
        "- tokens reused from epoch 2 on: 97%",
        "- compared with plain decoding on control steps: in bfloat16 3 of 1,000 tokens come out otherwise",
        "- reuse gap (reward of replayed rows minus fresh ones): +0.029",
        "- reward on held-out prompts: 0.500 -> 0.750",
        "- note: 1 response got no reward",
        "Versions: specrl 0.1.0, torch 2.13.0.",
    ):
        assert part in text


def test_a_run_without_measurements_claims_nothing():
    bare = {key: value for key, value in SUMMARY.items() if key != "measured"}
    text = card(config(), bare | {"flips": None, "reuse": {"reused_ratio": None, "reuse_gap": None}, "eval": []})
    assert "- speedup: not measured" in text
    assert "on control steps: unknown" in text
    assert "reuse gap" not in text
    assert "held-out" not in text


def test_a_measured_gap_of_zero_is_told():
    text = card(config(), SUMMARY | {"reuse": {"reused_ratio": 0.97, "reuse_gap": 0.0}})
    assert "- reuse gap (reward of replayed rows minus fresh ones): +0.000" in text


def test_the_settings_in_the_card_repeat_the_run(tmp_path):
    given = config(seed=3, output_dir="/elsewhere")
    given.trainer.prompts_per_step, given.dataset.train_size, given.dataset.test_size = 4, 64, 8
    (tmp_path / "run.yaml").write_text(settings(given))
    again = load([f"config={tmp_path / 'run.yaml'}"])
    mine, theirs = (
        {key: value for key, value in dataclasses.asdict(each).items() if key not in PLACE} for each in (given, again)
    )
    assert mine == theirs
    assert "elsewhere" not in settings(given)


@pytest.mark.parametrize(
    ("model", "data", "base", "datasets"),
    [
        ("Qwen/Qwen2.5-1.5B-Instruct", "gsm8k", "Qwen/Qwen2.5-1.5B-Instruct", ["openai/gsm8k"]),
        ("tiny", "arithmetic", None, None),
        ("/home/alice/models/qwen", "/home/alice/sums.jsonl", None, None),
    ],
)
def test_only_what_is_on_the_hub_is_linked(model, data, base, datasets):
    text = card(config(model=model, data=data), SUMMARY)
    assert (front(text).get("base_model"), front(text).get("datasets")) == (base, datasets)
    assert "alice" not in text
