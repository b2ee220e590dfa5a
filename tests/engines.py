"""Local engines for tests."""

from specrl.rollout.config import RolloutConfig
from specrl.rollout.drafting.budget import Budget
from specrl.rollout.drafting.drafting import Drafting
from specrl.rollout.engines.local.engine import TransformersEngine
from specrl.rollout.engines.local.head import drafter_of
from specrl.rollout.lossy.judged import Judged
from specrl.rollout.lossy.lenient import VerifyOldTextOnce, lenient
from specrl.rollout.lossy.routed import RoutedRollout
from specrl.rollout.lossy.text import ReadOrVerify
from specrl.rollout.verify import exact
from specrl.rollout.workers.ahead import Ahead


def local(model, sampling, *, lenience=None, window=0, drafter=None, ids=0, own_weights=False, **limits):
    """A local engine; with a `lenience` one that follows SPEC-RL's rule."""
    limits = RolloutConfig(**limits)
    if lenience is not None:
        return TransformersEngine(model, sampling, lenient(lenience), VerifyOldTextOnce(), limits, own_weights)
    drafter = None if drafter is None else drafter_of(drafter, sampling, limits, ids)
    return TransformersEngine(model, sampling, exact, Drafting(Budget(window), drafter), limits, own_weights)


def judged(model, sampling, judge, draft=None, window=16, own_weights=False, **limits):
    """A local engine whose verification a judge relaxes."""
    drafting = Judged(judge, sampling, draft, window, RolloutConfig(**limits))
    return TransformersEngine(model, sampling, drafting.rule, drafting, RolloutConfig(**limits), own_weights)


def reading(model, sampling, **limits):
    """A local engine as the policy of a RoutedRollout."""
    texts = ReadOrVerify()
    return TransformersEngine(model, sampling, texts.rule, texts, RolloutConfig(**limits))


def routed(model, sampling, draft, router, step_end, **limits):
    """A RoutedRollout of two local engines."""
    policy = reading(model, sampling, **limits)
    return RoutedRollout(policy, TransformersEngine(draft, sampling, limits=RolloutConfig(**limits)), router, step_end)


class Spare:
    """An engine that rolls out ahead between two calls, in this process, as a pool of one worker would.

    Args: passes: forward passes ahead between two calls; their tokens are available at the next `stop`.
    """

    own_weights, not_ahead = True, ""

    def __init__(self, engine, passes=1 << 30):
        self.engine, self.passes, self.rows = engine, passes, Ahead()
        self.began = []
        """Requests of each batch that was begun ahead."""

    @property
    def weight_version(self):
        return self.engine.weight_version

    def generate(self, requests):
        out = self.engine.generate(requests)
        while requests := self.rows.share(1):
            self.began.append(requests)
            polls = iter(range(self.passes))
            texts = self.engine.ahead(requests, stop=lambda polls=polls: next(polls, None) is None)
            self.rows.learn(requests, texts, seconds=0.5)
            if any(text.finish is None for text in texts):
                break
        return out

    def begin(self, requests):
        self.rows.plan(requests)

    def stop(self):
        return self.rows.take()

    def __getattr__(self, name):
        return getattr(self.engine, name)
