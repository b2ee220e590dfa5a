"""What a draft model adds: `python benchmarks/drafters.py [drafter=DIR] [rows=8,32,64] [repeats=5] [out=FILE.json]`.

Rollouts of the embedded policy with the same rows and keys, in turn: plain, with old trajectories only, and with old
trajectories and a draft model (the policy's own first layers, or one that `python -m specrl.drafter` made). In the
first epoch there are no old trajectories; later ones were written by the policy with noise on its weights. Every text
is compared with plain decoding's. Run it on a quiet machine.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from rollout.drafters.model import early_exit
from rollout.drafters.suffix import PromptTexts, SuffixDrafter
from rollout.engines.base import Sampling
from rollout.engines.transformers import TransformersEngine
from rollout.noise import derive_key
from rollout.types import Request
from specrl.bench import perturbed
from specrl.tasks import arithmetic
from specrl.tiny import load_tiny

GROUP, CAP, EXIT_LAYERS = 8, 256, 2
DRIFTS = {"first epoch": None, "heavy drift 0.1": 0.1, "heavy drift 0.05": 0.05, "drift 0.02": 0.02}
COLUMNS = ("method", "reused", "own", "model", "passes", "slowest", "draft s", "s", "speedup")


def main(drafter: str = "", rows: str = "8,32,64", repeats: str = "5", out: str = "") -> None:
    model, tokenizer = load_tiny()
    sampling = Sampling(frozenset([tokenizer.eos_token_id]))
    models = {"plain": None, "old texts": None, f"+ early exit {EXIT_LAYERS}": early_exit(model, EXIT_LAYERS)}
    if drafter:
        distilled = AutoModelForCausalLM.from_pretrained(drafter, dtype=torch.float32, local_files_only=True)
        models[f"+ distilled {distilled.config.num_hidden_layers}"] = distilled.eval()
    found = []
    for count in map(int, rows.split(",")):
        prompts = [tokenizer(p.prompt)["input_ids"] for p in arithmetic("test", count // GROUP, 0, "medium")]
        for regime, drift in DRIFTS.items():
            engines = {name: TransformersEngine(model, sampling, drafter=small) for name, small in models.items()}
            if drift is None:
                del engines["old texts"]
            old = None if drift is None else old_texts(model, engines["plain"], prompts, drift)
            lines = compare(engines, prompts, old, int(repeats))
            show(f"{count} rows, {regime}", lines)
            found += [{"rows": count, "regime": regime, **line} for line in lines]
    if out:
        where = f"CPU, {torch.get_num_threads()} threads"
        Path(out).write_text(json.dumps({"device": where, "cases": found}, indent=2) + "\n", encoding="utf-8")


def requests(prompts: list, visit: int, old: list | None) -> list[Request]:
    """The rows of one rollout, GROUP of each prompt; each drafts from its own old text and those of its siblings."""
    made = [Request(prompts[i // GROUP], derive_key(0, "drafters", i, visit), CAP) for i in range(GROUP * len(prompts))]
    groups = [PromptTexts(old[i : i + GROUP]) for i in range(0, len(made), GROUP)] if old else []
    for i, request in enumerate(made if old else []):
        request.drafter = SuffixDrafter(groups[i // GROUP], old[i])
    return made


def old_texts(model, engine: TransformersEngine, prompts: list, drift: float) -> list[list[int]]:
    """What the policy with noise on its weights wrote in the epoch before."""
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    load(model, perturbed(weights, drift))
    done, _ = engine.generate(requests(prompts, 0, None))
    load(model, weights)
    return [c.tokens for c in done]


def load(model, weights: dict) -> None:
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(weights[name])


def compare(engines: dict[str, TransformersEngine], prompts: list, old: list | None, repeats: int) -> list[dict]:
    """One line per engine: counts of the last rollout, medians of seconds and of the ratios to plain in each turn."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    lines: dict[str, dict] = {}
    for visit in range(1, repeats + 2):
        texts = None
        for name, engine in engines.items():
            batch = requests(prompts, visit, None if name == "plain" else old)
            began = time.perf_counter()
            done, stats = engine.generate(batch)
            seconds[name].append(time.perf_counter() - began)
            texts = texts or [c.tokens for c in done]
            if [c.tokens for c in done] != texts:
                raise SystemExit(f"{name} sampled other tokens than plain decoding; the comparison means nothing")
            model = stats.sources.get("model", (0, 0))
            lines[name] = {
                "method": name,
                "reused": sum(sum(c.reused) for c in done) / sum(map(len, texts)),
                "own": [stats.drafted - model[0], stats.accepted - model[1]],
                "model": model,
                "passes": sum(c.passes for c in done) / len(done),
                "slowest": max(c.passes for c in done),
                "draft_s": stats.draft_s,
            }
    for name, line in lines.items():
        timed = list(zip(seconds["plain"], seconds[name], strict=True))[1:]  # the first warms up
        line["seconds"] = statistics.median(s for _, s in timed)
        line["speedup"] = statistics.median(plain / s for plain, s in timed)
    return list(lines.values())


def show(title: str, lines: list[dict]) -> None:
    table = Table(title=title)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "method" else "right")
    for line in lines:
        own, model = (f"{accepted}/{drafted}" for drafted, accepted in (line["own"], line["model"]))
        table.add_row(
            line["method"],
            f"{line['reused']:.0%}",
            own,
            model,
            f"{line['passes']:.1f}",
            f"{line['slowest']}",
            f"{line['draft_s']:.3f}",
            f"{line['seconds']:.3f}",
            f"{line['speedup']:.2f}x",
        )
    Console().print(table)


if __name__ == "__main__":
    main(**dict(word.split("=", 1) for word in sys.argv[1:]))
