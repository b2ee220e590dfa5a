"""Initial drafter of a run's policy: `python -m specrl.drafter config=NAME out=DIR [kind=head] [layers=1]`.

Follows FastDraft (arXiv 2411.11055) for a policy that is already trained. The drafter is a copy of the policy with few
of its layers, or a head on its hidden states, distilled from the policy's full logits on responses that the policy
samples at temperature 1. The result is a model directory that transformers or, for a head, vLLM can load. This takes a
few minutes for the embedded policy on two cores.
"""

from __future__ import annotations

import copy
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, ClassVar, Literal

from specrl.config import load as cli
from specrl.config.options import ConfigError
from specrl.config.schema import Config
from specrl.rollout.sections import doc

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specrl.run.data import Example
    from specrl.trainers.cotraining.texts import Text

SAMPLED_TOGETHER = 256  # responses per line of progress
DEFAULTS = {"model": (700, 3e-3), "head": (1000, 5e-3)}  # steps and learning rate, tuned for the embedded policy


@dataclass
class DrafterOptions(Config):
    out: str = doc("", "directory to write the draft model to")
    kind: Literal["model", "head"] = doc(
        "model", "model: the policy's first layers; head: one layer on the policy's last hidden states, as EAGLE's"
    )
    layers: int = doc(1, "layers of the draft model: the policy's first ones and, from 2 on, its last")
    prompts: int = doc(768, "training prompts of the data; the policy answers each once", low=2)
    steps: int = doc(0, "optimiser steps; 0: 700, for a head 1000")
    select: Literal["all", "adaspec"] = doc(
        "all", "tokens learned from: all, or those furthest from a reference that is distilled first (AdaSPEC)"
    )
    bits: int = doc(0, "round the layers' matrices to so many bits per weight, for a weaker draft; 0 leaves them")
    batch: int = doc(16, "responses per step")
    learning_rate: float = doc(
        0.0, "peak of one rise and fall; 0: 3e-3, for a head 5e-3; about 1e-4 for models of a billion parameters"
    )

    scores: ClassVar[bool] = False

    @property
    def splits(self) -> tuple[Literal["train", "test"], ...]:
        return ("train",)

    @property
    def schedule(self) -> tuple[int, float]:
        """Optimiser steps and peak learning rate; those of DEFAULTS where an option is 0."""
        steps, rate = DEFAULTS[self.kind]
        return self.steps or steps, self.learning_rate or rate


def main(options: DrafterOptions) -> int:
    from specrl.run.policy import load_policy
    from specrl.run.preflight import check_out
    from specrl.run.prompts import render

    check_out(options.out)
    if options.bits and options.bits < 2:
        raise ConfigError(f"bits={options.bits} holds no number but zero. Take bits=2 or more, or 0 for none.")
    if options.kind == "head" and (options.bits or options.layers != 1):
        raise ConfigError(
            f"kind=head has one layer and no rounded weights, not layers={options.layers} and bits={options.bits}. "
            "Leave both out, or take kind=model."
        )
    learned, held_out = examples(options)
    policy, tokenizer, eos_ids = load_policy(options)
    student = untrained(policy.eval(), options)
    asked, tested = ([render(e, tokenizer, options.dataset).ids for e in part] for part in (learned, held_out))
    texts, _ = sample(policy, eos_ids, asked, options)
    distil(policy, student, texts, options)
    if options.bits:
        quantise(student, options.bits)
    student.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    share = agreement(policy, student, *sample(policy, eos_ids, tested, options))
    print(f"{options.out}: on new prompts {share:.1%} of the draft tokens are the policy's samples")
    return 0


def examples(options: DrafterOptions) -> tuple[list[Example], list[Example]]:
    """Prompts to distil on, and others of the same split to test on. Raises ConfigError if there is one only."""
    from specrl.run.data import load_examples

    wanted = options.prompts + max(16, options.prompts // 16)
    dataset = replace(options.dataset, train_size=wanted if options.generated else 0)
    found = load_examples(options.data, dataset, "train", options.seed)[:wanted]
    if len(found) < 2:
        raise ConfigError(f"data={options.data} has one training prompt, and one more is needed to test on.")
    tested = min(wanted - options.prompts, len(found) // 2)
    return found[:-tested], found[-tested:]


def without_drafter(argv: Sequence[str]) -> Sequence[str]:
    """The command line words, with config=grpo_math by default; a config may name the draft model that is made here."""
    named = any(word.startswith("config=") for word in argv)
    words = argv if named else ["config=grpo_math", *argv]
    return [*words, "rollout.drafter=", "rollout.acceptance=off", "trainer.drafter.train=false"]


def untrained(policy: PreTrainedModel, options: DrafterOptions) -> PreTrainedModel:
    """The untrained drafter."""
    if options.kind == "model":
        return shortened(policy, options.layers)
    from specrl.rollout.engines.local.head import Head

    return Head.of(policy)


def shortened(policy: PreTrainedModel, layers: int) -> PreTrainedModel:
    """A copy of the policy with its first `layers` - 1 layers and its last one, or only the first if `layers` is 1.

    The embedding, the final norm and the output layer are copied too.

    Raises:
        ConfigError: `layers` is not less than the policy's number of layers.
    """
    depth = policy.config.num_hidden_layers
    if not 1 <= layers < depth:
        raise ConfigError(f"layers={layers}: a draft model of this policy has 1 to {depth - 1} layers")
    kept = [*range(layers - 1), depth - 1] if layers > 1 else [0]
    config = copy.deepcopy(policy.config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[i] for i in kept]
    student = type(policy)(config)
    student.to(policy.device, policy.dtype)  # type: ignore[arg-type]  # the stub of `to` lacks self
    weights = policy.state_dict()
    for name, weight in student.state_dict().items():
        source = re.sub(r"\.(\d+)\.", lambda layer: f".{kept[int(layer[1])]}.", name, count=1)  # the layer's number
        weight.copy_(weights[source])
    student.generation_config = copy.deepcopy(policy.generation_config)
    return student


def sample(
    policy: PreTrainedModel, eos_ids: frozenset[int], prompts: Sequence[Sequence[int]], options: DrafterOptions
) -> tuple[list[Text], list[int]]:
    """Samples one response to each prompt from the policy at temperature 1; returns them with their keys."""
    from specrl.rollout.engines.base import SamplingParams
    from specrl.rollout.engines.local.engine import TransformersEngine
    from specrl.rollout.keys import derive_key
    from specrl.rollout.types import Completion, Request
    from specrl.trainers.cotraining.texts import Text

    keys = [derive_key(options.seed, "drafter", i, 0) for i in range(len(prompts))]
    requests = [Request(p, key, options.rollout.max_new_tokens) for p, key in zip(prompts, keys, strict=True)]
    print(f"sampling {len(requests)} responses of at most {options.rollout.max_new_tokens} tokens", flush=True)
    engine = TransformersEngine(policy, SamplingParams(eos_ids))
    done: list[Completion] = []
    began = time.perf_counter()
    while len(done) < len(requests):
        done += engine.generate(requests[len(done) : len(done) + SAMPLED_TOGETHER])[0]
        print(f"{len(done)}/{len(requests)} responses after {time.perf_counter() - began:.0f} s", flush=True)
    return [Text(tuple(p), tuple(c.tokens)) for p, c in zip(prompts, done, strict=True)], keys


def distil(policy: PreTrainedModel, student: PreTrainedModel, texts: Sequence[Text], options: DrafterOptions) -> None:
    """Trains the student in place on the responses; with select=adaspec, first a copy of it as the reference."""
    import torch
    from torch.optim.lr_scheduler import OneCycleLR

    from specrl.trainers.cotraining import distil as recipe
    from specrl.trainers.cotraining.texts import read

    reference = None
    if options.select == "adaspec":
        reference = copy.deepcopy(student)
        print("the reference first, on all tokens", flush=True)
        distil(policy, reference, texts, replace(options, select="all"))
    near = sorted(texts, key=len)  # similar lengths in a batch need less padding
    cuts = [near[at : at + options.batch] for at in range(0, len(near), options.batch)]
    steps, rate = options.schedule
    batches: dict[int, recipe.Batch] = {}  # keeps the policy's hidden states, which are far smaller than its logits
    optimizer = torch.optim.AdamW(student.parameters(), rate, betas=(0.9, 0.98), weight_decay=0.01)
    longer = max(11, steps)  # with 10 steps, the warm-up would have none
    schedule = OneCycleLR(optimizer, rate, total_steps=longer, pct_start=0.1)
    print(f"distilling in {steps} steps of {options.batch} responses", flush=True)
    rng = random.Random(options.seed)
    mix = torch.Generator().manual_seed(options.seed)
    began = time.perf_counter()
    order = (at for _ in count() for at in rng.sample(range(len(cuts)), len(cuts)))
    for step, at in zip(range(1, steps + 1), order, strict=False):
        if at not in batches:
            batches[at] = recipe.Batch.of(read(policy, cuts[at]), student)
        batch = batches[at]
        teacher = recipe.teacher_logits(policy, batch)
        passes = [*recipe.student_logits(student, batch, mix)]
        kept = None
        if reference is not None:
            with torch.no_grad():
                kept = recipe.selected(passes[0], next(recipe.student_logits(reference, batch, mix)), teacher)
        losses = [recipe.loss(logits, teacher, kept=kept) for logits in passes]
        recipe.step(optimizer, sum(losses[1:], start=losses[0]))
        schedule.step()
        if step % min(100, max(1, steps // 10)) == 0:
            seconds = time.perf_counter() - began
            values = ", ".join(f"{loss.item():.4f}" for loss in losses)
            print(f"step {step}/{steps} forward KL {values} after {seconds:.0f} s", flush=True)
    student.eval()


def quantise(model: PreTrainedModel, bits: int) -> None:
    """Rounds every matrix of the layers in place to 2^bits - 1 levels per row. The values remain floats."""
    import torch

    with torch.no_grad():
        for weight in model.base_model.get_submodule("layers").parameters():
            if weight.dim() == 2:
                scale = weight.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
                weight.copy_((weight / scale).round() * scale)


def agreement(policy: PreTrainedModel, student: PreTrainedModel, texts: Sequence[Text], keys: Sequence[int]) -> float:
    """Share of response positions at which the student, with the policy's noise, samples the policy's token.

    At every position, both models see the policy's response up to it as their prefix.

    Args: keys: those that the texts were sampled with.
    """
    import torch

    from specrl.rollout.engines.base import SamplingParams
    from specrl.trainers.cotraining import distil as recipe
    from specrl.trainers.cotraining.texts import read

    agreed = 0
    total = 0
    for text, key in zip(texts, keys, strict=True):
        with torch.no_grad():
            batch = recipe.Batch.of(read(policy, [text]), student)
            if not len(batch.targets):  # a head makes no prediction for a response of one token
                continue
            logits = next(recipe.student_logits(student, batch, torch.Generator())).float()
        samples = recipe.keyed_samples(logits, batch, [key], SamplingParams(frozenset())).tolist()
        first = len(text.response) - len(samples)
        agreed += sum(a == b for a, b in zip(samples, text.response[first:], strict=True))
        total += len(samples)
    return agreed / total


if __name__ == "__main__":
    raise SystemExit(cli.run(main, schema=DrafterOptions, training=False, words=without_drafter))
