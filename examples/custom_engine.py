"""An engine of one's own: slow and simple, with the same tokens as specrl's engine.

    python examples/custom_engine.py

The token at response position t must be `keyed_sample` of the logits with the request's key and t.
"""

import torch

from specrl import EngineSpec, RolloutConfig, build_engine
from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.noise import keyed_sample
from specrl.rollout.types import Completion, EngineStats, Request
from specrl.rollout.verify import cut
from specrl.tiny import load_tiny


class NaiveEngine:
    """One row at a time, the whole prefix for every token; drafts are ignored."""

    def __init__(self, model, sampling):
        self.model = model
        self.sampling = sampling
        self.weight_version = 0
        self.own_weights = False  # True: updates carry tensors

    def generate(self, requests):
        return [self._respond(request) for request in requests], EngineStats()

    @torch.inference_mode()
    def _respond(self, request):
        params = {name: getattr(self.sampling, name) for name in ("temperature", "top_k", "top_p")}
        tokens = []
        logprobs = []
        finish = None
        while finish is None:
            logits = self.model(torch.tensor([[*request.prompt, *tokens]])).logits[:, -1]
            position = torch.tensor([len(tokens)])
            token, logp, _, _ = keyed_sample(logits, torch.tensor([request.key]), position, **params)
            _, finish = cut(token.tolist(), self.sampling.eos_ids, request.max_new_tokens - len(tokens))
            tokens += token.tolist()
            logprobs += logp.tolist()
        n = len(tokens)
        return Completion(tokens, logprobs, logprobs, [False] * n, finish, self.weight_version, passes=n)

    @torch.inference_mode()
    def score(self, tokens):
        logp = self.model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        return logp.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()

    def update_weights(self, weights, version, probe=None):
        for name, tensor in weights or ():
            self.model.state_dict()[name].copy_(tensor)
        if probe is not None:
            probe.check(self.score(probe.tokens), version)  # raises when an update went wrong
        self.weight_version = version

    def close(self): ...


model, tokenizer = load_tiny()
eos_ids = frozenset({tokenizer.eos_token_id})
prompt = tokenizer("Tom has 30 pens. He buys 12, sells 20. How many pens does Tom have now?\n")["input_ids"]

(naive,), _ = NaiveEngine(model, SamplingParams(eos_ids)).generate([Request(prompt, key=7, max_new_tokens=160)])
engine = build_engine(EngineSpec(eos_ids=eos_ids, rollout=RolloutConfig(max_new_tokens=160)), model)
(fast,), _ = engine.generate([Request(prompt, key=7, max_new_tokens=160)])
assert naive.tokens == fast.tokens
print(tokenizer.decode(naive.tokens))
