"""vLLM's adaptive verification of texts: what is cut on the device. Run by test_vllm_v2.py under vllm_shim.

It is vLLM's own, but for what only a GPU has: streams, captured graphs (vLLM refuses the setting without them), the
costs measured from them, and a compiled top-k.
"""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from vllm.config import VllmConfig
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.spec_decode import adaptive_verification

from rollout.engines.vllm import sampler, texts, worker
from rollout.types import RolloutError
from tests.rollout.engines.vllm import test_vllm
from tests.rollout.engines.vllm.device_cases import some, texts_of_every_quality  # noqa: F401
from tests.rollout.engines.vllm.test_vllm import close, exactly, golden, saved  # noqa: F401
from tests.rollout.engines.vllm.test_vllm_served import keep_async
from tests.rollout.golden import Script, all_wrong, differing, requests_of

COSTS = [(n, 5 + 0.6 * n) for n in range(1, 513)]
"""(tokens of a step, milliseconds): dear enough that unlikely tokens do not pay."""


class Stream:
    """Of a device that has done everything when it is asked."""

    def __init__(self, *_, **__): ...
    def wait_stream(self, other): ...
    def synchronize(self): ...
    def record(self): ...


def test_without_graphs_vllm_refuses_it(saved):  # noqa: F811
    spec = test_vllm.spec_of(saved("qwen3")[1])
    spec.rollout.vllm.scheduling, spec.rollout.vllm.adaptive_verification = "async", True
    with (
        pytest.raises(RolloutError, match="Adaptive verification requires full CUDA graphs"),
        mock.patch.object(CpuPlatform, "check_and_update_config", classmethod(keep_async)),
    ):
        test_vllm.build_engine(spec)


@pytest.fixture(scope="module")
def adaptive(saved):  # noqa: F811
    """engine; `budgets`: (draft tokens scheduled, verified) of each step; `runner`: vLLM's."""
    found = SimpleNamespace(budgets=[])

    def create(*, enable_adaptive_verification, req_states, query_start_loc, num_bonus_tokens, max_total_logits, **_):
        assert enable_adaptive_verification, "the speculator says so"
        with mock.patch.multiple(torch.cuda, Stream=Stream, Event=Stream):
            manager = adaptive_verification.AdaptiveVerificationManager(
                req_states, query_start_loc, num_bonus_tokens, max_total_logits
            )
        manager.set_cost_curves([(1, 1.0)], COSTS)
        count = manager.get_num_tokens

        def get_num_tokens(tokens, drafts):
            verified = count(tokens, drafts)
            scheduled = sum(map(len, drafts.values()))
            found.budgets.append((scheduled, scheduled - sum(tokens.values()) + verified))
            return verified

        manager.get_num_tokens = get_num_tokens
        return manager

    def install(runner):
        found.runner = runner
        return sampler.install(runner)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", classmethod(keep_async))
        patch.setattr(model_runner, "maybe_create_adaptive_verification_manager", create)
        patch.setattr(model_runner, "resolve_adaptive_cudagraph_mode", lambda mode, **_: mode)
        patch.setattr(VllmConfig, "_validate_adaptive_verification", lambda self: None)
        patch.setattr(adaptive_verification, "stream", lambda *_: nullcontext())
        patch.setattr(torch.cuda, "current_stream", Stream)
        plain = adaptive_verification._assign_draft_token_budget
        patch.setattr(adaptive_verification, "_assign_draft_token_budget_compiled", plain)
        patch.setattr(worker, "install", install)
        spec = test_vllm.spec_of(saved("qwen3")[1], window=0)
        spec.rollout.vllm.scheduling, spec.rollout.vllm.adaptive_verification = "async", True
        with mock.patch("gc.collect"):
            found.engine = test_vllm.build_engine(spec)
        yield found
        close(found.engine)


def verified(adaptive, asked):
    """What the engine gives, and of the draft tokens that were verified the share that stood."""
    adaptive.budgets.clear()
    done, stats = adaptive.engine.generate(asked)
    return done, stats.accepted / sum(carried for _, carried in adaptive.budgets)


def test_drafts_that_are_cut_on_the_device_change_nothing(adaptive, some):  # noqa: F811
    cases, want = some()
    plain, _ = adaptive.engine.generate(requests_of(cases))
    assert differing(plain, want, 1e-4) == []
    done, _ = verified(adaptive, requests_of(cases, texts_of_every_quality([t for t, _, _ in want])))
    assert exactly(done) == exactly(plain), "bit for bit, log-probs too"
    assert sum(carried < scheduled for scheduled, carried in adaptive.budgets) > 5
    assert any(0 < carried < scheduled for scheduled, carried in adaptive.budgets)


def test_control_boundaries_of_the_host_are_found(adaptive, some, monkeypatch):  # noqa: F811
    """The host knows how many draft tokens there are, and not whose."""

    class Even(sampler.KeyedVerifier):
        def __call__(self, logits, batch, *more):
            fed = np.diff(batch.query_start_loc_np)[: batch.num_reqs]  # it shares them out evenly
            counts = fed if batch.num_draft_tokens_per_req is None else np.where(batch.num_draft_tokens_per_req, fed, 1)
            if counts.sum() == len(logits):
                batch = replace(batch, cu_num_logits=torch.tensor([0, *counts.cumsum().tolist()], dtype=torch.int32))
            return super().__call__(logits, batch, *more)

    cases, want = some()
    monkeypatch.setattr(adaptive.runner.rejection_sampler, "__class__", Even)
    done, _ = adaptive.engine.generate(requests_of(cases, texts_of_every_quality([t for t, _, _ in want])))
    assert differing(done, want, 1e-4) != []


def test_tokens_that_fit_are_verified_before_others(adaptive, some, monkeypatch):  # noqa: F811
    """Half of the rows have the right text, the others a wrong one. Control: nobody looks at how they fit."""
    cases, want = some()
    asked = [Script(t if i % 2 else all_wrong(t)) for i, (t, _, _) in enumerate(want)]
    for _ in range(2):
        done, stood = verified(adaptive, requests_of(cases, asked))
        assert differing(done, want, 1e-4) == []
    follow = texts.continue_texts

    def alike(*given):
        ids, fits = follow(*given)
        return ids, torch.zeros_like(fits)

    monkeypatch.setattr(texts, "continue_texts", alike)
    for _ in range(2):
        done, blind = verified(adaptive, requests_of(cases, asked))
        assert differing(done, want, 1e-4) == []
    assert stood > 1.3 * blind


def test_the_budget_leaves_the_choice_to_vllm(adaptive, some):  # noqa: F811
    """Of texts that are all wrong it would soon let none ride; scheduled, they cost nothing until they are verified."""
    cases, want = some()
    for _ in range(2):
        _, stats = adaptive.engine.generate(requests_of(cases, [Script(all_wrong(t)) for t, _, _ in want]))
    assert stats.drafted > 2 * sum(len(t) for t, _, _ in want)
