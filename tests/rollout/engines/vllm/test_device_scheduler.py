"""The asynchronous scheduler of drafts on the device: which requests have some, and which steps decode."""

from types import SimpleNamespace

import pytest

from tests.rollout.engines.vllm.engines import needs_vllm

pytestmark = needs_vllm


@pytest.mark.parametrize(("plain", "drafts"), [(0, True), (1, False)])
def test_a_plain_request_to_a_server_on_runner_v2_has_no_drafts(monkeypatch, plain, drafts):
    """It is the baseline that speed is compared with."""
    from specrl.rollout.engines.vllm import device_served
    from specrl.rollout.engines.vllm.wire import KeyedRequest

    monkeypatch.setattr(device_served.DraftScheduler, "add_request", lambda self, request: None)
    scheduler = object.__new__(device_served.KeyedScheduler)
    scheduler.drafts = SimpleNamespace(requests={"other": None}, admit=lambda *admitted: seen.append(admitted))
    seen = []
    extra = KeyedRequest(3, 4, "g", ((5, 6),), plain=bool(plain)).extra_args()
    params = SimpleNamespace(extra_args=extra)
    scheduler.add_request(SimpleNamespace(request_id="r", sampling_params=params, use_structured_output=False))
    assert seen == [("r", drafts)]


def test_a_step_that_only_reads_prompts_is_no_decoding():
    """However many requests wait: 200 prompt tokens of two of 256 requests are no decoding, one row that goes on is."""
    from specrl.rollout.drafting.drafting import Drafting
    from specrl.rollout.engines.vllm.device_scheduler import DraftLengths
    from specrl.rollout.engines.vllm.logits import LogitsBudget

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
