"""Cheaper drafters compared with a chain of a one-layer draft model.

    OMP_NUM_THREADS=1 python -m benchmarks.research.drafters out=FILE [gsm8k=DIR tokenizer=DIR]

Compared are parallel drafting, a trimmed output layer, and a quantised copy of the policy. All of them draft the same
held-out texts of the embedded policy with the noise that sampled them, so it is known at every position and depth
whether a draft is accepted. Rollouts are then replayed pass by pass: rows carry k drafts, or fewer where the drafter is
unsure, and continue after the first mismatch. Passes cost what they do on the simulated machines of
`benchmarks.research.budget`, and on one measured here: one thread, a policy of the width, depth and vocabulary of
Qwen2.5-0.5B (matrices, output layer and draw, without attention). Each method gets its best k and confidence threshold
in each cell. The tokens that a trimmed output layer cannot draw are counted on answers of GSM8K.
"""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel

from benchmarks.research import drafter_costs as costs
from benchmarks.research.budget import MACHINES
from benchmarks.research.drafter_walks import Cost, Grid, Way, chain_grid, masked_grid, planned, seconds, walk
from benchmarks.research.int8_copy import int8_copy
from benchmarks.research.mask_drafter import MaskDrafter
from benchmarks.research.mask_drafter import distil as distil_masks
from specrl.config import load as cli
from specrl.drafter import DrafterOptions, distil, quantise, sample, shortened
from specrl.rollout.sections import doc
from specrl.run.tasks import arithmetic
from specrl.tiny import load_tiny
from specrl.trainers.cotraining.texts import Text

DEPTHS, DOUBTS = (1, 2, 3, 4, 6, 8, 12, 16), (0.0, 0.2, 0.4, 0.6, 0.8)  # tried in each cell
SIZES = (1, 8, 64, 256)
MASKED = 8  # texts in a step of the parallel drafter: with their masks about as many positions as the chain's 16
CHAINS = {"chain": 1, "chain, 3 layers": 3}
PARALLEL = {"parallel": 1, "parallel, 3 layers": 3}
QUANTISED = {"int8": 8, "int4": 4, "int3": 4, "int4, less a tenth": 4}
"""Bits that a copy of the policy is charged for on the gpu: the last two are 4-bit copies that agree less."""
SAID = ("steps", "prompts", "rows", "depth", "gsm8k", "tokenizer")  # options that figures depend on
KEPT = 32_768  # ids of a trimmed head where no texts were counted


@dataclass
class DraftersConfig:
    steps: int = doc(700, "optimiser steps of each draft model", low=1)
    prompts: int = doc(768, "prompts that they learn from", low=8)
    rows: int = doc(256, "held-out responses", low=1)
    depth: int = doc(8, "drafts of a parallel pass", low=2, high=16)
    gsm8k: str = doc("", "directory of GSM8K's train.jsonl and test.jsonl; empty leaves the count of its tokens out")
    tokenizer: str = doc("", "directory of a tokenizer for them; empty takes words, digits and marks")
    out: str = doc("", "write the figures to this JSON file")


def main(options: DraftersConfig) -> int:
    torch.set_num_threads(1)
    policy, _ = load_tiny()
    learnt, held_out = texts(policy, options)
    models = draft_models(policy, learnt[0], options)
    grids = {
        name: (masked_grid if name in PARALLEL else chain_grid)(model, *held_out) for name, model in models.items()
    }
    grids["int8, inputs too"] = chain_grid(int8_copy(policy), *held_out)
    for bits in (8, 4, 3):
        model = copy.deepcopy(policy)
        quantise(model, bits)
        grids[f"int{bits}"] = chain_grid(model, *held_out)
    grids["int4, less a tenth"] = grids["int4"].blinded(0.1)
    result = {"options": described(options), "agreement": {name: grid.by_depth() for name, grid in grids.items()}}
    whole = {"ids": KEPT, "blind": 0.0}
    if options.gsm8k:
        result["vocabulary"] = vocabulary(options.gsm8k, options.tokenizer)
        whole = result["vocabulary"]["lists"][-1]
    measured = costs.parts(whole["ids"])
    result["measured_ms"] = {"tokens": costs.TOKENS, **measured}
    blinded = {name: grid.blinded(whole["blind"]) for name, grid in grids.items()}
    every = machines(policy, grids, blinded, measured)
    result["drafter_ms"] = {name: {way.name: asdict(way.cost) for way in ways} for name, (_, ways) in every.items()}
    result["cells"] = [cell for name, (plain, ways) in every.items() for cell in cells(name, ways, plain, held_out[0])]
    show(result)
    if options.out:
        Path(options.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


def described(options: DraftersConfig) -> dict:
    """The options without paths."""
    return {key: Path(v).name if isinstance(v := getattr(options, key), str) else v for key in SAID}


def texts(policy: PreTrainedModel, options: DraftersConfig) -> list[tuple[list[Text], list[int]]]:
    """The policy's responses to learn from and the held-out ones, with the keys that drew them."""
    tokenizer, made = load_tiny()[1], []
    for split, rows in (("train", options.prompts), ("test", options.rows)):
        prompts = [tuple(tokenizer(p.prompt)["input_ids"]) for p in arithmetic(split, rows, 0, "mixed")]
        end = frozenset([tokenizer.eos_token_id])
        made.append(sample(policy, end, prompts, DrafterOptions()))
    return made


def draft_models(policy: PreTrainedModel, learnt: Sequence[Text], options: DraftersConfig) -> dict[str, nn.Module]:
    """The chains and the parallel drafters, learnt alike."""
    recipe = DrafterOptions(steps=options.steps)
    made: dict[str, nn.Module] = {}
    for name, layers in CHAINS.items():
        made[name] = shortened(policy, layers)
        distil(policy, made[name], learnt, recipe)
    recipe = replace(recipe, batch=MASKED)
    for name, layers in PARALLEL.items():
        made[name] = MaskDrafter(shortened(policy, layers), options.depth)
        distil_masks(policy, made[name], learnt, recipe)
    return {name: model.eval() for name, model in made.items()}


def machines(
    policy: PreTrainedModel, grids: dict[str, Grid], blinded: dict[str, Grid], measured: dict
) -> dict[str, tuple[Cost, list[Way]]]:
    """What a plain pass costs on each machine, and every way of drafting there.

    Args: blinded: of drafters whose heads are trimmed; measured: of `drafter_costs.parts`.
    """
    cpu, gpu, half = [], [], []
    for name, layers in (CHAINS | PARALLEL).items():
        cpu.append(Way(name, grids[name], costs.on_cpu(policy, shortened(policy, layers)), name in PARALLEL))
    cpu.append(Way("copy in int8", grids["int8, inputs too"], costs.on_cpu(policy, int8_copy(policy))))
    for end, seen, trimmed in (("", grids, False), (", trimmed", blinded, True)):
        for name, layers in (CHAINS | PARALLEL).items():
            gpu.append(Way(name + end, seen[name], costs.on_gpu(layers, trimmed=trimmed), name in PARALLEL))
            price = costs.on_half_billion(measured, layers, trimmed=trimmed)
            half.append(Way(name + end, seen[name], price, name in PARALLEL))
        for name, bits in QUANTISED.items():
            price = costs.on_gpu(costs.LAYERS, bits, trimmed)
            gpu.append(Way(f"copy in {name}{end}", seen[name], price))
        price = costs.on_half_billion(measured, costs.DEPTH, small=True, trimmed=trimmed)
        half.append(Way(f"copy in int8{end}", seen["int8, inputs too"], price))
    plain = {name: costs.Pass(*MACHINES[name]) for name in ("cpu", "gpu")}
    whole = costs.on_half_billion(measured, costs.DEPTH)
    return {"cpu": (plain["cpu"], cpu), "gpu": (plain["gpu"], gpu), "cpu 0.5B": (whole, half)}


def cells(machine: str, ways: Sequence[Way], policy: Cost, texts: Sequence[Text]) -> Iterator[dict]:
    """Of each size: every way's best speedup over plain decoding, with the drafts and doubt that give it."""
    prompts = np.array([len(text.prompt) for text in texts])
    sizes = [size for size in SIZES if len(texts) % size == 0]
    alone = walk(planned(ways[0].grid, 0, 0.0), ways[0].grid.lengths)
    plain = {size: seconds(alone, prompts, size, policy, ways[0], 0) for size in sizes}
    found: dict[tuple[int, str], dict] = {}
    for way in ways:
        depths = [k for k in DEPTHS if k <= way.grid.accepted.shape[-1]]
        for most, doubt in product(depths, DOUBTS):
            passes = walk(planned(way.grid, most, doubt), way.grid.lengths)
            each = float(way.grid.lengths.sum() / passes["alive"].sum())
            for size in sizes:
                speedup = plain[size] / seconds(passes, prompts, size, policy, way, most)
                best = found.setdefault((size, way.name), {"speedup": 0.0})
                if speedup > best["speedup"]:
                    best |= {"speedup": round(speedup, 4), "k": most, "doubt": doubt, "tokens_per_pass": round(each, 3)}
    for size in sizes:
        yield {"machine": machine, "rows": size, "ways": {way.name: found[size, way.name] for way in ways}}


def vocabulary(directory: str, tokenizer: str) -> dict:
    """Token ids that answers of GSM8K use: lists from its first training answers, and how blind each is in its test."""
    known = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True) if tokenizer else None
    encode = (lambda text: known(text)["input_ids"]) if known else re.compile(r" ?[A-Za-z]+|\d|\s|[^\w\s]+").findall
    splits = {}
    for split in ("train", "test"):
        lines = (Path(directory) / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        splits[split] = [encode(json.loads(line)["answer"]) for line in lines]
    test, lists = Counter(token for answer in splits["test"] for token in answer), []
    for answers in (64, 512, 4096, len(splits["train"])):
        ids = {token for answer in splits["train"][:answers] for token in answer}
        blind = sum(n for token, n in test.items() if token not in ids) / test.total()
        lists.append({"answers": min(answers, len(splits["train"])), "ids": len(ids), "blind": round(blind, 5)})
    return {"of": len(known) if known else None, "test_tokens": test.total(), "lists": lists}


def show(result: dict) -> None:
    for name, found in result["agreement"].items():
        print(f"{name:14} given all before: {' '.join(f'{share:.3f}' for share in found['given'])}")
    for cell in result["cells"]:
        ways = (f"{name} {way['speedup']:.2f}x (k={way['k']})" for name, way in cell["ways"].items())
        print(f"{cell['machine']}, {cell['rows']} rows: {'; '.join(ways)}")


if __name__ == "__main__":
    raise SystemExit(cli.run(main, schema=DraftersConfig))
