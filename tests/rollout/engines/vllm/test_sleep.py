"""Sleep of vLLM between rollouts: what is kept, and how the weights come back. On a CPU vLLM keeps its memory."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from specrl.rollout.types import RolloutError
from specrl.trainers.weights import PolicyWeights
from tests.rollout.engines.vllm.engines import (
    TEXT,
    Incomplete,
    Recorded,
    assert_generates_as,
    close,
    moved,
    needs_vllm,
    probe_of,
    restore,
    spec_of,
    start,
)
from tests.rollout.golden import requests_of

pytestmark = needs_vllm


@pytest.fixture(scope="module")
def sleeping(saved, engine_of):
    """An engine that assumes a GPU, for all tests."""
    import specrl.rollout.engines.vllm.engine as module

    engine_of()
    spec = spec_of(saved("qwen3")[1])
    here = module.settings(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "settings", lambda spec: here)
        patch.setattr(module, "current_platform", SimpleNamespace(is_cpu=lambda: False))
        engine = start(spec)
    yield engine
    close(engine)


@pytest.fixture
def sleeper(saved, sleeping, monkeypatch):
    """(engine, model, calls): an engine that is awake with weights that cannot be sent again. Sleep at level 2
    overwrites the weights, as on a GPU; on a CPU vLLM accepts the calls and keeps its memory.
    """
    from vllm import LLM

    model, _ = saved("qwen3")
    restore(sleeping, model)
    calls, sleep, wake_up, update = [], LLM.sleep, LLM.wake_up, LLM.update_weights

    def asleep(llm, level):
        calls.append(level)
        if level == 2:
            llm.collective_rpc(lose)
        sleep(llm, level)

    def awake(llm, tags):
        calls.append("+".join(tags))
        return wake_up(llm, tags)

    def loaded(llm, request):
        calls.append("load")
        update(llm, request)

    monkeypatch.setattr(LLM, "sleep", asleep)
    monkeypatch.setattr(LLM, "wake_up", awake)
    monkeypatch.setattr(LLM, "update_weights", loaded)
    return sleeping, model, calls


@torch.no_grad()
def lose(worker):
    for p in worker.get_model().parameters():
        p.fill_(float("nan"))


def renewed(engine, model, seed, source=PolicyWeights):
    """A new policy, whose weights the engine gets from `source`."""
    new = moved(model, seed)
    weights = source(new)
    engine.update_weights(weights, engine.weight_version + 1, probe_of(new))
    return new, weights


RELOADS = ["weights", "load", "kv_cache", 2]


def test_nothing_is_restored_only_to_be_overwritten(sleeper, golden):
    engine, model, calls = sleeper
    cases, _ = golden()
    assert_generates_as(engine, model, cases)
    assert_generates_as(engine, model, cases)
    assert calls == [1, "weights+kv_cache", 1], "nobody can bring the weights of the file again: they are kept"
    for seed in (1, 2):
        calls.clear()
        new, _ = renewed(engine, model, seed)
        assert_generates_as(engine, new, cases)
        assert calls == RELOADS


def test_a_rollout_without_an_update_before_it_reloads_the_weights(sleeper, golden):
    engine, model, calls = sleeper
    cases, _ = golden()
    new, source = renewed(engine, model, 1, Recorded)
    version = engine.weight_version
    assert_generates_as(engine, new, cases)
    calls.clear()
    assert_generates_as(engine, new, cases)
    assert calls == RELOADS
    assert len(source.walks) == 2
    assert engine.weight_version == version
    engine.score(TEXT)
    assert_generates_as(engine, new, cases)
    assert calls == RELOADS * 3, "a score gives the memory back too"


def collective(policy):
    source = Recorded(policy)
    source.collective = True
    return source


def once(policy):
    return iter(PolicyWeights(policy))


@pytest.mark.parametrize("source", [collective, once])
def test_weights_that_cannot_be_walked_again_are_kept(sleeper, golden, source):
    """One rank may wake up when no other rank takes part in gathering."""
    engine, model, calls = sleeper
    cases, _ = golden()
    new, _ = renewed(engine, model, 1, source)
    assert_generates_as(engine, new, cases)
    assert_generates_as(engine, new, cases)
    assert calls == ["load", 1, "weights+kv_cache", 1]


def test_a_source_that_changed_without_an_update_is_found(sleeper, golden):
    engine, model, _ = sleeper
    cases, _ = golden()
    new, _ = renewed(engine, model, 1)
    engine.generate(requests_of(cases))
    with torch.no_grad():
        new.model.norm.weight.mul_(1.1)
    with pytest.raises(RolloutError, match="does not run the weights it was sent"):
        engine.generate(requests_of(cases))
    with pytest.raises(RolloutError, match=f"version {engine.weight_version} failed; send the weights again"):
        engine.generate(requests_of(cases))


class Asleep:
    """An LLM that reports only the level of its sleep. Args: drafter: its draft model."""

    def __init__(self, drafter):
        self.levels = []
        self.worker = SimpleNamespace(get_draft_model=lambda: drafter, device=torch.device("cpu"))
        self.llm_engine = SimpleNamespace(is_sleeping=lambda: False)
        for name in ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"):
            setattr(self, name, lambda *_, **__: None)

    def collective_rpc(self, ask):
        return [ask(self.worker)]

    def sleep(self, level):
        self.levels.append(level)

    def wake_up(self, tags):
        pass


@pytest.mark.parametrize("drafts", [False, True])
def test_a_draft_model_that_no_update_brings_is_kept_asleep(saved, drafts):
    """Level 2 discards it too, and a rollout would continue with random weights, as slowly as without a draft model."""
    from specrl.rollout.engines.vllm.weights import Updates, described
    from specrl.rollout.engines.weights import WeightCheck

    model, path = saved("qwen3")
    llm = Asleep(model if drafts else None)
    spec = spec_of(path, drafter=str(path) if drafts else "")
    updates = Updates(llm, WeightCheck(*described(spec)), 1, True, lambda version, probe: None)
    updates.update(PolicyWeights(model), 1, None)
    updates.sleep()
    assert llm.levels == [1 if drafts else 2]
    if drafts:
        updates.update(PolicyWeights(model, drafter=model), 2, None)
        updates.sleep()
        assert llm.levels == [1, 2]


def test_an_update_that_fails_asleep_leaves_nothing_to_generate_with(sleeper, golden):
    engine, model, calls = sleeper
    cases, _ = golden()
    new, source = renewed(engine, model, 1)
    engine.generate(requests_of(cases))
    version = engine.weight_version + 1
    with pytest.raises(RolloutError, match="lacks 1"):
        engine.update_weights(Incomplete(new), version, probe_of(new))
    for use in (lambda: engine.generate(requests_of(cases)), lambda: engine.score(TEXT)):
        with pytest.raises(RolloutError, match=f"version {version} failed; send the weights again"):
            use()
    calls.clear()
    engine.update_weights(source, version, probe_of(new))
    assert_generates_as(engine, new, cases)
    assert calls == RELOADS


def test_memory_is_given_back_after_scores_failures_and_rollouts_without_rows(sleeper, golden):
    """Otherwise the trainer's next update would run out of GPU memory."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    engine, model, calls = sleeper
    cases, _ = golden()
    assert_generates_as(engine, model, cases)
    calls.clear()
    engine.score([3, 4, 5])
    assert calls == ["weights+kv_cache", 1]
    calls.clear()
    failing = mock.patch.object(CPUModelRunner, "execute_model", side_effect=MemoryError("planted"))
    with failing, pytest.raises(MemoryError, match="planted"):
        engine.generate(requests_of(cases))
    assert calls == ["weights+kv_cache", 1]
    new, _ = renewed(engine, model, 1)
    calls.clear()
    assert engine.generate([])[0] == []
    assert calls == [2], "of a worker that has no rows of the batch"
    assert_generates_as(engine, new, cases)
    assert calls == [2, *RELOADS]


def test_memory_that_does_not_come_back_is_an_error(sleeper, golden, monkeypatch):
    from vllm import LLM

    engine, _, _ = sleeper
    engine.generate(requests_of(golden()[0]))
    with monkeypatch.context() as patch:
        patch.setattr(LLM, "wake_up", lambda llm, tags: None)
        with pytest.raises(RolloutError, match=r"rollout\.vllm\.sleep=false"):
            engine.generate(requests_of(golden()[0]))
