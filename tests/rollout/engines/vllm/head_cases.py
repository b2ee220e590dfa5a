"""vLLM drafts with a head on the policy's hidden states. test_vllm_v2.py runs this file under vllm_shim."""
# ruff: noqa: F811 - the fixture of device_cases, which tests name as an argument

from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator

from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.engines.local.engine import TransformersEngine
from specrl.rollout.engines.local.head import Head
from specrl.rollout.engines.vllm import planned_model, planned_v2, sampler, worker
from specrl.rollout.engines.vllm.weights import described
from specrl.rollout.engines.weights import WeightCheck
from specrl.rollout.types import RolloutError
from specrl.trainers.weights import PolicyWeights
from tests.rollout.engines.local.test_head import LENGTH, by_hand
from tests.rollout.engines.vllm.device_cases import acceptance, engine_of  # noqa: F401 - a fixture
from tests.rollout.engines.vllm.engines import close, exactly, moved, policy, probe_of, spec_of, start
from tests.rollout.golden import EOS_IDS, Script, differing, requests_of

ROWS, DEPTHS, STEPS = 8, (1, 2), 120


@pytest.fixture(scope="session")
def case(golden):
    """The policy, a head overfitted to the responses, rows, and the policy's responses."""
    cases, want = (part[:ROWS] for part in golden())
    model = policy("qwen3").requires_grad_(False)
    head = Head.of(model)
    texts = [torch.tensor([[*prompt, *tokens]]) for (prompt, _), (tokens, _, _) in zip(cases, want, strict=True)]
    texts = [ids for ids in texts if ids.shape[1] > DEPTHS[-1] + 1]
    states = [model.base_model(ids, use_cache=False).last_hidden_state for ids in texts]
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
    return model, head.eval(), cases, want


@pytest.fixture(scope="session")
def heads(case, tmp_path_factory):
    """The directory of that head."""
    path = tmp_path_factory.mktemp("head")
    case[1].save_pretrained(path)
    return str(path)


@pytest.fixture
def guesses(monkeypatch):
    """By request key: the response positions and tokens that were drafted, in order."""
    recorded, guess = defaultdict(list), sampler.KeyedSampler.guess

    def record(keyed, logits, idx_mapping, pos):
        tokens, index = guess(keyed, logits, idx_mapping, pos), idx_mapping.long()
        positions = pos + 1 - keyed.requests.starts[index]
        columns = (keyed.requests.keys[index].tolist(), positions.tolist(), tokens.tolist())
        for key, position, token in zip(*columns, strict=True):
            recorded[key].append((position, token))
        return tokens

    monkeypatch.setattr(sampler.KeyedSampler, "guess", record)
    return recorded


def strange(guesses, model, head, cases, want) -> tuple[int, int]:
    """The number of drafts, and how many of them differ from the head's drafts computed over the full text at once."""
    drafts, others = 0, 0
    for request, (tokens, _, _) in zip(requests_of(cases), want, strict=True):
        for first in range(0, len(guesses[request.key]), LENGTH):
            positions, draft = zip(*guesses[request.key][first : first + LENGTH], strict=True)
            start = positions[0]
            if 0 < start <= len(tokens):  # not in the middle of a prompt
                assert positions == tuple(range(start, start + LENGTH))
                others += list(draft) != by_hand(model, head, request, tokens[:start])
                drafts += 1
    return others, drafts


def test_it_drafts_what_the_head_drafts_by_hand(engine_of, case, heads, guesses):
    model, head, cases, want = case
    assert acceptance(engine_of(drafter=heads, draft_tokens=LENGTH), cases, want) > 0.2
    others, drafts = strange(guesses, model, head, cases, want)
    assert others == 0 < ROWS < drafts
    for row in guesses.values():
        row[:] = [(position, token + 1) for position, token in row]
    assert strange(guesses, model, head, cases, want) == (drafts, drafts), "control"


@pytest.fixture(scope="session")
def planned(heads, saved):
    """(engine, asked): an engine whose scheduler carries the drafts of texts and of the head, which samples among 30
    ids, and for how many tokens the head was asked.
    """
    asked, propose = [], EagleSpeculator.propose

    def record(*arguments, **options):
        asked.append(options.get("num_speculative_tokens"))
        return propose(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EagleSpeculator, "propose", record)
        patch.setattr("specrl.rollout.engines.vllm.engine.FREQUENT_IDS", 30)
        engine = start(spec_of(saved("qwen3")[1], drafter=heads, draft_tokens=8))
        engine.drafting.budget.window = 0  # the measured costs decide
        yield engine, asked
        close(engine)


def test_it_drafts_beside_texts_and_runs_as_often_as_rows_can_use_its_tokens(planned, case, monkeypatch):
    """Where no row drafts, the head makes no pass."""
    *_, cases, want = case
    engine, asked = planned
    texts = [Script(tokens) if i % 2 else None for i, (tokens, _, _) in enumerate(want)]
    counts = {}
    for plain in (True, False):
        asked.clear()
        done, _ = engine.generate([replace(request, plain=plain) for request in requests_of(cases)])
        assert differing(done, want, 1e-4) == []
        counts[plain] = [*asked]
    assert counts[True] == []
    assert max(counts[False]) > 1
    most = planned_v2.MODEL_TOKENS
    monkeypatch.setattr(planned_model.ModelDrafts, "proposes", lambda model, rows: most)
    asked.clear()
    engine.generate([replace(request, plain=True) for request in requests_of(cases)])
    assert {*asked} == {most}, "control"
    monkeypatch.undo()
    for drafters in (texts, texts):
        done, stats = engine.generate(requests_of(cases, drafters))
        assert differing(done, want, 1e-4) == []
    assert all(stats.sources[source][1] > 0 for source in ("model", "custom"))


def test_it_samples_among_the_ids_that_the_texts_use_most(planned, case, guesses, monkeypatch):
    *_, cases, want = case
    engine, _ = planned
    texts = [text for (prompt, _), (tokens, _, _) in zip(cases, want, strict=True) for text in (prompt, tokens)]
    used = EOS_IDS.union(*texts)

    def accepted() -> float:
        engine.generate(requests_of(cases))  # it counts the ids of the responses
        guesses.clear()
        done, stats = engine.generate(requests_of(cases))
        assert differing(done, want, 1e-4) == []
        return stats.sources["model"][1] / stats.sources["model"][0]

    good = accepted()
    drafted = {token for row in guesses.values() for _, token in row}
    assert drafted <= used
    assert len(drafted) <= 30 < len(used)
    assert good > 0.2
    draft_from = worker.draft_from

    def of_other_ids(runner, ids):
        reason = draft_from(runner, ids)
        runner.sampler.draft_weight = runner.sampler.draft_weight.roll(1, 0)
        return reason

    monkeypatch.setattr(worker, "draft_from", of_other_ids)
    assert accepted() < good / 2, "the planted fault is seen: rows of the output layer in another order"


def test_it_follows_the_updates(engine_of, case, heads, guesses):
    """Its weights are matched by name. Embedding and output layer are always the policy's current ones."""
    model, head, cases, want = case
    engine = engine_of(drafter=heads, draft_tokens=LENGTH)
    good, stale = acceptance(engine, cases, want), Head.load(heads, model)
    with torch.no_grad():
        stale.fc.weight.zero_()
    engine.update_weights(PolicyWeights(model, drafter=stale), 1, probe_of(model))
    assert acceptance(engine, cases, want) < 0.6 * good
    new = moved(model, 1)
    done, _ = TransformersEngine(new, SamplingParams(EOS_IDS)).generate(requests_of(cases))
    after = exactly(done)
    for version, weights in enumerate((PolicyWeights(new, drafter=head), PolicyWeights(new)), 2):
        guesses.clear()
        engine.update_weights(weights, version, probe_of(new))
        acceptance(engine, cases, after)
        others, drafts = strange(guesses, new, Head.load(heads, new), cases, after)
        assert others == 0 < drafts
    short = dict(PolicyWeights(model, drafter=head))
    del short["drafter.fc.weight"]
    with pytest.raises(RolloutError, match=r"lacks 1 of the model's weights, such as 'drafter.fc.weight'"):
        engine.update_weights(short.items(), 4, probe_of(model))
    engine.update_weights(PolicyWeights(model, drafter=head), 4, probe_of(model))
    assert acceptance(engine, cases, want) == good


def test_it_is_a_speculator_of_vllms_too(engine_of, case, heads):
    *_, cases, want = case
    done, stats = engine_of(f"eagle={heads}", draft_tokens=LENGTH).generate(requests_of(cases))
    assert differing(done, want, 1e-4) == []
    (drafted, accepted) = stats.sources["eagle"]
    assert accepted > 0.2 * drafted


def test_a_head_of_another_policy_is_refused_before_anything_is_loaded(saved, heads, tmp_path):
    spec = spec_of(saved("qwen3")[1], drafter=heads)
    names = WeightCheck(*described(spec))
    assert "drafter.fc.weight" in names.shapes
    assert not any(
        word in name for name in names.shapes if name.startswith("drafter.") for word in ("embed", "lm_head")
    )
    other = Head.load(heads, policy("qwen3"))
    other.fc = torch.nn.Linear(32, 16)
    other.save_pretrained(tmp_path)
    with pytest.raises(RolloutError, match=f"the head in {tmp_path} cannot be read"):
        described(spec_of(saved("qwen3")[1], drafter=str(tmp_path)))
