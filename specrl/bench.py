"""Paired rollout benchmark: `python -m specrl.bench [config=NAME] [model=PATH old_model=PATH] [rows=32]`.

An old policy writes the cache, a newer one rolls out the same prompts plainly and speculatively, in turn, with the same
keys. Times are whole stages: look-up, prefill, drafting, verification, decoding and store. Each pair gives one ratio;
the median is reported, and the least and the largest. Texts are compared token for token.

With config=NAME, a file or a run's directory, model, prompts, engine and sampling are that training config's, and every
other word overrides it; without, the embedded policy answers generated arithmetic.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rollout.config import RolloutConfig, doc
from specrl import config as cli
from specrl.savings import counted
from specrl.schema import Config, DatasetConfig
from specrl.speedup import of_pairs
from trainers.config import TrainerConfig

if TYPE_CHECKING:
    from rollout.speculative import SpeculativeRollout
    from rollout.types import RolloutBatch, Row


@dataclass
class Measurement:
    """What is timed, and how often, whatever the policy."""

    old_model: str = doc("", "the policy that wrote the cache; empty takes the newer one, perturbed by `drift`")
    drift: float = doc(0.02, "noise on the old policy's matrices, in units of each matrix's own spread")
    rows: int = doc(32, "rows of one rollout batch")
    repeats: int = doc(5, "timed pairs per case, after one warm-up")
    generate: bool = doc(True, "also time transformers' model.generate on the same prompts")
    ablation: bool = doc(False, "instead, what each source of drafts adds, for 1, 8, 64 and 256 rows up to `rows`")
    drafters: list[str] = field(
        default_factory=list, metadata={"help": "draft models to try in the ablation: directories, or layers=N"}
    )
    out: str = doc("", "write the results to this JSON file too")


@dataclass
class BenchOptions(Measurement):
    """The bench without config=NAME."""

    model: str = doc("tiny", "the newer policy: tiny, a hub id or a local directory")
    data: str = doc("arithmetic", "prompts, as in training")
    level: Literal["easy", "medium", "hard", "mixed"] = doc("medium", "difficulty of data=arithmetic")
    precision: str = doc("fp32", "fp32 or bf16")
    device: str = doc("auto", "auto, cpu, cuda or cuda:N")
    rollout: RolloutConfig = field(
        default_factory=RolloutConfig,
        metadata={"help": "the engine and its settings; law and replay are the bench's own"},
    )


@dataclass
class BenchConfig(Config, Measurement):
    """The bench of a training config."""


@dataclass(frozen=True)
class Case:
    """One line of the table. Seconds are medians over the repeats, speedup the median of the paired ratios.

    `speedup_range` is the least and the largest of these ratios.
    """

    name: str
    reused: float
    plain_s: float
    specrl_s: float
    speedup: float
    speedup_range: tuple[float, float]
    passes_per_row: float
    passes_max: int
    plain_passes: int
    differing_rows: int
    rows: int


def command(argv: Sequence[str]) -> int:
    """The command line; with config=NAME its words are options of training."""
    given = any(word.startswith("config=") for word in argv)
    return cli.run(main, argv, BenchConfig if given else BenchOptions, training=False)


def main(options: BenchOptions | BenchConfig) -> int:
    from rich.console import Console

    from specrl import ablation

    bench, others, tokenizer = prepare(options, ablation.OTHERS if options.ablation else 0)
    console = Console(width=None if sys.stdout.isatty() else 110)  # whole columns in a log file
    result = {"options": asdict(options), "device": device_name(bench.model.device)}
    if options.ablation:
        result |= ablation.run(console, bench, others, options.drafters, options.repeats)
    else:
        result |= compare(console, bench, options, tokenizer)
    bench.engine.close()
    if options.out:
        Path(options.out).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


def training_config(options: BenchOptions | BenchConfig, prompts: int) -> Config:
    """The configuration whose rollouts are timed; without config=NAME it has `prompts` prompts.

    Raises:
        ConfigError: it asks for something that the bench does not time.
    """
    rollout = options.rollout
    for key, value, timed in (
        ("rollout.law", rollout.law, "exact"),
        ("cluster.num_workers", options.cluster.num_workers if isinstance(options, Config) else 0, 0),
    ):
        if value != timed:
            raise cli.ConfigError(f"{key}={value}: the bench times the exact rule in one process. Add {key}={timed}.")
    if isinstance(options, Config):
        return options
    return Config(
        model=options.model,
        data=options.data,
        device=options.device,
        dataset=DatasetConfig(train_size=prompts, level=options.level),
        rollout=rollout,
        trainer=TrainerConfig(precision="bf16" if options.precision == "bf16" else "fp32"),
    )


def prepare(options: BenchOptions | BenchConfig, others: int = 0) -> tuple[Bench, list[Row], Any]:
    """The bench, `others` rows of further prompts, and the policy's tokenizer."""
    from rollout.types import Row
    from specrl.data import load_examples, render
    from specrl.policy import load_policy

    group = options.rollout.group_size
    if options.rows % group:
        nearest = max(1, round(options.rows / group)) * group
        raise cli.ConfigError(f"rows={options.rows} is no multiple of rollout.group_size={group}. Try rows={nearest}.")
    needed = -(-(options.rows + others) // group)
    config = training_config(options, needed)
    examples = load_examples(config.data, config.dataset, "train", config.seed)[:needed]
    if len(examples) < needed:
        raise cli.ConfigError(
            f"rows={options.rows} takes {needed} prompts of {group} responses, and data={config.data} has "
            f"{len(examples)}. Try rows={max(1, len(examples) - -(-others // group)) * group}, or more prompts."
        )
    model, tokenizer, eos_ids = load_policy(config)
    rows = [Row(e.id, tuple(render(e, tokenizer))) for e in examples for _ in range(group)]
    newer = {name: p.detach().clone() for name, p in model.named_parameters()}
    if options.old_model:
        older = dict(load_policy(replace(config, model=options.old_model))[0].named_parameters())
    else:
        older = perturbed(newer, options.drift)
    bench = Bench(model.eval(), eos_ids, config, rows[: options.rows], older, newer)
    return bench, rows[options.rows :], tokenizer


def compare(console, bench: Bench, options: BenchOptions, tokenizer) -> dict[str, Any]:
    """The table of cases, and of rival methods on the same engine."""
    from specrl import rivals

    cases = [bench.case(name, options.repeats, **kind) for name, kind in CASES.items()]
    show(console, bench.config, options.repeats, cases)
    result: dict[str, Any] = {"cases": [asdict(case) for case in cases]}
    if bench.config.rollout.engine == "vllm":
        lines = rivals.compare(bench, options.repeats)
        rivals.show(console, lines, options.rows)
        result["methods"] = [asdict(line) for line in lines]
    elif options.generate:
        result["generate_s"] = bench.generate_seconds(tokenizer, options.repeats)
        show_generate(console, options, result["generate_s"])
    return result


CASES = {
    "fresh noise": {"replay": 0.0},
    "replayed noise": {"replay": 1.0},
    "same policy, replayed": {"replay": 1.0, "drifted": False},
    "useless drafts": {"replay": 0.0, "useless": True},
}


def perturbed(weights: dict, drift: float) -> dict:
    """Weights with seeded Gaussian noise of `drift` times each matrix's spread; vectors stay."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return {
        name: w + (drift * w.std() * torch.randn(w.shape, generator=generator).to(w)) if w.dim() > 1 else w
        for name, w in weights.items()
    }


class Bench:
    """Both policies and the prompts, with one engine that is switched between them."""

    def __init__(self, model, eos_ids: frozenset[int], config: Config, rows: Sequence[Row], older: dict, newer: dict):
        from rollout.engines import build_engine
        from specrl.policy import engine_spec

        self.model, self.config, self.rows = model, config, list(rows)
        self.vocab = model.get_output_embeddings().weight.shape[0]
        self.weights = {"older": older, "newer": newer}
        self.spec = engine_spec(config, eos_ids)
        self.engine = build_engine(self.spec, model if config.rollout.engine == "transformers" else None)
        self._texts: dict[str, RolloutBatch] = {}

    def case(self, name: str, repeats: int, *, replay: float, drifted: bool = True, useless: bool = False) -> Case:
        """Times `repeats` pairs of plain and speculative rollouts of the newer policy on the older one's cache."""
        older = self.old_batch("older" if drifted else "newer")
        self.switch("newer")
        pairs = []
        for i in range(repeats + 1):
            if self.engine.contexts is not None:
                self.engine.contexts.clear()  # it would know the very texts from the last repeat
            rollout = self.rollout(older, replay=replay, useless=useless)
            plain = self.plain(1, replay) if i % 2 else None  # in turn: the second of a pair is a few percent faster
            batch = rollout.generate(self.rows, visit=1, step=1)
            rollout.store(self.rows, batch, step=1)
            pairs.append((plain or self.plain(1, replay), batch))
        pairs = pairs[1:]
        plain, batch = pairs[-1]
        done = batch.completions
        ratio, least, most = of_pairs([b.total_s for _, b in pairs], [p.total_s for p, _ in pairs])
        return Case(
            name=name,
            reused=sum(sum(c.reused) for c in done) / sum(len(c.tokens) for c in done),
            plain_s=statistics.median(p.total_s for p, _ in pairs),
            specrl_s=statistics.median(b.total_s for _, b in pairs),
            speedup=ratio,
            speedup_range=(least, most),
            passes_per_row=sum(c.passes for c in done) / len(done),
            passes_max=max(c.passes for c in done),
            plain_passes=max(c.passes for c in plain.completions),
            differing_rows=sum(a.tokens != b.tokens for a, b in zip(done, plain.completions, strict=True)),
            rows=len(done),
        )

    def generate_seconds(self, tokenizer, repeats: int) -> dict[str, float]:
        """Median seconds of model.generate and of this engine's plain decoding, in turn; both decode to the cap.

        Both sample to the cap without an EOS, so that they do the same number of steps.
        """
        import torch

        from rollout.engines.base import Sampling
        from rollout.engines.transformers import TransformersEngine
        from rollout.types import Request

        cap = self.config.rollout.max_new_tokens
        engine = TransformersEngine(self.model, Sampling(frozenset(), self.config.rollout.temperature))
        requests = [Request(row.prompt, i, cap) for i, row in enumerate(self.rows)]
        inputs = tokenizer.pad({"input_ids": [list(row.prompt) for row in self.rows]}, return_tensors="pt")
        sampling = {"do_sample": True, "temperature": self.config.rollout.temperature, "top_k": 0, "top_p": 1.0}
        times: dict[str, list[float]] = {"plain": [], "generate": []}
        for _ in range(repeats + 1):
            began = time.perf_counter()
            engine.generate(requests)
            times["plain"].append(time.perf_counter() - began)
            began = time.perf_counter()
            with torch.inference_mode():
                self.model.generate(
                    **inputs.to(self.model.device),
                    **sampling,
                    max_new_tokens=cap,
                    min_new_tokens=cap,
                    pad_token_id=tokenizer.pad_token_id,
                )
            times["generate"].append(time.perf_counter() - began)
        return {name: statistics.median(seconds[1:]) for name, seconds in times.items()}

    def old_batch(self, policy: str = "older") -> RolloutBatch:
        """What `policy` wrote in the epoch before: plain responses, the content of the cache."""
        if policy not in self._texts:
            self.switch(policy)
            self._texts[policy] = self.rollout(None).generate(self.rows, visit=0, step=0)
        return self._texts[policy]

    def rollout(
        self, old: RolloutBatch | None, *, engine=None, useless: bool = False, **settings
    ) -> SpeculativeRollout:
        """A rollout stage whose cache holds the old batch, or texts of random tokens of the same lengths."""
        import random

        from rollout.cache import Fingerprint, TrajectoryCache
        from rollout.speculative import SpeculativeRollout

        cache = TrajectoryCache(Fingerprint(), self.vocab)
        stage = SpeculativeRollout(engine or self.engine, cache, replace(self.config.rollout, **settings), seed=0)
        if old is not None:
            entries = stage.entries(self.rows, old, step=0)
            if useless:
                rng = random.Random(0)
                entries = [
                    (e, s, replace(t, tokens=[rng.randrange(self.vocab) for _ in t.tokens])) for e, s, t in entries
                ]
            cache.put_many(entries)
        return stage

    def plain(self, visit: int, replay: float = 0.0) -> RolloutBatch:
        """The rows of a visit by plain decoding, with the keys that a speculative rollout of it has."""
        return self.rollout(None, law="off", replay=replay).generate(self.rows, visit=visit, step=1)

    def switch(self, policy: str, engine=None) -> None:
        """Gives an engine (by default the bench's own) the weights of a policy."""
        import torch

        engine = engine or self.engine
        if engine.own_weights:
            engine.update_weights(self.weights[policy].items(), engine.weight_version + 1)
            return
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(self.weights[policy][name])


def device_name(device) -> str:
    import torch

    return torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def show(console, config: Config, repeats: int, cases: Sequence[Case]) -> None:
    """The result as a table."""
    from rich.table import Table

    what = f"{cases[0].rows} rows, {config.model}, {config.trainer.precision}, {config.rollout.engine}"
    console.print(f"{what}: medians (least to largest) of {counted(repeats, 'pair')}", highlight=False, soft_wrap=True)
    table = Table()
    for column in ("case", "reused", "plain s", "specrl s", "speedup", "passes", "slowest", "differ"):
        table.add_column(column, justify="left" if column == "case" else "right", no_wrap=True)
    for c in cases:
        table.add_row(
            c.name,
            f"{c.reused:.0%}",
            f"{c.plain_s:.3f}",
            f"{c.specrl_s:.3f}",
            f"{c.speedup:.2f}x ({c.speedup_range[0]:.2f} to {c.speedup_range[1]:.2f})",
            f"{c.passes_per_row:.1f}",
            f"{c.passes_max}/{c.plain_passes}",
            f"{c.differing_rows}",
        )
    console.print(table)


def show_generate(console, options: BenchOptions, seconds: dict[str, float]) -> None:
    ratio = seconds["generate"] / seconds["plain"]
    console.print(
        f"plain decoding {seconds['plain']:.3f} s, model.generate {seconds['generate']:.3f} s for "
        f"{options.rollout.max_new_tokens} tokens a row: the baseline is {ratio:.2f}x as fast as generate"
    )


if __name__ == "__main__":
    raise SystemExit(command(sys.argv[1:]))
