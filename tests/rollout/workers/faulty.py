"""Engines that fail on some prompts or collect weights, and requests. Worker processes import this module."""

import os
import random
import signal
import time
from pathlib import Path

from specrl.rollout.build import build_engine
from specrl.rollout.drafting.suffix import PromptTexts, SuffixDrafter
from specrl.rollout.keys import derive_key
from specrl.rollout.types import Request

VOCAB, EOS_IDS = 61, frozenset({1, 7})
POISON, DEADLY, SLOW = range(58, 61)
"""First tokens of prompts that cause faults."""


class Faulty:
    """A real engine that fails on some prompts."""

    own_weights = True

    def __init__(self, engine, folder):
        self.engine, self.folder = engine, folder
        note(folder, "pids")

    def generate(self, requests):
        if not requests:
            note(self.folder, "idle")
        marks = [request.prompt[0] for request in requests]
        if DEADLY in marks:
            os.kill(os.getpid(), signal.SIGKILL)
        if SLOW in marks:
            note(self.folder, "slow")
            time.sleep(1)
        if POISON in marks:
            raise ValueError("cannot digest this prompt")
        return self.engine.generate(requests)

    def ahead(self, requests, stop):
        marks = [request.prompt[0] for request in requests]
        if SLOW in marks:
            note(self.folder, "ahead")
            while not stop():
                time.sleep(0.01)
        return self.engine.ahead(requests, stop)

    def __getattr__(self, name):
        return getattr(self.engine, name)


def note(folder, what):
    """Records that the event happened in this process."""
    (folder / what).mkdir(exist_ok=True)
    (folder / what / str(os.getpid())).touch()


def noted(folder, what):
    """The processes in which the event happened."""
    return [int(path.name) for path in (folder / what).glob("*")]


def build(spec):
    return Faulty(build_engine(spec), Path(spec.model))


class Deaf(Faulty):
    """Accepts versions but not weights."""

    def update_weights(self, weights, version, probe=None):
        self.engine.update_weights(self.engine.model.state_dict().items(), version, probe)


def build_deaf(spec):
    return Deaf(build_engine(spec), Path(spec.model))


class Collected:
    """Records the weights that it receives, and loads them into a transformers engine."""

    def __init__(self, engine):
        self.engine, self.gpus, self.joined, self.weights = engine, (f"GPU of {os.getpid()}",), [], None

    def join(self, route, init):
        self.joined.append((route, init["rank_offset"]))

    def begin_update(self, version, metadata):
        self.expected, self.weights = [meta.name for meta in metadata], {}

    def receive(self, update):
        self.weights |= update

    def finish_update(self, version, probe):
        assert list(self.weights) == self.expected
        self.engine.update_weights(self.weights.items(), version, probe)


def build_linked(spec):
    engine = build_engine(spec)
    engine.updates = Collected(engine)
    return engine


def requests_of(n=24, visit=0, marks=(), drafts=None):
    """n requests for prompts shared by four rows each. The first prompts begin with `marks`."""
    rng = random.Random(5)
    prompts = [[rng.randrange(8, 50) for _ in range(3 + i % 4)] for i in range(-(-n // 4))]
    for prompt, mark in zip(prompts, marks, strict=False):
        prompt[0] = mark
    return [
        Request(prompts[i // 4], derive_key(3, "workers", i, visit), 20, drafts and drafts[i], expected_tokens=10)
        for i in range(n)
    ]


def drafters(texts):
    """Right, wrong and shifted drafts, with one index for every four rows. A drafter serves one response."""
    rng = random.Random(2)
    noisy = [[rng.randrange(VOCAB) if rng.random() < 0.2 else t for t in text] for text in texts]
    shifted = [list(text[i % 3 :]) or [9] for i, text in enumerate(noisy)]
    groups = [PromptTexts([*shifted[i : i + 4], list(texts[i - 1])]) for i in range(0, len(texts), 4)]
    return [SuffixDrafter(groups[i // 4], text) for i, text in enumerate(shifted)]
