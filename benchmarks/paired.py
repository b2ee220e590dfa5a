"""Paired rollouts of two policies: `python -m benchmarks.paired [config=NAME] [model=PATH old_model=PATH] [rows=32]`.

An old policy fills the cache. A newer one then generates responses to the same prompts with the same keys, by plain and
by speculative decoding: a pass each in turn, or a rollout each where a process has only one engine. Times cover the
complete rollout: look-up, prefill, drafting, verification, decoding and storing. Each pair gives one ratio; the median,
the smallest and the largest are reported. The responses are compared token for token. Other scripts time their own
cases with `Bench`.

`specrl.bench` tells a user whether drafts pay for a policy; this measures specrl itself, at a drift of the weights that
can be chosen, and with drafts that are useless.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.interleaved import interleaved, possible, sharing
from specrl.bench import BenchConfig, check, prompts
from specrl.config import load as cli
from specrl.config.load import load
from specrl.results import tables
from specrl.results.records import counted
from specrl.results.speedup import Flips
from specrl.rollout.metrics import Divergence
from specrl.rollout.sections import doc
from specrl.run.policy import rollout_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from specrl.rollout.engines.base import Engine
    from specrl.rollout.speculative import SpeculativeRollout
    from specrl.rollout.types import RolloutBatch, Row

COLUMNS = ("case", "reused", "plain s", "specrl s", "speedup", "slowest")


@dataclass
class PairConfig(BenchConfig):
    old_model: str = doc("", "the policy that wrote the cache; empty takes the newer one, perturbed by `drift`")
    drift: float = doc(0.02, "noise on the old policy's matrices, in units of each matrix's own spread")
    rows: int = doc(32, "rows of one rollout batch")
    repeats: int = doc(5, "timed pairs per case, after one warm-up", low=1)


def with_config(words: Sequence[str], name: str = "grpo_math") -> list[str]:
    """The command line words, with config=NAME added if they set no config."""
    return [*([] if any(word.startswith("config=") for word in words) else [f"config={name}"]), *words]


def options(*words: str) -> PairConfig:
    """The options of a script from `key=value` words."""
    return load(with_config(words), PairConfig, training=False)


@dataclass(frozen=True)
class Timing:
    """Plain and speculative rollouts of the same rows. Seconds are medians over the repeats.

    `speedup` is the median of the paired ratios, and `speedup_range` is the smallest and the largest of them.
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
    compared_tokens: int
    flip_position: float
    rows: int


def prepare(config: PairConfig) -> tuple[Bench, Any]:
    """The bench, and the policy's tokenizer.

    Raises:
        ConfigError: the configuration uses a feature that the bench does not time, or has too few prompts.
    """
    from specrl.run.policy import load_policy

    check(config)
    group = config.rollout.group_size
    model, tokenizer, eos_ids = load_policy(config)
    rows = prompts(replace(config, rows=-(-config.rows // group) * group), tokenizer)
    newer = {name: p.detach().clone() for name, p in model.named_parameters()}
    if config.old_model:
        older = dict(load_policy(replace(config, model=config.old_model))[0].named_parameters())
    else:
        older = perturbed(newer, config.drift)
    bench = Bench(model.eval(), eos_ids, config, rows[: config.rows], older, newer)
    return bench, tokenizer


def perturbed(weights: dict, drift: float) -> dict:
    """Adds seeded Gaussian noise of `drift` times its standard deviation to each matrix; vectors are unchanged."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return {
        name: w + (drift * w.std() * torch.randn(w.shape, generator=generator).to(w)) if w.dim() > 1 else w
        for name, w in weights.items()
    }


class Bench:
    """Both policies and the prompts, with engines whose weights are switched between the policies.

    They are built on first use.
    """

    def __init__(
        self, model, eos_ids: frozenset[int], config: PairConfig, rows: Sequence[Row], older: dict, newer: dict
    ):
        from specrl.run.policy import engine_spec

        self.model, self.config, self.rows = model, config, list(rows)
        self.vocab = model.get_output_embeddings().weight.shape[0]
        self.weights = {"older": older, "newer": newer}
        self.spec = engine_spec(config, eos_ids)
        self.interleaves = possible(config.rollout.engine, model)
        self._texts: dict[str, RolloutBatch] = {}

    @cached_property
    def engine(self) -> Engine:
        """Built on first use. Set it before that to time an engine with another acceptance rule."""
        from specrl.rollout.build import build_engine

        return build_engine(self.spec, self.model if self.config.rollout.engine == "transformers" else None)

    @cached_property
    def plain_engine(self) -> Engine:
        """The engine of plain decoding."""
        from specrl.rollout.build import build_engine

        return build_engine(self.spec, sharing(self.model)) if self.interleaves else self.engine

    def together(self, *rollouts: Callable[[], RolloutBatch]) -> list[RolloutBatch]:
        """What the rollouts return: a pass each in turn, or one after the other where they are not interleaved."""
        return interleaved(*rollouts) if self.interleaves else [rollout() for rollout in rollouts]

    def pair(self, stage: SpeculativeRollout, replay: float, plain_first: bool) -> list[RolloutBatch]:
        """The rows by plain decoding, and with drafts. Args: plain_first: the second of two may be a bit faster."""
        plain, drafts = self.plain(1, replay), partial(self.timed, stage)
        if plain_first:
            return self.together(plain, drafts)
        drafted, plainly = self.together(drafts, plain)
        return [plainly, drafted]

    def time_pairs(
        self, name: str, *, replay: float, old_policy: str = "older", change: Change | None = None
    ) -> Timing:
        """Times pairs of plain and speculative rollouts of the newer policy with the cache of `old_policy`."""
        old = self.old_batch(old_policy)
        self.switch("newer")
        pairs = []
        for i in range(self.config.repeats + 1):
            pairs.append(self.pair(self.rollout(old, replay=replay, change=change), replay, plain_first=i % 2 == 1))
        pairs = pairs[1:]
        plain, batch = pairs[-1]
        done = batch.completions
        divergence = Divergence.of(done, plain.completions)
        ratio, least, most = of_pairs([b.total_s for _, b in pairs], [p.total_s for p, _ in pairs])
        return Timing(
            name=name,
            reused=sum(sum(c.reused) for c in done) / sum(len(c.tokens) for c in done),
            plain_s=statistics.median(p.total_s for p, _ in pairs),
            specrl_s=statistics.median(b.total_s for _, b in pairs),
            speedup=ratio,
            speedup_range=(least, most),
            passes_per_row=sum(c.passes for c in done) / len(done),
            passes_max=max(c.passes for c in done),
            plain_passes=max(c.passes for c in plain.completions),
            differing_rows=len(divergence.first),
            compared_tokens=divergence.tokens,
            flip_position=divergence.metrics().get("spec/flip_position", 0.0),
            rows=len(done),
        )

    def timed(self, stage: SpeculativeRollout, visit: int = 1) -> RolloutBatch:
        """Generates the rows of a visit, including look-up and storing."""
        batch = stage.generate(self.rows, visit=visit, step=1)
        stage.store(self.rows, batch, step=1)
        return batch

    def old_batch(self, policy: str = "older") -> RolloutBatch:
        """The plain responses of `policy` in the previous epoch, which fill the cache."""
        if policy not in self._texts:
            self.switch(policy)
            self._texts[policy] = self.rollout(None, acceptance="off").generate(self.rows, visit=0, step=0)
        return self._texts[policy]

    def rollout(
        self, old: RolloutBatch | None, *, engine=None, change: Change | None = None, **settings
    ) -> SpeculativeRollout:
        """A rollout stage whose cache holds the old batch. Args: change: alters its texts."""
        from specrl.rollout.cache.memory import Fingerprint, TrajectoryCache
        from specrl.rollout.speculative import SpeculativeRollout

        cache = TrajectoryCache(Fingerprint())
        stage = SpeculativeRollout(engine or self.engine, cache, replace(self.config.rollout, **settings), seed=0)
        if old is not None:
            entries = stage.entries(self.rows, old, step=0)
            if change is not None:
                rng = random.Random(0)
                entries = [(e, s, replace(t, tokens=change(t.tokens, rng, self.vocab))) for e, s, t in entries]
            cache.put_many(entries)
        return stage

    def plain(self, visit: int, replay: float = 0.0) -> Callable[[], RolloutBatch]:
        """What generates the rows of a visit by plain decoding, with the same keys as a speculative rollout."""
        stage = self.rollout(None, engine=self.plain_engine, acceptance="off", replay=replay)
        return partial(stage.generate, self.rows, visit=visit, step=1)

    def switch(self, policy: str) -> None:
        """Loads the weights of a policy into the engine, or into the model that the engines share."""
        import torch

        if self.engine.own_weights:
            self.engine.update_weights(self.weights[policy].items(), self.engine.weight_version + 1)
            return
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(self.weights[policy][name])


Change = Callable[[Sequence[int], random.Random, int], list[int]]
"""What a case does to a stored text, given a source of randomness and the vocabulary's size."""


def cut(tokens: Sequence[int], rng: random.Random, vocab: int) -> list[int]:
    """The text up to a random position, at least one token: SPEC-RL's control without verification of where to cut."""
    return list(tokens[: rng.randint(1, len(tokens))])


def useless(tokens: Sequence[int], rng: random.Random, vocab: int) -> list[int]:
    """Random tokens."""
    return [rng.randrange(vocab) for _ in tokens]


def of_pairs(specrl_s: Sequence[float], plain_s: Sequence[float]) -> tuple[float, float, float]:
    """Median, smallest and largest ratio of plain to speculative seconds over repeats of the same work."""
    ratios = sorted(plain / specrl for specrl, plain in zip(specrl_s, plain_s, strict=True))
    return statistics.median(ratios), ratios[0], ratios[-1]


def device_name(device) -> str:
    """The GPU's name, or the CPU with the number of threads that torch uses."""
    import torch

    return torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def main(config: PairConfig) -> int:
    from rich.console import Console

    bench, tokenizer = prepare(config)
    cases = [
        bench.time_pairs("fresh noise", replay=0.0),
        bench.time_pairs("replayed noise", replay=1.0),
        bench.time_pairs("same policy, replayed", replay=1.0, old_policy="newer"),
        bench.time_pairs("texts cut at random", replay=0.0, change=cut),
        bench.time_pairs("useless drafts", replay=0.0, change=useless),
    ]
    console = Console()
    described = f"{config.rows} rows, {config.model}, {config.trainer.precision}, {config.rollout.engine}"
    title = f"{described}: medians (least to largest) of {counted(config.repeats, 'pair')}"
    tables.show(console, title, COLUMNS, [cells(case) for case in cases])
    differing = sum(case.differing_rows for case in cases)
    before = sum(case.differing_rows * case.flip_position for case in cases)
    flips = Flips(differing, sum(case.compared_tokens for case in cases), before / max(1, differing))
    tables.note(console, f"compared token for token: {flips.sentence(rollout_dtype(config))}")
    seconds = generate_seconds(bench, tokenizer) if config.rollout.engine == "transformers" else None
    if seconds:
        tables.note(
            console,
            f"plain decoding {seconds['plain']:.3f} s, model.generate {seconds['generate']:.3f} s for "
            f"{config.rollout.max_new_tokens} tokens a row: plain decoding, the baseline, is "
            f"{seconds['generate'] / seconds['plain']:.2f}x as fast as generate",
        )
    bench.engine.close()
    if config.out:
        result = {
            "options": asdict(config),
            "device": device_name(bench.model.device),
            "cases": [asdict(case) for case in cases],
            "generate_s": seconds,
        }
        Path(config.out).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


def cells(timing: Timing) -> tuple[str, ...]:
    """A row of the table. `slowest` is the largest number of passes of a row, with specrl and with plain decoding."""
    low, high = timing.speedup_range
    return (
        timing.name,
        f"{timing.reused:.0%}",
        f"{timing.plain_s:.3f}",
        f"{timing.specrl_s:.3f}",
        f"{timing.speedup:.2f}x ({low:.2f} to {high:.2f})",
        f"{timing.passes_max}/{timing.plain_passes}",
    )


def generate_seconds(bench: Bench, tokenizer: PreTrainedTokenizerBase) -> dict[str, float]:
    """Median seconds of model.generate and of the engine's plain decoding, timed alternately.

    Both ignore EOS and sample up to the length cap, so they take the same number of steps.
    """
    import torch

    from specrl.rollout.engines.base import SamplingParams
    from specrl.rollout.engines.local.engine import TransformersEngine
    from specrl.rollout.types import Request

    cap = bench.config.rollout.max_new_tokens
    temperature = bench.config.rollout.temperature
    engine = TransformersEngine(bench.model, SamplingParams(frozenset(), temperature))
    requests = [Request(row.prompt, i, cap) for i, row in enumerate(bench.rows)]
    inputs = tokenizer.pad({"input_ids": [list(row.prompt) for row in bench.rows]}, return_tensors="pt")
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    length = {"max_new_tokens": cap, "min_new_tokens": cap, "pad_token_id": tokenizer.pad_token_id}
    times: dict[str, list[float]] = {"plain": [], "generate": []}
    for _ in range(bench.config.repeats + 1):
        began = time.perf_counter()
        engine.generate(requests)
        times["plain"].append(time.perf_counter() - began)
        began = time.perf_counter()
        with torch.inference_mode():
            bench.model.generate(**inputs.to(bench.model.device), **sampling, **length)
        times["generate"].append(time.perf_counter() - began)
    return {name: statistics.median(seconds[1:]) for name, seconds in times.items()}


def command(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    return cli.run(main, argv, PairConfig, training=False, words=with_config)


if __name__ == "__main__":
    raise SystemExit(command())
