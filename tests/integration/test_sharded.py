"""FSDP 2 on two CPU processes: weights, gradients and optimiser in halves, rollouts by a whole bf16 copy in each."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.integration.test_two_processes import same_metrics
from tests.runs import SHORT, SPARE_VLLM, by_two_processes, drafter, policy, run, words

pytestmark = pytest.mark.long

# accelerate takes FSDP where there are accelerators; torch shards on CPUs too. What `accelerate launch` asks for comes
# in the environment. Each process runs every command line of a JSON file, and reports what it holds at the end.
PROGRAM = """
import json, os, sys
from pathlib import Path
from accelerate import DistributedType
from accelerate.state import AcceleratorState

begin = AcceleratorState.__init__

def on_cpus(self, *args, fsdp_plugin=None, **options):
    begin(self, *args, fsdp_plugin=fsdp_plugin, **options)
    if fsdp_plugin is not None:
        self.fsdp_plugin = fsdp_plugin
        if self._mixed_precision != "no":
            fsdp_plugin.set_mixed_precision(self._mixed_precision)
    if self.__dict__.get("fsdp_plugin") is not None:
        self.distributed_type = DistributedType.FSDP

AcceleratorState.__init__ = on_cpus
import specrl.run.run
import specrl.train
import tests.runs as runs
import torch
from specrl.config import load as config
from specrl.trainers.ppo.critic import Critic
from specrl.trainers.ppo.trainer import PPOTrainer

build, build_engine, made = specrl.run.run.build_trainer, specrl.run.run.build_engine, []
forward, all_reduce = Critic.forward, PPOTrainer._all_reduce
record = None

def listened(*args):
    made.append(build(*args))
    runs.listen(made[-1], record)
    return made[-1]

def deaf(self, *args):
    values = forward(self, *args)
    if os.environ["RANK"] == "1" and values.requires_grad:
        values.register_hook(torch.zeros_like)
    return values

def begin_run(name):
    # The name asks for an engine with fp32 weights of its own, and for faults.
    global record
    made.clear()
    record = runs.Recording()
    own = lambda spec, *_: build_engine(spec)
    specrl.run.run.build_engine = own if "fp32" in name else build_engine
    Critic.forward = deaf if "deaf" in name else forward
    PPOTrainer._all_reduce = (lambda self, values: values) if "alone" in name else all_reduce

def held(tensors):
    return sum((t.to_local() if hasattr(t, "to_local") else t).numel() for t in tensors)

specrl.run.run.build_trainer = listened
folder = Path(sys.argv[1])
found = {}
for name, words in json.loads((folder / "runs.json").read_text()):
    begin_run(name)
    with runs.unreported():
        code = config.run(specrl.train.main, words)
    found[name] = {"code": code, "losses": record.losses}
    found[name]["rollouts"] = [{n: getattr(s, n) for n in ("rows", "tokens", "rewards")} for s in record.steps]
    if code == 0:
        trainer = made[-1]
        weights, drafter = held(trainer.model.parameters()), trainer.rollouts.drafter_trainer
        trainer.rollouts.sync()
        states = [t for state in trainer.optimizer.state.values() for t in state.values() if t.dim()]
        found[name] |= {
            "weights": weights,
            "moments": held(states),
            "kinds": sorted({str(t.dtype) for t in states}),
            "copy": {n: t.double().sum().item() for n, t in trainer.rollouts.engine.model.state_dict().items()},
            "steps": trainer.state.global_step,
            "drafter": drafter and [p.double().sum().item() for p in drafter.drafter.parameters()],
        }
(folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))
"""
FSDP_2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",  # accelerate's default; rollouts need a whole copy in each process
}
EVALUATED = {"trainer__eval_prompts": 4, "trainer__eval_every": 1}
WIDTH = 32  # of the policy's hidden states, which the value head reads
PPO = SHORT | {
    "config": "ppo_math",
    "trainer__updates_per_rollout": 2,
    "trainer__rows_per_pass": 1,
    "trainer__beta": 0.05,
    "trainer__critic__model": "separate",
    "trainer__save_every": 4,
}
TRAINED = {"trainer__drafter__train": "true", "trainer__drafter__share": 0.5}
RUNS = {
    "shared": {},
    "copy": {"trainer__precision": "bf16", "trainer__max_steps": 2, "trainer__save_every": 1} | EVALUATED,
    "rest": {"trainer__precision": "bf16", "trainer__max_steps": 3, "name": "copy", "resume": "auto"},
    "ppo fp32": PPO,
    "ppo fp32 cut": PPO | TRAINED | {"name": "cut", "trainer__max_steps": 4},
    "ppo fp32 rest": PPO | TRAINED | {"name": "cut", "resume": "auto"},
    "ppo fp32 deaf": PPO | {"trainer__max_steps": 2},
    "ppo fp32 alone": PPO | {"trainer__max_steps": 2},
}


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """The folder of the runs, what both processes report of each, and what they said."""
    folder = tmp_path_factory.mktemp("sharded")
    plan = []
    for name, options in RUNS.items():
        usual = {"name": name.replace(" ", "-"), "rollout__max_new_tokens": 12}
        if "trainer__drafter__train" in options:
            usual["rollout__drafter"] = drafter(folder / "drafter")
        plan.append((name, words(folder, model=policy(), **usual | options)))
    (folder / "runs.json").write_text(json.dumps(plan))
    reports, said = by_two_processes(folder, SPARE_VLLM + PROGRAM, 420, **FSDP_2)
    return folder, reports, said


def test_each_process_holds_half_of_weights_critic_and_optimiser(launched):
    _, reports, _ = launched
    whole = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(policy()).parameters())
    for name, numbers in (("copy", whole), ("ppo fp32", 2 * whole + WIDTH + 1)):
        both = [report[name] for report in reports]
        assert sum(report["weights"] for report in both) == numbers
        assert max(report["weights"] for report in both) < 0.6 * numbers
        for report in both:
            assert (report["code"], report["moments"]) == (0, 2 * report["weights"])
            assert report["kinds"] == ["torch.float32"], "the optimiser updates float32 weights"


def test_each_process_rolls_out_with_all_of_the_trained_weights(launched):
    folder, (first, second), _ = launched
    assert (first["rest"]["code"], first["rest"]["steps"]) == (0, 3), "from the checkpoint of step 2 on"
    assert first["rest"]["copy"] == second["rest"]["copy"]
    saved = AutoModelForCausalLM.from_pretrained(folder / "copy" / "model", dtype=torch.float32)
    initial = AutoModelForCausalLM.from_pretrained(policy(), dtype=torch.float32)
    sums = [
        {name: weight.bfloat16().double().sum().item() for name, weight in model.state_dict().items()}
        for model in (saved, initial)
    ]
    assert first["rest"]["copy"] == sums[0]
    assert sums[0] != sums[1], "control: it was trained"
    assert first["copy"]["copy"] != sums[0], "control: so it was by the last step"


def test_one_process_evaluates_with_weights_that_all_gather(launched):
    lines = [json.loads(line) for line in (launched[0] / "copy" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "eval/reward" in line] == [0, 1, 2]


def test_rollouts_by_the_trainers_own_shards_are_refused_before_the_first_step(launched):
    _, reports, said = launched
    assert [report["shared"]["code"] for report in reports] == [3, 3]
    assert all("FSDP 2 leaves no process a whole model" in text for text in said)


def test_sharded_ppo_is_ppo_on_one_process(launched, tmp_path):
    """With a separate critic and a KL penalty, in fp32: the same rollouts, gradients and losses up to rounding."""
    folder, reports, _ = launched
    first, second = (report["ppo fp32"] for report in reports)
    alone = run(tmp_path, **PPO)
    for a, b, whole in zip(first["rollouts"], second["rollouts"], alone.steps, strict=True):
        assert [tuple(row) for row in a["rows"] + b["rows"]] == whole.rows
        assert a["tokens"] + b["tokens"] == whole.tokens
        assert a["rewards"] + b["rewards"] == whole.rewards
    but = ("entropy", "clip_ratio/")  # TRL's means over passes, whose rows are others
    walked = same_metrics(folder / "ppo-fp32", tmp_path / "run", but)
    assert {"loss", "policy_loss", "value_loss", "kl", "grad_norm", "value/grad_norm"} <= walked
    for fault in ("deaf", "alone"):  # the critic's gradient is one process's; advantages are normalised in each
        with pytest.raises(AssertionError, match="value/grad_norm" if fault == "deaf" else "loss|norm"):
            same_metrics(folder / f"ppo-fp32-{fault}", tmp_path / "run", but)
    saved = AutoModelForCausalLM.from_pretrained(folder / "ppo-fp32" / "model").state_dict()
    for name, weight in saved.items():
        assert weight.double().sum().item() == pytest.approx(alone.weights[name].double().sum().item(), abs=1e-2), name


def test_a_resumed_run_of_sharded_ppo_is_the_undisturbed_one(launched):
    """It also trains a drafter, which is the same in both processes and changes no text."""
    for report in launched[1]:
        whole, cut, rest = (report[name] for name in ("ppo fp32", "ppo fp32 cut", "ppo fp32 rest"))
        assert (cut["steps"], rest["steps"]) == (4, whole["steps"])
        for key in ("losses", "rollouts"):
            assert cut[key] + rest[key] == whole[key]
        assert rest["copy"] == whole["copy"]
        assert rest["drafter"] != cut["drafter"], "control: it learned"
    first, second = (report["ppo fp32 rest"] for report in launched[1])
    assert first["drafter"] == second["drafter"]
