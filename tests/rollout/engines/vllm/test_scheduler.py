"""The synchronous scheduler appends a step's tokens at once. Requests end and are cached as with vLLM's scheduler."""

from types import SimpleNamespace

import pytest

from tests.rollout.engines.vllm.engines import needs_vllm

pytestmark = needs_vllm
EOS, BLOCK, CAP, CONTEXT = 1, 4, 20, 22


def outputs(ours: bool, steps: list[list[int]]) -> list[tuple]:
    """The output of each step for a request, and the request's state afterwards."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

    from specrl.rollout.engines.vllm.scheduler import HostScheduler

    class Part(HostScheduler if ours else Scheduler):
        def __init__(self):
            self.max_model_len = CONTEXT

        def update(self, request, tokens):
            return self._update_request_with_output(request, [*tokens])

    init_none_hash(sha256)
    params = SamplingParams(max_tokens=CAP, stop_token_ids=[EOS], ignore_eos=True)
    hasher = get_request_block_hasher(BLOCK, sha256)
    request, scheduler, results = Request("a", [2, 3, 4], params, None, block_hasher=hasher), Part(), []
    for tokens in steps:
        tokens, stopped = scheduler.update(request, tokens)
        state = list(request.all_token_ids), list(request.block_hashes), request.status, request.stop_reason
        results.append((tokens, stopped, *state))
    return results


@pytest.mark.parametrize(
    ("steps", "ends"),
    [
        ([[5], [6, 7, 8, 9, 10, 11], [12, 13]], None),
        ([[5, 6], [7, 8, 9, EOS]], "FINISHED_STOPPED"),
        ([[EOS]], "FINISHED_STOPPED"),
        ([[5] * 12, [6] * 7], "FINISHED_LENGTH_CAPPED"),  # the end of the context
    ],
)
def test_steps_end_and_hash_as_vllms_own(steps, ends):
    ours = outputs(True, steps)
    assert ours == outputs(False, steps)
    assert len(ours[-1][3]) == (3 + sum(map(len, steps))) // BLOCK
    assert ours[-1][1] == (ends is not None)
    assert ends is None or ours[-1][4].name == ends


def test_control_it_relies_on_no_tokens_after_the_end():
    """vLLM's scheduler cuts them off; the host flow never emits any."""
    assert outputs(True, [[5, EOS, 6]]) != outputs(False, [[5, EOS, 6]])


@pytest.mark.parametrize(("plain", "drafts"), [(0, True), (1, False)])
def test_a_plain_request_to_a_server_on_runner_v2_has_no_drafts(monkeypatch, plain, drafts):
    """It is the baseline that speed is compared with."""
    from specrl.rollout.engines.vllm import served_v2
    from specrl.rollout.engines.vllm.wire import KeyedRequest

    monkeypatch.setattr(served_v2.DraftScheduler, "add_request", lambda self, request: None)
    scheduler = object.__new__(served_v2.KeyedScheduler)
    scheduler.draft_lengths = SimpleNamespace(requests={"other": None}, admit=lambda *admitted: seen.append(admitted))
    seen = []
    extra = KeyedRequest(3, 4, "g", ((5, 6),), plain=bool(plain)).extra_args()
    params = SimpleNamespace(extra_args=extra)
    scheduler.add_request(SimpleNamespace(request_id="r", sampling_params=params, use_structured_output=False))
    assert seen == [("r", drafts)]
