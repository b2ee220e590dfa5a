"""vLLM drafts with a head on the policy's hidden states. test_vllm_v2.py runs this file under vllm_shim."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy
from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator

from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.engines.local.engine import TransformersEngine
from specrl.rollout.engines.local.head import Head
from specrl.rollout.engines.vllm import sampler, worker
from specrl.rollout.engines.vllm.weights import WeightCheck
from specrl.rollout.types import RolloutError
from specrl.trainers.weights import PolicyWeights
from tests.rollout.engines.local.test_head import LENGTH, by_hand
from tests.rollout.engines.vllm import test_vllm
from tests.rollout.engines.vllm.device_cases import acceptance, engine_of  # noqa: F401
from tests.rollout.engines.vllm.test_vllm import golden, moved, probe_of, saved, spec_of  # noqa: F401
from tests.rollout.golden import EOS_IDS, differing, requests_of

ROWS, DEPTHS, STEPS = 8, (1, 2), 200


@pytest.fixture(scope="session")
def case(golden):  # noqa: F811
    """The policy, a head overfitted to the responses, rows, and the policy's responses."""
    cases, want = (part[:ROWS] for part in golden())
    policy = test_vllm.policy("qwen3").requires_grad_(False)
    head = Head.of(policy)
    texts = [torch.tensor([[*prompt, *tokens]]) for (prompt, _), (tokens, _, _) in zip(cases, want, strict=True)]
    texts = [ids for ids in texts if ids.shape[1] > DEPTHS[-1] + 1]
    states = [policy.base_model(ids, use_cache=False).last_hidden_state for ids in texts]
    optimizer = torch.optim.Adam(head.parameters(), 1e-3)
    for _ in range(STEPS):
        loss = torch.zeros(())
        for ids, state in zip(texts, states, strict=True):
            for depth in DEPTHS:
                state = head(ids[:, depth:-1], state[:, : ids.shape[1] - 1 - depth]).last_hidden_state
                logits = head.get_output_embeddings()(state)[0]
                loss = loss + cross_entropy(logits, ids[0, depth + 1 :], reduction="sum")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return policy, head.eval(), cases, want


@pytest.fixture(scope="session")
def heads(case, tmp_path_factory):
    """The directory of that head."""
    path = tmp_path_factory.mktemp("head")
    case[1].save_pretrained(path)
    return str(path)


@pytest.fixture
def guesses(monkeypatch):
    """By request key: the response positions and tokens that were drafted, in order."""
    found, guess = defaultdict(list), sampler.KeyedSampler.guess

    def spy(keyed, logits, slots, pos):
        tokens, slots = guess(keyed, logits, slots, pos), slots.long()
        at = pos + 1 - keyed.requests.starts[slots]
        for key, *one in zip(keyed.requests.keys[slots].tolist(), at.tolist(), tokens.tolist(), strict=True):
            found[key].append(one)
        return tokens

    monkeypatch.setattr(sampler.KeyedSampler, "guess", spy)
    return found


def strange(guesses, policy, head, cases, want) -> tuple[int, int]:
    """The number of drafts, and how many of them differ from the head's drafts computed over the full text at once."""
    drafts, others = 0, 0
    for request, (tokens, _, _) in zip(requests_of(cases), want, strict=True):
        for first in range(0, len(guesses[request.key]), LENGTH):
            places, draft = zip(*guesses[request.key][first : first + LENGTH], strict=True)
            if 0 < places[0] <= len(tokens):  # not in the middle of a prompt
                assert places == tuple(range(places[0], places[0] + LENGTH))
                others += list(draft) != by_hand(policy, head, request, tokens[: places[0]])
                drafts += 1
    return others, drafts


def test_it_drafts_what_the_head_drafts_by_hand(engine_of, case, heads, guesses):  # noqa: F811
    policy, head, cases, want = case
    assert acceptance(engine_of(drafter=heads, draft_tokens=LENGTH), cases, want) > 0.2
    others, drafts = strange(guesses, policy, head, cases, want)
    assert others == 0 < ROWS < drafts
    for row in guesses.values():
        row[:] = [(at, token + 1) for at, token in row]
    assert strange(guesses, policy, head, cases, want) == (drafts, drafts), "control"


def test_it_follows_the_updates(engine_of, case, heads, guesses):  # noqa: F811
    """Its weights are matched by name. Embedding and output layer are always the policy's current ones."""
    policy, head, cases, want = case
    engine = engine_of(drafter=heads, draft_tokens=LENGTH)
    good, stale = acceptance(engine, cases, want), Head.load(heads, policy)
    with torch.no_grad():
        stale.fc.weight.zero_()
    engine.update_weights(PolicyWeights(policy, drafter=stale), 1, probe_of(policy))
    assert acceptance(engine, cases, want) < 0.6 * good
    new = moved(policy, 1)
    done, _ = TransformersEngine(new, SamplingParams(EOS_IDS)).generate(requests_of(cases))
    after = [(c.tokens, c.logprobs, c.finish) for c in done]
    for version, given in enumerate((PolicyWeights(new, drafter=head), PolicyWeights(new)), 2):
        guesses.clear()
        engine.update_weights(given, version, probe_of(new))
        acceptance(engine, cases, after)
        others, drafts = strange(guesses, new, Head.load(heads, new), cases, after)
        assert others == 0 < drafts
    short = dict(PolicyWeights(policy, drafter=head))
    del short["drafter.fc.weight"]
    with pytest.raises(RolloutError, match=r"lacks 1 of the model's weights, such as 'drafter.fc.weight'"):
        engine.update_weights(short.items(), 4, probe_of(policy))
    engine.update_weights(PolicyWeights(policy, drafter=head), 4, probe_of(policy))
    assert acceptance(engine, cases, want) == good


def test_it_is_a_speculator_of_vllms_too(engine_of, case, heads):  # noqa: F811
    *_, cases, want = case
    done, stats = engine_of(f"eagle={heads}", draft_tokens=LENGTH).generate(requests_of(cases))
    assert differing(done, want, 1e-4) == []
    (drafted, accepted) = stats.sources["eagle"]
    assert accepted > 0.2 * drafted


def test_a_head_of_another_policy_is_refused_before_anything_is_loaded(saved, heads, tmp_path):  # noqa: F811
    spec = spec_of(saved("qwen3")[1], drafter=heads)
    names = WeightCheck(spec)
    assert "drafter.fc.weight" in names.shapes
    assert not any(
        word in name for name in names.shapes if name.startswith("drafter.") for word in ("embed", "lm_head")
    )
    other = Head.load(heads, test_vllm.policy("qwen3"))
    other.fc = torch.nn.Linear(32, 16)
    other.save_pretrained(tmp_path)
    with pytest.raises(RolloutError, match=f"the head in {tmp_path} cannot be read"):
        WeightCheck(spec_of(saved("qwen3")[1], drafter=str(tmp_path)))


def test_passes_that_vllm_captured_with_its_own_draws_are_not_replayed():
    """On a GPU vLLM captures a head's passes with their sampling before the keyed sampler is installed."""
    speculator, modes = EagleSpeculator.__new__(EagleSpeculator), []
    speculator.init_cudagraph_manager = modes.append
    worker.share_noise(SimpleNamespace(speculator=speculator, sampler=None))
    assert modes == [CUDAGraphMode.NONE]


@pytest.mark.parametrize("borrows", [True, False])
def test_what_a_head_borrows_is_not_loaded_with_it(monkeypatch, borrows):
    """vLLM passes a table without weights to all models of a kind, which must not make a draft model a head."""
    reloaded, loaded = [], []
    monkeypatch.setattr(worker, "initialize_layerwise_reload", reloaded.append)
    transfer, rotary = worker.Transfer.__new__(worker.Transfer), torch.nn.Identity()
    transfer.model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(3, 2), "rotary": rotary})
    theirs = transfer.model["embed"] if borrows else torch.nn.Embedding(3, 2)
    transfer.drafter = torch.nn.ModuleDict({"fc": torch.nn.Linear(4, 2), "embed": theirs, "rotary": rotary})
    transfer.drafter.load_weights = loaded.extend
    transfer.start_weight_update()
    transfer.load_weights([("drafter.fc.weight", torch.ones(2, 4)), ("drafter.fc.bias", torch.ones(2))])
    assert [name for name, _ in loaded] == ["fc.weight", "fc.bias"]
    parts = [transfer.drafter["fc"], rotary] if borrows else [transfer.drafter]
    assert reloaded == [transfer.model, *parts]
