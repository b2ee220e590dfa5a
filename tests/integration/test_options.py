"""Two steps of every packaged config and of every value of a choice.

The row of a value has the other options it needs to be in effect. Rows without contradictions are packed into one run.
"""

import json
import math
from contextlib import nullcontext

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import specrl.train
from specrl.config import load as cli
from specrl.config import options
from specrl.config.load import known_configs
from specrl.config.schema import Config
from specrl.rollout.lossy.judge import JudgeHead
from specrl.rollout.lossy.pair import fingerprint, write_card
from specrl.rollout.sections import SOURCES
from tests.runs import ROOT, drafter, policy, unreported

SMALL = {  # two visits of two prompts, so that the second step drafts from the texts of the first
    "dataset.train_size": 2,
    "dataset.test_size": 2,
    "rollout.group_size": 4,
    "rollout.max_new_tokens": 12,
    "rollout.routed.max_step_tokens": 4,
    "trainer.epochs": 2,
    "trainer.prompts_per_step": 2,
    "trainer.eval_prompts": 1,
    "report.plots": "false",
}

# Configs --------------------------------------------------------------------------------------------------------------

HERE = {"model": "{policy}", "data": "arithmetic", "rollout.engine": "transformers", "trainer.rows_per_pass": 2}
CONFIGS = {  # what is not as packaged, besides SMALL
    "arbitrage_math": {
        "model": "{policy}",
        "rollout.drafter": "{drafter}",
        "rollout.acceptance": "routed",  # as its head says
        "rollout.routed.path": "{arbitrage lines}",
    },
    "dapo_math": {"trainer.overlong_buffer": 4},
    "grpo_gsm8k": HERE,  # no GPU, no downloads
    "grpo_math": {},
    "grpo_math_vllm": {"rollout.engine": "transformers"},  # with vLLM: test_vllm.py
    "judge_math": {
        "model": "{policy}",
        "rollout.drafter": "{drafter}",
        "rollout.acceptance": "judged",
        "rollout.judged.path": "{judge}",
    },
    "ppo_gsm8k": HERE,
    "ppo_math": {},
    "ray_grpo_math": {"cluster.num_workers": 0},  # with workers: test_ray.py
}

# Choices --------------------------------------------------------------------------------------------------------------

GRPO, PPO = {"trainer.algorithm": "grpo"}, {"trainer.algorithm": "ppo"}
GAE, KL = {**PPO, "trainer.advantage": "gae"}, {**PPO, "trainer.beta": 0.05}
EXACT = {"rollout.acceptance": "exact"}
LENIENT = {"rollout.acceptance": "lenient", "rollout.replay": 0, "rollout.drafter": ""}
LENIENT |= {"trainer.old_logprobs": "auto", "rollout.top_p": 1, "rollout.temperature": 1}
LOSSY = {"trainer.old_logprobs": "auto", "rollout.top_p": 1, "rollout.drafter": "{drafter}"}
ROUTED = {**LOSSY, "rollout.acceptance": "routed"}
JUDGED = {**LOSSY, "rollout.acceptance": "judged", "rollout.replay": 0}
LEARNED = {"trainer.precision": "fp32", "lora.rank": 0}  # what was learned of this very policy
JUDGE = {**JUDGED, **LEARNED, "rollout.judged.path": "{judge}"}
VLLM = "tests/integration/test_vllm.py"
ON_V2 = "tests/rollout/engines/vllm/test_vllm.py"  # all of it, once more on Model Runner V2
ON_DEVICE = "tests/rollout/engines/vllm/device_cases.py"
ON_GPU = "tests/rollout/engines/vllm/test_settings.py"  # the arguments for vLLM, as there is no compiler on this CPU
TAUGHT = {**EXACT, "rollout.drafter": "{drafter}", "trainer.drafter.train": "true"}

CHOICES = {
    "resume": {"no": {}, "auto": {}},
    "trust_remote_code": {"true": {}, "false": {}},
    "dataset.level": {"easy": {}, "medium": {}, "hard": {}, "mixed": {}},
    "rollout.engine": {"transformers": {}, "vllm": "tests/integration/test_vllm.py"},
    "rollout.acceptance": {
        "exact": EXACT,
        "lenient": LENIENT,
        "judged": {**JUDGE, "rollout.drafter": ""},
        "routed": ROUTED,
        "off": {},
    },
    "rollout.ahead": {"auto": "tests/integration/test_ray.py", "off": EXACT},
    "rollout.cache.clear": {"true": EXACT, "false": EXACT},
    "rollout.cache.on_write_error": {"warn": EXACT, "stop": EXACT},
    "rollout.judged.by": {"judge": {**JUDGE, "rollout.sources": "[]"}, "kl": JUDGED},
    "rollout.judged.uncorrected": {"true": {**JUDGE, "trainer.correction": "none"}, "false": {}},
    "rollout.routed.by": {
        "likelihood": ROUTED,
        "entropy": ROUTED,
        "rsd": {**ROUTED, "rollout.routed.path": "{prm}"},
        "arbitrage": {**ROUTED, **LEARNED, "rollout.routed.path": "{arbitrage}"},
    },
    "dataset.chat_template": {"auto": {}, "off": {}, "on": "tests/specrl/run/test_prompts.py"},
    "rollout.routed.uncorrected": {
        "true": {**ROUTED, "rollout.routed.by": "entropy", "trainer.correction": "none"},
        "false": {},
    },
    "rollout.local.graphs": {"auto": {}, "off": {}},
    "rollout.vllm.scheduling": {"auto": VLLM, "sync": VLLM, "async": ON_DEVICE},
    "rollout.vllm.runner": {"auto": VLLM, "v1": VLLM, "v2": ON_V2},
    "rollout.vllm.compile": {"auto": VLLM, "off": VLLM, "on": ON_GPU},
    "rollout.vllm.sleep": {"true": VLLM, "false": VLLM},
    "trainer.algorithm": {"grpo": {}, "dapo": {}, "ppo": {}},
    "trainer.advantage": {"gae": PPO, "rloo": PPO, "reinforce_plus_plus": PPO},
    "trainer.lr_schedule": {"constant": {}, "linear": {}, "cosine": {}},
    "trainer.kl_penalty": {"reward": KL, "loss": KL},
    "trainer.loss": {"auto": GRPO, "grpo": GRPO, "dapo": GRPO, "dr_grpo": GRPO, "bnpo": GRPO},
    "trainer.scale_rewards": {"group": GRPO, "batch": GRPO, "none": GRPO},
    "trainer.mask_truncated": {"true": {}, "false": {}},
    "trainer.old_logprobs": {"auto": {}, "trainer": EXACT, "engine": EXACT},
    "trainer.correction": {
        "none": LENIENT,
        "token_truncate": LENIENT,
        "token_mask": LENIENT,
        "sequence_truncate": LENIENT,
        "sequence_mask": LENIENT,
    },
    "trainer.precision": {"fp32": {}, "bf16": {}, "pure_bf16": {"lora.rank": 0}},
    "trainer.clip": {"auto": {}},
    "trainer.ratio": {"token": {}, "sequence": GRPO},
    "trainer.overlong_buffer": {"auto": {}},
    "trainer.refills": {"auto": {}},
    "trainer.gradient_checkpointing": {"true": {}, "false": {}},
    "trainer.drafter.train": {"true": TAUGHT, "false": {}},
    "trainer.drafter.objective": {"forward_kl": TAUGHT, "tvd": TAUGHT},
    "trainer.critic.model": {"head": GAE, "separate": GAE},
    "reward.isolate_user": {"true": {}, "false": {}},
    "reward.on_limit": {"mask": {}, "zero": {}},
    "cluster.dashboard": {"true": "tests/specrl/run/test_cluster.py", "false": {}},
    "report.plots": {"true": {}, "false": {}},
}
"""Of every option with choices and every switch: each value and what else it needs, or the test that runs it."""

FORMS = [
    *({**EXACT, "rollout.sources": f"[{name}]"} for name in SOURCES),
    {**EXACT, "rollout.sources": "[]", "rollout.drafter": ""},
    {**EXACT, "rollout.sources": "[]", "rollout.drafter": "{drafter}"},
    {**EXACT, "rollout.drafter": "{drafter}", **PPO},
    {**EXACT, "rollout.drafter": "{drafter}", "lora.rank": 2},
    *({**TAUGHT, "rollout.drafter": "head", **algorithm} for algorithm in (GRPO, PPO)),
    {**EXACT, "rollout.budget.window": 4},
]
"""Values of text options that change which code runs."""
NUMBERS = [
    {"lora.rank": 2, **GRPO},
    {"lora.rank": 2, **PPO, "trainer.critic.model": "head"},
    {"rollout.replay": 0.5, **EXACT},
    {"rollout.temperature": 0.5, **EXACT},
    {"rollout.top_p": 0.9, "rollout.top_k": 20, "trainer.old_logprobs": "trainer", **EXACT},
    {"rollout.measure_every": 0, **EXACT},
    {"rollout.measure_every": 1, **EXACT},
    {"rollout.tie_margin": 0},
    {"rollout.local.kv_cache_mb": 2},
    {"trainer.beta": 0.1, **GRPO},
    {"trainer.kl_target": 0.1, **KL},
    {"trainer.entropy_bonus": 0.01, **PPO},
    {"trainer.critic.clip": 0, **GAE},
    {"trainer.minibatches": 2, **PPO},
    {"trainer.updates_per_rollout": 2, **GRPO},
    {"trainer.updates_per_rollout": 2, **PPO},
    {"trainer.rows_per_pass": 4},
    {"trainer.clip_high": 0.3},
    {"trainer.overlong_buffer": 4},
    {"trainer.warmup_steps": 1},
    {"trainer.weight_decay": 0.1},
    {"trainer.save_every": 4, "trainer.eval_every": 1, "trainer.log_completions_every": 1},
    {"reward.workers": 2, "reward.isolate_user": "true"},
    {"reward.functions": "[math,format]", "reward.weights": "[1,0.5]"},
]


def packed(rows: list[dict]) -> list[dict]:
    """The rows in as few runs as a greedy search finds: a row joins the first run that does not contradict it."""
    runs: list[dict] = []
    for row in sorted(rows, key=len, reverse=True):
        for run in runs:
            if all(run.get(key, value) == value for key, value in row.items()):
                run |= row
                break
        else:
            runs.append(dict(row))
    return runs


ROWS = [
    *({key: value, **needs} for key, row in CHOICES.items() for value, needs in row.items() if isinstance(needs, dict)),
    *FORMS,
    *NUMBERS,
]
RUNS = packed(ROWS)
FAST = {"model": "{policy}", "reward.functions": "[tests.runs:digits]", "reward.isolate_user": "false"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Results of other commands: a draft model, routers, a judge and a process reward model, all of them random."""
    folder = tmp_path_factory.mktemp("made")
    paths = {name: str(folder / name) for name in ("drafter", "arbitrage", "arbitrage lines", "judge", "prm")}
    model = AutoModelForCausalLM.from_pretrained(policy())
    weak = AutoModelForCausalLM.from_pretrained(drafter(folder / "drafter"))
    card = {"kind": "arbitrage", "policy": fingerprint(model), "draft": fingerprint(weak), "weights": [1.0, -1.0, 0.0]}
    for name, separators in {"arbitrage": ["\n\n"], "arbitrage lines": ["\n"]}.items():
        (folder / name).mkdir()
        write_card(folder / name, {**card, "separators": separators})
    JudgeHead(torch.ones(model.config.hidden_size), 0.0, 0.5).save(folder / "judge", {"policy": card["policy"]})
    shape = model.config
    shape.num_labels = 2
    AutoModelForSequenceClassification.from_config(shape).save_pretrained(folder / "prm")
    AutoTokenizer.from_pretrained(policy()).save_pretrained(folder / "prm")
    return {"policy": str(policy()), **paths}


def train(folder, made, config, changes) -> list[dict]:
    """The metrics of a run of the command, one dictionary a step."""
    chosen = {**SMALL, **changes, "output_dir": folder, "name": "run"}
    argv = [f"config={config}", *(f"{key}={str(value).format_map(made)}" for key, value in chosen.items())]
    with nullcontext() if "report.plots" in changes else unreported():
        assert cli.run(specrl.train.main, argv) == 0, argv
    assert (folder / "run" / "model").is_dir()
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]  # the others are evaluations


def test_every_choice_has_a_row():
    known = options.options(Config)
    wanted = {key: {*o.choices} or {"true", "false"} for key, o in known.items() if o.choices or o.type is bool}
    assert {key: {*values} for key, values in CHOICES.items()} == wanted
    assert all(set(row) <= {*known} for row in [*ROWS, *CONFIGS.values()]), "a row names an option that is none"
    assert all((ROOT / row).is_file() for rows in CHOICES.values() for row in rows.values() if isinstance(row, str))


def test_every_config_has_a_row():
    assert set(CONFIGS) == {path.stem for path in (ROOT / "configs").glob("*.yaml")} <= set(known_configs())


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_a_packaged_config_trains(tmp_path, made, name):
    steps = train(tmp_path, made, name, CONFIGS[name])
    assert len(steps) >= 2
    assert all(math.isfinite(step["loss"]) for step in steps)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(RUNS)))
def test_every_value_trains(tmp_path, made, number):
    print(RUNS[number])
    steps = train(tmp_path, made, "grpo_math", {**FAST, **RUNS[number]})
    assert len(steps) >= 2
    assert all(math.isfinite(step["loss"]) for step in steps)
