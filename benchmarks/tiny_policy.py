"""The recipe of the embedded policy: 1.2 M parameters that solve half of `specrl.run.tasks.arithmetic`.

    python -m benchmarks.tiny_policy out=DIR [steps=N] [blur=X] [batch=N] [seed=N]
    python -m specrl.evaluate config=grpo_math model=DIR

First supervised training on generated problems until most of the skill is there, then `blur`: noise on the weights
that brings sampled accuracy from about 0.75 down to 0.55. Reinforcement learning can then raise it on a CPU, which it
could not if the skill had never been learned. The recipe needs no network; one machine writes the same bytes twice.
"""

import math
import random
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from specrl.config import load as cli
from specrl.config.options import ConfigError
from specrl.rollout.sections import doc
from specrl.run import tasks
from specrl.run.tasks import Problem, arithmetic

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
IGNORE = -100  # the label torch's cross entropy skips
DATA_SEED = 1_000_003  # far from the small seeds of experiments, so that their train problems are new to the policy
LEARNING_RATE = 3e-3  # the peak of one rise and fall
# (level, fifths of all steps): most of the arithmetic is learned on short problems, at half the cost of the others.
PLAN = (("easy", 2), ("mixed", 3))
PIECES = r" ?[A-Za-z]+|[0-9]|#+| [-+*=] | |\n|[.,:?]"


@dataclass
class Recipe:
    out: str = doc("", "directory to write the policy to")
    steps: int = doc(1800, "optimiser steps, rounded up per part of the plan", low=1)
    blur: float = doc(0.4, "noise on the weights afterwards, in units of a matrix's spread")
    batch: int = doc(32, "problems in a step", low=1)
    seed: int = doc(0, "of weights, problems and blur")


def build_tokenizer(further: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """A closed vocabulary: one token per digit, operator and mark, and words together with their leading space.

    `decode(encode(text)) == text` for every text of `specrl.run.tasks`; anything else becomes "<unk>".

    Args: further: tokens besides these, such as marks of a chat template.
    """
    spaced = (*tasks.ITEMS, *tasks.PACKS, *tasks.PEOPLE, "He", "She", "How", "many", "does", "have", "has", "now", "of")
    verbs = " ".join((*tasks.GAINS, *tasks.LOSSES)).split()
    words = [*tasks.PEOPLE, "He", "She", *(f" {word}" for word in (*spaced, *verbs))]
    marks = [*"0123456789", " ", "\n", " + ", " - ", " * ", " = ", "####", ".", ",", ":", "?"]
    vocabulary = {piece: index for index, piece in enumerate([PAD, EOS, UNK, *marks, *words, *further])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    pieces = "|".join([*map(re.escape, further), PIECES])
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(pieces), behavior="isolated")
    raw.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
        model_input_names=["input_ids", "attention_mask"],
    )


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """A fresh policy. Narrow and deep, because the depth gives a pass the cost profile of a large model."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=8,
        intermediate_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    # top_k=0 and top_p=1: sampling from the policy itself, which transformers' default of top_k=50 is not.
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return model


def train(model: Qwen3ForCausalLM, total: int, data: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Supervised training in place, AdamW with one cycle of the learning rate. Args: total: batches in `data`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=total, pct_start=0.1)
    started = time.perf_counter()
    model.train()
    for step, (ids, labels) in enumerate(data, start=1):
        logits = model(input_ids=ids, use_cache=False).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"step {step}/{total} loss {loss.item():.4f} after {time.perf_counter() - started:.0f} s", flush=True)


def batches(
    tokenizer: PreTrainedTokenizerFast, plan: list[tuple[str, int]], recipe: Recipe
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of `collate` for (level, steps) after (level, steps); problems of similar length share a batch."""
    shuffle = random.Random(recipe.seed)
    pool = recipe.batch * 16
    for level, steps in plan:
        problems = arithmetic("train", steps * recipe.batch, DATA_SEED + recipe.seed, level)
        for start in range(0, len(problems), pool):
            near = sorted(problems[start : start + pool], key=lambda p: len(p.prompt) + len(p.solution))
            cuts = [near[at : at + recipe.batch] for at in range(0, len(near), recipe.batch)]
            shuffle.shuffle(cuts)
            yield from (collate(tokenizer, cut) for cut in cuts)


def collate(tokenizer: PreTrainedTokenizerFast, problems: list[Problem]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels of a batch, int64 (batch, longest), padded on the right; only answer and end have labels."""
    prompts = tokenizer([p.prompt for p in problems]).input_ids
    answers = [[*ids, tokenizer.eos_token_id] for ids in tokenizer([p.solution for p in problems]).input_ids]
    longest = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    ids = torch.full((len(problems), longest), tokenizer.pad_token_id)
    labels = torch.full_like(ids, IGNORE)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return ids, labels


@torch.no_grad()
def blur(model: torch.nn.Module, amount: float, seed: int) -> None:
    """Adds normal noise to every matrix in place, `amount` times the matrix's standard deviation."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.add_(torch.randn(parameter.shape, generator=generator) * parameter.std() * amount)


def make(recipe: Recipe) -> None:
    """The recipe: train, blur, then write the model (bfloat16) and its tokenizer to the folder `out`."""
    if not recipe.out:
        raise ConfigError("out is missing: the directory to write the policy to, such as out=outputs/tiny")
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, recipe.seed)
    plan = [(level, math.ceil(recipe.steps * share / 5)) for level, share in PLAN]
    train(model, sum(steps for _, steps in plan), batches(tokenizer, plan, recipe))
    blur(model, recipe.blur, recipe.seed)
    model.to(torch.bfloat16).save_pretrained(recipe.out)
    tokenizer.save_pretrained(recipe.out)


if __name__ == "__main__":
    torch.set_num_threads(1)  # the order of float additions, and so the written bytes, depend on the number of threads
    raise SystemExit(cli.run(make, schema=Recipe))
