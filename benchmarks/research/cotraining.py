"""Does co-training keep a drafter close to a moving policy, what does it cost, and does it pay?

    python benchmarks/research/cotraining.py [drafters=[DIR,...]] [to=DIR] [steps=8] [out=FILE.json]

The embedded policy moves in equal steps to the policy in `to` (for example one that a run has trained), or to a copy
of itself with noise on its matrices. Each step rolls out new prompts twice with the same keys and no old texts: with
the initial drafter, and with the co-trained one, which has seen only earlier steps. Then the co-trained drafter learns
from the update's forward pass, as in training. Initial drafters are those in `drafters`, made by
`python -m specrl.drafter out=DIR [kind=head]`, and a copy of the policy's first and last layer.

Passes are counts and repeat exactly. Seconds are processor seconds of one thread. Saved seconds are the rollout with
the initial drafter minus the one with the co-trained drafter. An update's seconds are its forward and backward pass.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import torch
from torch.nn.utils.rnn import pad_sequence

from benchmarks.paired import perturbed
from specrl.drafter import shortened
from specrl.rollout.config import RolloutConfig
from specrl.rollout.drafting.budget import Budget
from specrl.rollout.drafting.drafting import Drafting
from specrl.rollout.engines.base import EngineSpec, SamplingParams
from specrl.rollout.engines.local.drafter import ModelDrafter
from specrl.rollout.engines.local.engine import TransformersEngine
from specrl.rollout.engines.local.head import Head, HeadDrafter, load_drafter
from specrl.rollout.keys import derive_key
from specrl.rollout.types import Completion, EngineStats, Request
from specrl.run.tasks import arithmetic
from specrl.tiny import load, load_tiny
from specrl.trainers.config import DrafterConfig
from specrl.trainers.cotraining.trainer import DrafterTrainer

PROMPTS, GROUP, CAP = 4, 8, 200  # a step of config=grpo_math
DRIFT = 0.4
DRAFT_TOKENS = 4
SHARED = {"learning_rate": 3e-4}
VARIANTS = {"tvd": {"objective": "tvd"}, "forward KL": {"objective": "forward_kl"}}
Done = tuple[list[Completion], EngineStats, float]
"""Completions, stats and seconds of a rollout."""


class MovingPolicy:
    """The embedded policy on a straight line to other weights."""

    def __init__(self, to: str):
        self.model, self.tokenizer = load_tiny()
        self.sampling = SamplingParams(frozenset([self.tokenizer.eos_token_id]))
        self._start = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self._end = dict(load(to)[0].named_parameters()) if to else perturbed(self._start, DRIFT)

    @torch.no_grad()
    def move(self, share: float) -> None:
        for name, p in self.model.named_parameters():
            p.copy_(self._start[name].lerp(self._end[name], share))

    def engine(self, drafter) -> TransformersEngine:
        kind = HeadDrafter if isinstance(drafter, Head) else ModelDrafter
        drafting = Drafting(Budget(DRAFT_TOKENS), model=kind(drafter, self.sampling))
        return TransformersEngine(self.model, self.sampling, drafting=drafting)

    def drafter(self, directory: str) -> torch.nn.Module:
        """A head borrows layers of this policy."""
        return load_drafter(
            EngineSpec(eos_ids=self.sampling.eos_ids, rollout=RolloutConfig(drafter=directory)), self.model
        )

    def update(self, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
        """What an update computes of its rows: a forward and a backward pass over all of them."""
        rows = [torch.tensor([*prompt, *response]) for prompt, response in texts]
        ids = pad_sequence(rows, batch_first=True)
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        logits = self.model.train()(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
        logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0].mul(mask[:, 1:]).sum().backward()
        self.model.zero_grad(set_to_none=True)
        self.model.eval()


def main(drafters: str = "", to: str = "", steps: str = "8", out: str = "") -> None:
    torch.set_num_threads(1)
    policy, count = MovingPolicy(to), int(steps)
    prompts = [policy.tokenizer(p.prompt)["input_ids"] for p in arithmetic("train", PROMPTS * count, 0, "medium")]
    batches = [
        [
            Request(prompts[step * PROMPTS + i // GROUP], derive_key(0, "cotraining", i, step), CAP)
            for i in range(PROMPTS * GROUP)
        ]
        for step in range(count)
    ]
    initial = {Path(path).name: policy.drafter(path) for path in drafters.strip("[]").split(",") if path}
    initial["copied layers"] = shortened(policy.model, 2)
    cases = []
    for name, model in initial.items():
        for variant, options in VARIANTS.items():
            lines = follow(policy, model, batches, DrafterConfig(**SHARED | options))
            show(f"{name}, {variant}", lines)
            cases.append({"drafter": name, "variant": variant, "steps": lines})
    if out:
        about = {"to": Path(to).name or f"noise {DRIFT}", "rows": PROMPTS * GROUP, "cap": CAP, "settings": SHARED}
        Path(out).write_text(json.dumps({**about, "cases": cases}, indent=2) + "\n", encoding="utf-8")


def rollout(engine: TransformersEngine, batch: Sequence[Request]) -> Done:
    began = time.process_time()
    done, stats = engine.generate(batch)
    return done, stats, time.process_time() - began


def follow(policy: MovingPolicy, drafter, batches: Sequence[Sequence[Request]], options: DrafterConfig) -> list[dict]:
    """One line per step of a policy that moves, with rollouts of the frozen and of the co-trained drafter."""
    policy.move(0.0)
    moving = copy.deepcopy(drafter)
    trainer = DrafterTrainer(moving, policy.model, options, policy.sampling)
    still = DrafterTrainer(drafter, policy.model, replace(options, learning_rate=0.0), policy.sampling)
    frozen, trained = policy.engine(drafter), policy.engine(moving)
    lines = []
    for version, batch in enumerate(batches):
        policy.move(version / max(1, len(batches) - 1))
        before, _, before_s = rollout(frozen, batch)
        done, _, seconds = rollout(trained, batch)
        if [c.tokens for c in done] != [c.tokens for c in before]:
            raise SystemExit("the two drafters gave different texts; the comparison means nothing")
        texts = [(request.prompt, c.tokens) for request, c in zip(batch, done, strict=True)]
        took = {}
        trainer.observe(texts)
        still.observe(texts)
        for name, part in {"update_s": lambda texts=texts: policy.update(texts), "cost_s": trainer.step}.items():
            began = time.process_time()
            metrics = part()
            took[name] = time.process_time() - began
        line = {
            "frozen_agreement": still.step()["drafter/agreement"],
            "agreement": metrics["drafter/agreement"],
            "frozen_passes": fmean(c.passes for c in before),
            "passes": fmean(c.passes for c in done),
            "saved_s": before_s - seconds,
            "gen_s": seconds,
            **took,
            "tokens": metrics["drafter/tokens"],
        }
        lines.append({key: round(value, 4) for key, value in line.items()})
    return lines


def show(title: str, lines: Sequence[dict]) -> None:
    print(title)
    for step, line in enumerate(lines):
        if step % 4 == 0 or step == len(lines) - 1:
            print(f"  step {step:2}  {summary([line])}")
    print(f"  second half  {summary(lines[len(lines) // 2 :])}", flush=True)


def summary(lines: Sequence[dict]) -> str:
    mean = {key: fmean(line[key] for line in lines) for key in lines[0]}
    return (
        f"agreement {mean['frozen_agreement']:.3f} frozen, {mean['agreement']:.3f} co-trained; "
        f"passes a row {mean['frozen_passes']:.1f}, {mean['passes']:.1f}; "
        f"cost {mean['cost_s']:.3f} s ({mean['cost_s'] / mean['update_s']:.1%} of an update, "
        f"{mean['tokens']:.0f} tokens), saved {mean['saved_s']:.2f} of {mean['gen_s'] + mean['saved_s']:.2f} s"
    )


if __name__ == "__main__":
    main(**dict(word.split("=", 1) for word in sys.argv[1:]))
