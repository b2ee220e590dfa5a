"""Routed decoding by steps: which model writes a response's tokens, rollback, and failures of the router."""

import math
from contextlib import nullcontext
from dataclasses import dataclass, field

import pytest
import torch

from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.engines.local.engine import TransformersEngine
from specrl.rollout.engines.local.reader import Session
from specrl.rollout.keys import derive_key
from specrl.rollout.lossy import text
from specrl.rollout.lossy.routed import RoutedRollout
from specrl.rollout.lossy.router import (
    Candidate,
    Step,
    StepEnd,
    by_likelihood,
    decide,
)
from specrl.rollout.lossy.row import RoutedRow
from specrl.rollout.types import Request, RolloutError
from specrl.rollout.verify import accept_exact
from tests import engines

EOS = 1
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ012345"
NAMES = ["!", "", "~", *LETTERS]
EVERY = ["!", "~", *LETTERS]  # each token ends a step


def decode(tokens):
    return "".join(NAMES[t] for t in tokens)


@dataclass
class AcceptanceRule:
    """A router that applies a function to the candidate."""

    rule: object
    threshold: float = 0.5
    low: float = 0.0
    high: float = 1.0
    needs: frozenset = frozenset()
    usual_gap: float | None = None
    seen: list = field(default_factory=list)

    def score(self, candidates):
        self.seen += candidates
        return [self.rule(candidate) for candidate in candidates]


ALWAYS, NEVER = AcceptanceRule(lambda c: 1.0), AcceptanceRule(lambda c: 0.0)


def odd(candidate):
    return float(len(candidate.history) % 2)


def requests(count=4, cap=16):
    return [Request([5 + i % 3] * (2 + i % 4), derive_key(0, "routed", i, 0), cap) for i in range(count)]


@pytest.fixture(scope="module")
def models(build_model):
    return build_model("qwen3", 0), build_model("qwen3", 1)


def step_end(separators=("~", "a", "b", "c", "d"), cap=30):
    return StepEnd(separators, decode, {EOS}, cap, len(NAMES))


def engine(models, router, end=None, **limits):
    policy, draft = models
    return engines.routed(policy, SamplingParams(frozenset({EOS}), 0.7), draft, router, end or step_end(), **limits)


def plain(model, asked):
    done, _ = TransformersEngine(model, SamplingParams(frozenset({EOS}), 0.7)).generate(asked)
    return done


def naive(models, asked, rule, end):
    """Reference for routed decoding: one row at a time, by full plain generations without KV cache or batching."""
    policy, draft = models
    texts = []
    for request in asked:
        text, steps, finished = [], 0, False
        while not finished:
            steps_of = {}
            for name, model in (("draft", draft), ("policy", policy)):
                rest = continued(model, request, text)
                length = next(n for n in range(1, len(rest) + 1) if end(rest[:n]) or n == len(rest))
                steps_of[name] = rest[:length]
            drafted = steps_of["draft"]
            sound = end(drafted) in ("separator", "eos")
            use = "policy" if not sound or rule(steps) > 0.5 else "draft"
            text += steps_of[use]
            steps += 1
            finished = text[-1] == EOS or len(text) >= request.max_new_tokens
        texts.append(text)
    return texts


def continued(model, request, text):
    """The continuation of `text` by `model`, with the request's noise at the same response positions."""
    from specrl.rollout.noise import keyed_sample

    out = []
    with torch.no_grad():
        model.eval()
        while True:
            ids = torch.tensor([[*request.prompt, *text, *out]])
            at = len(text) + len(out)
            sample = keyed_sample(
                model(ids).logits[:, -1], torch.tensor([request.key]), torch.tensor([at]), temperature=0.7
            )[0].item()
            out.append(sample)
            if sample == EOS or at + 1 >= request.max_new_tokens:
                return out


# --- exactness


def test_every_step_escalated_is_plain_decoding_of_the_policy(models):
    asked = requests()
    done, stats = engine(models, ALWAYS).generate(asked)
    assert [c.tokens for c in done] == [c.tokens for c in plain(models[0], asked)]
    assert [c.finish for c in done] == [c.finish for c in plain(models[0], asked)]
    assert not any(any(c.reused) for c in done)
    assert stats.steps == stats.escalated > len(asked)


@pytest.mark.parametrize("needs", [set(), {"rival"}, {"likelihood"}, {"likelihood", "rival"}])
def test_mixed_steps_follow_the_definition(models, needs):
    asked = requests()
    router = AcceptanceRule(odd, needs=frozenset(needs))
    done, stats = engine(models, router, rows_per_batch=2 if needs else 256).generate(asked)
    assert [c.tokens for c in done] == naive(models, asked, lambda n: n % 2, step_end())
    assert 0 < stats.escalated < stats.steps


@pytest.mark.parametrize("needs", [set(), {"likelihood", "rival"}])
def test_every_pass_of_the_policy_is_counted_for_its_row(models, monkeypatch, needs):
    """Those in which it only reads too."""
    routed = engine(models, AcceptanceRule(odd, needs=frozenset(needs)))
    spent, generate = [], routed.policy.generate

    def counted(asked):
        done, stats = generate(asked)
        spent.extend(c.passes for c in done)
        return done, stats

    monkeypatch.setattr(routed.policy, "generate", counted)
    done, _ = routed.generate(requests())
    assert sum(c.passes for c in done) == sum(spent) > 0


def test_a_wrong_noise_position_after_a_step_is_caught(models, monkeypatch):
    """Planted fault: after the first step an engine samples with the noise of the response's beginning again."""
    follow = RoutedRow.request_after

    def wrong(row, *args):
        request = follow(row, *args)
        request.position = 0
        return request

    monkeypatch.setattr(RoutedRow, "request_after", wrong)
    done, _ = engine(models, ALWAYS).generate(asked := requests())
    assert [c.tokens for c in done] != [c.tokens for c in plain(models[0], asked)]


@pytest.mark.long
def test_kv_is_kept_between_steps_and_that_of_another_row_is_caught(models, monkeypatch):
    asked, routing = requests(), engine(models, ALWAYS, step_end(EVERY, 99))
    done, stats = routing.generate(asked)
    with monkeypatch.context() as without:
        without.setattr(TransformersEngine, "session", lambda engine, requests, beside: nullcontext())
        again, more = routing.generate(asked)
    assert [c.tokens for c in again] == [c.tokens for c in done]
    assert stats.forward_tokens < more.forward_tokens
    claim = Session.claim

    def shuffled(session, keys, taken):
        """Planted fault: slabs of other rows, with the texts that the rows' own would hold."""
        slabs, texts = zip(*claim(session, keys, taken), strict=True)
        return [*zip([*slabs[1:], *slabs[:1]], texts, strict=True)]

    monkeypatch.setattr(Session, "claim", shuffled)
    done, _ = routing.generate(asked)
    assert [c.tokens for c in done] != [c.tokens for c in plain(models[0], asked)]


TWO = [a + b for a in LETTERS[:6] for b in LETTERS[:30]]  # half of the tokens may end a step, one in twenty does


@pytest.mark.long
def test_a_step_that_ends_at_the_first_token_that_may_end_it_is_caught(models, monkeypatch):
    asked, end = requests(cap=40), StepEnd(TWO, decode, {EOS}, 40, len(NAMES))
    router, want = AcceptanceRule(odd), naive(models, asked, lambda n: n % 2, end)
    done, _ = engine(models, router, end).generate(asked)
    assert [c.tokens for c in done] == want
    steps = [c.step for c in router.seen] + [step for c in router.seen for step in c.history]
    assert any(token in end.stop_ids for step in steps for token in step.tokens[:-1]), "the test has no power"
    early = lambda self, tokens: "eos" if tokens[-1] == EOS else "separator"  # noqa: E731
    monkeypatch.setattr(StepEnd, "__call__", early)  # planted: every stop id counts as the end of a step
    done, _ = engine(models, AcceptanceRule(odd), end).generate(asked)
    assert [c.tokens for c in done] != want


def test_a_step_that_has_begun_asks_for_no_more_than_the_rest_of_the_response(models):
    routing = engine(models, AcceptanceRule(lambda c: 1.0, needs=frozenset({"likelihood"})))
    generate, asked = routing.policy.generate, []
    routing.policy.generate = lambda requests: asked.extend(requests) or generate(requests)
    routing.generate(requests(cap=16))
    assert any(request.position for request in asked)
    assert max(request.position + request.max_new_tokens for request in asked) == 16


def test_an_engine_that_cannot_read_is_refused(models):
    sampling = SamplingParams(frozenset({EOS}), 0.7)
    both = [TransformersEngine(model, sampling) for model in models]
    with pytest.raises(RolloutError, match="was to read"):
        RoutedRollout(*both, NEVER, step_end(EVERY, 99)).generate(requests())


# --- the policy reads draft steps


READ = frozenset({"likelihood"})


def test_keeping_a_token_that_the_policy_does_not_draw_is_caught(models, monkeypatch):
    """Planted fault: of an escalated step the policy keeps one token that it does not sample itself."""
    monkeypatch.setattr(text, "accept_exact", lambda draws, draft: min(accept_exact(draws, draft) + 1, len(draft)))
    done, _ = engine(models, AcceptanceRule(ALWAYS.rule, needs=READ)).generate(asked := requests())
    assert [c.tokens for c in done] != [c.tokens for c in plain(models[0], asked)]


def test_a_router_is_given_the_policys_own_log_probs(models):
    seen = []

    def note(c):  # the history is the engine's list, which grows
        seen.append(([*c.prompt, *c.response], c.step, list(c.history)))
        return odd(c)

    engine(models, AcceptanceRule(note, needs=READ)).generate(requests())
    kept = 0
    for before, step, history in seen:
        tokens = step.tokens
        with torch.no_grad():
            logits = models[0].eval()(torch.tensor([[*before, *tokens]])).logits[0, len(before) - 1 : -1] / 0.7
        forced = logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0].tolist()
        assert step.policy_logprobs == pytest.approx(forced, abs=1e-4)
        assert step.policy_logprobs != pytest.approx(step.logprobs, abs=1e-2), "not the draft's"
        assert all(len(earlier.policy_logprobs) == len(earlier.tokens) for earlier in history)
        kept += sum(earlier.source == "draft" for earlier in history)
    assert kept


def test_likelihood_escalates_what_the_policy_doubts():
    steps = [Step("draft", [9, 9], policy_logprobs=[-0.1, x]) for x in (-0.5, -1.0, -1.1, -math.inf)]
    decision = decide(by_likelihood(1.0), [Candidate(0, [5], [], step) for step in steps])
    assert (decision.escalate, decision.faults) == ([False, False, True, True], 0)


def test_every_token_has_its_source_and_both_log_probs(models):
    asked = requests()
    done, _ = engine(models, AcceptanceRule(odd)).generate(asked)
    for request, c in zip(asked, done, strict=True):
        text = torch.tensor([[*request.prompt, *c.tokens]])
        logprobs = []
        for model in models:
            with torch.no_grad():
                logits = model.eval()(text).logits[0, len(request.prompt) - 1 : -1] / 0.7
            logprobs.append(logits.log_softmax(-1).gather(-1, torch.tensor(c.tokens)[:, None])[:, 0])
        policy, draft = logprobs
        assert torch.allclose(torch.tensor(c.logprobs), policy, atol=1e-4)
        behaviour = torch.where(torch.tensor(c.reused), draft, policy)
        assert torch.allclose(torch.tensor(c.behaviour_logprobs), behaviour, atol=1e-4)
    assert any(any(c.reused) and not all(c.reused) for c in done)


# --- step ends


@pytest.mark.parametrize(
    ("separators", "pieces", "ends"),
    [
        (["\n\n"], ["a", "\n", "\n", "b"], 3),  # across tokens
        (["\n\n"], ["a", ".\n\nb", "c"], 2),  # inside a token
        (["\n\n"], ["a.\n", "\nb", "c"], 2),  # across tokens, with further text in the last one
        (["\n\n"], ["a", "\n", "b", "\n"], None),
        (["</step>", "\n\n"], ["a", "</", "step", ">", "b"], 4),
        (["\n"], ["\n", "a"], 1),  # an empty step still ends
    ],
)
def test_separators_at_token_boundaries(separators, pieces, ends):
    end = StepEnd(separators, lambda tokens: "".join(pieces[t] for t in tokens), set(), 50, len(pieces))
    reasons = [end(range(n)) for n in range(1, len(pieces) + 1)]
    assert reasons[: ends or None] == ([None] * (ends - 1) + ["separator"] if ends else [None] * len(pieces))


def test_eos_and_cap_end_a_step():
    end = step_end(cap=3)
    assert end([10, EOS]) == "eos"
    assert (end([10, 11]), end([10, 11, 12])) == (None, "cap")
    assert (end.blank([2]), end.blank([2, 9]), end.blank([EOS])) == (False, False, True)


@pytest.mark.parametrize(("separators", "cap"), [([], 5), ([""], 5), (["\n"], 0)])
def test_senseless_step_rules_are_refused(separators, cap):
    with pytest.raises(RolloutError):
        StepEnd(separators, decode, {EOS}, cap, len(NAMES))


# --- bad behaviour falls back to the policy


def raises(candidate):
    raise KeyError("router broke")


@pytest.mark.parametrize(
    "rule",
    [raises, lambda c: math.nan, lambda c: -0.5, lambda c: 1.5, lambda c: "x", lambda c: None],
    ids=["raises", "nan", "low", "high", "text", "nothing"],
)
def test_a_broken_router_means_the_policys_path(models, rule, caplog):
    asked = requests()
    done, stats = engine(models, AcceptanceRule(rule, needs=READ)).generate(asked)
    assert [c.tokens for c in done] == [c.tokens for c in plain(models[0], asked)]
    assert stats.route_faults == stats.escalated == stats.steps
    assert len(caplog.records) == 1, "said once, counted always"


def test_one_bad_score_costs_its_own_step_and_too_few_scores_all():
    candidates = [Candidate(i, [5], [], Step("draft", [9])) for i in range(3)]
    router = AcceptanceRule(lambda c: [0.1, math.nan, 0.9][c.row])
    decision = decide(router, candidates)
    assert (decision.escalate, decision.faults) == ([False, True, True], 1)
    router.score = lambda candidates: [0.0]
    decision = decide(router, candidates)
    assert (decision.escalate, decision.faults) == ([True] * 3, 3)


def test_a_score_out_of_range_is_no_step_to_keep_whatever_the_threshold():
    router = AcceptanceRule(lambda c: 1.2, threshold=2.0)
    decision = decide(router, [Candidate(0, [5], [], Step("draft", [9]))])
    assert (decision.escalate, decision.faults) == ([True], 1)


@pytest.mark.long
@pytest.mark.parametrize(
    "end",
    [StepEnd([" "], lambda tokens: " " * len(tokens), {EOS}, 30, len(NAMES)), step_end(["?"], 5)],
    ids=["all tokens are blank", "no step ends"],
)
def test_empty_and_endless_steps_are_the_policys_and_counted(models, end):
    done, stats = engine(models, NEVER, end).generate(requests())
    assert stats.route_faults > 0
    assert all(c.tokens[-1] == EOS and c.reused[-1] for c in done if any(c.reused)), "a step that ended was kept"
    assert all(c.finish == "stop" or len(c.tokens) == 16 for c in done)


def test_a_draft_model_with_nan_weights_is_replaced_by_the_policy(models, build_model):
    broken = build_model("qwen3", 1)
    routing = engine((models[0], broken), NEVER)
    with torch.no_grad():
        broken.model.norm.weight.fill_(math.nan)
    asked = requests()
    done, stats = routing.generate(asked)
    assert [c.tokens for c in done] == [c.tokens for c in plain(models[0], asked)]
    assert stats.route_faults == stats.steps


@pytest.mark.parametrize("router", [NEVER, by_likelihood(1.0)], ids=["reads at the end", "reads"])
def test_a_policy_with_nan_weights_stops_the_rollout(models, build_model, router):
    broken = build_model("qwen3", 1)
    routed = engine((broken, models[1]), router, step_end(EVERY, 99))
    with torch.no_grad():
        broken.model.norm.weight.fill_(math.nan)
    with pytest.raises(RolloutError, match="NaN or infinite logits"):
        routed.generate(requests())


# --- drift, and rows that an engine fails on


@pytest.mark.parametrize(("usual", "warned"), [(0.0, True), (99.0, False)])
def test_the_drift_of_a_learned_router_is_measured_and_said_once(models, usual, warned, caplog):
    router = AcceptanceRule(odd, usual_gap=usual)
    routing = engine(models, router)
    for _ in range(2):
        done, stats = routing.generate(requests())
    kept = [(b, p) for c in done for b, p, r in zip(c.behaviour_logprobs, c.logprobs, c.reused, strict=True) if r]
    assert stats.route_drift == pytest.approx(sum(b - p - usual for b, p in kept))
    said = [record.message for record in caplog.records]
    assert len(said) == warned
    assert all("less likely under the policy" in message for message in said)


def test_a_worker_without_rows_returns_nothing(models):
    """A pool with more workers than prompts calls the idle ones too."""
    done, stats = engine(models, AcceptanceRule(lambda c: 1.0, needs=frozenset({"likelihood"}))).generate([])
    assert (done, stats.steps) == ([], 0)
