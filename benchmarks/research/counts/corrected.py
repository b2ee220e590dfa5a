"""Online Speculative Decoding's buffer (arXiv 2310.07177): co-training on the corrected positions only.

The embedded policy moves in equal steps, as in `benchmarks.research.cotraining`, and writes new texts after each. Three
copies of the one-layer draft model are measured on them and then learn: nothing, from every position, or from the
positions where their own keyed draw was not the policy's token. `KEEP` rounds of texts stay in the buffer.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean

import torch
from torch import Tensor

from benchmarks.research.cotraining import MovingPolicy
from benchmarks.research.counts.record import Record
from specrl.drafter import DrafterOptions, sample
from specrl.run.tasks import arithmetic
from specrl.trainers.config import DrafterConfig
from specrl.trainers.cotraining import distil
from specrl.trainers.cotraining.texts import read

ROUNDS, PROMPTS = 8, 16  # of the policy, and new responses in each
RATES = (3e-4, 1e-3)
UPDATES = 2  # gradient steps of a round
KEEP = 2  # rounds
CAP = 256  # tokens of a response


@dataclass(frozen=True)
class Round:
    """New texts of the policy as it was then."""

    batch: distil.Batch
    teacher: Tensor
    """Its logits [N, V]."""
    keys: list[int]
    wanted: Tensor
    """Its tokens [N], drawn with the noise of these keys."""


def measure(record: Record) -> dict:
    """Agreement before each round's learning, and the share of the positions that was learnt from."""
    policy = MovingPolicy("")
    problems = arithmetic("train", ROUNDS * PROMPTS, 1, "medium")
    prompts = [tuple(record.tokenizer(problem.prompt)["input_ids"]) for problem in problems]
    rounds = [moved(policy, record.chain, prompts, version) for version in range(ROUNDS)]
    ways = [("nothing", 0.0), *product(("all", "corrected"), RATES)]
    return {"lines": [followed(record.chain, policy, rounds, *way) for way in ways]}


def moved(policy: MovingPolicy, student, prompts: Sequence[tuple[int, ...]], version: int) -> Round:
    """What the policy writes and computes after so many steps."""
    policy.move(version / max(1, ROUNDS - 1))
    asked = prompts[version * PROMPTS : (version + 1) * PROMPTS]
    texts, keys = sample(policy.model, policy.sampling.eos_ids, asked, DrafterOptions(seed=version))
    batch = distil.Batch.of(read(policy.model, texts), student)
    teacher = distil.teacher_logits(policy.model, batch)
    return Round(batch, teacher, keys, distil.keyed_samples(teacher, batch, keys, policy.sampling))


def followed(initial, policy: MovingPolicy, rounds: Sequence[Round], way: str, rate: float) -> dict:
    student = copy.deepcopy(initial)
    optimizer = torch.optim.AdamW(student.parameters(), rate, weight_decay=0.0)
    buffer: deque[Round] = deque(maxlen=KEEP)
    agreement, learnt, seen = [], 0, 0
    for new in rounds:
        agreement.append(round(agreed(student, policy, new)[1].float().mean().item(), 4))
        buffer.append(new)
        for old in [*buffer] * (UPDATES if rate else 0):
            logits, right = agreed(student, policy, old)
            kept = ~right if way == "corrected" else torch.ones_like(right)
            distil.step(optimizer, distil.loss(logits, old.teacher, DrafterConfig().objective, kept=kept))
            seen += len(kept)
            learnt += int(kept.sum())
    return {
        "learns": way,
        "learning rate": rate,
        "agreement": agreement,
        "mean of the second half": round(fmean(agreement[ROUNDS // 2 :]), 4),
        "share of the positions": round(learnt / seen, 4) if seen else 0.0,
    }


def agreed(student, policy: MovingPolicy, texts: Round) -> tuple[Tensor, Tensor]:
    """The student's logits [N, V], and where its keyed draw is the policy's token, bool [N]."""
    logits = next(distil.student_logits(student, texts.batch, torch.Generator()))
    return logits, distil.keyed_samples(logits.detach(), texts.batch, texts.keys, policy.sampling) == texts.wanted
