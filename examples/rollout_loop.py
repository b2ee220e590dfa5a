"""SpeculativeRollout in a training loop of one's own: REINFORCE with a group baseline, about 20 lines.

python examples/rollout_loop.py
"""

import torch

from specrl.reward.answers import marked_answer
from specrl import EngineSpec, Fingerprint, RolloutConfig, Row, SpeculativeRollout, TrajectoryCache, build_engine
from specrl.run.tasks import arithmetic
from specrl.tiny import load_tiny

model, tokenizer = load_tiny()
problems = {problem.id: problem for problem in arithmetic("train", 2, level="easy")}
config, eos_ids = RolloutConfig(group_size=4, max_new_tokens=160), frozenset({tokenizer.eos_token_id})
engine = build_engine(EngineSpec(eos_ids=eos_ids, rollout=config), model)
cache = TrajectoryCache(Fingerprint({"tokenizer": "tiny"}))
rollout = SpeculativeRollout(engine, cache, config, seed=0)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

rows = [Row(p.id, tuple(tokenizer(p.prompt)["input_ids"])) for p in problems.values() for _ in range(config.group_size)]
for step in range(3):  # every step visits the same prompts, as epochs do
    engine.update_weights(None, version=step)  # None: the engine shares the model
    batch = rollout.generate(rows, visit=step, step=step)
    texts = tokenizer.batch_decode([c.tokens for c in batch.completions], skip_special_tokens=True)
    scores = [float(marked_answer(t) == problems[r.example_id].answer) for r, t in zip(rows, texts, strict=True)]
    rollout.store(rows, batch, step=step, rewards=scores)  # the next visit drafts with these
    groups = torch.tensor(scores).view(-1, config.group_size)
    advantages = (groups - groups.mean(1, keepdim=True)).flatten()
    for row, c, advantage in zip(rows, batch.completions, advantages, strict=True):
        ids = torch.tensor([[*row.prompt, *c.tokens]])
        logp = model(ids).logits[0, len(row.prompt) - 1 : -1].log_softmax(-1)
        (-advantage * logp.gather(-1, ids[0, len(row.prompt) :, None]).sum() / len(rows)).backward()
    optimizer.step()
    optimizer.zero_grad()
    reused, count = (sum(sum(c.reused) for c in batch.completions), sum(len(c.tokens) for c in batch.completions))
    print(f"step {step}: reward {sum(scores) / len(scores):.2f}, {reused} of {count} tokens reused")
