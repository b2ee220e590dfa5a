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


def test_a_step_that_only_reads_prompts_is_no_decoding():
    """However many requests wait: 200 prompt tokens of two of 256 requests are no decoding, one row that goes on is."""
    from specrl.rollout.drafting.drafting import Drafting
    from specrl.rollout.engines.vllm.logits import LogitsBudget
    from specrl.rollout.engines.vllm.scheduler import DraftLengths

    lengths = DraftLengths(source="texts", drafting=Drafting(), draft_tokens=8, budget=LogitsBudget(1000))
    for i in range(256):
        lengths.admit(str(i), drafts=False)

    def step(tokens: int, *sampled: str) -> tuple[bool, bool]:
        """Whether the step's seconds are those of a prompt, and of decoding."""
        before = lengths.stats.prefill_s, lengths.stats.decode_s
        for name in sampled:
            lengths.observe_tokens(name, 1)
        lengths.observe_step(tokens)
        return lengths.stats.prefill_s > before[0], lengths.stats.decode_s > before[1]

    assert step(200) == (True, False), "a part of a prompt"
    assert step(200, "0", "1") == (True, False), "the rest of two prompts"
    assert step(300, "0", "1", "2") == (False, True), "two rows that decode, beside a long prompt"
    assert step(1, "0") == (False, True)
    assert step(5) == (True, False), "nothing is left of the step before"
    assert (lengths.stats.passes, lengths.stats.forward_tokens) == (5, 706)
