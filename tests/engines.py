"""Local engines of tests: a model, a law, and what is tried."""

from rollout.drafting.budget import Budget
from rollout.drafting.contexts import ContextTable
from rollout.drafting.drafting import Drafting
from rollout.engines.base import Limits
from rollout.engines.local.drafter import ModelDrafter
from rollout.engines.local.engine import TransformersEngine
from rollout.lossy.judged import Judged
from rollout.lossy.lenient import Once, lenient
from rollout.lossy.routed import RoutedEngine
from rollout.verify import exact


def local(model, sampling, *, lenience=None, window=0, contexts=False, drafter=None, own_weights=False, **limits):
    """A transformers engine; with a `lenience` that of the published rule."""
    limits = Limits(**limits)
    if lenience is not None:
        return TransformersEngine(model, sampling, lenient(lenience), Once(), limits, own_weights)
    drafter = None if drafter is None else ModelDrafter(drafter, sampling, limits)
    drafting = Drafting(Budget(window), ContextTable() if contexts else None, drafter)
    return TransformersEngine(model, sampling, exact, drafting, limits, own_weights)


def judged(model, sampling, judge, draft=None, window=16, own_weights=False, **limits):
    """A transformers engine whose verification a judge relaxes."""
    drafting = Judged(judge, sampling, draft, window, Limits(**limits))
    return TransformersEngine(model, sampling, drafting.rule, drafting, Limits(**limits), own_weights)


def routed(model, sampling, steps, **limits):
    """A routed engine."""
    return RoutedEngine(model, sampling, steps, Limits(**limits))
