"""A judge that follows its policy: mined anew from the old texts of a rollout before it judges them, and refit."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError

from rollout.durable import write_durably
from rollout.routers.judge import JudgeHead
from rollout.types import RolloutError, Row
from trainers.judge import Labels, fit_judge
from trainers.mining import Miner, while_followed

STATE = "judge.safetensors"
ROWS = 32  # of a rollout that are mined
MISMATCHES = 8  # tried in each
KEPT = 1024  # the latest labels are fitted to
RECALL = 0.99  # share of the important mismatches that the threshold must catch

Score = Callable[[Sequence[Row], Sequence[list[int]]], list[float | None]]


class JudgeRefit:
    """Refits a judge's head in place, every few rollouts, to labels of which the oldest are forgotten.

    Nothing random is drawn, so a resumed run is the undisturbed one.

    Args:
        judge: of the engine.
        miner: of the policy; it sees the weights as they are when it is called.
        score: total rewards of rows' responses.
        every: rollouts between two refits.
    """

    def __init__(self, judge: JudgeHead, miner: Miner, score: Score, every: int):
        self.judge, self._miner, self._score, self._every = judge, miner, score, every
        hidden = torch.zeros(0, len(judge.weight))
        self.labels = Labels(hidden, torch.zeros(0, dtype=torch.bool), torch.zeros(0, dtype=torch.long))
        self._rollouts = 0

    def step(self, rows: Sequence[Row], stored: Sequence[Sequence[int] | None]) -> dict[str, float]:
        """Mines and refits where that is due, before the rows are rolled out. Returns the metrics.

        Args: stored: the old text of each row, None where it has none.
        """
        self._rollouts += 1
        known = [(row, text) for row, text in zip(rows, stored, strict=True) if text is not None][:ROWS]
        if (self._rollouts - 1) % self._every or not known:
            return {}
        began = time.perf_counter()
        chosen = [row for row, _ in known]
        found = self._miner(
            [row.prompt for row in chosen],
            [zlib.crc32(row.example_id.encode()) for row in chosen],
            while_followed([text for _, text in known]),
            lambda some, texts: self._score([chosen[i] for i in some], texts),
            MISMATCHES,
        )
        self.labels = (self.labels + found).last(KEPT)
        metrics = {"judge/labels": len(self.labels), "judge/mismatches": len(found)}
        if fitted := fit_judge(self.labels, RECALL):
            device = self.judge.weight.device
            self.judge.weight, self.judge.bias = fitted.weight.to(device), fitted.bias
            self.judge.threshold = fitted.threshold
            metrics["judge/roc_auc"] = fitted.roc_auc
        if len(self.labels):
            metrics["judge/important_ratio"] = self.labels.important.float().mean().item()
        return metrics | {"timing_s/judge": time.perf_counter() - began}

    def save(self, directory: Path) -> None:
        """Writes the state after a step into a checkpoint's directory, whose marker makes it count."""
        directory.mkdir(parents=True, exist_ok=True)
        numbers = torch.tensor([self.judge.bias, self.judge.threshold, self._rollouts], dtype=torch.float64)
        labels = {"hidden": self.labels.hidden, "important": self.labels.important, "problem": self.labels.problem}
        tensors = {"weight": self.judge.weight.cpu(), "numbers": numbers} | labels
        write_durably(directory / STATE, safetensors.torch.save({k: v.contiguous() for k, v in tensors.items()}))

    def load(self, directory: Path) -> None:
        """Goes on from what `save` wrote.

        Raises:
            RolloutError: it is missing, damaged or another policy's; nothing was loaded.
        """
        try:
            found = safetensors.torch.load((directory / STATE).read_bytes())
            weight, (bias, threshold, rollouts) = found["weight"], found["numbers"].tolist()
            labels = Labels(found["hidden"], found["important"], found["problem"])
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise RolloutError(
                f"the judge's state in {directory} cannot be read: {error}. Resume from an older checkpoint"
            ) from error
        if weight.shape != self.judge.weight.shape:
            raise RolloutError(
                f"the judge's state in {directory} is of states of {len(weight)} numbers, the policy's have "
                f"{len(self.judge.weight)}. Resume with the policy that the run began with"
            )
        self.judge.weight = weight.to(self.judge.weight.device)
        self.judge.bias, self.judge.threshold = bias, threshold
        self.labels, self._rollouts = labels, int(rollouts)
