"""A drafter of one's own: what followed the last two tokens before, in prompt or response, may follow again.

    python examples/custom_drafter.py

A wrong guess costs time, never correctness: the response is the one that plain decoding gives.
"""

from specrl.rollout.config import RolloutConfig
from specrl.rollout.build import build_engine
from specrl.rollout.engines.base import EngineSpec
from specrl.rollout.types import Request
from specrl.tiny import load_tiny


class PromptLookup:
    """Drafts by looking up the last two tokens (prompt lookup decoding)."""

    source = "lookup"  # its acceptance is counted and estimated by this name

    def __init__(self, prompt):
        self._prompt = list(prompt)

    def propose(self, tokens, limit):
        """At most `limit` guesses for the ids that follow the response `tokens`."""
        text = [*self._prompt, *tokens]
        at = next((i for i in range(len(text) - 3, -1, -1) if text[i : i + 2] == text[-2:]), None)
        return [] if at is None else text[at + 2 : at + 2 + limit]


model, tokenizer = load_tiny()
config = RolloutConfig(max_new_tokens=160, sources=[], draft_tokens=8)  # no other drafts, 8 tokens
engine = build_engine(EngineSpec(eos_ids=frozenset({tokenizer.eos_token_id}), rollout=config), model)
prompt = tokenizer("Tom has 30 pens. He buys 12, buys 12, buys 12. How many pens does Tom have now?\n")["input_ids"]

(plain,), _ = engine.generate([Request(prompt, key=7, max_new_tokens=160, plain=True)])
(drafted,), stats = engine.generate([Request(prompt, key=7, max_new_tokens=160, drafter=PromptLookup(prompt))])
assert drafted.tokens == plain.tokens

print(tokenizer.decode(drafted.tokens))
count, accepted = stats.sources["lookup"]
print(f"{plain.passes} passes plainly, {drafted.passes} with drafts; {accepted} of {count} accepted")
