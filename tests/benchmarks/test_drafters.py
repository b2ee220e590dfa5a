"""What benchmarks/drafters.py counts: the noise of a list of ids, masks behind prefixes, and passes of a rollout."""

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.drafter_costs import Pass
from benchmarks.drafter_walks import Grid, Way, chain_grid, masked_grid, seconds, walk
from benchmarks.int8_copy import Int8Linear
from benchmarks.mask_drafter import MaskDrafter, ends_of
from benchmarks.responses import response_logits
from specrl.drafter import DrafterOptions, agreement, sample, shortened
from specrl.tiny import load_tiny
from specrl.trainers.cotraining.texts import Text

NOTHING = Pass(0.0, 0.0, 0.0)


@pytest.fixture(scope="module")
def policy():
    return load_tiny()[0]


@pytest.fixture(scope="module")
def drawn(policy):
    """Texts of the policy and the keys that drew them."""
    prompts = [(20, 31, 42), (21, 33, 11, 12), (24, 35)]
    return sample(policy, frozenset([policy.config.eos_token_id]), prompts, DrafterOptions(max_new_tokens=24))


def grid_of(stands: list[list[int]], chance: float = 1.0) -> Grid:
    """Of rows whose token t is drafted rightly where stands[row][t], whatever the depth; depths 1 to 3."""
    length = len(stands[0])
    flat = np.pad(np.array(stands, bool), ((0, 0), (0, 6)))
    windows = np.lib.stride_tricks.sliding_window_view(flat, 3, axis=1)
    chances = np.broadcast_to(chance ** np.arange(1, 4, dtype=np.float32), windows.shape)
    return Grid(windows, chances, np.full(len(stands), length))


def test_a_mask_answers_as_behind_its_own_prefix_alone(policy):
    text, drafter = Text((3, 4, 5), (9, 10, 11, 12, 13), 0), MaskDrafter(shortened(policy, 2), 3)
    other = Text((7, 8), (9,) * 12, 0)
    with torch.inference_mode():
        drafter.mask += torch.randn(128, generator=torch.Generator().manual_seed(0))
        ends = ends_of(text, 3)
        logits = drafter([ends, ends_of(other, 3)])[: len(ends.answers)]
        chain = response_logits(drafter.student, [text])
        torch.testing.assert_close(logits[ends.depths[ends.answering] == 0], chain, atol=1e-3, rtol=0)
        for n in range(3):
            prefix = drafter.student.get_input_embeddings()(torch.tensor([*text.prompt, *text.response[:n]]))
            alone = torch.cat([prefix, drafter.mask.expand(2, -1)])[None]
            hidden = drafter.student.base_model(inputs_embeds=alone, use_cache=False).last_hidden_state[0, -3:]
            mine = ends.ends[ends.answering] == 2 + n
            assert ends.answers[mine].tolist() == [n, n + 1, n + 2]
            want = drafter.student.get_output_embeddings()(hidden)
            torch.testing.assert_close(logits[mine], want, atol=1e-3, rtol=0)
            assert not torch.allclose(want[1], chain[n + 1], atol=1e-2), "control: it has not seen the token before"


def test_grids_say_where_drafts_stand(policy, drawn):
    grid = chain_grid(shortened(policy, 1), *drawn)
    shares = grid.by_depth()
    assert shares["alone"][0] == pytest.approx(agreement(policy, shortened(policy, 1), *drawn).keyed, abs=1e-3)
    assert chain_grid(policy, *drawn).by_depth()["given"] == [1.0] * 8, "the policy agrees with itself"
    assert grid.blinded(1.0).by_depth()["alone"] == [0.0] * 8
    first = masked_grid(MaskDrafter(shortened(policy, 1), 2), *drawn)
    assert np.array_equal(first.stands[..., 0], grid.stands[:, : first.stands.shape[1], 0]), "the first is the chain's"


def test_rows_go_on_behind_the_first_draft_that_differs():
    grid = grid_of([[1, 1, 0, 1, 1, 1, 1]])
    passes = walk(grid, 2, 0.0)
    assert passes["at"].ravel().tolist() == [0, 3, 6]  # two stand and a token is drawn, twice; then the last one
    assert passes["carried"].ravel().tolist() == [2, 2, 1]
    assert passes["fed"].ravel().tolist() == [1, 3, 3]
    assert walk(grid, 3, 0.0)["at"].ravel().tolist() == [0, 3]
    assert len(walk(grid, 0, 0.0)["at"]) == 7
    doubting = walk(grid_of([[1] * 7], chance=0.8), 3, 0.7)  # the second draft stands in 0.64
    assert doubting["carried"].ravel().tolist() == [1, 1, 1, 1]
    assert doubting["tried"].ravel().tolist() == [2, 2, 2, 1]


def test_passes_are_charged_to_policy_and_drafter():
    grid = grid_of([[1, 1, 0, 1, 1, 1, 1], [1] * 7])
    passes, prompts = walk(grid, 2, 0.0), np.array([10, 20])
    assert passes["alive"].sum(0).tolist() == [3, 3]
    fixed, tokens, scored = Pass(1000, 0, 0), Pass(0, 0, 1000), Pass(0, 0, 0, score=1000)

    def charged(policy, drafter, at_once, rows=2):
        return seconds(passes, prompts, rows, policy, Way("", grid, drafter, at_once), 2)

    assert charged(fixed, NOTHING, False) == 3
    assert charged(fixed, NOTHING, False, rows=1) == 6
    assert charged(tokens, NOTHING, False) == 6 + 2 * (2 + 2 + 1)
    assert charged(Pass(0, 0, 0, 1000), NOTHING, False) == 6 * 20 + 6 * 23 + 4 * 26  # tokens x the longest row
    assert charged(NOTHING, fixed, False) == 2 + 2 + 1
    assert charged(NOTHING, fixed, True) == 3
    assert charged(NOTHING, tokens, False) == 2 * (1 + 3 + 3) + 2 * (1 + 1)
    assert charged(NOTHING, tokens, True) == 2 * (1 + 3 + 3) + 6 * 1
    assert charged(NOTHING, scored, True) == 6 * 2


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_in_int8_is_near_the_linear_one_and_a_token_needs_no_other(bias):
    torch.manual_seed(0)
    linear, x = nn.Linear(96, 40, bias=bias), torch.randn(2, 33, 96)
    x[0, 0] = 0.0
    small = Int8Linear(linear)
    want, found = linear(x), small(x)
    assert 0 < (found - want).norm() < 0.02 * want.norm()
    assert torch.equal(found[0, 0], torch.zeros(40) if linear.bias is None else linear.bias)
    x[1] *= 50
    assert torch.equal(small(x)[0], found[0]), "its result depends on no other token"
    assert torch.equal(small(x[0, 7:8])[0], found[0, 7]), "nor on their number"
