"""Does co-training keep a drafter close to a moving policy? `python benchmarks/cotraining.py [OUT.json] [steps] [TO]`

The embedded policy moves in equal steps to the policy in the directory TO, such as one that a run has trained, or else
to itself with noise on its matrices. Its rollouts are sampled once; then every loss and selection follows the same
texts with a drafter of the policy's first two layers, and is measured on each rollout before it learns from it. Two
initial drafters: those layers as they are, and distilled on texts of the initial policy.

Saved seconds are estimated: plain decoding's seconds times the share of passes that the gain in agreement saves, with
passes of equal cost and free drafts.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from rollout.engines.base import Sampling
from rollout.engines.transformers import TransformersEngine
from rollout.noise import derive_key, keyed_draw
from rollout.types import Request
from specrl.bench import perturbed
from specrl.tasks import arithmetic
from specrl.tiny import load, load_tiny
from trainers.drafter import DrafterConfig, DrafterTrainer, Text, response_logits, tokens_per_pass

PROMPTS, GROUP, CAP = 4, 8, 200  # a step of config=grpo_math
LAYERS, DISTILL_STEPS, DRIFT = 2, 40, 0.4
SHARED = {"learning_rate": 3e-4, "updates": 4, "tokens_per_update": 1024, "measure_tokens": 2048, "patience": 0}
DISTILL = {"loss": "tvd", "learning_rate": 1e-3}
VARIANTS = {
    "forward_kl": {"loss": "forward_kl"},
    "reverse_kl": {"loss": "reverse_kl"},
    "mixed": {"loss": "mixed"},
    "tvd": {"loss": "tvd"},
    "tvd, errors": {"loss": "tvd", "select": "errors"},
    "tvd, adaspec ema": {"loss": "tvd", "select": "adaspec", "reference": "ema"},
    "tvd, 1 update": {"loss": "tvd", "updates": 1},
    "tvd, rate 1e-3": {"loss": "tvd", "learning_rate": 1e-3},
}


@dataclass(frozen=True)
class Rollout:
    """Rows (prompt ids, response ids) of one step, their noise keys, and the seconds of plain decoding."""

    rows: list[tuple[list[int], list[int]]]
    keys: list[int]
    plain_s: float


class MovingPolicy:
    """The embedded policy on a straight line to other weights."""

    def __init__(self, to: str):
        self.model, self.tokenizer = load_tiny()
        self._start = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self._end = dict(load(to)[0].named_parameters()) if to else perturbed(self._start, DRIFT)
        self.engine = TransformersEngine(self.model, Sampling(frozenset([self.tokenizer.eos_token_id])))

    @torch.no_grad()
    def move(self, share: float) -> None:
        for name, p in self.model.named_parameters():
            p.copy_(self._start[name].lerp(self._end[name], share))

    def rollout(self, prompts: Sequence[list[int]], visit: int) -> Rollout:
        keys = [derive_key(0, "cotraining", i, visit) for i in range(len(prompts) * GROUP)]
        requests = [Request(prompts[i // GROUP], key, CAP) for i, key in enumerate(keys)]
        began = time.perf_counter()
        done, _ = self.engine.generate(requests)
        plain_s = time.perf_counter() - began
        return Rollout([(r.prompt, c.tokens) for r, c in zip(requests, done, strict=True)], keys, plain_s)


def main(out: str = "", steps: int = 20, to: str = "") -> None:
    torch.set_num_threads(1)
    policy = MovingPolicy(to)
    ids = [
        policy.tokenizer(p.prompt)["input_ids"]
        for p in arithmetic("train", PROMPTS * (steps + DISTILL_STEPS), 0, "medium")
    ]
    batches = [ids[i : i + PROMPTS] for i in range(0, len(ids), PROMPTS)]
    shares = [0.0] * DISTILL_STEPS + [i / max(1, steps - 1) for i in range(steps)]
    rollouts = []
    for visit, (prompts, share) in enumerate(zip(batches, shares, strict=True)):
        policy.move(share)
        rollouts.append(policy.rollout(prompts, visit))
    first, moving = rollouts[:DISTILL_STEPS], list(zip(shares[DISTILL_STEPS:], rollouts[DISTILL_STEPS:], strict=True))
    policy.move(0.0)
    layers = truncated(policy.model, LAYERS)
    distilled = copy.deepcopy(layers)
    began = time.perf_counter()
    follow(policy, distilled, [(0.0, rollout) for rollout in first], DISTILL)
    print(f"distilled on {DISTILL_STEPS} rollouts in {time.perf_counter() - began:.1f} s")
    cases = []
    for start, drafter in (("distilled", distilled), ("layers", layers)):
        for name, options in VARIANTS.items():
            case = {"drafter": start, "variant": name, **follow(policy, copy.deepcopy(drafter), moving, options)}
            cases.append(case)
            show(case)
    if out:
        about = {"steps": steps, "to": Path(to).name or f"noise {DRIFT}", "rows": PROMPTS * GROUP, "settings": SHARED}
        Path(out).write_text(json.dumps({**about, "cases": cases}, indent=2) + "\n", encoding="utf-8")


def truncated(policy: PreTrainedModel, layers: int) -> PreTrainedModel:
    """The policy's first layers with its norm and head, copied."""
    config = copy.deepcopy(policy.config)
    config.num_hidden_layers, config.layer_types = layers, config.layer_types[:layers]
    drafter = AutoModelForCausalLM.from_config(config)
    drafter.load_state_dict({name: w for name, w in policy.state_dict().items() if name in drafter.state_dict()})
    return drafter


def follow(policy: MovingPolicy, drafter, rollouts: Sequence[tuple[float, Rollout]], options: dict) -> dict:
    """Co-trains along the rollouts, each given with the policy's place; lists have one entry per step."""
    trainer = DrafterTrainer(drafter, policy.model, DrafterConfig(**SHARED | options))
    found = {"initial": [], "trained": [], "overlap": [], "seconds": [], "teacher_s": [], "saved_s": []}
    for version, (share, rollout) in enumerate(rollouts):
        policy.move(share)
        errors = [()] * len(rollout.rows)
        if trainer.options.select == "errors":
            errors = [rejections(trainer.drafter, *row) for row in zip(rollout.rows, rollout.keys, strict=True)]
        trainer.observe(rollout.rows, errors, version)
        metrics = trainer.step()
        found["initial"].append(metrics["drafter/agreement_initial"])
        found["trained"].append(metrics["drafter/agreement"])
        found["overlap"].append(metrics["drafter/overlap"])
        found["seconds"].append(metrics["timing_s/drafter"])
        found["teacher_s"].append(metrics["timing_s/drafter_teacher"])
        before, now = (
            1 / tokens_per_pass(metrics[f"drafter/{name}"], trainer.options.draft_tokens)
            for name in ("agreement_initial", "agreement")
        )
        found["saved_s"].append(rollout.plain_s * (before - now))
    return found


@torch.no_grad()
def rejections(drafter, row: tuple[list[int], list[int]], key: int) -> list[int]:
    """Response positions where the drafter's keyed draw is not the policy's."""
    prompt, response = row
    logits = response_logits(drafter, [Text(tuple(prompt), tuple(response), (), 0)])
    draws = keyed_draw(logits, torch.full((len(response),), key), torch.arange(len(response)))[0]
    return (draws != torch.tensor(response)).nonzero()[:, 0].tolist()


def show(case: dict) -> None:
    for step in range(0, len(case["trained"]), 5):
        values = {name: case[name][step] for name in ("initial", "trained", "overlap")}
        print(f"  step {step:2} " + "  ".join(f"{name} {value:.3f}" for name, value in values.items()))
    late = {name: fmean(case[name][len(case[name]) // 2 :]) for name in ("initial", "trained")}
    print(
        f"{case['drafter']}, {case['variant']}: second half {late['initial']:.3f} -> {late['trained']:.3f}, "
        f"{fmean(case['seconds']):.2f} s a step (teacher {fmean(case['teacher_s']):.2f}), "
        f"saves an estimated {fmean(case['saved_s']):.2f} s",
        flush=True,
    )


if __name__ == "__main__":
    main(*(int(a) if a.isdigit() else a for a in sys.argv[1:]))
