"""What a judge gains where wording is free: `python benchmarks/judges.py work=DIR out=FILE`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import torch

from specrl import tasks
from specrl.tasks import Problem, arithmetic

TUNING = {"steps": 120, "batch": 32, "learning_rate": 1e-3}


def reworded(problem: Problem, rng: random.Random) -> Problem:
    """The same solution in free words: any verb that gains or loses, and the name or the pronoun."""
    name = problem.prompt.partition(" ")[0]
    lines = []
    for line in problem.solution.splitlines(keepends=True):
        for kind in (tasks.GAINS, tasks.LOSSES):
            said = next((verb for verb in kind if f" {verb} " in line), None)
            if said:
                line = line.replace(f" {said} ", f" {rng.choice(kind)} ", 1)
                break
        subject = tasks.PEOPLE[name]
        lines.append(line.replace(subject, rng.choice((name, subject)), 1))
    return replace(problem, solution="".join(lines))


def batches(tokenizer, level: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    from specrl.tiny import DATA_SEED, collate

    rng, size = random.Random(0), TUNING["batch"]
    problems = arithmetic("train", TUNING["steps"] * size, DATA_SEED + 1, level)
    for at in range(0, len(problems), size):
        yield collate(tokenizer, [reworded(p, rng) for p in problems[at : at + size]])


def tune(model, tokenizer, level: str) -> None:
    """Teaches the embedded policy to word its solutions freely."""
    from torch.nn.functional import cross_entropy

    from specrl.tiny import IGNORE

    optimizer = torch.optim.AdamW(model.parameters(), TUNING["learning_rate"], betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, TUNING["steps"])
    model.train()
    for ids, labels in batches(tokenizer, level):
        logits = model(input_ids=ids, use_cache=False).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()
