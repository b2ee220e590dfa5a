"""The draft model never changes a token, samples with the policy's noise, and its KV follows the emitted tokens."""

import copy
import random
from dataclasses import replace

import pytest
import torch

import specrl.rollout.engines.local.reader as reader
from specrl.rollout.engines.local.engine import TransformersEngine
from specrl.rollout.engines.local.head import Head
from specrl.rollout.engines.local.reader import Reader
from specrl.rollout.types import Request, RolloutError
from tests.engines import local
from tests.rollout.golden import SAMPLING, VOCAB, Script, prompts_and_caps, requests_of


def requests(drafters=None) -> list[Request]:
    return requests_of(prompts_and_caps(24), drafters)


def outputs(done):
    return [(c.tokens, c.finish) for c in done]


class Engine:
    """Keeps the stats of its last rollout."""

    def __init__(self, *args, **options):
        self._engine = local(*args, **options)
        self.drafting, self.budget = self._engine.drafting, self._engine.drafting.budget
        self.update_weights = self._engine.update_weights

    def generate(self, requests):
        self.judged, observe = [0, 0], self.budget.drafter.observe_chain

        def judge(logprobs, accepted):
            self.judged = [self.judged[0] + len(logprobs), self.judged[1] + accepted]
            observe(logprobs, accepted)

        self.budget.drafter.observe_chain = judge
        done, stats = self._engine.generate(requests)
        self.budget.drafter.observe_chain = observe
        self.sources = {"model": (0, 0), "custom": (0, 0), **stats.sources}
        return done, stats


def rates(engine) -> float:
    """Share of the draft model's tokens that equal the policy's samples, also after an EOS."""
    return engine.judged[1] / engine.judged[0]


def blurred(model, amount: float = 0.01, seed: int = 0):
    """A copy with noise on every matrix, `amount` times its standard deviation: right more often than not."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in other.parameters():
            if p.dim() > 1:
                p.add_(amount * p.std() * torch.randn(p.shape, generator=generator))
    return other


@pytest.fixture(scope="module")
def policy(tiny):
    return tiny("llama")


@pytest.fixture(scope="module")
def plain(policy):
    return TransformersEngine(policy, SAMPLING).generate(requests())[0]


# Identity -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "window"), [("twin", 0), ("stranger", 1), ("family", 5)])
def test_any_draft_model_changes_nothing(policy, tiny, build_model, plain, kind, window):
    drafter = {
        "twin": lambda: copy.deepcopy(policy),
        "stranger": lambda: build_model("llama", seed=9),
        "family": lambda: tiny("gpt2"),
    }[kind]()
    engine = Engine(policy, SAMPLING, window=window, drafter=drafter)
    rng = random.Random(2)
    own = [
        Script([rng.randrange(VOCAB) if rng.random() < i / 24 else t for t in c.tokens]) if i % 3 else None
        for i, c in enumerate(plain)
    ]
    for batch in (requests(), requests(drafters=own), requests()):
        done, stats = engine.generate(batch)
        assert outputs(done) == outputs(plain)
        assert all(c.logprobs == pytest.approx(d.logprobs, abs=1e-4) for c, d in zip(done, plain, strict=True))
        assert sum(sum(c.reused) for c in done) == stats.accepted
        if window:
            assert engine.sources["model"][0] > 0
    changed, _ = engine.generate([replace(r, key=~r.key) for r in requests()])
    assert outputs(changed) != outputs(plain), "control: the noise decides"


@pytest.mark.parametrize("bounds", [{}, {"tokens_per_pass": 5}, {"tokens_per_pass": 40, "rows_per_batch": 7}])
def test_a_copy_of_the_policy_is_always_right(policy, plain, bounds):
    """Catching up, moving the cursor and removing rows lose nothing: a wrong KV entry would lower the acceptance."""
    engine = Engine(policy, SAMPLING, window=6, drafter=copy.deepcopy(policy), **bounds)
    done, _ = engine.generate(requests())
    assert outputs(done) == outputs(plain)
    assert rates(engine) == 1.0
    assert sum(c.passes for c in done) < sum(c.passes for c in plain) / 3
    wrong = [Script([(t + 1) % VOCAB for t in c.tokens]) if i % 2 else None for i, c in enumerate(plain)]
    engine.generate(requests(drafters=wrong))
    assert rates(engine) == 1.0, "rows whose own drafts were rejected in between"


def test_a_plain_request_is_decoded_without_the_model(policy, plain):
    """The baseline of control steps and acceptance=off. One row of the batch that may draft is the control."""
    engine = local(policy, SAMPLING, window=5, drafter=copy.deepcopy(policy))
    own = [Script(c.tokens) for c in plain]
    done, stats = engine.generate([replace(r, plain=True) for r in requests(drafters=own)])
    assert outputs(done) == outputs(plain)
    assert (stats.drafted, stats.sources) == (0, {})
    assert [c.passes for c in done] == [len(c.tokens) for c in done]
    longest = max(range(len(plain)), key=lambda i: len(plain[i].tokens))
    done, stats = engine.generate([replace(r, plain=i != longest) for i, r in enumerate(requests())])
    assert outputs(done) == outputs(plain)
    assert stats.accepted == sum(done[longest].reused) > 0


@pytest.mark.parametrize(("kind", "ids"), [("twin", 3), ("twin", VOCAB), ("head", 30)])
def test_drafts_from_some_ids_change_nothing(policy, plain, kind, ids):
    drafter = {"twin": copy.deepcopy, "head": Head.of}[kind](policy)
    engine = Engine(policy, SAMPLING, window=5, drafter=drafter, ids=ids)
    for _ in range(2):
        done, _ = engine.generate(requests())
        assert outputs(done) == outputs(plain)
    assert engine.sources["model"][0] > 0


# The same noise, and KV that follows the emitted tokens ---------------------------------------------------------------


def test_kv_that_is_not_rolled_back_costs_acceptance_only(policy, plain, monkeypatch):
    def rate():
        engine = Engine(policy, SAMPLING, window=6, drafter=blurred(policy))
        assert outputs(engine.generate(requests())[0]) == outputs(plain)
        return rates(engine)

    right, texts, missing = rate(), {}, Reader.missing

    def kept(reader, row, text, final=True):
        """Planted fault: rejected tokens are kept, and the cursor only moves forward."""
        known = texts.get((id(reader), row), 0)
        texts[id(reader), row] = len(text)
        return list(text[known:]) if known else missing(reader, row, text)

    monkeypatch.setattr(Reader, "missing", kept)
    monkeypatch.setattr(reader, "row_tokens", lambda requests: 500)  # memory for the kept tokens
    assert rate() < right - 0.2


def test_the_draft_models_context_bounds_the_drafts(policy, plain, monkeypatch):
    drafter = copy.deepcopy(policy)
    drafter.config.max_position_embeddings = 20
    engine = Engine(policy, SAMPLING, window=8, drafter=drafter)
    longest, launch = [], Reader.launch

    def watched(reader, feed, ends=False):
        flight = launch(reader, feed, ends)
        if ends:  # the draft model's
            longest.append(flight.width)
        return flight

    monkeypatch.setattr(Reader, "launch", watched)
    done, _ = engine.generate(requests())
    assert outputs(done) == outputs(plain)
    assert max(longest) == 20
    assert max(len(r.prompt) + len(c.tokens) for r, c in zip(requests(), done, strict=True)) > 30


# A model that cannot be used ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_unusable_logits_are_dropped_with_one_warning(policy, plain, value, caplog):
    drafter = copy.deepcopy(policy)
    engine = Engine(policy, SAMPLING, window=4, drafter=drafter)
    with torch.no_grad():
        drafter.model.norm.weight.fill_(value)
    engine.generate(requests())
    done, stats = engine.generate(requests())
    assert caplog.text.count("The logits of rollout.drafter are NaN or infinite") == 1
    assert outputs(done) == outputs(plain)
    assert engine.sources["model"] == (0, 0)
    assert stats.drafted == 0


def test_another_vocabulary_is_refused(policy, build_model):
    with pytest.raises(RolloutError, match=r"53 tokens and the policy 61.*tokenizer"):
        local(policy, SAMPLING, drafter=build_model("llama", vocab=53))


def test_a_model_that_does_not_run_packed_is_refused(policy):
    with pytest.raises(RolloutError, match="Linear is not a causal LM"):
        local(policy, SAMPLING, drafter=torch.nn.Linear(3, 3))
