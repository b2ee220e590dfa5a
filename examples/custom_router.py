"""A router of one's own: keeps the draft model's reasoning steps that repeat no earlier one. Routing is lossy.

    python examples/custom_router.py

The draft model is four of the policy's layers.
"""

from specrl.drafter import shortened
from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.engines.local.engine import TransformersEngine
from specrl.rollout.lossy.routed import RoutedRollout
from specrl.rollout.lossy.router import Router, StepEnd
from specrl.rollout.lossy.text import ReadOrVerify
from specrl.rollout.types import Request
from specrl.tiny import load_tiny


def repeats(candidates):
    """1 for a step that the response has already; the policy writes the steps that score above the threshold."""
    return [float(any(c.step.tokens == step.tokens for step in c.history)) for c in candidates]


model, tokenizer = load_tiny()
sampling = SamplingParams(frozenset({tokenizer.eos_token_id}))
prompt = tokenizer("Tom has 30 pens. He buys 12, sells 20. How many pens does Tom have now?\n")["input_ids"]

texts = ReadOrVerify()
engine = RoutedRollout(
    policy=TransformersEngine(model, sampling, texts.rule, texts),
    draft=TransformersEngine(shortened(model, 4), sampling),
    router=Router(repeats, threshold=0.5),
    step_end=StepEnd(["\n"], tokenizer.decode, sampling.eos_ids, max_tokens=24, vocab=len(tokenizer)),
)
(response,), stats = engine.generate([Request(prompt, key=7, max_new_tokens=160)])
assert len(response.behaviour_logprobs) == len(response.tokens)

print(tokenizer.decode(response.tokens))
print(f"{stats.steps} steps, {stats.escalated} of them by the policy")
