"""Two steps of every packaged config and of every value of a choice.

The row of a value has the other options it needs to be in effect. Rows without contradictions are packed into one run.
"""

import json
import math
from contextlib import nullcontext

import pytest
import torch
from transformers import AutoModelForCausalLM

import specrl.train
from specrl.config import load as cli
from specrl.config import options
from specrl.config.load import known_configs
from specrl.config.schema import Config
from specrl.rollout.lossy.arbitrage import GRID
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
REASONING = HERE | {
    "dataset.train_split": "train",
    "dataset.test_split": "test",
    "dataset.chat_template_kwargs": "{{}}",
    "dataset.prompt_template": "",
    "cluster.num_workers": 0,
    "cluster.gpus_per_worker": 0,
    "cluster.address": "",
    "trainer.precision": "fp32",  # the probe is strict about a random policy in bf16
}
CONFIGS = {  # what is not as packaged, besides SMALL
    "arbitrage_math": {
        "model": "{policy}",
        "rollout.drafter": "{drafter}",
        "rollout.acceptance": "routed",  # as its head says
        "rollout.trained": "{arbitrage lines}",
    },
    "dapo_math": {"trainer.overlong_buffer": 4},
    "grpo": HERE | {"dataset.train_split": "train", "dataset.test_split": "test"},  # no GPU, no downloads
    "grpo_gsm8k": HERE,
    "grpo_math": {},
    "grpo_smollm2": {"model": "{policy}"},  # with the real model: test_smollm2.py
    "grpo_math_vllm": {"rollout.engine": "transformers"},  # with vLLM: test_vllm.py
    "judge_math": {
        "model": "{policy}",
        "rollout.drafter": "{drafter}",
        "rollout.acceptance": "judged",
        "rollout.trained": "{judge}",
    },
    "ppo_gsm8k": HERE,
    "ppo_math": {},
    "ray_grpo_math": {"cluster.num_workers": 0},  # with workers: test_ray.py
    "tools_math": {"model": "tiny_tools", "rollout.max_new_tokens": 24},
    "reasoning_math": REASONING,  # with vLLM and workers: test_vllm.py
    "reasoning_math_7b": REASONING | {"rollout.vllm.tensor_parallel": 1},
}

# Choices --------------------------------------------------------------------------------------------------------------

GRPO, PPO = {"trainer.algorithm": "grpo"}, {"trainer.algorithm": "ppo"}
GAE = {**PPO, "trainer.advantage": "gae"}
EXACT = {"rollout.acceptance": "exact"}
LENIENT = {"rollout.acceptance": "lenient", "rollout.replay": 0, "rollout.drafter": ""}
LENIENT |= {"trainer.old_logprobs": "auto", "rollout.top_p": 1, "rollout.temperature": 1}
LOSSY = {"trainer.old_logprobs": "auto", "rollout.top_p": 1, "rollout.drafter": "{drafter}"}
ROUTED = {**LOSSY, "rollout.acceptance": "routed"}
JUDGED = {**LOSSY, "rollout.acceptance": "judged", "rollout.replay": 0}
LEARNED = {"trainer.precision": "fp32", "lora.rank": 0}  # what was learned of this very policy
JUDGE = {**JUDGED, **LEARNED, "rollout.trained": "{judge}"}
VLLM = "tests/integration/test_vllm.py"
ON_V2 = "tests/rollout/engines/vllm/test_vllm.py"  # all of it, once more on Model Runner V2
ON_GPU = "tests/rollout/engines/vllm/test_settings.py"  # the arguments for vLLM, as there is no compiler on this CPU
ALL = "every other value"
TAUGHT = {**EXACT, "rollout.drafter": "{drafter}", "trainer.drafter.train": "true"}

NEEDS = {
    "rollout.engine": {"vllm": VLLM},
    "rollout.acceptance": {
        "exact": EXACT,
        "lenient": LENIENT,
        "judged": {**JUDGE, "rollout.drafter": ""},
        "routed": ROUTED,
    },
    "rollout.ahead": {"auto": "tests/integration/test_ray.py", "off": EXACT},
    "rollout.cache.log": {"true": EXACT},
    "rollout.routed.by": {
        ALL: ROUTED,
        "arbitrage": {**ROUTED, **LEARNED, "rollout.trained": "{arbitrage}"},
    },
    "rollout.vllm.runner": {ALL: VLLM, "v2": ON_V2},
    "rollout.vllm.compile": {ALL: VLLM, "on": ON_GPU},
    "rollout.vllm.sleep": {ALL: VLLM},
    "dataset.chat_template": {"on": "tests/specrl/run/test_prompts.py"},
    "trainer.advantage": {ALL: PPO},
    "trainer.loss": {ALL: GRPO},
    "trainer.scale_rewards": {ALL: GRPO},
    "trainer.old_logprobs": {"trainer": EXACT, "engine": EXACT},
    "trainer.correction": {ALL: LENIENT},
    "trainer.precision": {"pure_bf16": {"lora.rank": 0}},
    "trainer.ratio": {"sequence": GRPO},
    "trainer.drafter.train": {"true": TAUGHT},
    "trainer.critic.model": {ALL: GAE},
}
"""What a value of an option needs besides, or the test that runs it. Values that are not here need nothing."""

FORMS = [
    *({**EXACT, "rollout.sources": f"[{name}]"} for name in SOURCES),
    {**EXACT, "rollout.sources": "[]", "rollout.drafter": ""},
    {**EXACT, "rollout.sources": "[]", "rollout.drafter": "{drafter}"},
    {**EXACT, "rollout.drafter": "{drafter}", **PPO},
    {**EXACT, "rollout.drafter": "{drafter}", "lora.rank": 2},
    *({**TAUGHT, "rollout.drafter": "head", **algorithm} for algorithm in (GRPO, PPO)),
    {**EXACT, "rollout.draft_tokens": 4},
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
    {"rollout.kv_cache_mb": 2},
    {"trainer.beta": 0.1, **GRPO},
    {"trainer.entropy_bonus": 0.01, **PPO},
    {"trainer.minibatches": 2, **PPO},
    {"trainer.updates_per_rollout": 2, **GRPO},
    {"trainer.updates_per_rollout": 2, **PPO},
    {"trainer.rows_per_pass": 4},
    {"trainer.clip_high": 0.3},
    {"trainer.overlong_buffer": 4},
    {"trainer.warmup_steps": 1},
    {"trainer.weight_decay": 0.1},
    {"trainer.save_every": 4, "trainer.eval_every": 1, "trainer.log_completions_every": 1},
    {"reward.workers": 2},
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


KNOWN = options.options(Config)
CHOICES = {
    (key, value): NEEDS.get(key, {}).get(value, NEEDS.get(key, {}).get(ALL, {}))
    for key, option in KNOWN.items()
    for value in option.choices or (("true", "false") if option.type is bool else ())
}
ROWS = [
    *({key: value, **needs} for (key, value), needs in CHOICES.items() if isinstance(needs, dict)),
    *FORMS,
    *NUMBERS,
]
RUNS = packed(ROWS)
FAST = {"model": "{policy}", "reward.functions": "[tests.rewards:digits]", "reward.timeout_s": 60}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Results of other commands: a draft model, routers and a judge, all of them random."""
    folder = tmp_path_factory.mktemp("made")
    paths = {name: str(folder / name) for name in ("drafter", "arbitrage", "arbitrage lines", "judge")}
    model = AutoModelForCausalLM.from_pretrained(policy())
    weak = AutoModelForCausalLM.from_pretrained(drafter(folder / "drafter"))
    card = {"kind": "arbitrage", "policy": fingerprint(model), "draft": fingerprint(weak)}
    card |= {"weights": [1.0, -1.0, *[0.0] * 5], "usual_gaps": [0.0] * GRID}
    for name, separators in {"arbitrage": ["\n\n"], "arbitrage lines": ["\n"]}.items():
        (folder / name).mkdir()
        write_card(folder / name, {**card, "separators": separators})
    JudgeHead(torch.ones(model.config.hidden_size), 0.0, 0.5).save(folder / "judge", {"policy": card["policy"]})
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


def test_every_row_names_options_values_and_tests_that_exist():
    assert all(set(row) <= {*KNOWN} for row in [*ROWS, *CONFIGS.values()]), "a row names an option that is none"
    assert {(key, value) for key, row in NEEDS.items() for value in row if value != ALL} <= {*CHOICES}
    assert set(NEEDS) <= {key for key, _ in CHOICES}
    assert all((ROOT / needs).is_file() for needs in CHOICES.values() if isinstance(needs, str))


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
