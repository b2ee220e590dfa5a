"""Cost of the keyed draw compared with the output layer before it, at a real vocabulary.

    python benchmarks/research/noise.py [rows] [OUT.json]

On the same hidden states, in turn: the output layer alone, and the draw alone (noise of every token, log-softmax, the
two best scores), eager and compiled by torch.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import torch

from specrl.rollout.noise import keyed_sample

VOCABULARY = 151_936
HIDDEN = {"Qwen2.5-0.5B": 896, "Qwen2.5-1.5B": 1536, "Qwen2.5-3B": 2048, "Qwen2.5-7B": 3584}


def main(rows: int = 64, out: str = "") -> None:
    gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    keys, positions = torch.arange(rows, device=device) * 7919, torch.arange(rows, device=device)
    compiled = torch.compile(keyed_sample, dynamic=True)
    found = []
    with torch.inference_mode():
        for name, hidden in HIDDEN.items():
            head = torch.nn.Linear(hidden, VOCABULARY, bias=False, device=device, dtype=dtype)
            states = torch.randn(rows, hidden, device=device, dtype=dtype)
            logits = head(states)
            parts = {
                "head": lambda head=head, states=states: head(states),
                "draw": lambda logits=logits: keyed_sample(logits, keys, positions),
                "compiled draw": lambda logits=logits: compiled(logits, keys, positions),
            }
            seconds = {part: [] for part in parts}
            for i in range(8):
                for part, work in parts.items():
                    took = timed(work, gpu)
                    if i:
                        seconds[part].append(took)
            ms = {part: 1e3 * statistics.median(values) for part, values in seconds.items()}
            found.append({"model": name, "hidden": hidden, "rows": rows, **ms})
            ratio = ms["compiled draw"] / ms["head"]
            print(f"{name:14} " + "  ".join(f"{p} {t:7.2f} ms" for p, t in ms.items()) + f"  draw/head {ratio:.2f}")
    if out:
        where = torch.cuda.get_device_name() if gpu else f"CPU, {torch.get_num_threads()} threads"
        Path(out).write_text(json.dumps({"device": where, "cases": found}, indent=2) + "\n", encoding="utf-8")


def timed(work, gpu: bool) -> float:
    if gpu:
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    main(*(int(a) if a.isdigit() else a for a in sys.argv[1:]))
