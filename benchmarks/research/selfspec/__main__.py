"""Ways of drafting that are not built, and what they would bring.

    python -m benchmarks.research.selfspec [drafter=DIR] out=FILE

The embedded policy writes texts with keyed noise; a way of drafting is judged by how often its draws with the same
noise are the policy's tokens, given the policy's text before them. All figures are counts, or follow from counts and
the costs of simulated machines, so the speed of the machine does not matter.

- layers: every subset of the policy's layers as its draft model (Kangaroo, SWIFT, DEL)
- sparse: the policy drafts on part of its own KV cache (SparseSpec, SpecPV, RAPID)
- overlap: drafting during verification instead of before it (PEARL, Mirror-SD, EasySpec)
- places: of several equally long matches, the most recent or the most frequent continuation (SAM decoding)
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.research.selfspec import layers, overlap, places, sparse
from specrl.config import load as cli
from specrl.rollout.sections import doc
from specrl.tiny import load, load_tiny

SECTIONS = ("layers", "sparse", "overlap", "places")


@dataclass
class SelfSpecConfig:
    texts: int = doc(64, "texts of the policy; a quarter of them for sparse and for sets of half layers", low=8)
    drafter: str = doc(
        "", "draft model: beside the layers, and to overlap; empty overlaps the policy's first two layers"
    )
    sections: list[str] = field(default_factory=lambda: [*SECTIONS], metadata={"help": f"of {', '.join(SECTIONS)}"})
    out: str = doc("", "write the figures to this JSON file")


def main(options: SelfSpecConfig) -> int:
    if unknown := [name for name in options.sections if name not in SECTIONS]:
        raise cli.ConfigError(f"sections={unknown[0]} is none of {', '.join(SECTIONS)}.")
    torch.set_num_threads(1)
    policy, tokenizer = load_tiny()
    console = Console(width=110)
    result = {"options": asdict(options) | {name: Path(getattr(options, name)).name for name in ("drafter", "out")}}
    draft_model = load(options.drafter)[0] if options.drafter else None
    if "layers" in options.sections:
        result["layers"] = layers.measure(policy, tokenizer, draft_model, options.texts, console)
    if "sparse" in options.sections:
        result["sparse"] = sparse.measure(policy, tokenizer, options.texts // 4, console)
    if "overlap" in options.sections:
        result["overlap"] = overlap.measure(policy, tokenizer, draft_model, options.texts, console)
    if "places" in options.sections:
        result["places"] = places.measure(policy, tokenizer, options.texts, console)
    if options.out:
        Path(options.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(cli.run(main, schema=SelfSpecConfig))
