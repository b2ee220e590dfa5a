"""What a judge of old texts gains where wording is free.

    python benchmarks/research/judges.py work=DIR out=FILE [to=MODEL]

The embedded policy writes one text for each problem, so it is first trained to word solutions freely; GRPO then moves
it (exact verification, three epochs). The judge's labels are mined, under the policy that this run ended with, from the
texts that the run stored and from those that the policy of one epoch earlier writes for more problems. It is evaluated
on held-out problems: on texts of that earlier policy, and of a much worse copy of the policy with noise on its weights.
Passes, tokens and rewards are counted, so the machine does not matter. `work` keeps the two models; a second call
uses them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from specrl.config import load as cli
from specrl.rollout.sections import doc
from specrl.run import tasks
from specrl.run.tasks import Problem, arithmetic

LEVEL, CAP = "easy", 100
RUN = [
    "config=grpo_math",
    "name=run",
    f"dataset.level={LEVEL}",
    "dataset.train_size=64",
    f"rollout.max_new_tokens={CAP}",
    "rollout.measure_every=0",
    "trainer.epochs=3",
    "trainer.learning_rate=3e-4",
    "trainer.lr_schedule=constant",
    "trainer.save_every=16",
    "trainer.keep_checkpoints=4",
    "trainer.eval_prompts=0",
    "report.plots=false",
]
AN_EPOCH_EARLIER = "checkpoints/checkpoint-32"
TEST_PROBLEMS, TEXTS = {"an epoch earlier": 2400, "worse": 512}, 3
MINED_PROBLEMS = 128  # of them, for the ROC
MORE_PROBLEMS = 2048  # further ones for the judge: one text in a hundred has an important mismatch
RECALL = 0.99
BLUR = 0.4  # of the worse policy
MISMATCHES = 16


@dataclass
class JudgesConfig:
    work: str = doc("", "directory for the two models")
    out: str = doc("", "write the figures to this JSON file")
    to: str = doc("", "a policy trained from the embedded one, to count mismatches between the two as well")


def main(options: JudgesConfig) -> int:
    from specrl.reward.config import RewardConfig
    from specrl.reward.loading import load_rewards

    work, rewards = Path(options.work), load_rewards(RewardConfig())
    try:
        result = {"free wording": judged(work, rewards)}
        if options.to:
            result["embedded policy"] = [shares(options.to, heat, rewards) for heat in (1.0, 0.5)]
    finally:
        rewards.close()
    print(json.dumps(result, indent=2))
    if options.out:
        Path(options.out).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


# The two models --------------------------------------------------------------------------------------------------

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
    from benchmarks.tiny_policy import DATA_SEED, collate

    rng, size = random.Random(0), TUNING["batch"]
    problems = arithmetic("train", TUNING["steps"] * size, DATA_SEED + 1, level)
    for at in range(0, len(problems), size):
        yield collate(tokenizer, [reworded(p, rng) for p in problems[at : at + size]])


def tune(model, tokenizer, level: str) -> None:
    """Teaches the embedded policy to word its solutions freely."""
    from torch.nn.functional import cross_entropy

    from benchmarks.tiny_policy import IGNORE

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


def prepare(work: Path) -> Path:
    """The run directory, made when it is not there."""
    import specrl.train
    from specrl.tiny import load_tiny

    free, run = work / "free", work / "run"
    if not free.exists():
        model, tokenizer = load_tiny()
        tune(model, tokenizer, LEVEL)
        model.save_pretrained(free)
        tokenizer.save_pretrained(free)
    if not run.exists():
        specrl.train.main(cli.load([*RUN, f"model={free}", f"output_dir={work}"]))
    return run


# Measuring -------------------------------------------------------------------------------------------------------


def policy(model: str, level: str, temperature: float, **sizes):
    """A policy on a task, as train_judge sees it."""
    from specrl.lossy.pair import load_pair

    words = ["config=grpo_math", f"model={model}", f"dataset.level={level}", f"rollout.temperature={temperature}"]
    words += [f"{key.replace('__', '.')}={value}" for key, value in sizes.items()]
    return load_pair(cli.load(words, training=False))


def texts_of(old, examples: Sequence, count: int, first: int = 0) -> list:
    """`count` texts of a policy for each example, as a cache would hold them; `first` numbers the first example."""
    from specrl.lossy.judging import Drafted
    from specrl.rollout.engines.local.engine import TransformersEngine
    from specrl.rollout.keys import derive_key
    from specrl.rollout.types import Request
    from specrl.run.prompts import render

    owners = [(i, example, n) for i, example in enumerate(examples, first) for n in range(count)]
    cap = old.config.rollout.max_new_tokens
    requests = [
        Request(render(e, old.tokenizer, old.config.dataset).ids, derive_key(0, e.id, n, 0, "old"), cap, plain=True)
        for _, e, n in owners
    ]
    done, _ = TransformersEngine(old.policy, old.sampling).generate(requests)
    return [Drafted(e, i, n, c.tokens) for (i, e, n), c in zip(owners, done, strict=True)]


def judged(work: Path, rewards) -> dict:
    """The judge of the run's stored texts: its ROC, and what it gains on texts of two older policies."""
    from benchmarks.tiny_policy import blur
    from specrl.lossy.fit import fit_judge, roc_auc
    from specrl.lossy.judging import mismatches, read_cache
    from specrl.rollout.lossy.judge import JudgeHead
    from specrl.run.data import load_examples

    run = prepare(work)
    most = max(TEST_PROBLEMS.values())
    sizes = {"dataset__train_size": 64, "dataset__test_size": most, "rollout__max_new_tokens": CAP}
    new, earlier, worse = (policy(str(run / p), LEVEL, 1.0, **sizes) for p in ("model", AN_EPOCH_EARLIER, "model"))
    blur(worse.policy, BLUR, seed=0)
    train, test = (load_examples("arithmetic", new.config.dataset, split, 0) for split in ("train", "test"))
    more = load_examples("arithmetic", replace(new.config.dataset, train_size=64 + MORE_PROBLEMS), "train", 0)[64:]
    mined = [*read_cache(new, train, run), *texts_of(earlier, more, 1, first=64)]
    labels = mismatches(new, mined, rewards, MISMATCHES)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    judge, _ = fit_judge(labels, RECALL)
    shuffled, _ = fit_judge(replace(labels, important=labels.important[order]), RECALL)
    rules = {
        "exact": JudgeHead(judge.weight, judge.bias, 0.0),
        "judge": judge,
        "shuffled labels": shuffled,
        "everything accepted": JudgeHead(judge.weight, judge.bias, 2.0),
    }
    olds = {"an epoch earlier": earlier, "worse": worse}
    stored = {name: texts_of(old, test[: TEST_PROBLEMS[name]], TEXTS) for name, old in olds.items()}
    held_out = [row for row in stored["worse"] if row.sample_index == 0 and row.problem < MINED_PROBLEMS]
    fresh = mismatches(new, held_out, rewards, MISMATCHES)
    important = fresh.important.tolist()
    return {
        "mined": {"mismatches": len(labels), "important": int(labels.important.sum())},
        "held out": {
            "mismatches": len(fresh),
            "important": sum(important),
            "roc_auc": roc_auc(judge.importance(fresh.hidden).tolist(), important),
            "roc_auc of shuffled labels": roc_auc(shuffled.importance(fresh.hidden).tolist(), important),
        },
        "problems": TEST_PROBLEMS,
        "texts of each": TEXTS,
        **{name: on_texts(new, rules, texts, rewards) for name, texts in stored.items()},
    }


def on_texts(new, rules: dict, stored: Sequence, rewards) -> dict:
    """Accuracy and tokens a pass of each rule with these texts as drafts."""
    from specrl.lossy.judging import compare, score

    examples = [row.example for row in stored]
    before = score(new, examples, [row.text for row in stored], rewards)
    lines = compare(new, rules, stored, rewards)
    return {"accuracy of the old texts": sum(before) / len(before), "rules": lines}


def shares(to: str, temperature: float, rewards) -> dict:
    """Mismatches of the embedded policy's texts with a policy trained from it."""
    from specrl.lossy.judging import mismatches, score
    from specrl.run.data import load_examples

    old, new = (policy(name, "medium", temperature, dataset__train_size=64) for name in ("tiny", to))
    stored = texts_of(old, load_examples("arithmetic", new.config.dataset, "train", 0), 1)
    right = score(new, [r.example for r in stored], [r.text for r in stored], rewards)
    labels = mismatches(new, stored, rewards, MISMATCHES)
    of_right = torch.tensor([bool(right[i]) for i in labels.problem.tolist()])
    return {
        "temperature": temperature,
        "mismatches": len(labels),
        "important": int(labels.important.sum()),
        "mismatches of right texts": int(of_right.sum()),
        "important of right texts": int((labels.important & of_right).sum()),
    }


if __name__ == "__main__":
    raise SystemExit(cli.run(main, schema=JudgesConfig))
