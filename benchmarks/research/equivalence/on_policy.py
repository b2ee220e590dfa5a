"""On-policy identity in the real trainers: what the rollout recorded is what the weights that are trained say.

GRPO (TRL's trainer) and PPO train the embedded policy for a few steps. Before each update every response is scored
again by the model's own forward pass, alone and without padding, and compared with the log-probs the rollout recorded,
reused and new tokens separately. The control compares those that the visit before recorded for the same text.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch

import specrl.train
from specrl.config import load as cli
from specrl.rollout.types import Completion, RolloutBatch, Row
from specrl.rollout.verify import accept_exact
from specrl.trainers.rollouts import Rollouts

OPTIONS = {
    "data": "arithmetic:easy",
    "dataset.train_size": 8,
    "rollout.group_size": 4,
    "rollout.max_new_tokens": 100,
    "rollout.replay": 0.5,
    "rollout.measure_every": 0,
    "rollout.draft_tokens": 16,
    "trainer.epochs": 3,
    "trainer.prompts_per_step": 4,
    "trainer.learning_rate": 2e-4,
    "trainer.eval_prompts": 0,
    "report.plots": "false",
}
LOGGED = {"logged": "sampling/sampling_logp_difference/max", "clipped": "clip_ratio/region_mean"}


class Identity:
    """Largest distances in nats, and the tokens they were taken over."""

    def __init__(self):
        self.largest = {"reused": 0.0, "new": 0.0, "stored": 0.0}
        self.tokens = dict.fromkeys(self.largest, 0)
        self._stored: dict[tuple[str, int], Completion] = {}

    def see(self, rows: Sequence[Row], batch: RolloutBatch, model: torch.nn.Module) -> None:
        """Compares a batch with the weights it was drawn from, before they are updated."""
        for row, sample_index, done in zip(rows, batch.sample_indices, batch.completions, strict=True):
            logp = score(model, row.prompt, done.tokens)
            before = self._stored.get((row.example_id, sample_index))
            for reused, recorded, ours in zip(done.reused, done.logprobs, logp, strict=True):
                self._note("reused" if reused else "new", recorded - ours)
            for i in range(accept_exact(done.tokens, before.tokens) if before else 0):
                self._note("stored", before.logprobs[i] - logp[i])
            self._stored[row.example_id, sample_index] = done

    def _note(self, name: str, distance: float) -> None:
        self.largest[name] = max(self.largest[name], abs(distance))
        self.tokens[name] += 1


@torch.no_grad()
def score(model: torch.nn.Module, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
    """Log-prob of each response token at temperature 1, by the model's own forward pass."""
    ids = torch.tensor([[*prompt, *tokens]])
    logprobs = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return logprobs.gather(-1, ids[0, len(prompt) :, None])[:, 0].tolist()


@contextmanager
def watched() -> Iterator[Identity]:
    """Shows every rollout batch of the runs inside to an Identity, before the update."""
    identity, finish = Identity(), Rollouts.finish

    def spy(rollouts: Rollouts) -> dict[str, float]:
        identity.see(rollouts.sampled_batch.rows, rollouts.sampled_batch.batch, rollouts.engine.model)
        return finish(rollouts)

    with mock.patch.object(Rollouts, "finish", spy):
        yield identity


def measure(algorithm: str) -> dict[str, float]:
    """Trains by `config=grpo_math` or `ppo_math`, small: largest distances, tokens, and what the trainer logged."""
    with tempfile.TemporaryDirectory() as folder, watched() as identity:
        words = {"config": f"{algorithm}_math", "name": "run", "output_dir": folder, **OPTIONS}
        specrl.train.main(cli.load([f"{key}={value}" for key, value in words.items()]))
        lines = map(json.loads, (Path(folder) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
        steps = [line for line in lines if LOGGED["clipped"] in line]
    logged = {name: max(step[key] for step in steps) for name, key in LOGGED.items()}
    return identity.largest | {f"{name}_tokens": n for name, n in identity.tokens.items()} | logged
