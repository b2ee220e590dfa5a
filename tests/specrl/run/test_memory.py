"""The memory plan: each part by hand, the sum, and the advice when it does not fit."""

import pytest
import torch

from specrl.config import load as cli
from specrl.run import memory
from specrl.run.memory import Plan
from specrl.run.policy import load_policy, trained_dtype
from tests.runs import policy

ROWS, GROUP, CAP, PROMPT, VOCAB = 4, 4, 28, 50, 85
CO_TRAINING = ["rollout.drafter=x", "trainer.drafter.train=true"]


def plan(*options):
    words = [f"model={policy()}", "rollout.group_size=4", "rollout.max_new_tokens=28", "trainer.prompts_per_step=4"]
    config = cli.load(["config=grpo_math", *words, *options])
    model, _, _ = load_policy(config, trained_dtype(config))
    return memory.plan(config, model, PROMPT).parts, model


def test_each_part_by_hand():
    parts, model = plan()
    weights = sum(p.numel() for p in model.parameters()) * 4
    mb = {name: size * 2**20 for name, size in parts.items()}
    assert mb == pytest.approx(
        {
            "policy": weights,
            "gradients and optimiser": 3 * weights,
            "rollout KV": 16 * (PROMPT + CAP) * 2 * 2 * 2 * 8 * 4,  # rows, tokens, K and V, layers, heads, size, bytes
            "verification logits": 2048 * VOCAB * 16,
            "training logits": 2 * 4 * 16 * CAP * VOCAB,
        }
    )


@pytest.mark.parametrize(
    ("options", "part", "factor"),
    [
        (["rollout.rows_per_batch=4"], "rollout KV", 1 / 4),
        (["trainer.rows_per_pass=8"], "training logits", 1 / 2),
        (["trainer.drafter.tokens_per_update=512"], "co-training logits", 1 / 2),
        (["trainer.precision=bf16", "lora.rank=16"], "policy", 1 / 2),
        (["trainer.precision=bf16"], "rollout KV", 1 / 2),
    ],
)
def test_the_advised_options_shrink_their_part(options, part, factor):
    assert plan(*CO_TRAINING, *options)[0][part] == pytest.approx(plan(*CO_TRAINING)[0][part] * factor)


def test_float32_weights_have_a_bfloat16_copy_for_rollouts():
    plain, mixed = plan()[0], plan("trainer.precision=bf16")[0]
    assert mixed["rollout copy"] == pytest.approx(plain["policy"] / 2)
    assert [mixed[part] for part in ("policy", "gradients and optimiser")] == [plain["policy"], 3 * plain["policy"]]
    pure = plan("trainer.precision=pure_bf16")[0]
    assert [pure["policy"], pure.get("rollout copy")] == [plain["policy"] / 2, None]
    assert plan("trainer.precision=bf16", "rollout.engine=vllm")[0]["vLLM weights"] == plain["policy"] / 2


def test_several_processes_share_the_rows_and_with_fsdp_the_optimiser(monkeypatch):
    alone, _ = plan()
    monkeypatch.setenv("WORLD_SIZE", "4")
    shared, _ = plan()
    quarter = {"rollout KV": 4, "training logits": 4}
    assert shared == {name: size / quarter.get(name, 1) for name, size in alone.items()}
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert plan()[0] == shared | {"gradients and optimiser": shared["gradients and optimiser"] / 4}


def test_ppo_may_hold_two_models_more():
    weights = plan()[0]["policy"]
    parts, _ = plan("trainer.algorithm=ppo", "trainer.critic.model=separate", "trainer.beta=0.1")
    assert (parts["reference"], parts["critic"]) == (weights, 4 * weights)
    assert not plan("trainer.algorithm=ppo")[0].keys() & {"reference", "critic"}
    assert "reference" not in plan("trainer.beta=0.1", "lora.rank=4")[0], "the adapter is switched off instead"


def test_engines_elsewhere_take_no_memory_here():
    parts, _ = plan("cluster.num_workers=2")
    assert parts.keys() == {"policy", "gradients and optimiser", "training logits"}
    parts, _ = plan("rollout.engine=vllm", "rollout.vllm.kv_cache_mb=64")
    assert parts["vLLM KV"] == 64
    assert parts["vLLM weights"] == parts["policy"]


CUDA = torch.device("cuda")


@pytest.fixture
def on_a_gpu(monkeypatch):
    """on_a_gpu(*options): the plan of a run with vLLM on a GPU of 1000 MB, and the MB of the policy's weights."""

    def planned(*options):
        words = [f"model={policy()}", "rollout.engine=vllm", "rollout.vllm.memory_utilization=0.4", *options]
        config = cli.load(["config=grpo_math", *words])
        model, _, _ = load_policy(config, trained_dtype(config))
        monkeypatch.setattr(memory, "total_mb", lambda device: 1000.0)
        monkeypatch.setattr(type(model), "device", CUDA)
        return memory.plan(config, model, PROMPT), sum(p.numel() for p in model.parameters()) * 4 / 2**20

    return planned


def test_vllm_on_a_gpu_takes_its_share_of_the_device(on_a_gpu):
    plan, weights = on_a_gpu()
    assert plan.parts["vLLM weights"] == pytest.approx(weights)
    assert plan.parts["vLLM KV"] == pytest.approx(400 - weights), "its weights are part of its share"
    assert on_a_gpu("rollout.vllm.kv_cache_mb=64")[0].parts["vLLM KV"] == 64
    halved = on_a_gpu("rollout.vllm.tensor_parallel=2")[0].parts
    assert (halved["vLLM weights"], halved["vLLM KV"]) == pytest.approx((weights / 2, 400 - weights / 2))


def test_vllm_that_sleeps_and_the_update_take_turns(on_a_gpu):
    plan, weights = on_a_gpu()
    rest = 4 * weights  # the policy, its gradients and optimiser
    logits = plan.parts["verification logits"]
    assert plan.sleeps
    assert sum(plan.peak.values()) == pytest.approx(rest + 400 + logits), "the update takes less"
    assert plan.held == pytest.approx(weights), "what sleeps is free"
    larger, _ = on_a_gpu("dataset.train_size=4096", "trainer.prompts_per_step=4096")
    assert larger.parts["training logits"] > 400 + logits
    assert sum(larger.peak.values()) == pytest.approx(rest + larger.parts["training logits"])
    awake, _ = on_a_gpu("rollout.vllm.sleep=false")
    assert not awake.sleeps
    assert awake.peak == awake.parts
    assert awake.held == pytest.approx(weights + 400)


def test_the_sentence():
    parts = {"policy": 3000.0, "rollout KV": 9000.4, "training logits": 0.2}
    line = memory.sentence(Plan(parts, held=3000.0), 17000)
    end = "MB of 20000 MB free at the start, activations left out"
    assert line == f"memory plan: policy 3000, rollout KV 9000 = 12001 {end}", "what is there already was free once"
    assert memory.sentence(Plan(parts, held=3000.0), 7000).endswith(
        "left out. KV gets the 7000 MB that are left: fewer rows run at a time, the others after"
    )
    assert memory.sentence(Plan(parts, held=3000.0), 4000).endswith(
        "the largest part is rollout KV: lower rollout.max_new_tokens, as less than half of the rows run at a time"
    )
    shared = {"policy": 3000.0, "vLLM weights": 1000.0, "vLLM KV": 6000.0, "training logits": 8000.0}
    line = memory.sentence(Plan(shared, sleeps=True), 11500)
    assert "training logits 8000 = 11000 MB, rollout or update, as vLLM sleeps in between, of 11500 MB" in line
    assert "It does not fit" not in line
    assert "largest part is training logits" in memory.sentence(Plan(shared), 11500), "awake it does not"


def test_every_part_has_advice():
    ppo = ["trainer.algorithm=ppo", "trainer.critic.model=separate", "trainer.beta=0.1"]
    names = {
        name
        for options in ([], ["rollout.engine=vllm"], ["trainer.precision=bf16"], CO_TRAINING, ppo)
        for name in plan(*options)[0]
    }
    assert names == memory.ADVICE.keys()
