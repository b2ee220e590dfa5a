"""Transfer of weights to an engine: names, merged adapters, and the probe that verifies them."""

import copy
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator, DistributedType
from torch.distributed.fsdp import StateDictType

from specrl.rollout.build import build_engine
from specrl.rollout.config import RolloutConfig
from specrl.rollout.engines.base import DRAFTER, Probe
from specrl.rollout.engines.weights import WeightCheck
from specrl.rollout.types import Request, RolloutError
from specrl.trainers.weights import PolicyWeights, check, check_shared, exact_bits, probe, send
from tests.engines import local
from tests.runs import differences, run

TEXT = tuple(range(3, 40))


def own_engine(model):
    """An engine with a copy of the model, as in a worker."""
    from specrl.rollout.engines.base import SamplingParams

    return local(copy.deepcopy(model), SamplingParams(frozenset([1])), own_weights=True, window=8)


def texts(engine):
    return [c.tokens for c in engine.generate([Request(TEXT[:5], key, 20) for key in range(6)])[0]]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_every_weight_once_by_its_name(build_model, family):
    model = build_model(family)
    sent = dict(PolicyWeights(model))
    assert sent.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in sent.items())
    assert all(not tensor.requires_grad for tensor in sent.values())


def test_an_engine_follows_its_trainer(build_model):
    trained = build_model("qwen3", seed=1)
    engine = own_engine(build_model("qwen3", seed=2))
    shared = local(trained, engine.sampling, window=8)
    assert texts(engine) != texts(shared)
    send(engine, trained, 3, TEXT)
    assert texts(engine) == texts(shared)
    assert engine.weight_version == 3
    assert not shared.own_weights
    send(shared, trained, 3, TEXT)
    assert shared.weight_version == 3


def process(kind, *, zero_stage=None, fsdp_version=None, saves=StateDictType.FULL_STATE_DICT):
    """What a process's accelerator reports about the distribution of the model."""
    deepspeed = SimpleNamespace(zero_stage=zero_stage) if zero_stage is not None else None
    fsdp = SimpleNamespace(fsdp_version=fsdp_version, state_dict_type=saves) if fsdp_version is not None else None
    return SimpleNamespace(distributed_type=kind, state=SimpleNamespace(deepspeed_plugin=deepspeed, fsdp_plugin=fsdp))


SHARED, COPY = False, True


@pytest.mark.parametrize(
    ("accelerator", "own_weights", "name"),
    [
        (process(DistributedType.FSDP, fsdp_version=2), SHARED, "FSDP 2 leaves no process a whole model"),
        (process(DistributedType.FSDP, fsdp_version=1), COPY, "FSDP 1 leaves no process a whole model"),
        (process(DistributedType.DEEPSPEED, zero_stage=3), COPY, "DeepSpeed ZeRO-3 leaves no process a whole model"),
        (
            process(DistributedType.FSDP, fsdp_version=2, saves=StateDictType.SHARDED_STATE_DICT),
            COPY,
            "SHARDED_STATE_DICT. Set it to FULL_STATE_DICT",
        ),
        (process(DistributedType.MULTI_GPU), SHARED, None),
        (process(DistributedType.DEEPSPEED, zero_stage=2), SHARED, None),
        (process(DistributedType.FSDP, fsdp_version=2), COPY, None),
    ],
)
def test_an_engine_that_cannot_get_the_whole_model_is_refused(accelerator, own_weights, name):
    if name is None:
        check_shared(own_weights, accelerator)
        return
    with pytest.raises(RolloutError) as caught:
        check_shared(own_weights, accelerator)
    assert name in str(caught.value)


def test_a_grpo_run_checks_that_before_its_first_step(tmp_path, monkeypatch):
    monkeypatch.setattr(Accelerator, "distributed_type", DistributedType.FSDP)
    with pytest.raises(RolloutError, match="FSDP 1 leaves no process a whole model"):
        run(tmp_path, trainer__max_steps=1)


@pytest.mark.parametrize("adapted", [False, True], ids=["plain", "lora"])
def test_wrappers_leave_no_trace_in_names(build_model, adapted):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = build_model("qwen3", seed=1)
    expected = dict(PolicyWeights(model))
    wrapped = lora(copy.deepcopy(model)) if adapted else copy.deepcopy(model)
    merged = dict(PolicyWeights(wrapped))
    layers = (wrapped.get_base_model() if adapted else wrapped).model.layers
    layers[0], layers[1].mlp = checkpoint_wrapper(layers[0]), torch.compile(layers[1].mlp)
    names = {part for name, _ in wrapped.named_parameters() for part in name.split(".")}
    assert {"_orig_mod", "_checkpoint_wrapped_module"} < names, "control: they are there"
    sent = dict(PolicyWeights(torch.compile(wrapped)))
    assert sent.keys() == expected.keys()
    assert all(torch.equal(sent[name], weight) for name, weight in merged.items())
    assert own_engine(model).model.state_dict().keys() >= sent.keys()


def lora(model, **options):
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", **options))
    with torch.no_grad():
        for name, p in wrapped.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1)
    return wrapped


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"use_dora": True}], ids=["lora", "rslora", "dora"])
def test_adapters_arrive_merged(build_model, options):
    base = build_model("qwen3", seed=1, scale=3.0)
    wrapped = lora(copy.deepcopy(base), **options)
    if "use_dora" in options:
        with pytest.raises(RolloutError, match="DoRA"):
            dict(PolicyWeights(wrapped))
        return
    sent = dict(PolicyWeights(wrapped))
    merged = copy.deepcopy(wrapped).merge_and_unload()
    assert sent.keys() == dict(base.named_parameters()).keys()
    for name, tensor in merged.named_parameters():
        torch.testing.assert_close(sent[name], tensor.detach())
    assert not torch.equal(sent["model.layers.0.mlp.up_proj.weight"], base.model.layers[0].mlp.up_proj.weight)
    engine = own_engine(base)
    send(engine, wrapped, 1, TEXT)  # the probe compares with a forward pass through the adapters


def test_weights_that_did_not_arrive_are_noticed(build_model):
    trained, engine = build_model("qwen3", seed=1), own_engine(build_model("qwen3", seed=2))
    others = PolicyWeights(build_model("qwen3", seed=2))
    with pytest.raises(RolloutError, match="does not run the weights it was sent"):
        engine.update_weights(others, 3, probe(trained, TEXT))
    assert engine.weight_version == 0, "the update did not happen"


def test_one_wrong_matrix_is_noticed(build_model):
    trained, engine = build_model("qwen3", seed=1), own_engine(build_model("qwen3", seed=1))
    sent = {n: w * 1.02 if n == "model.layers.1.mlp.up_proj.weight" else w for n, w in PolicyWeights(trained)}
    with pytest.raises(RolloutError, match=r"weight version 1 the engine's log-probs differ .* \(allowed 0\.001\)"):
        engine.update_weights(sent.items(), 1, probe(trained, TEXT))


@pytest.mark.parametrize("logprobs", [[float("nan"), -2.0], [-1.0, float("nan")], [-1.0, -2.1], [-1.0]])
def test_a_probe_is_strict(logprobs):
    with pytest.raises(RolloutError, match=r"probe|log-probs"):
        Probe((1, 2, 3), (-1.0, -2.0), 0.05).check(logprobs, 7)
    Probe((1, 2, 3), (-1.0, -2.0), 0.05).check([-1.04, -2.04], 7)


def rounding(trials: int, seed: int, inside: float, wrong: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs [trials, 63] of two sides that compute the same logits in bfloat16, the largest of them in [16, 32).

    The error that a side adds before its logits are rounded, to steps of 0.125, is normal with standard deviation
    `inside`. The other side's output layer is `wrong` times the correct one. Half of the tokens are likely ones.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(trials, 63, 32, generator=generator)
    logits[..., :2] = 16 + 14 * torch.rand(trials, 63, 1, generator=generator) - torch.tensor([0.0, 0.5])
    target = torch.randint(0, 4, (trials, 63, 1), generator=generator)
    sides = []
    for factor in (1.0, wrong):
        rounded = (factor * (logits + inside * torch.randn(logits.shape, generator=generator))).bfloat16().float()
        sides.append(rounded.log_softmax(-1).gather(-1, target)[..., 0])
    return sides[0], sides[1]


class Logits(torch.nn.Module):
    """A policy with fixed logits."""

    def __init__(self, logits, dtype):
        super().__init__()
        self.logits, self.weight = logits, torch.nn.Parameter(torch.zeros(1, dtype=dtype))

    def forward(self, input_ids):
        return type("Output", (), {"logits": self.logits})


def alarms(allowed: Probe, ours: torch.Tensor, theirs: torch.Tensor) -> int:
    """The number of trials that would end a run."""
    count = 0
    for a, b in zip(ours.tolist(), theirs.tolist(), strict=True):
        try:
            Probe(allowed.tokens, tuple(a), allowed.tolerance, allowed.outliers).check(b, 1)
        except RolloutError:
            count += 1
    return count


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "inside"), [(torch.bfloat16, 0.05), (torch.float32, 0.1)], ids=["bf16", "autocast"])
def test_rounding_to_bfloat16_is_no_false_alarm_and_an_output_layer_that_is_2_percent_wrong_is(dtype, inside):
    large = torch.zeros(1, 64, 61)
    large[..., 3] = 20.0
    allowed = probe(Logits(large, dtype), tuple(i % 61 for i in range(64)), torch.bfloat16)
    ours, theirs = rounding(40_000, 0, inside)
    assert ((ours - theirs).abs().amax(-1) > 0.25).float().mean() > 0.05, "the largest difference alone would not do"
    assert alarms(allowed, ours, theirs) == 0  # of 40 000: below 1e-4 with 95 % confidence
    assert alarms(allowed, *rounding(2_000, 1, inside, wrong=1.02)) > 0.99 * 2_000


def test_in_bfloat16_a_right_copy_passes_and_a_wrong_matrix_or_a_stale_layer_does_not(build_model):
    trained = build_model("qwen3", seed=1)
    engine = own_engine(copy.deepcopy(trained).bfloat16())
    expected = probe(trained, TEXT, torch.bfloat16)
    sent = {name: weight.bfloat16() for name, weight in PolicyWeights(trained)}
    engine.update_weights(sent.items(), 1, expected)
    stale = dict(PolicyWeights(build_model("qwen3", seed=2)))
    faults = [
        {"model.layers.1.mlp.up_proj.weight": 1.25 * sent["model.layers.1.mlp.up_proj.weight"]},
        {"lm_head.weight": 1.1 * sent["lm_head.weight"]},
        {name: weight for name, weight in stale.items() if name.startswith("model.layers.0.")},
    ]
    for fault in faults:
        with pytest.raises(RolloutError, match=r"on average .* nats"):
            engine.update_weights((sent | fault).items(), 2, expected)
    engine.update_weights(sent.items(), 3, expected)


def test_a_few_tokens_may_differ_more_where_outliers_are_allowed():
    text, logprobs = tuple(range(33)), (-1.0,) * 32
    loose = Probe(text, logprobs, 0.1, outliers=1 / 16)
    loose.check([-1.5, -1.5, *[-1.0] * 30], 1)
    with pytest.raises(RolloutError, match=r"9% of the tokens by more than 0\.4"):
        loose.check([-1.5, -1.5, -1.5, *[-1.0] * 29], 1)
    with pytest.raises(RolloutError, match=r"on average 0\.2 nats \(allowed 0\.1\)"):
        loose.check([-1.2] * 32, 1)
    with pytest.raises(RolloutError, match="nan"):
        loose.check([float("nan"), *[-1.0] * 31], 1)


def test_a_probe_is_taken_without_dropout_and_puts_every_mode_back():
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=61, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5, **sizes)).train()
    model.transformer.drop.eval()
    modes = [module.training for module in model.modules()]
    got = probe(model, TEXT)
    assert [module.training for module in model.modules()] == modes
    model.eval()
    with torch.no_grad():
        logp = model(torch.tensor([TEXT])).logits[0, :-1].log_softmax(-1)
    assert got.logprobs == pytest.approx(logp.gather(-1, torch.tensor(TEXT[1:])[:, None])[:, 0].tolist(), abs=1e-6)
    model.train()
    with torch.no_grad():
        dropped = model(torch.tensor([TEXT])).logits[0, :-1].log_softmax(-1)
    assert (dropped - logp).abs().max() > 0.01  # control: dropout would be detected


def softer(model):
    forward = model.forward

    def scaled(*args, **options):
        out = forward(*args, **options)
        out.logits = out.logits / 1.05
        return out

    model.forward = scaled


def test_a_shared_policy_that_was_changed_behind_the_engine_is_noticed(build_model):
    model = build_model("qwen3")
    engine = local(model, own_engine(model).sampling, window=8)
    check(engine, model, 3, TEXT)
    softer(model)
    with pytest.raises(RolloutError, match=r"weight version 3 .* does not compute what the trainer's model computes"):
        check(engine, model, 3, TEXT)
    check(own_engine(build_model("qwen3", seed=2)), model, 3, TEXT)  # separate weights were probed when sent


@pytest.fixture
def own_weights(monkeypatch):
    """Runs whose engine holds a copy of the policy, as workers do."""
    import specrl.run.run

    monkeypatch.setattr(specrl.run.run, "make_engine", lambda config, spec, trained: build_engine(spec))


@pytest.mark.slow
def test_a_run_is_the_same_with_an_engine_of_its_own(tmp_path, request):
    shared = run(tmp_path, name="shared", trainer__eval_prompts=4)
    request.getfixturevalue("own_weights")
    copied = run(tmp_path, name="copied", trainer__eval_prompts=4)
    assert differences(shared, copied) == []
    assert copied.trainer.rollouts.engine.model is not shared.trainer.rollouts.engine.model
    logs = [log for log in copied.trainer.state.log_history if "loss" in log]
    assert all(log["timing_s/sync"] > 0 for log in logs)


@pytest.mark.slow
def test_control_weights_that_are_not_sent(tmp_path, own_weights):
    def sabotage(trainer):
        update, first = trainer.rollouts.engine.update_weights, {}

        def stale(weights, version, probe=None):
            first.setdefault("weights", [(name, w.clone()) for name, w in weights])
            update(first["weights"], version, probe)

        trainer.rollouts.engine.update_weights = stale

    with pytest.raises(RolloutError, match="does not run the weights it was sent"):
        run(tmp_path, sabotage)


def test_an_update_brings_all_of_a_draft_model_or_none_of_it(build_model):
    policy, drafter = build_model("qwen3", 1), build_model("llama", 2)
    update = WeightCheck(policy, drafter)
    weights = [*policy.named_parameters()]
    drafts = [(DRAFTER + name, weight) for name, weight in drafter.named_parameters()]
    update.before(weights)
    update.before(weights + drafts)
    with pytest.raises(RolloutError, match=r"lacks 1 of the model's weights, such as 'drafter\."):
        update.before(weights + drafts[1:])


@pytest.mark.parametrize(("options", "exact"), [({}, True), ({"top_p": 0.9}, False), ({"top_k": 20}, False)])
def test_rounding_may_change_which_tokens_are_kept(options, exact):
    assert exact_bits(torch.float32, torch.device("cpu"), RolloutConfig(**options)) == exact
