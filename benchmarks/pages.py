"""Renders figures into pages: between `<!-- figure: BLOCK -->` and `<!-- /figure -->`, from benchmarks/results."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specrl.config.options import ConfigError
from specrl.results import tables

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ("README.md", "docs/two_kinds.md", "docs/ahead.md", "benchmarks/README.md")
BLOCK = re.compile(r"(<!-- figure: ([\w-]+) -->\n).*?(<!-- /figure -->)", re.DOTALL)


def rendered(page: str) -> str:
    """The page with every block written anew.

    Raises:
        ConfigError: a block is unknown, or its figure has not been measured.
    """

    def block(match: re.Match) -> str:
        if match[2] not in BLOCKS:
            raise ConfigError(f"the page has a figure block '{match[2]}'. Known: {', '.join(BLOCKS)}.")
        return match[1] + "\n".join(BLOCKS[match[2]]()) + "\n" + match[3]

    return BLOCK.sub(block, page)


def load(name: str) -> dict[str, Any]:
    """The file of a figure."""
    path = RESULTS / f"{name}.json"
    if not path.is_file():
        raise ConfigError(f"{path.name} is missing. Measure it: python -m benchmarks.figures measure=[{name}]")
    return json.loads(path.read_text(encoding="utf-8"))


def speedup(name: str, kind: str, phase: str) -> str:
    """A speedup of a run's report with its interval."""
    rows = load(name)["result"][kind]["savings"]
    (row,) = [row["speedup"] for row in rows if row["phase"] == phase]
    interval = "" if row["low"] is None else f" ({row['low']:.2f} to {row['high']:.2f})"
    return f"{row['ratio']:.2f}x{interval}"


def source(name: str, folder: str = "benchmarks/results") -> str:
    """A link to the file of a figure, with its commit."""
    return f"[{load(name)['commit']}]({folder}/{name}.json)"


def console() -> list[str]:
    """The end of what `make train` prints, without its table."""
    lines = load("train")["result"]["printed"]
    starts = ("Step 128/", "Eval at step 128", "Speedup of", "reward:")
    return ["```", *(line for line in lines if line.startswith(starts)), "```", f"({source('train')})"]


LATER = "rollout, from epoch 2 on"
ALL = "rollout, all these steps"
STEP = "step, controls left out"


def headline() -> list[str]:
    """README's first figures."""
    ratios = [*(speedup("whole-runs", "paired", phase) for phase in (LATER, ALL, STEP)), rival("vllm-old-text")]
    later, everything, step, vllm = (ratio.partition(" ")[0] for ratio in ratios)
    return [
        "Against the same GRPO run without drafts, rollouts are "
        f"{later} as fast from epoch 2 on, {everything} over all 8 epochs,",
        f"and whole steps {step}. With drafts of an earlier epoch, vLLM with specrl is {vllm} as fast as stock vLLM.",
        "All of it was measured on two CPU cores, with a policy of 1.2 M parameters.",
    ]


def savings() -> list[str]:
    """README's table: what was measured, against what, and the file."""
    runs = {name: (speedup(name, kind, LATER), speedup(name, kind, ALL)) for name, kind in KINDS.items()}
    rows = [
        (
            "GRPO, 128 steps of 32 rows: rollouts",
            "the same run without drafts",
            "{} from epoch 2 on, {} in all".format(*runs["whole-runs"]),
            "whole-runs",
        ),
        (
            "PPO: rollouts of its control steps",
            "the same rows without drafts",
            "{} from epoch 2 on, {} in all".format(*runs["ppo"]),
            "ppo",
        ),
        ("vLLM, 32 rows, drafts from nearby weights", "stock vLLM, compiled", rival("vllm"), "vllm"),
        (
            "vLLM, 32 rows, drafts of an earlier epoch of a run",
            "stock vLLM, compiled",
            rival("vllm-old-text"),
            "vllm-old-text",
        ),
        (
            "[rollouts ahead](docs/ahead.md) on one worker, first epoch: whole steps",
            "the same worker idle during updates",
            f"{ahead_speedup():.2f}x",
            "ahead-fresh",
        ),
        *(
            (
                f"{rows} rows: a first epoch; after a small change of the weights",
                "plain decoding by specrl's engine",
                f"{ablation(rows, 'first epoch')}; {ablation(rows, 'little drift')}",
                "ablation",
            )
            for rows in (8, 256)
        ),
        ("64 rows, drafts that are never right", "the same", useless(), "bench"),
    ]
    cells = [(*row[:3], source(row[3])) for row in rows]
    return tables.markdown(("setting", "baseline", "speedup", "commit, file"), cells)


KINDS = {"whole-runs": "paired", "ppo": "measured"}


def rival(name: str, method: str = "specrl exact, replay 0") -> str:
    """The median speedup of a method over stock vLLM, with the range over the repeats."""
    (line,) = [line for line in load(name)["result"]["methods"] if line["method"] == method]
    low, high = line["speedup_range"]
    return f"{line['speedup']:.2f}x ({low:.2f} to {high:.2f})"


def ablation(rows: int, regime: str, head: bool = False) -> str:
    """The median speedup of all texts, with a head in addition or without."""
    lines = [line for line in load("ablation")["result"]["lines"] if (line["rows"], line["regime"]) == (rows, regime)]
    _, texts, with_head = lines  # the first is plain decoding
    return f"{(with_head if head else texts)['speedup']:.2f}x"


def ahead_speedup() -> float:
    """Of whole steps of a first epoch, by rollouts ahead alone."""
    return {line["epoch"]: line["speedup"] for line in load("ahead-fresh")["result"]["epochs"]}["all"]


def useless() -> str:
    """The slow-down by drafts that are never accepted."""
    (case,) = [case for case in load("bench")["result"]["cases"] if case["name"] == "useless drafts"]
    return "{:.2f}x ({:.2f} to {:.2f})".format(case["speedup"], *case["speedup_range"])


def real() -> list[str]:
    """Both kinds of drafts and the published rule on the real language model: measured, and on two simulated GPUs."""
    rows = []
    for here, *gpus in zip(*(load(name)["result"]["lines"] for name in REAL), strict=True):
        reading = here["reading"]
        shares = (f"{reading[name]:.2f}" for name in ("entropy", "fresh", "same_key"))
        kinds = zip(*(line["timings"] for line in (here, *gpus)), strict=True)
        speeds = (", ".join(f"{timing['speedup']:.2f}" for timing in timings) for timings in kinds)
        published = ", ".join(f"{timing['speedup']:.2f}" for timing in here["published"])
        rows.append((str(here["rows"]), f"{here['temperature']:g}", *shares, *speeds, published))
    columns = ("rows", "temperature", "entropy", "p(old token)", "same key")
    columns += ("old text, fresh noise", "text under the same key", "published rule, l = 1, e^0.5")
    return [
        *tables.markdown(columns, rows),
        "",
        f"Speed over plain decoding: two cores of an {load('real')['machine']['cpu']} "
        f"({source('real', '../benchmarks/results')}), then simulated H100s with 1.5 B and 7 B parameters "
        f"({source('real-gpu', '../benchmarks/results')}, {source('real-gpu-7b', '../benchmarks/results')}); "
        f"the published rule on the cores. Plain decoding is {generate()} as fast as model.generate.",
    ]


REAL = ("real", "real-gpu", "real-gpu-7b")


def generate() -> str:
    """Speed of plain decoding over model.generate on the real language model, from the least to the largest."""
    ratios = [line["generate_s"]["generate"] / line["generate_s"]["plain"] for line in load("real")["result"]["lines"]]
    return f"{min(ratios):.2f}x to {max(ratios):.2f}x"


def real_run() -> list[str]:
    """Drafts that are eight updates old."""
    lines = load("real-run")["result"]["lines"]
    rows = [
        (
            f"{line['temperature']:g}",
            *(f"{line['reading'][name]:.2f}" for name in ("entropy", "fresh", "same_key")),
            *(measured(timing) for timing in line["timings"]),
        )
        for line in lines
    ]
    columns = ("temperature", "entropy", "p(old token)", "same key", "old text, fresh noise", "text under the same key")
    where = source("real-run", "../benchmarks/results")
    return [*tables.markdown(columns, rows), "", f"{lines[0]['rows']} rows on two CPU cores ({where})."]


def measured(timing: dict[str, Any]) -> str:
    return f"{timing['speedup']:.2f}x ({timing['least']:.2f} to {timing['most']:.2f})"


def real_sentence() -> list[str]:
    """README's figures of the real language model, at most rows and the highest temperature."""
    line = load("real")["result"]["lines"][-1]
    old, coupled = (f"{timing['speedup']:.2f}x" for timing in line["timings"])
    return [
        f"A real language model, SmolLM2-135M-Instruct at temperature {line['temperature']:g} "
        f"({line['reading']['entropy']:.1f} nats), {line['rows']} rows on two cores: {old} from old text,",
        f"and {coupled} from text under the same key ({source('real')}).",
        "[Two kinds of drafts](docs/two_kinds.md) says what to expect in your set-up.",
    ]


def set_ups() -> list[str]:
    """What README promises to whom: the set-up, what it drafts from, and a figure."""
    trl = load("trl-ahead")["result"]
    filled, old, plain = first_epoch("fill", "150", "0", "plain")
    real_filled, real_plain = first_epoch("smollm2-fill", "64", "plain")
    kinds = list(zip(*(line["timings"] for line in load("real")["result"]["lines"]), strict=True))
    old_text, same_key = ([timing["speedup"] for timing in timings] for timings in kinds)
    embedded = speedup("whole-runs", "paired", LATER).partition(" ")[0]
    rows = [
        (
            "TRL with a vLLM server (`specrl.serve`), from the first epoch on",
            "the server begins the next batch while TRL scores and updates",
            f"whole steps {trl['speedup']:.2f}x ({trl['least']:.2f} to {trl['most']:.2f}), embedded policy "
            f"({source('trl-ahead')})",
        ),
        (
            "`specrl.train` with Ray workers, from the first epoch on",
            "idle workers begin the next batch",
            f"whole steps {ahead_speedup():.2f}x, embedded policy ({source('ahead-fresh')})",
        ),
        (
            "one process with a GPU, transformers or vLLM, under TRL too, from the first epoch on",
            "rows of the next batch join passes",
            f"rollouts {real_plain / real_filled:.1f}x with SmolLM2's text at temperature 1 "
            f"({source('smollm2-fill')}), {plain / filled:.1f}x with the embedded policy's ({source('fill')}), "
            f"{old / filled:.1f}x over old text "
            "alone; simulated 1.5B",
        ),
        (
            "a sweep with one seed, evaluations on the same prompts",
            "text under the same key",
            f"rollouts {min(same_key):.2f}x to {max(same_key):.2f}x, SmolLM2 ({source('real')})",
        ),
        (
            "several epochs",
            "old text, as far as the policy's entropy allows",
            f"rollouts {min(old_text):.2f}x to {max(old_text):.2f}x with SmolLM2, {embedded} with the embedded policy",
        ),
        ("one epoch otherwise, or hundreds of sequences at a time", "nothing", "leave it off"),
    ]
    return tables.markdown(("your set-up", "what it drafts from", "over the same without it"), rows)


def first_epoch(name: str, *fills: str) -> list[float]:
    """Simulated seconds of a rollout in the first epoch, for these values of `rollout.fill`."""
    seconds = {(line["epoch"], line["fill"]): line["seconds"] for line in load(name)["result"]["lines"]}
    return [seconds[1, fill] for fill in fills]


def vllm() -> list[str]:
    """Speed over stock vLLM by method, for drafts from nearby weights and from an earlier epoch of a run."""
    methods = {
        "specrl off": "specrl, no drafts",
        "specrl lenient e^0.5": "lenient, l = e^0.5",
        "specrl exact, replay 0": "exact, fresh noise",
        "specrl exact, replay 1": "exact, replayed noise",
    }
    rows = [(shown, rival("vllm", name), rival("vllm-old-text", name)) for name, shown in methods.items()]
    columns = (
        "method",
        f"2 % noise on the weights, {source('vllm', 'results')}",
        f"a run, {source('vllm-old-text', 'results')}",
    )
    return tables.markdown(columns, rows)


def sources() -> list[str]:
    """Speedup with all texts, and with a head in addition, by rows and regime."""
    regimes = ("first epoch", "heavy drift", "some drift", "little drift")
    rows = [
        (str(size), *(f"{ablation(size, regime)}, {ablation(size, regime, True)}" for regime in regimes))
        for size in (1, 8, 64, 256)
    ]
    return tables.markdown(("rows", *regimes), rows)


def ahead() -> list[str]:
    """Whole steps with and without rollouts ahead, by epoch."""
    runs = {
        "16 rows, any drafts": "ahead-small",
        "32 rows, any drafts": "ahead",
        "16 rows, no other drafts": "ahead-fresh",
    }
    rows = []
    for shown, name in runs.items():
        epochs = load(name)["result"]["epochs"]
        for line in epochs if len(epochs) > 2 else epochs[:1]:  # of one epoch, the last line repeats it
            error = "" if line["error"] is None else f" +- {line['error']:.2f}"
            seconds = f"{line['off']['seconds']:.2f} -> {line['auto']['seconds']:.2f}"
            passes = f"{line['off']['passes']:.0f} -> {line['auto']['passes']:.0f}"
            ended = f"{line['auto']['ended']:.0%}, {line['auto']['unchanged']:.0%}"
            when = "all epochs" if line["epoch"] == "all" else f"epoch {line['epoch']}"
            rows.append((f"{shown}, {when}", f"{line['speedup']:.2f}x{error}", seconds, passes, ended))
    return tables.markdown(
        ("run", "whole steps", "seconds a step", "passes of the slowest row", "rows complete ahead, unchanged"), rows
    )


def fill() -> list[str]:
    """Simulated seconds of a rollout, plain, without and with rows of the next batch in its passes, by epoch."""
    rows = []
    for name, model in {"smollm2-fill": "SmolLM2", "fill": "embedded", "fill-7b": "embedded"}.items():
        result = load(name)["result"]
        for line in result["lines"]:
            plain = next(other for other in result["lines"] if other["epoch"] == line["epoch"])
            if line["fill"] == plain["fill"]:
                continue
            speed = f"{plain['seconds'] / line['seconds']:.2f}x"
            shares = (f"{line[key]:.0%}" for key in ("complete", "unchanged"))
            numbers = (f"{1e3 * line['seconds']:.0f}", speed, f"{line['passes']:.0f}", f"{line['ahead']:.2f}")
            rows.append((f"{model}, {result['gpu']}", str(line["epoch"]), line["fill"], *numbers, *shares))
    columns = (
        "policy, size",
        "epoch",
        "fill",
        "ms a rollout",
        "over plain",
        "passes of the slowest row",
        "tokens ahead",
    )
    return tables.markdown((*columns, "complete", "unchanged"), rows)


def twins() -> list[str]:
    """Passes of a row, mean and slowest, of runs without and with another run's log, in two epochs, by engine."""
    rows = []
    for name, engine in (("twins", ""), ("twins-vllm", "vLLM: ")):
        for arm in load(name)["result"]["arms"]:
            if arm["arm"] not in ("the same again", "lr x 0.5", "dapo's loss", "ppo"):
                continue
            sides = [side for pair in zip(arm["without"], arm["with"], strict=True) for side in pair][:4]
            rows.append((engine + arm["arm"], *(passes(side, "") for side in sides)))
    columns = [f"{n} {side}" for n in (1, 2) for side in ("without", "with the log")]
    return tables.markdown(("run B", *(f"epoch {column}" for column in columns)), rows)


def evaluations() -> list[str]:
    """Passes of a row and seconds of the evaluations of a run, by source of the drafts."""
    evals = load("evaluations")["result"]["evaluations"]
    shown = {"last texts": "from the last evaluation", "no last texts": "without its texts", "plain": "none"}
    rows = [
        (shown[name], *(f"{passes(record, 'eval/')}, {record['eval/gen_s']:.1f} s" for record in records))
        for name, records in evals.items()
    ]
    return tables.markdown(("drafts", *(f"step {record['step']}" for record in evals["plain"])), rows)


def passes(record: dict[str, Any], prefix: str) -> str:
    """Passes of the mean and of the slowest row."""
    return f"{record[prefix + 'passes_per_row']:.1f} / {record[prefix + 'passes_max']:.0f}"


def turns() -> list[str]:
    """Passes and seconds of conversations by visit, and what kept results of a tool save."""
    lines = load("turns")["result"]["turns"]
    rows = []
    for visit in sorted({line["visit"] for line in lines}):
        of = [line for line in lines if line["visit"] == visit]
        sums = {key: sum(line[key] for line in of) for key in ("passes plain", "passes drafted")}
        seconds = {key: sum(line[key] for line in of) for key in ("seconds plain", "seconds drafted")}
        cells = (*(f"{sums[key]}" for key in sums), *(f"{seconds[key]:.1f}" for key in seconds))
        rows.append((f"epoch {visit}", *cells))
    return tables.markdown(("all turns", "passes without drafts", "with", "seconds without", "with"), rows)


def tool_calls() -> list[str]:
    """Calls of a tool and the time that they took, with every call made and with results kept."""
    rows = [
        (
            f"{row['tool ms']} ms",
            *(str(row[f"calls, {kind}"]) for kind in TOOL),
            *(f"{row[f'tool s, {kind}']:.1f} s" for kind in TOOL),
        )
        for row in load("turns")["result"]["tools"]
    ]
    columns = ("a call takes", "calls, each made", "results kept", "waits, each made", "results kept")
    return tables.markdown(columns, rows)


TOOL = ("every call", "results kept")


def whole_runs() -> list[str]:
    """Seconds by phase of the run without drafts and of the one with them."""
    rows = load("whole-runs")["result"]["paired"]["savings"]
    cells = [(row["phase"], *(f"{row[key]:.1f}" for key in ("plain_s", "specrl_s", "saved_s"))) for row in rows]
    return tables.markdown(("phase", "plain s", "specrl s", "saved s"), cells)


BLOCKS: dict[str, Callable[[], list[str]]] = {
    "headline": headline,
    "console": console,
    "savings": savings,
    "vllm": vllm,
    "sources": sources,
    "real": real,
    "real-sentence": real_sentence,
    "set-ups": set_ups,
    "real-run": real_run,
    "ahead": ahead,
    "fill": fill,
    "whole-runs": whole_runs,
    "twins": twins,
    "evaluations": evaluations,
    "turns": turns,
    "tool-calls": tool_calls,
}
