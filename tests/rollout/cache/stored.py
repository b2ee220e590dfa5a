"""Trajectories for tests of the cache, and functions that save and load them."""

import random

from specrl.rollout.cache import memory
from specrl.rollout.cache.memory import Fingerprint, TrajectoryCache
from specrl.rollout.types import Trajectory

EOS = 1
PRINT = Fingerprint({"tokenizer": "t1", "dataset": "d1"}, {"temperature": "1.0"})


def entries(count=60, step=0, logprobs=False, seed=0) -> list[tuple[str, int, Trajectory]]:
    rng, made = random.Random(f"{seed}/{step}"), []
    for i in range(count):
        finish = rng.choice(["stop", "length"])
        ids = [*rng.choices(range(2, 1000), k=rng.randrange(30)), EOS if finish == "stop" else 2]
        scores = tuple(-i / 8 for i in range(len(ids))) if logprobs and rng.random() < 0.5 else None
        key, reward = rng.getrandbits(64) - 2**63, rng.choice([None, 0.0, 1.0, -0.1])
        made.append((f"ex-é{i // 4}", i % 4, Trajectory(tuple(ids), key, finish, step, step, reward, scores)))
    return made


def saved(directory, given, step=0, fingerprint=PRINT) -> TrajectoryCache:
    cache = TrajectoryCache(fingerprint)
    cache.put_many(given)
    cache.save(directory, step)
    return cache


def load(directory, fingerprint=PRINT, vocab_size=1000, eos_ids=(EOS,), **options) -> TrajectoryCache:
    return memory.load(directory, fingerprint, vocab_size, eos_ids, **options)


def contents(cache, given):
    return [(e, s, t) for e, s, _ in given if (t := cache.get(e, s)) is not None]
