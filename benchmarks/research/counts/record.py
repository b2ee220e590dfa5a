"""Recorded texts of the embedded policy, a draft model, and what a way of drafting is worth on the simulated GPU."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel

from benchmarks.research import drafter_costs as costs
from benchmarks.research.budget import MACHINES
from benchmarks.research.drafter_walks import Cost, Grid, Plan, Way, planned, seconds, walk
from specrl.drafter import DrafterOptions, distil, sample, shortened
from specrl.run.tasks import arithmetic
from specrl.tiny import load, load_tiny
from specrl.trainers.cotraining.texts import Text

LEARNT, HELD_OUT = 192, 128  # responses to learn from, and to replay
CAP = 256  # tokens of a response
SIZES = (1, 8, 64)  # rows of a batch
STEPS = 150  # of the draft model, on 16 responses
MACHINE = "gpu"
FREE = costs.Pass(0.0, 0.0, 0.0)
ONE_LAYER = costs.on_gpu(1)


@dataclass
class Record:
    """The policy's texts with their keys. Args: work: keeps texts and draft models for the next script."""

    work: Path | None = None

    def __post_init__(self) -> None:
        self.policy, self.tokenizer = load_tiny()
        self.learnt, _ = self._texts("train", LEARNT, 0)
        self.texts, self.keys = self._texts("test", HELD_OUT, 0)

    @cached_property
    def stored(self) -> list[Text]:
        """Another response to each held-out prompt, as an epoch before would have left it."""
        return self._texts("test", HELD_OUT, 1)[0]

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(text.response) for text in self.texts])

    def _texts(self, split: str, count: int, seed: int) -> tuple[list[Text], list[int]]:
        file = self.work and self.work / f"texts-{split}-{count}-{seed}.json"
        if file and file.exists():
            kept = json.loads(file.read_text(encoding="utf-8"))
            return [Text(tuple(prompt), tuple(response)) for prompt, response in kept["texts"]], kept["keys"]
        prompts = [tuple(self.tokenizer(p.prompt)["input_ids"]) for p in arithmetic(split, count, 0, "mixed")]
        end = frozenset([self.tokenizer.eos_token_id])
        texts, keys = sample(self.policy, end, prompts, DrafterOptions(seed=seed))
        if file:
            file.parent.mkdir(parents=True, exist_ok=True)
            kept = {"texts": [(text.prompt, text.response) for text in texts], "keys": keys}
            file.write_text(json.dumps(kept), encoding="utf-8")
        return texts, keys

    @cached_property
    def chain(self) -> PreTrainedModel:
        """A draft model of one layer, distilled on the texts to learn from."""
        folder = self.work and self.work / f"chain-{STEPS}"
        if folder and folder.exists():
            return load(folder)[0]
        model = shortened(self.policy, 1)
        distil(self.policy, model, self.learnt, DrafterOptions(steps=STEPS))
        if folder:
            model.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)
        return model.eval()

    def best(self, plans: Iterable[tuple[Mapping, Plan]], cost: Cost = FREE, at_once: bool = False) -> dict[str, dict]:
        """For each size of a batch the highest speed over plain decoding, with the settings and tokens a pass of it.

        Args: plans: settings and what they do; "most" is the number of tokens of a draft; cost: of a pass of the
            drafter; at_once: one such pass gives the whole draft.
        """
        prompts = np.array([len(text.prompt) for text in self.texts])
        policy = costs.Pass(*MACHINES[MACHINE])
        nothing = np.zeros((len(prompts), self.lengths.max() + 1), int)
        alone = walk(Plan(nothing, nothing, nothing), self.lengths)
        sizes = [size for size in SIZES if len(prompts) % size == 0]
        way = Way("", None, cost, at_once)
        plain = {size: seconds(alone, prompts, size, policy, way, 0) for size in sizes}
        found: dict[str, dict] = {f"{size} rows": {"speedup": 0.0} for size in sizes}
        for settings, plan in plans:
            passes = walk(plan, self.lengths)
            tokens = self.lengths.sum() / passes["alive"].sum()
            for size in sizes:
                speedup = plain[size] / seconds(passes, prompts, size, policy, way, settings["most"])
                if speedup > found[f"{size} rows"]["speedup"]:
                    line = {"speedup": round(float(speedup), 4), "tokens a pass": round(float(tokens), 4), **settings}
                    found[f"{size} rows"] = line
        return found


def plans_of(
    grid: Grid, mosts: Sequence[int] = (1, 2, 4, 8, 16), doubts: Sequence[float] = (0.0, 0.2, 0.4, 0.6, 0.8)
) -> Iterable[tuple[dict, Plan]]:
    """Drafts of each length, ended at each estimated probability."""
    for most in (most for most in mosts if most <= grid.accepted.shape[-1]):
        for doubt in doubts:
            yield {"most": most, "doubt": doubt}, planned(grid, most, doubt)
