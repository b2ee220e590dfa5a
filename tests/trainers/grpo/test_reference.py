"""Reference log-probs cached by text: equal to recomputed ones, bit for bit if rows run alone."""

from hashlib import blake2b

import pytest
import torch

import specrl.trainers.grpo.reference as reference_module
from specrl.trainers.grpo.reference import ReferenceLogProbs

KEEP = 6


class Policy:
    """Log-probs that depend on all text before a token. Counts passes and tokens."""

    def __init__(self, model):
        self.model, self.passes, self.rows = model, 0, 0

    @torch.no_grad()
    def __call__(self, ids, mask, keep):
        self.passes, self.rows = self.passes + 1, self.rows + len(ids)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logp = self.model(input_ids=ids, attention_mask=mask, position_ids=positions).logits.log_softmax(-1)
        return logp[:, -keep - 1 : -1].gather(-1, ids[:, -keep:, None])[..., 0]


@pytest.fixture
def policy(build_model):
    return Policy(build_model("llama").eval())


def padded(*texts):
    """ids and mask of (prompt, response) pairs, with prompts padded left and responses padded right to KEEP."""
    width = max(len(prompt) for prompt, _ in texts)
    rows = [([0] * (width - len(p)) + p, r + [0] * (KEEP - len(r))) for p, r in texts]
    mask = [[0] * (width - len(p)) + [1] * (len(p) + len(r)) + [0] * (KEEP - len(r)) for p, r in texts]
    return torch.tensor([p + r for p, r in rows]), torch.tensor(mask)


A, B, C = ([5, 6, 7, 8], [9, 10, 11]), ([6, 7], [9, 10, 11]), ([5, 6, 7, 8], [9, 12, 13, 14, 15])


@pytest.mark.parametrize("alone", [True, False])
def test_new_rows_are_computed_and_known_rows_kept(policy, alone):
    reference = ReferenceLogProbs(alone=alone)
    ids, mask = padded(A, B, C)
    expected_rows = policy(ids, mask, KEEP) * mask[:, -KEEP:]
    policy.passes = policy.rows = 0
    first, reused = reference(ids, mask, KEEP, policy)
    torch.testing.assert_close(first, expected_rows, rtol=0, atol=1e-5)
    assert (reused, policy.passes, policy.rows) == (0, 3 if alone else 1, 3)
    again, reused = reference(*padded(C, A), KEEP, policy)
    assert torch.equal(again, first[[2, 0]])
    assert (reused, policy.rows) == (2, 3)


def test_a_row_alone_has_the_same_bits_in_any_batch(policy):
    batches = [(A, B, C), (C, B), (B,), (B, ([1] * 9, [2] * 6), A)]
    rows_of = {}
    for texts in batches:
        out, _ = ReferenceLogProbs(alone=True)(*padded(*texts), KEEP, policy)
        for (prompt, response), row in zip(texts, out, strict=True):
            rows_of.setdefault((*prompt, -1, *response), []).append(row[: len(response)])
    assert len(rows_of) == 4
    assert all(torch.equal(rows[0], row) for rows in rows_of.values() for row in rows)


def test_control_a_key_without_the_prompt_or_the_border_is_seen(policy, monkeypatch):
    """A key is a hash of the text, 8 bytes a token, and of the response's length, 8 more bytes."""

    def wrong(part):
        monkeypatch.setattr(reference_module, "blake2b", lambda data, **size: blake2b(part(data), **size))
        reference = ReferenceLogProbs(alone=True)
        moved = ([5, 6, 7], [8, 9, 10, 11])  # the same tokens as A, but one more of them belongs to the response
        pairs = [(reference(*padded(text), KEEP, policy)[0], text) for text in (A, B, moved)]
        expected = [policy(*padded(text), KEEP) * padded(text)[1][:, -KEEP:] for _, text in pairs]
        return [not torch.allclose(got, want, atol=1e-4) for (got, _), want in zip(pairs, expected, strict=True)]

    assert wrong(lambda data: data) == [False, False, False]
    assert wrong(lambda data: data[-8 * (1 + int.from_bytes(data[-8:], "little")) :]) == [False, True, False]
    assert wrong(lambda data: data[:-8]) == [False, False, True]


def test_a_response_that_is_fully_masked(policy):
    ids, mask = padded(A, B)
    mask[0, -KEEP:] = 0
    out, _ = ReferenceLogProbs(alone=True)(ids, mask, KEEP, policy)
    assert out[0].tolist() == [0] * KEEP
    assert policy.rows == 1
    assert out[1, :3].lt(0).all()


def test_memory_is_bounded_and_the_latest_stay(policy):
    reference = ReferenceLogProbs(alone=True, max_mb=7 * 4 / 2**20)  # seven tokens
    for texts, rows in (((A, B), 2), ((A,), 2), ((C,), 3), ((A, B), 4 + 1)):
        reference(*padded(*texts), KEEP, policy)
        assert policy.rows == rows
    for _ in range(5):  # the counted size is the real one, so the capacity neither shrinks nor grows
        before = policy.rows
        for texts, rows in (((A, B), 0), ((C,), 1), ((A, B), 3)):
            reference(*padded(*texts), KEEP, policy)
            assert policy.rows == before + rows
