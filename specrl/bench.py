"""Is specrl worth it for a policy? `python -m specrl.bench config=NAME [old_model=PATH] [rows=16] [out=FILE]`.

An old policy writes responses. A newer one rolls out the same prompts, in turn by plain decoding and with the old texts
as drafts, of both kinds that there are:

- Old text under fresh noise is accepted with the probability of its tokens, which the policy's entropy bounds.
- Text under the same key (rollouts ahead, twin runs, evaluations, replayed rows) is accepted where both policies draw
  the same token from the same noise, which the change of the weights bounds.

Without `old_model` the newer policy is one optimiser step further, at the learning rate of the config.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrl.config import load as cli
from specrl.config.options import ConfigError
from specrl.config.schema import Config
from specrl.results import tables
from specrl.results.speedup import Flips
from specrl.rollout.metrics import Divergence
from specrl.rollout.sections import doc
from specrl.rollout.types import RolloutBatch, Row
from specrl.run.policy import rollout_dtype

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from specrl.rollout.cache.memory import TrajectoryCache
    from specrl.rollout.engines.base import SamplingParams
    from specrl.rollout.speculative import SpeculativeRollout

KINDS = {"old text, fresh noise": (0.0, "fresh"), "text under the same key": (1.0, "same_key")}
"""Kinds of drafts: the `rollout.replay` that makes one of the old text, and the field of `Reading` that is its p."""
COLUMNS = ("drafts", "p", "at best", "reused", "measured")
EPS = 1e-8  # of AdamW
PAYS = 1.05
"""Drafts pay where every pair is faster by more than this: less is noise between two rollouts."""


@dataclass
class BenchConfig(Config):
    old_model: str = doc("", "the policy that wrote the old text; empty: `model`, and the newer one is a step further")
    rows: int = doc(16, "rows of one rollout", low=1)
    repeats: int = doc(3, "timed pairs of each kind of drafts, after one rollout that warms up", low=1)
    out: str = doc("", "write the figures to this JSON file too")


@dataclass(frozen=True)
class Reading:
    """The old texts as the newer policy sees them. All but `tokens` are means over the tokens."""

    tokens: int
    entropy: float
    """Of its distribution after temperature, top-k and top-p, in nats."""
    fresh: float
    """Probability of the old token."""
    same_key: float
    """Share of tokens that it draws too, from the same noise."""


@dataclass(frozen=True)
class Timing:
    """Rollouts with one kind of drafts. Seconds are medians, and `speedup` is the median of the pairs' ratios."""

    kind: str
    p: float
    """Probability that a token of the draft is accepted, see `Reading`."""
    reused: float
    plain_s: float
    specrl_s: float
    speedup: float
    least: float
    most: float
    passes: int
    """Of the engine in one rollout."""
    plain_passes: int
    tokens: int
    """Through the model in one rollout, rejected ones and prompts included."""
    plain_tokens: int
    differing_rows: int
    compared_tokens: int

    @classmethod
    def of(cls, kind: str, reading: Reading, pairs: Sequence[Sequence[RolloutBatch]]) -> Timing:
        """Args: pairs: rollouts of the same rows by plain decoding, and with drafts of this kind."""
        plain, batch = pairs[-1]
        ratios = [plain.total_s / batch.total_s for plain, batch in pairs]
        compared = Divergence.of(batch.completions, plain.completions)
        return cls(
            kind,
            p=getattr(reading, KINDS[kind][1]),
            reused=sum(sum(c.reused) for c in batch.completions) / sum(len(c.tokens) for c in batch.completions),
            plain_s=statistics.median(plain.total_s for plain, _ in pairs),
            specrl_s=statistics.median(batch.total_s for _, batch in pairs),
            speedup=statistics.median(ratios),
            least=min(ratios),
            most=max(ratios),
            passes=batch.stats.passes,
            plain_passes=plain.stats.passes,
            tokens=batch.stats.forward_tokens,
            plain_tokens=plain.stats.forward_tokens,
            differing_rows=len(compared.first),
            compared_tokens=compared.tokens,
        )

    def cells(self, price: float) -> tuple[str, ...]:
        """A row of the table. Args: price: see `Result`."""
        best = f"{best_speedup(self.p, price):.2f}x"
        measured = f"{self.speedup:.2f}x ({self.least:.2f} to {self.most:.2f})"
        return self.kind, f"{self.p:.2f}", best, f"{self.reused:.0%}", measured


@dataclass(frozen=True)
class Result:
    reading: Reading
    price: float
    """Seconds that a draft token for every row adds to a pass of plain decoding, as a share of that pass."""
    timings: list[Timing]

    def advice(self) -> str:
        """One sentence: whether specrl pays for this policy, and what to switch on."""
        old, coupled = self.timings
        ahead = (
            "it comes from rollouts ahead, which GPUs have by default and CPUs with cluster.num_workers, or from "
            "rollout.twin in a sweep of one seed"
        )
        if old.least > PAYS:
            more = f"; with text under the same key {coupled.speedup:.2f}x: {ahead}" * (coupled.least > old.most)
            return f"It pays: with its defaults specrl makes these rollouts {old.speedup:.2f}x as fast{more}."
        if coupled.least > PAYS:
            return (
                f"Old text does not pay, text under the same key does ({coupled.speedup:.2f}x): {ahead}. Without it "
                "rollout.acceptance=off trains the same weights in the same time."
            )
        return "It does not pay here. rollout.acceptance=off trains the same weights without drafts."


def main(config: BenchConfig) -> int:
    from rich.console import Console

    console = Console()
    result = measure(config, console)
    show(config, result, console)
    if config.out:
        figures = asdict(result) | {"options": asdict(config), "advice": result.advice()}
        Path(config.out).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


def show(config: BenchConfig, result: Result, console: Console) -> None:
    """Prints the table, what its numbers mean, and the advice."""
    reading = result.reading
    dtype = rollout_dtype(config)
    rollout = config.rollout
    title = f"{config.model}, {dtype}, {rollout.engine}, {config.rows} rows, temperature {rollout.temperature:g}"
    tables.show(console, title, COLUMNS, [timing.cells(result.price) for timing in result.timings])
    differing = sum(timing.differing_rows for timing in result.timings)
    compared = Flips(differing, sum(timing.compared_tokens for timing in result.timings), 0.0)
    older = f"one optimiser step at trainer.learning_rate={config.trainer.learning_rate:g} older"
    for line in (
        f"The policy of the old text is {config.old_model or older}; in a run, old text is an epoch old.",
        f"p: probability that a token of the draft is accepted, over {reading.tokens:,} tokens of the old policy.",
        "At best: where p is alike in all rows. A rollout ends with its slowest row, which may leave its text at once.",
        f"Entropy: {reading.entropy:.2f} nats. A draft token for every row takes {result.price:.2f} of a plain pass, "
        "so drafts pay where p is above that.",
        f"Compared token for token: {compared.sentence(dtype)}.",
    ):
        tables.note(console, line)
    tables.note(console, result.advice(), "bold")


def measure(config: BenchConfig, console: Console) -> Result:
    """Loads or makes both policies, reads the old texts, and times the pairs.

    Raises:
        ConfigError: the config uses what is not timed here, or has too few prompts.
    """
    from rich.progress import Progress

    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=3 + len(KINDS) * (1 + config.repeats))

        def doing(what: str) -> None:
            progress.update(task, advance=1, description=what)

        bench, old, reading = prepare(config, doing)
        timings = [bench.time(kind, reading, old, doing) for kind in KINDS]
        result = Result(reading, bench.price(old), timings)
    bench.engine.close()
    return result


def prepare(config: BenchConfig, doing: Callable[[str], None]) -> tuple[Bench, RolloutBatch, Reading]:
    """The bench with the newer policy, the old texts, and how the newer policy reads them.

    Args: doing: is called with what begins.
    """
    from specrl.run.policy import load_policy

    check(config)
    doing("loading the policy")
    newer, tokenizer, eos_ids = load_policy(config)
    model = load_policy(replace(config, model=config.old_model))[0] if config.old_model else newer
    bench = Bench(config, model.eval(), eos_ids, prompts(config, tokenizer))
    doing("old text")
    bench.send()
    old = bench.write()
    doing("the newer policy, and how it reads the old text")
    if config.old_model:
        model.load_state_dict(newer.state_dict())
    else:
        step(model, bench.rows, old, config.trainer.learning_rate)
    bench.send()
    return bench, old, read(model, bench.sampling, bench.rows, old)


def check(config: BenchConfig) -> None:
    """Raises ConfigError for options that are not timed here."""
    group = config.rollout.group_size
    if (rule := config.rollout.acceptance) != "exact":
        raise ConfigError(f"rollout.acceptance={rule} is not timed here. Add rollout.acceptance=exact.")
    if (workers := config.cluster.num_workers) > 0:
        raise ConfigError(f"cluster.num_workers={workers}: this times one process. Add cluster.num_workers=0.")
    if config.rows % group:
        nearest = max(1, round(config.rows / group)) * group
        raise ConfigError(f"rows={config.rows} is no multiple of rollout.group_size={group}. Try rows={nearest}.")


def prompts(config: BenchConfig, tokenizer: PreTrainedTokenizerBase) -> list[Row]:
    """The rows of a rollout. Raises ConfigError if the data has too few prompts."""
    from specrl.run.data import load_examples
    from specrl.run.prompts import render

    group = config.rollout.group_size
    count = config.rows // group
    size = count if config.generated else config.dataset.train_size  # generated on demand
    examples = load_examples(config.data, replace(config.dataset, train_size=size), "train", config.seed)[:count]
    if len(examples) < count:
        raise ConfigError(
            f"rows={config.rows} takes {count} prompts of {group} responses, and data={config.data} has "
            f"{len(examples)}. Try rows={len(examples) * group}."
        )
    return [Row(e.id, tuple(render(e, tokenizer, config.dataset).ids)) for e in examples for _ in range(group)]


class Bench:
    """A policy, one engine, because vLLM's sleep mode allows one per process, and the rows that it rolls out."""

    def __init__(self, config: BenchConfig, model: PreTrainedModel, eos_ids: frozenset[int], rows: list[Row]):
        from specrl.rollout.build import build_engine
        from specrl.rollout.engines.base import SamplingParams
        from specrl.run.policy import engine_spec

        self.config = config
        self.model = model
        self.rows = rows
        rollout = config.rollout
        self.sampling = SamplingParams(eos_ids, rollout.temperature, rollout.top_k, rollout.top_p)
        shared = model if rollout.engine == "transformers" else None
        self.engine = build_engine(engine_spec(config, eos_ids), shared)

    def send(self) -> None:
        """Brings the engine to the weights of the model, unless it shares them."""
        if self.engine.own_weights:
            self.engine.update_weights([*self.model.named_parameters()], self.engine.weight_version + 1)

    def write(self) -> RolloutBatch:
        """The rows' responses by plain decoding at their first visit: the old text."""
        return self.stage(acceptance="off").generate(self.rows, visit=0, step=0)

    def stage(self, cache: TrajectoryCache | None = None, **options: Any) -> SpeculativeRollout:
        """The rollout stage. Args: options: those of `rollout` that differ."""
        from specrl.rollout.speculative import SpeculativeRollout

        return SpeculativeRollout(self.engine, cache, replace(self.config.rollout, **options), self.config.seed)

    def time(self, kind: str, reading: Reading, old: RolloutBatch, doing: Callable[[str], None]) -> Timing:
        """Times pairs of rollouts at the next visit: plain decoding, and drafts of this kind."""
        doing(f"{kind}: warming up")
        keys = self.draft(kind, old).keys
        stage = self.stage()
        pairs = []
        for i in range(self.config.repeats):
            doing(f"{kind}: plain decoding and drafts, pair {i + 1}")
            plain = stage.plain(self.rows, keys) if i % 2 else None  # in turn: the second may be faster
            batch = self.draft(kind, old)
            pairs.append((plain or stage.plain(self.rows, keys), batch))
        return Timing.of(kind, reading, pairs)

    def draft(self, kind: str, old: RolloutBatch) -> RolloutBatch:
        """A rollout that drafts from the old text only. Its seconds include looking up and storing."""
        from specrl.rollout.cache.memory import Fingerprint, TrajectoryCache

        stage = self.stage(TrajectoryCache(Fingerprint()), replay=KINDS[kind][0])
        stage.store(self.rows, old, step=0)
        batch = stage.generate(self.rows, visit=1, step=1)
        stage.store(self.rows, batch, step=1)
        return batch

    def price(self, old: RolloutBatch) -> float:
        """See `Result.price`: by the costs that the budget has fitted to the passes so far."""
        rows = len(self.rows)
        width = statistics.fmean(
            len(row.prompt) + len(c.tokens) / 2 for row, c in zip(self.rows, old.completions, strict=True)
        )
        fixed, token = self.engine.drafting.budget.cost(rows, round(width))  # type: ignore[attr-defined]
        return rows * token / (fixed + rows * token)


def best_speedup(p: float, price: float) -> float:
    """The best speedup by drafts of one length, max over k of (1 + p + ... + p^k) / (1 + price k).

    Leviathan et al. 2023 (arXiv 2211.17192), theorem 3.8, where verifying takes time and drafting none.

    Args:
        p: probability that a draft token is accepted, given that those before it are.
        price: see `Result.price`.
    """
    from specrl.rollout.drafting.cost import emitted

    best = 1.0
    length = 1
    while (faster := emitted(p, length) / (1 + price * length)) > best:
        best = faster
        length += 1
    return best


def read(model: PreTrainedModel, sampling: SamplingParams, rows: Sequence[Row], old: RolloutBatch) -> Reading:
    """The old texts as the model sees them, by one pass over each."""
    import torch

    from specrl.rollout.noise import keyed_sample, process_logits

    sums = [0.0, 0.0, 0.0]
    tokens = 0
    temperature, top_k, top_p = sampling.terms
    with torch.inference_mode():
        for row, completion, key in zip(rows, old.completions, old.keys, strict=True):
            logits = response_logits(model, row, completion.tokens).float().cpu()
            text = torch.tensor(completion.tokens)
            probabilities = process_logits(logits, temperature or 1.0, top_k, top_p).softmax(-1)
            drawn, *_ = keyed_sample(
                logits,
                torch.full_like(text, key),
                torch.arange(len(text)),
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
            )
            agreed = (drawn == text).float()
            chance = probabilities.gather(-1, text[:, None]) if temperature else agreed
            means = torch.special.entr(probabilities).sum(-1), chance, agreed
            sums = [so_far + float(values.sum()) for so_far, values in zip(sums, means, strict=True)]
            tokens += len(text)
    return Reading(tokens, *(total / tokens for total in sums))


def step(model: PreTrainedModel, rows: Sequence[Row], old: RolloutBatch, learning_rate: float) -> None:
    """Takes AdamW's first step from the weights of the model.

    The step is learning_rate * g / (|g| + EPS): the moments of Adam are g and g^2 after their first correction, so the
    gradient's size does not matter. The advantages are +1 and -1 in turn, as a group of right and wrong responses has.
    """
    import torch

    model.zero_grad()
    for i, (row, completion) in enumerate(zip(rows, old.completions, strict=True)):
        targets = torch.tensor(completion.tokens, device=model.device)
        losses = torch.nn.functional.cross_entropy(response_logits(model, row, completion.tokens).float(), targets)
        (losses * (-1) ** i).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if (g := parameter.grad) is not None:
                parameter.sub_(learning_rate * g / (g.abs() + EPS))
    model.zero_grad()


def response_logits(model: PreTrainedModel, row: Row, tokens: Sequence[int]) -> Tensor:
    """Logits [T, V] that the T response tokens are sampled from."""
    import torch

    ids = torch.tensor([[*row.prompt, *tokens[:-1]]], device=model.device)
    return model(input_ids=ids, logits_to_keep=len(tokens)).logits[0]


def command(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    return cli.run(main, argv, BenchConfig, training=False)


if __name__ == "__main__":
    raise SystemExit(command())
