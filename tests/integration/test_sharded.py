"""FSDP 2 on two CPU processes: weights, gradients and optimiser in halves, rollouts by a whole bf16 copy in each."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.runs import by_two_processes, policy, words

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
from specrl.config import load as config

build, made = specrl.run.run.build_trainer, []

def listened(*args):
    made.append(build(*args))
    return made[-1]

def held(tensors):
    return sum((t.to_local() if hasattr(t, "to_local") else t).numel() for t in tensors)

specrl.run.run.build_trainer = listened
folder = Path(sys.argv[1])
found = {}
for name, words in json.loads((folder / "runs.json").read_text()):
    made.clear()
    code = config.run(specrl.train.main, words)
    found[name] = {"code": code}
    if code == 0:
        trainer = made[-1]
        weights = held(trainer.model.parameters())
        trainer.rollouts.sync()
        states = [t for state in trainer.optimizer.state.values() for t in state.values() if t.dim()]
        found[name] |= {
            "weights": weights,
            "moments": held(states),
            "kinds": sorted({str(t.dtype) for t in states}),
            "copy": {n: t.double().sum().item() for n, t in trainer.rollouts.engine.model.state_dict().items()},
            "steps": trainer.state.global_step,
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
RUNS = {
    "shared": {},
    "ppo": {"config": "ppo_math"},
    "copy": {"trainer__precision": "bf16", "trainer__max_steps": 2, "trainer__save_every": 1} | EVALUATED,
    "rest": {"trainer__precision": "bf16", "trainer__max_steps": 3, "name": "copy", "resume": "auto"},
}


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """The folder of the runs, what both processes report of each, and what they said."""
    folder = tmp_path_factory.mktemp("sharded")
    plan = [
        (name, words(folder, model=policy(), **{"name": name, "rollout__max_new_tokens": 12} | options))
        for name, options in RUNS.items()
    ]
    (folder / "runs.json").write_text(json.dumps(plan))
    reports, said = by_two_processes(folder, PROGRAM, 300, **FSDP_2)
    return folder, reports, said


def test_each_process_holds_half_of_weights_and_optimiser(launched):
    _, reports, _ = launched
    whole = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(policy()).parameters())
    first, second = (report["copy"] for report in reports)
    assert [first["code"], second["code"], first["steps"]] == [0, 0, 2]
    assert first["weights"] + second["weights"] == whole
    assert first["moments"] + second["moments"] == 2 * whole
    assert max(first["moments"], second["moments"]) < 0.6 * 2 * whole
    assert first["kinds"] == ["torch.float32"], "the optimiser updates float32 weights"


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
    assert [report["ppo"]["code"] for report in reports] == [3, 3]
    assert all("PPO" in text and "trainer.algorithm=grpo" in text for text in said)
