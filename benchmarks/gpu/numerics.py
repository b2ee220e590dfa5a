"""Phase 6: effects of rounding: tokens that differ between plain and drafted decoding, weight probes that complain."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu import model as models
from benchmarks.gpu.compare import differences
from benchmarks.gpu.run import Absent, Step
from benchmarks.gpu.sizes import Shape
from benchmarks.gpu.timing import Context
from specrl.rollout.config import RolloutConfig
from specrl.rollout.engines.base import Probe
from specrl.rollout.engines.local.engine import TransformersEngine
from specrl.rollout.types import Completion, RolloutError


def steps(context: Context) -> Iterator[Step]:
    sizes = context.sizes
    for name, shape, dtype in (("bf16", sizes.policy, torch.bfloat16), ("fp32", sizes.smaller, torch.float32)):
        bench = Numerics(context, shape, dtype)
        yield Step(f"{name}/policy", bench.prepare)
        if bench.policies is None:
            continue
        yield Step(f"{name}/against_off", bench.against_off)
        if dtype == torch.bfloat16:
            yield Step(f"{name}/probes", partial(bench.probes, as_float32=False))
            yield Step(f"{name}/probes_of_fp32_policy", partial(bench.probes, as_float32=True))
            yield Step(f"{name}/against_off_fp32_head", bench.against_off_fp32_head)
        del bench


class Float32Head(nn.Linear):
    """An output layer whose logits are float32 sums of the products of its coarser weights."""

    def forward(self, hidden: Tensor) -> Tensor:
        if hidden.device.type != "cuda":
            return F.linear(hidden.float(), self.weight.float())
        flat = torch.mm(hidden.flatten(0, -2), self.weight.T, out_dtype=torch.float32)
        return flat.view(*hidden.shape[:-1], -1)


class Numerics:
    """A policy and an older one in one type, and their texts."""

    def __init__(self, context: Context, shape: Shape, dtype: torch.dtype):
        self.context, self.shape, self.dtype, self.sizes = context, shape, dtype, context.sizes
        self.prompts = models.prompts(self.sizes)[: self.sizes.numeric_rows]
        self.policies: models.Policies | None = None

    def prepare(self) -> dict:
        self.model = models.build(self.shape, self.context.device, self.dtype)
        self.policies = models.policies(self.model, self.engine(), self.sizes)
        lengths = [self.sizes.numeric_tokens] * len(self.prompts)
        with self.policies.older():
            self.old = self.texts(models.plain(self.prompts, lengths, visit=0))
        self.asked = models.plain(self.prompts, lengths, visit=1)
        return {"accepted": round(self.policies.accepted, 4), "drift": round(self.policies.drift, 5)}

    def engine(self) -> TransformersEngine:
        limits = RolloutConfig(rows_per_batch=self.sizes.numeric_rows)
        return TransformersEngine(self.model, models.SAMPLING, limits=limits)

    def texts(self, requests: list) -> list[list[int]]:
        return [c.tokens for c in self.engine().generate(requests)[0]]

    def against_off(self) -> dict:
        """Exact decoding with drafts against plain decoding with the same noise; in float32 no row may differ."""
        plain, plain_stats = self.engine().generate(self.asked)
        done, stats = self.engine().generate(models.drafted(self.asked, self.old))
        self.plain: list[Completion] = plain
        result = differences(plain, done) | {"ties": plain_stats.ties + stats.ties, "passes": stats.passes}
        if self.dtype == torch.float32 and result["differing_rows"]:
            result["error"] = f"{result['differing_rows']} of {len(done)} rows differ in float32: none may"
        return result

    def against_off_fp32_head(self) -> dict:
        """The same with float32 logits. The output layer is left so."""
        head = self.model.get_output_embeddings()
        shape, kind = (head.in_features, head.out_features), head.weight.dtype
        wide = Float32Head(*shape, bias=False, device="meta", dtype=kind)
        wide.weight = head.weight
        self.model.set_output_embeddings(wide)
        return self.against_off()

    def probes(self, as_float32: bool) -> dict:
        """Weight probes of its texts that complain of the right weights, and of the older policy's.

        Args: as_float32: the trainer's policy is in float32, its weights being those of the engine.
        """
        try:
            from specrl.trainers.weights import probe
        except ImportError as error:
            raise Absent(f"specrl.trainers.weights: {error}") from None
        policy = copy.deepcopy(self.model).float() if as_float32 else self.model
        engine, dtype = self.engine(), self.dtype if as_float32 else None
        texts = [[*r.prompt[-8:], *c.tokens] for r, c in zip(self.asked, self.plain, strict=True)][: self.sizes.probes]
        made = [probe(policy, text, dtype) for text in texts]
        right = [engine.score(p.tokens) for p in made]
        with self.policies.older():
            wrong = [engine.score(p.tokens) for p in made]
        pairs = [pair for p, of_text in zip(made, right, strict=True) for pair in zip(p.logprobs, of_text, strict=True)]
        gaps = [abs(a - b) for a, b in pairs]
        result = {"probes": len(made), "false_alarms": complaints(made, right), "caught": complaints(made, wrong)}
        return result | {"mean_gap": fmean(gaps), "largest_gap": max(gaps), "allowed": fmean(p.tolerance for p in made)}


def complaints(probes: list[Probe], scored: list[list[float]]) -> int:
    """How many probes do not agree with what was scored."""
    count = 0
    for probe, of_text in zip(probes, scored, strict=True):
        try:
            probe.check(of_text, 0)
        except RolloutError:
            count += 1
    return count
