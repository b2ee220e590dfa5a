"""A draft head on the policy's hidden states: it changes no token, and reads the states of the policy's passes."""

import pytest
import torch

from specrl.rollout.config import RolloutConfig
from specrl.rollout.drafting.budget import Budget, Plan
from specrl.rollout.engines.base import EngineSpec
from specrl.rollout.engines.local import probe, varlen
from specrl.rollout.engines.local.head import Head, HeadDrafter, load_drafter
from specrl.rollout.engines.local.kv import States
from specrl.rollout.engines.local.reader import Reader
from specrl.rollout.noise import keyed_sample
from specrl.rollout.types import RolloutError
from tests.rollout.engines.local.test_varlen import replayed
from tests.rollout.golden import (
    SAMPLING,
    VOCAB,
    differing,
    drafts_of_every_quality,
    engine_of,
    requests_of,
)

TOGETHER, LENGTH = 6, 5


@pytest.fixture
def on_gpu_passes(monkeypatch):
    monkeypatch.setattr(probe, "on_gpu", lambda model: True)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "window"), [("qwen3", 4), ("llama", 0)])
def test_a_head_changes_nothing(golden, family, window):
    model, cases, want = golden(family)
    drafters = drafts_of_every_quality([t for t, _, _ in want])
    for bounds in ({}, {"rows_per_batch": 5, "tokens_per_pass": 7}):
        engine = engine_of(model, window=window, drafter=Head.of(model), **bounds)
        for given in (None, drafters):
            done, stats = engine.generate(requests_of(cases, given))
            assert differing(done, want) == []
        assert not window or stats.sources["model"][0] > 0


@pytest.mark.parametrize("settings", [{}, {"ids": 20, "rows_per_batch": 5}])
def test_nor_in_the_passes_of_a_gpu(golden, on_gpu_passes, settings):
    model, cases, want = golden("qwen3")
    engine = engine_of(model, window=4, drafter=Head.of(model), **settings)
    assert engine.policy.layout is varlen.StaticPass
    engine.policy.record = engine.drafting.model.packed.record = replayed
    done, stats = engine.generate(requests_of(cases))
    assert differing(done, want) == []
    assert stats.sources["model"][0] > 0


# Input of the head ----------------------------------------------------------------------------------------------------


def drafts(policy, head, rows, texts) -> list[list[int]]:
    """The head's drafts after the responses of rows whose policy has read all but their last tokens."""
    model, drafter = engine_of(policy).policy, HeadDrafter(head, SAMPLING)
    with model.inference(), drafter.packed.inference():
        reader = Reader(model, rows, states=True)
        reader.admit(dict.fromkeys(range(len(rows)), ()))
        drafter.open(rows, len(rows), reader)
        drafter.reader.admit(dict.fromkeys(range(len(rows)), ()))
        for end in (1, LENGTH):  # most of the first draft was accepted
            budget = Budget(LENGTH)
            at = {row: text[:end] for row, text in texts.items()}
            for part in reader.parts({row: reader.missing(row, text[:-1]) for row, text in at.items()}):
                reader.read(part)
            chain = budget.chain([1] * len(rows), Plan({}, frozenset(), 0.0))
            found = drafter.propose(at, [LENGTH] * len(rows), chain, budget)
    return found


@torch.no_grad()
def by_hand(policy, head, request, text) -> list[int]:
    """The same chain, computed over the full text at once."""
    ids = torch.tensor([[*request.prompt, *text]])
    states = policy.base_model(ids[:, :-1], use_cache=False).last_hidden_state
    for at in range(len(text), len(text) + LENGTH):
        made = head(ids[:, 1:], states).last_hidden_state[:, -1:]
        key, place = torch.tensor([request.key]), torch.tensor([at])
        token = keyed_sample(head.get_output_embeddings()(made)[0], key, place)[0]
        ids, states = torch.cat([ids, token[None]], 1), torch.cat([states, made], 1)
    return ids[0, -LENGTH:].tolist()


@pytest.fixture
def case(golden):
    """A policy, a head, rows with prompts of at least two tokens, and texts."""
    policy, cases, _ = golden("qwen3")
    head = Head.of(policy)
    with torch.no_grad():
        for weight in head.parameters():
            weight.add_(0.3 * weight.std() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    rows = [row for row in requests_of(cases) if len(row.prompt) > 1 and row.max_new_tokens > 20][:TOGETHER]
    texts = {
        i: [first := 7 * i, *by_hand(policy, head, row, [first])][:LENGTH] for i, row in enumerate(rows)
    }  # some drafts were accepted
    return policy, head, rows, texts


def test_it_drafts_behind_the_policys_own_states(case):
    policy, head, rows, texts = case
    assert drafts(policy, head, rows, texts) == [by_hand(policy, head, r, texts[i]) for i, r in enumerate(rows)]


def test_states_of_other_positions_are_seen(case, monkeypatch):
    policy, head, rows, texts = case
    write = States.write
    monkeypatch.setattr(States, "write", lambda kept, slots, hidden: write(kept, (slots - 1).clamp(min=0), hidden))
    assert drafts(policy, head, rows, texts) != [by_hand(policy, head, r, texts[i]) for i, r in enumerate(rows)]


def test_states_of_what_was_drafted_are_seen(case, monkeypatch):
    policy, head, rows, texts = case
    monkeypatch.setattr(Reader, "rollback", lambda *given: None)
    assert drafts(policy, head, rows, texts) != [by_hand(policy, head, r, texts[i]) for i, r in enumerate(rows)]


@pytest.mark.parametrize("fault", ["other positions", "stale"])
def test_a_head_that_reads_wrongly_costs_time_only(golden, fault, monkeypatch):
    model, cases, want = golden("qwen3")
    head = Head.of(model)
    if fault == "stale":
        with torch.no_grad():
            head.fc.weight.zero_()
    else:
        write = States.write
        monkeypatch.setattr(States, "write", lambda kept, slots, hidden: write(kept, (slots - 1).clamp(min=0), hidden))
    assert differing(engine_of(model, window=4, drafter=head).generate(requests_of(cases))[0], want) == []


# Its layers -----------------------------------------------------------------------------------------------------------


def test_it_travels_in_the_form_of_eagle(golden, tmp_path):
    from safetensors.torch import load_file

    model, *_ = golden("qwen3")
    head = Head.of(model)
    head.save_pretrained(tmp_path)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert {"fc.weight", "layers.0.self_attn.q_proj.weight", "layers.0.post_attention_layernorm.weight"} <= names
    assert not any(word in name for name in names for word in ("embed", "lm_head", "input_layernorm"))
    again = Head.load(tmp_path, model)
    assert all(torch.equal(a, b) for a, b in zip(head.parameters(), again.parameters(), strict=True))


def test_a_head_of_another_policy_is_refused(golden, build_model, tmp_path):
    model, *_ = golden("qwen3")
    Head.of(model).save_pretrained(tmp_path)
    other = build_model("llama")
    other.lm_head = torch.nn.Linear(2 * model.config.hidden_size, VOCAB)
    with pytest.raises(RolloutError, match=r"reads hidden states of .* Make one for this policy"):
        Head.load(tmp_path, other)
    (tmp_path / "model.safetensors").write_bytes(b"cut short")
    with pytest.raises(RolloutError, match="cannot be read"):
        Head.load(tmp_path, model)


def test_a_policy_without_such_a_layer_is_refused(golden):
    with pytest.raises(RolloutError, match=r"no .*intermediate_size.* Use a draft model"):
        Head.of(golden("gpt2")[0])


@pytest.mark.parametrize("acceptance", ["judged", "routed"])
def test_a_rule_by_which_drafts_are_text_refuses_a_head(golden, acceptance):
    spec = EngineSpec(eos_ids=frozenset(), rollout=RolloutConfig(acceptance=acceptance, drafter="head"))
    with pytest.raises(RolloutError, match=r"rollout\.acceptance=.*kind=model"):
        load_drafter(spec, golden("qwen3")[0])
