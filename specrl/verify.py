"""Checks the responses of a finished run against its weights: `python -m specrl.verify run=DIR [step=N] [rows=K]`.

Rows of the rollout of step N are decoded again, without drafts, with the weights of checkpoint-N and the run's keys.
They are compared with the digests that the run kept, and with its log. A row that is absent, unknown or there twice is
a failure too. That shows which tokens these weights give under these keys. It shows neither that the weights are those
that were trained, nor that the updates were right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specrl.config.load import RUN_ERROR, load_saved
from specrl.config.load import run as run_command
from specrl.config.options import ConfigError
from specrl.results.records import counted, find_run
from specrl.rollout.sections import doc

if TYPE_CHECKING:
    from specrl.config.schema import Config
    from specrl.evaluate import Serving
    from specrl.rollout.receipts import Receipt
    from specrl.rollout.types import Completion, Request
    from specrl.run.data import Example

NEAR_TIE = {"float32": 1e-3, "bfloat16": 0.1}
"""Gap between the scores of two tokens below which another machine may sample the other one, by the weights' dtype."""
NOT_SHOWN = (
    "Shown: these weights give these tokens under the keys of this run. Not shown: that the weights are those that "
    "were trained, nor that rewards and updates were right."
)


@dataclass
class VerifyOptions:
    run: str = doc("", "run directory, or the name of a run in outputs")
    step: int = doc(-1, "step whose rollout is checked; -1 is the last one that can be", low=-1)
    rows: int = doc(0, "rows to decode, from the first on; 0 is all")


@dataclass(frozen=True)
class Divergence:
    """A row that was not reproduced."""

    receipt: Receipt
    why: str
    near_tie: bool = False


def main(options: VerifyOptions) -> int:
    """Prints what was reproduced. Returns RUN_ERROR if a row differs by more than a near-tie."""
    if not options.run:
        raise ConfigError("run is missing: the directory of a run, such as run=outputs/grpo_math")
    folder = find_run(options.run)
    config = load_saved(folder)
    about, recorded = kept(folder)
    models = weights(folder, config)
    step = chosen(options.step, models, recorded, folder)
    config.model = models[step]
    config.rollout.drafter = ""
    from specrl.evaluate import serving

    with serving(config) as served:
        examples = same_examples(config, served, about)
        wrong = wrong_rows(recorded[step], examples, config)
        receipts = recorded[step][: options.rows or None]
        decoded = [receipt for receipt in receipts if receipt.example_id in examples]
        differing = check(config, served, examples, decoded, texts_of(folder, step)) if decoded else []
    for line in receipt_lines(folder, step, decoded, differing, served):
        print(line)
    for line in wrong:
        print(f"wrong row: {line}")
    if left := len(receipts) - len(decoded):
        print(f"{counted(left, 'row')} of later turns left out: the run does not keep their prompts.")
    return RUN_ERROR if wrong or any(not row.near_tie for row in differing) else 0


def kept(folder: Path) -> tuple[dict, dict[int, list[Receipt]]]:
    """The digests of a run. Raises ConfigError if there are none."""
    from specrl.rollout.receipts import DIGESTS, read_receipts

    try:
        return read_receipts(folder)
    except OSError as error:
        raise ConfigError(
            f"{folder / DIGESTS} cannot be read: {error.strerror}. Runs of specrl.train with "
            "rollout.acceptance=exact or off keep it; give one of them."
        ) from error


def wrong_rows(receipts: Sequence[Receipt], examples: Mapping[str, Example], config: Config) -> list[str]:
    """Sentences about rows of a rollout that are missing, come twice, or belong to no prompt of the data.

    Rows of unknown prompts are later turns where the run has tools.
    """
    group = config.rollout.group_size
    counts = Counter((receipt.example_id, receipt.sample_index) for receipt in receipts)
    known = {name for name, _ in counts if name in examples}
    found = [
        f"example {name}, sample {sample}: {counts[name, sample]} rows, not 1"
        for name in sorted(known)
        for sample in range(group)
        if counts[name, sample] != 1
    ]
    for name, sample in counts:
        if name in known and not 0 <= sample < group:
            found.append(f"example {name}, sample {sample}: there are {group} samples, from 0 on")
        elif name not in known and not config.dataset.tools:
            found.append(f"example {name}, sample {sample}: the data has no such example")
    wanted = config.trainer.prompts_per_step
    if len(known) < wanted or (len(known) > wanted and not config.trainer.refill_rounds):
        found.append(f"{counted(len(known), 'prompt')} in the rollout, not trainer.prompts_per_step={wanted}")
    return found


def weights(folder: Path, config: Config) -> dict[int, str]:
    """The model of each step that has one: the initial one, and those of complete checkpoints."""
    from specrl.run import policy
    from specrl.trainers.checkpoint import completed

    saved = {c.step: str(c.path) for c in completed(folder / "checkpoints") if not policy.flaw(c.path)}
    return {0: config.model} | saved


def chosen(step: int, models: Mapping[int, str], recorded: Mapping[int, object], folder: Path) -> int:
    """The step to check, whose checkpoint is undamaged. Raises ConfigError, CheckpointError."""
    from specrl.trainers.checkpoint import Checkpoint

    steps = sorted(models.keys() & recorded.keys())
    if not steps or step not in (-1, *steps):
        had = ", ".join(map(str, steps)) or "none"
        raise ConfigError(
            f"step={step} cannot be checked: it needs digests and a checkpoint with a model. Steps of {folder} that "
            f"can be: {had}. A run keeps more with trainer.save_every=N and trainer.keep_checkpoints=M."
        )
    step = steps[-1] if step == -1 else step
    if step:
        Checkpoint(Path(models[step])).verify(text_decides=False)
    return step


def same_examples(config: Config, served: Serving, about: Mapping) -> dict[str, Example]:
    """The training prompts by id. Raises ConfigError if they have changed since the run."""
    from specrl.run.data import load_examples
    from specrl.run.prompts import chat_template
    from specrl.run.run_dir import data_digests

    examples = load_examples(config.data, config.dataset, "train", config.seed)
    now = data_digests(chat_template(served.tokenizer, config.dataset), train=examples)
    if about.get("data", {}).get("train") != now["train"]:
        raise ConfigError(
            f"The train rows of data={config.data} are not those of the run, or the tokenizer's chat template has "
            "changed. Restore the old ones."
        )
    return {example.id: example for example in examples}


def texts_of(folder: Path, step: int) -> dict[int, list[int]]:
    """The tokens of the log by key, empty without one. Raises CacheError if it is damaged."""
    from specrl.rollout.cache.log import TEXTS
    from specrl.rollout.cache.record import unpack
    from specrl.rollout.cache.snapshot import read_file
    from specrl.rollout.types import CacheError

    path = folder / TEXTS / f"step_{step}.parquet"
    try:
        entries = read_file(path)[1] if path.is_file() else []
        return {text.key: [*text.tokens] for text in (unpack(blob) for _, _, blob in entries)}
    except CacheError as error:
        raise CacheError(f"{path} is damaged ({error}). Without it, the digests alone are compared") from error


def check(
    config: Config,
    served: Serving,
    examples: Mapping[str, Example],
    receipts: Sequence[Receipt],
    texts: Mapping[int, list[int]],
) -> list[Divergence]:
    """Decodes the rows plainly and names those that differ. Args: texts: of the log, by key."""
    from specrl.rollout.keys import derive_key, generation
    from specrl.rollout.receipts import digest
    from specrl.rollout.types import Request
    from specrl.run.prompts import render

    seed, cap = config.seed, config.rollout.max_new_tokens
    keys = []
    for name, sample, visit, _, _ in receipts:
        noise = generation(seed, name, sample, visit, config.rollout.replay)
        keys.append(derive_key(seed, name, sample, noise))
    prompts = [render(examples[receipt.example_id], served.tokenizer, config.dataset).ids for receipt in receipts]
    requests = [Request(ids, key, cap, plain=True) for ids, key in zip(prompts, keys, strict=True)]
    completions, _ = served.engine.generate(requests)
    differing = []
    for receipt, request, completion in zip(receipts, requests, completions, strict=True):
        text = texts.get(request.key)
        if receipt.key != request.key:
            differing.append(Divergence(receipt, f"its key is {receipt.key}, and the run's is {request.key}"))
        elif text is not None and text != completion.tokens:
            differing.append(located(config, served, receipt, request, completion, text))
        elif digest(request.key, completion.tokens, completion.finish) != receipt.digest:
            why = "its digest is another" if text is None else "the log has these tokens, and its digest is another"
            differing.append(Divergence(receipt, why))
    return differing


def located(
    config: Config, served: Serving, receipt: Receipt, request: Request, drawn: Completion, text: list[int]
) -> Divergence:
    """Where a row leaves the text of the log, and by how much the drawn token was better."""
    from specrl.rollout.verify import accept_exact
    from specrl.run.policy import rollout_dtype

    at = accept_exact(text, drawn.tokens[: len(text)])
    if at == len(text) or at == len(drawn.tokens):
        return Divergence(
            receipt, f"the log ends after {len(text)} tokens, and these weights after {len(drawn.tokens)}"
        )
    gap = gap_at(config, served, request, drawn.tokens[:at], drawn.tokens[at], text[at])
    why = f"token {at}: the log has id {text[at]}, these weights give id {drawn.tokens[at]}, gap {gap:.2g}"
    return Divergence(receipt, why, near_tie=gap < NEAR_TIE[rollout_dtype(config)])


def gap_at(config: Config, served: Serving, request: Request, before: list[int], drawn: int, claimed: int) -> float:
    """Score of the drawn token minus that of the claimed one, under the noise of the row."""
    import torch

    from specrl.rollout.noise import gumbel, process_logits, row_words

    device = served.model.device
    with torch.no_grad():
        logits = served.model(torch.tensor([[*request.prompt, *before]], device=device)).logits[:, -1]
    options = config.rollout
    scores = process_logits(logits, options.temperature, options.top_k, options.top_p)
    if options.temperature:
        words = row_words(*(torch.tensor([value], device=device) for value in (request.key, len(before))))
        scores = scores + gumbel(*words, scores.shape[-1])
    return float(scores[0, drawn] - scores[0, claimed])


def receipt_lines(
    folder: Path, step: int, receipts: Sequence[Receipt], differing: Sequence[Divergence], served: Serving
) -> list[str]:
    """The lines of the receipt."""
    from specrl.rollout.durable import read_json
    from specrl.run.machine import ENVIRONMENT_FILE
    from specrl.run.run_dir import environment, rounding

    near = sum(row.near_tie for row in differing)
    ties = f", {counted(near, 'near-tie')}" if near else ""
    lines = [
        f"{len(receipts) - len(differing)} of {counted(len(receipts), 'row')} reproduced{ties}: {folder}, step {step}"
    ]
    for row in differing:
        kind = "near-tie" if row.near_tie else "differs"
        name, sample, visit, _, _ = row.receipt
        lines.append(f"{kind}: example {name}, sample {sample}, visit {visit}: {row.why}")
    file = folder / ENVIRONMENT_FILE
    began = rounding(read_json(file.read_bytes())) if file.is_file() else {}
    now = rounding(environment(served.model.device.type, 1))
    for title, values in (("The run", began), ("Here", now)):
        known = [f"{key} {value or 'none'}" for key, value in values.items()]
        lines.append(f"{title}: {', '.join(known) or 'unknown'}")
    return [*lines, NOT_SHOWN]


if __name__ == "__main__":
    raise SystemExit(run_command(main, schema=VerifyOptions))
