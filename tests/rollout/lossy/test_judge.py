"""Judges: the acceptance rule, exactness when no mismatch is accepted, faulty judges, and mining."""

import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from specrl.rollout.drafting.suffix import PromptTexts, SuffixDrafter
from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.engines.local.engine import TransformersEngine
from specrl.rollout.keys import derive_key
from specrl.rollout.lossy.judge import WEIGHTS, JudgeHead
from specrl.rollout.lossy.pair import write_card
from specrl.rollout.types import Request, RolloutError
from tests.engines import judged as judged_engine

EOS = 1
SAMPLING = SamplingParams(frozenset({EOS}), 0.7)


class Verdicts:
    """A judge that applies a function to all mismatches."""

    usual_share = None

    def __init__(self, rule):
        self.unimportant = rule


ALL = Verdicts(lambda hidden: [True] * len(hidden))
NONE = Verdicts(lambda hidden: [False] * len(hidden))


def requests(count=4, cap=24, stored=None):
    made = [Request([5 + i % 3] * (2 + i), derive_key(0, "judged", i, 0), cap) for i in range(count)]
    for request, text in zip(made, stored or [], strict=False):
        request.drafter = SuffixDrafter(PromptTexts(), [token for token, _ in text])
        request.draft_logprobs = [logprob for _, logprob in text]
    return made


@pytest.fixture(scope="module")
def models(build_model):
    return build_model("qwen3", 0), build_model("qwen3", 1)


@pytest.fixture(scope="module")
def plain(models):
    return [
        [c.tokens for c in TransformersEngine(model, SAMPLING).generate(requests())[0]] for model in models
    ]  # of the policy and of the draft


def old(plain):
    """Stored texts with distinguishable stored log-probs."""
    return [[(token, -0.5 - i / 1024) for i, token in enumerate(text)] for text in plain[1]]


def engine(models, judge, **options):
    return judged_engine(models[0], SAMPLING, **{"judge": judge, "draft": models[1], "window": 5, **options})


# --- the rule


# --- the engine


@pytest.mark.parametrize(
    ("window", "stored", "drafting"), [(1, True, True), (5, False, True), (64, True, False), (64, True, True)]
)
def test_a_judge_that_accepts_nothing_is_exact(models, plain, window, stored, drafting):
    asked = requests(stored=old(plain) if stored else None)
    draft = models[1] if drafting else None
    done, stats = engine(models, NONE, window=window, draft=draft).generate(asked)
    assert [c.tokens for c in done] == plain[0]
    assert all(b == p for c in done for b, p in zip(c.behaviour_logprobs, c.logprobs, strict=True))
    assert (stats.drafted > 0) == (stored or drafting)


def test_the_threshold_of_a_head(models, plain):
    head = JudgeHead(torch.randn(32, generator=torch.Generator().manual_seed(0)), 0.0, 0.0)
    assert [c.tokens for c in engine(models, head).generate(requests())[0]] == plain[0]
    head.threshold = 1.1
    everything = engine(models, head).generate(requests())[0]
    assert [c.tokens for c in everything] == [c.tokens for c in engine(models, ALL).generate(requests())[0]]
    assert [c.tokens for c in everything] != plain[0]
    head.threshold, head.bias = 0.9, math.nan
    assert [c.tokens for c in engine(models, head).generate(requests())[0]] == plain[0], "NaN is not unimportant"


def test_the_judge_sees_the_states_that_have_read_the_draft_tokens(models, plain):
    seen = []

    def look(hidden):
        seen.append(hidden.clone())
        return [False] * len(hidden)

    (request,) = requests(1, stored=old(plain))
    engine(models, Verdicts(look), window=8, draft=None).generate([request])
    text = torch.tensor([[*request.prompt, *plain[1][0][:8]]])
    with torch.no_grad():
        states = models[0].model(text).last_hidden_state[0, len(request.prompt) :]
    torch.testing.assert_close(seen[0], states, rtol=0, atol=1e-4)


def test_waiting_rows_are_judged_alike(models):
    asked, some = requests(count=7), Verdicts(lambda hidden: (hidden[:, 0] > 0).tolist())
    want, _ = engine(models, some).generate(asked)
    done, _ = engine(models, some, rows_per_batch=2).generate(asked)
    assert [c.tokens for c in done] == [c.tokens for c in want]
    assert [c.tokens for c in want] != [c.tokens for c in engine(models, NONE).generate(asked)[0]], "some were accepted"


def test_judged_tokens_carry_the_drafts_log_prob(models):
    asked = requests()
    done, _ = engine(models, ALL).generate(asked)
    off = 0
    for request, c in zip(asked, done, strict=True):
        logprobs = []
        for model in models:
            with torch.no_grad():
                text = torch.tensor([[*request.prompt, *c.tokens]])
                logits = model.eval()(text).logits[0, len(request.prompt) - 1 : -1] / 0.7
            logprobs.append(logits.log_softmax(-1).gather(-1, torch.tensor(c.tokens)[:, None])[:, 0].tolist())
        assert c.logprobs == pytest.approx(logprobs[0], abs=1e-4)
        for b, p, q, reused in zip(c.behaviour_logprobs, *logprobs, c.reused, strict=True):
            assert b == pytest.approx(p, abs=1e-4) or (reused and b == pytest.approx(q, abs=1e-4))
            off += abs(b - p) > 1e-3
            if reused:
                assert b == pytest.approx(q, abs=1e-4), "it is accepted whatever is sampled"
    assert off > 0


@pytest.mark.parametrize(("kept", "drafts"), [(24, False), (5, True)])
def test_judged_stored_text_carries_its_stored_log_prob(models, plain, kept, drafts):
    """Also if the stored text is shorter than the window: a draft model continues it and does not replace it."""
    texts, draft = [text[:kept] for text in old(plain)], models[1] if drafts else None
    done, _ = engine(models, ALL, window=64, draft=draft).generate(requests(stored=texts))
    for c, text in zip(done, texts, strict=True):
        for (token, logprob), b, emitted, reused in zip(text, c.behaviour_logprobs, c.tokens, c.reused, strict=False):
            assert not reused or (emitted, b) == (token, logprob)
        assert [b for b, reused in zip(c.behaviour_logprobs, c.reused, strict=True) if not reused] == [
            p for p, reused in zip(c.logprobs, c.reused, strict=True) if not reused
        ]


@pytest.mark.parametrize("known", [0, 3])
def test_stored_text_without_log_probs_is_verified_exactly(models, plain, known):
    asked = requests(stored=old(plain))
    for request in asked:
        request.draft_logprobs = request.draft_logprobs[:known] or None
    done, _ = engine(models, ALL, window=64, draft=None).generate(asked)
    assert not any(math.isnan(b) for c in done for b in c.behaviour_logprobs)
    for c, text in zip(done, plain[1], strict=True):
        assert c.tokens[:known] == text[:known]
        assert c.behaviour_logprobs[known:] == c.logprobs[known:]
    if not known:
        assert [c.tokens for c in done] == plain[0]


def test_after_a_changed_token_stored_text_is_verified_exactly(models, plain):
    """The rest of the text was written for the token that was changed."""
    seen = []

    def first_two(hidden):
        seen.append(len(hidden))
        return [i < 2 for i in range(len(hidden))] if len(seen) == 1 else [True] * len(hidden)

    stored = old(plain)
    done, stats = engine(models, Verdicts(first_two), window=8, draft=None).generate(requests(1, stored=stored))
    assert done[0].tokens[:2] == plain[1][0][:2]
    assert done[0].tokens[2] != plain[1][0][2], "the policy draws another token there"
    assert seen == [8], "nobody is asked about the rest"
    assert stats.drafted > 8, "which is drafted all the same"
    assert done[0].behaviour_logprobs[2:] == done[0].logprobs[2:]


def test_tokens_of_another_text_are_verified_exactly(models, plain):
    """Only the sample's old text has stored log-probs. Tokens copied from other texts are verified exactly."""
    asked = requests()
    for request, text in zip(asked, old(plain), strict=True):
        request.drafter = SuffixDrafter(PromptTexts([[token for token, _ in text]]))
        request.draft_logprobs = [logprob for _, logprob in text]
    done, stats = engine(models, ALL, window=64, draft=None).generate(asked)
    assert stats.drafted > 0
    assert [c.tokens for c in done] == plain[0]


def by_window(models, plain, head, waits=True):
    """(tokens, behaviour log-probs) of judged stored text under three windows."""
    found = []
    for window in (1, 5, 64):
        judging = engine(models, head, window=window, draft=None)
        rule = judging.rule
        if not waits:
            judging.rule = lambda key, draft, drawn, rule=rule: rule(key, replace(draft, next_token=None), drawn)
        done, _ = judging.generate(requests(stored=old(plain)))
        found.append([(c.tokens, [round(b, 4) for b in c.behaviour_logprobs]) for c in done])
    return found


@pytest.mark.long
def test_the_window_changes_no_accepted_text(models, plain):
    """Every token that can be judged is judged, in whichever pass."""
    head = JudgeHead(torch.randn(32, generator=torch.Generator().manual_seed(0)), 0.0, 0.9)
    found = by_window(models, plain, head)
    assert found[0] == found[1] == found[2]
    assert [tokens for tokens, _ in found[0]] not in plain, "neither text as it is"

    hasty = by_window(models, plain, head, waits=False)
    assert hasty[2] == found[2]
    assert hasty[0] != found[0], "control: draws that do not wait leave the text"


def raises(hidden):
    raise KeyError("judge broke")


@pytest.mark.parametrize(
    "rule",
    [raises, lambda hidden: [], lambda hidden: [math.nan] * len(hidden), lambda hidden: ["yes"] * len(hidden)],
    ids=["raises", "too few", "nan", "text"],
)
def test_a_broken_judge_means_exact_verification(models, plain, rule):
    done, stats = engine(models, Verdicts(rule)).generate(requests())
    assert [c.tokens for c in done] == plain[0]
    assert stats.route_faults > 0


def test_models_of_other_vocabularies_are_refused(models, build_model):
    with pytest.raises(RolloutError, match="40 tokens and the policy 61"):
        engine((models[0], build_model("qwen3", 1, vocab=40)), NONE)


# --- judges


@pytest.mark.parametrize(("usual", "warned"), [(0.25, 1), (1.0, 0)])
def test_the_drift_of_a_learned_judge_is_measured_and_said_once(models, usual, warned, caplog):
    everything = Verdicts(lambda hidden: [True] * len(hidden))
    everything.usual_share = usual
    judging = engine(models, everything)
    for _ in range(2):
        done, stats = judging.generate(requests(count=12))
    written = sum(len(c.tokens) for c in done)
    assert written / 2 < stats.mismatches <= written, "two models of random weights rarely sample the same token"
    assert stats.judge_drift == pytest.approx((1 - usual) * stats.mismatches)
    assert len([record for record in caplog.records if "judge" in record.message]) == warned


def test_a_saved_head_judges_as_before_and_for_its_policy_only(tmp_path):
    head = JudgeHead(torch.randn(8, generator=torch.Generator().manual_seed(1)), 0.25, 0.4, 0.75)
    head.save(tmp_path, {"policy": "p"})
    loaded = JudgeHead.load(tmp_path, policy="p")
    hidden = torch.randn(16, 8, generator=torch.Generator().manual_seed(2))
    assert torch.equal(loaded.importance(hidden), head.importance(hidden))
    assert (loaded.threshold, loaded.usual_share) == (0.4, 0.75)
    with pytest.raises(RolloutError, match="trained for another policy"):
        JudgeHead.load(tmp_path, policy="q")
    file = tmp_path / WEIGHTS
    whole = file.read_bytes()
    for damage in (whole[:40], b"", b"x" * 60):
        file.write_bytes(damage)
        with pytest.raises(RolloutError, match=f"the judge in {tmp_path} cannot be loaded"):
            JudgeHead.load(tmp_path, policy="p")
    save_file({"weight": torch.zeros(8)}, file)
    with pytest.raises(RolloutError, match="cannot be loaded: 'bias'"):
        JudgeHead.load(tmp_path, policy="p")
    file.write_bytes(whole)
    write_card(tmp_path, {"kind": "judge", "policy": "p", "threshold": 0.4})
    with pytest.raises(RolloutError, match="no usual_share; train it again"):
        JudgeHead.load(tmp_path, policy="p")


def test_a_mismatch_that_the_judge_refuses_counts_in_its_drift(models):
    nothing = Verdicts(lambda hidden: [False] * len(hidden))
    nothing.usual_share = 0.25
    _, stats = engine(models, nothing).generate(requests())
    assert stats.mismatches > 0
    assert stats.judge_drift == pytest.approx(-0.25 * stats.mismatches)
