"""Mining on a policy, compared with the same search by hand: one row at a time, plain decoding, full forward passes."""

import torch

from specrl.lossy.mining import Miner, until_first_mismatch
from specrl.rollout.engines.base import SamplingParams
from specrl.rollout.engines.local.engine import TransformersEngine
from specrl.rollout.types import Request

EOS, CAP, MOST = 1, 16, 5
PROMPTS = [[5, 6], [5, 6], [9, 4, 7], [8]]


def reward(text):
    return float(sum(token % 3 for token in text) % 3 > 0)


def by_hand(model, stored):
    """The result of the semi-greedy search as [(states, important, problem)]."""
    engine = TransformersEngine(model, SamplingParams(frozenset({EOS}), 0.0))

    def greedy(prompt, cap):
        return engine.generate([Request(prompt, 0, cap, plain=True)])[0][0].tokens if cap else []

    labels = []
    for problem, (prompt, draft) in enumerate(zip(PROMPTS, stored, strict=True)):
        text, tried, at = greedy(prompt, CAP), 0, 0
        wanted = reward(text)
        while (
            wanted and at < min(len(text), len(draft)) and text[at] != EOS and tried < MOST and text[:at] == draft[:at]
        ):
            if draft[at] != text[at]:
                tried += 1
                prefix = [*text[:at], draft[at]]
                new = prefix if draft[at] == EOS else [*prefix, *greedy([*prompt, *prefix], CAP - len(prefix))]
                with torch.no_grad():
                    state = model.eval().model(torch.tensor([[*prompt, *prefix]])).last_hidden_state[0, -1]
                labels.append((state, reward(new) != wanted, problem))
                text = new if reward(new) == wanted else text
            at += 1
    return labels


def test_labels_are_those_of_the_search_by_hand(build_model):
    model = build_model("qwen3", 0)
    generator = torch.Generator().manual_seed(0)
    stored = torch.randint(2, 61, (len(PROMPTS), CAP), generator=generator).tolist()
    stored[2][4] = EOS
    miner = Miner(model, SamplingParams(frozenset({EOS}), 0.7), CAP, tokens_per_pass=64)
    asked = []

    def score(rows, texts):
        asked.extend(rows)
        return [reward(text) for text in texts]

    labels = miner(PROMPTS, range(len(PROMPTS)), until_first_mismatch(stored), score, MOST)
    want = by_hand(model, stored)
    rank = sorted(range(len(labels)), key=lambda i: labels.problem[i])  # the miner alternates between rows
    assert [(labels.important[i].item(), labels.problem[i].item()) for i in rank] == [w[1:] for w in want]
    torch.testing.assert_close(labels.hidden[rank], torch.stack([w[0] for w in want]), atol=1e-4, rtol=1e-4)
    assert 0 < labels.important.sum() < len(labels), "both kinds are there"
    assert asked[: len(PROMPTS)] == [0, 1, 2, 3]
