"""The embedded tiny policy and its recipe: 1.2 M parameters that solve `specrl.tasks.arithmetic` about half the time.

    python -m specrl.tiny out=DIR [steps=N] [blur=X] [batch=N] [seed=N]

First supervised training on generated problems until most of the skill is there, then `blur`: noise on the weights
that brings sampled accuracy from about 0.75 down to 0.55. Reinforcement learning can then raise it on a CPU, which it
could not if the skill had never been learned. The recipe needs no network; one machine writes the same bytes twice.
"""

import math
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from specrl import tasks
from specrl.policy import TINY_PATH
from specrl.tasks import Problem, arithmetic

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
IGNORE = -100  # the label torch's cross entropy skips
DATA_SEED = 1_000_003  # far from the small seeds of experiments, so that their train problems are new to the policy
LEARNING_RATE = 3e-3  # the peak of one rise and fall
# (level, fifths of all steps): most of the arithmetic is learned on short problems, at half the cost of the others.
PLAN = (("easy", 2), ("mixed", 3))
PIECES = r" ?[A-Za-z]+|[0-9]|#+| [-+*=] | |\n|[.,:?]"


@dataclass(frozen=True)
class Recipe:
    """What the command accepts; `steps` round up per part of `PLAN`, `blur` is in units of a matrix's spread."""

    out: str
    steps: int = 1800
    blur: float = 0.4
    batch: int = 32
    seed: int = 0


def load(path: str | Path) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """A policy folder as a float32 model in evaluation mode and its tokenizer. Reads local files only."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
    return model.eval(), AutoTokenizer.from_pretrained(path, local_files_only=True)


def load_tiny() -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """The shipped policy, as `load(TINY_PATH)`."""
    return load(TINY_PATH)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A closed vocabulary: one token per digit, operator and mark, and whole words together with their leading space.

    `decode(encode(text)) == text` for every text of `specrl.tasks`; anything else becomes "<unk>".
    """
    spaced = (*tasks.ITEMS, *tasks.PACKS, *tasks.PEOPLE, "He", "She", "How", "many", "does", "have", "has", "now", "of")
    verbs = " ".join((*tasks.GAINS, *tasks.LOSSES)).split()
    words = [*tasks.PEOPLE, "He", "She", *(f" {word}" for word in (*spaced, *verbs))]
    marks = [*"0123456789", " ", "\n", " + ", " - ", " * ", " = ", "####", ".", ",", ":", "?"]
    vocabulary = {piece: index for index, piece in enumerate([PAD, EOS, UNK, *marks, *words])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
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


def train(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> None:
    """Supervised training in place on answer tokens, AdamW with one cycle of the learning rate."""
    plan = [(level, math.ceil(recipe.steps * share / 5)) for level, share in PLAN]
    total = sum(steps for _, steps in plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=total, pct_start=0.1)
    started = time.perf_counter()
    model.train()
    for step, (ids, labels) in enumerate(batches(tokenizer, plan, recipe), start=1):
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
    """Adds normal noise to every matrix in place, `amount` times the matrix's own standard deviation."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.add_(torch.randn(parameter.shape, generator=generator) * parameter.std() * amount)


@dataclass(frozen=True)
class Measure:
    """Shares in 0..1 over sampled completions; `certainty`: mean probability of a sampled token; `length`: tokens."""

    accuracy: float
    certainty: float
    finished: float
    length: float


@torch.no_grad()
def measure(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, problems: list[Problem], seed: int = 0, limit: int = 320
) -> Measure:
    """Samples one completion of at most `limit` tokens per problem at temperature 1 and scores it."""
    model.eval()
    inputs = tokenizer([p.prompt for p in problems], return_tensors="pt", padding=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        out = model.generate(
            **inputs, do_sample=True, top_k=0, max_new_tokens=limit, output_logits=True, return_dict_in_generate=True
        )
    tokens = out.sequences[:, inputs.input_ids.shape[1] :]
    probabilities = torch.stack(out.logits, 1).float().softmax(-1).gather(-1, tokens[..., None])[..., 0]
    ended = tokens == tokenizer.eos_token_id
    mask = ended.cumsum(1) - ended.long() == 0
    texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    right = [
        text.rpartition("#### ")[2] == p.answer and bool(end.any())
        for text, p, end in zip(texts, problems, ended, strict=True)
    ]
    return Measure(
        accuracy=sum(right) / len(right),
        certainty=(probabilities * mask).sum().item() / mask.sum().item(),
        finished=ended.any(1).float().mean().item(),
        length=mask.sum().item() / len(problems),
    )


def parse(arguments: list[str]) -> Recipe:
    """Turns `key=value` words into a recipe.

    Raises:
        SystemExit: a word that is not `key=value`, an unknown key, a value of the wrong kind, or no `out`.
    """
    kinds = {field.name: field.type for field in fields(Recipe)}
    optional = " ".join(f"[{field.name}={field.default}]" for field in fields(Recipe)[1:])
    usage = f"usage: python -m specrl.tiny out=DIR {optional}"
    given: dict[str, str | int | float] = {}
    for word in arguments:
        key, equals, value = word.partition("=")
        if not equals:
            raise SystemExit(f"tiny: {word!r} is not of the form key=value.\n{usage}")
        if key not in kinds:
            near = get_close_matches(key, kinds, n=1, cutoff=0.0)[0]
            raise SystemExit(f"tiny: unknown key {key!r} in {word!r}. Did you mean {near!r}?\n{usage}")
        try:
            given[key] = kinds[key](value)
        except ValueError:
            raise SystemExit(f"tiny: {key} wants {kinds[key].__name__}, got {value!r}.\n{usage}") from None
    for key in ("steps", "batch"):
        if given.get(key, 1) < 1:
            raise SystemExit(
                f"tiny: {key} must be 1 or more, got {given[key]}; the nearest allowed value is 1.\n{usage}"
            )
    if "out" not in given:
        raise SystemExit(f"tiny: `out` is missing, the folder to write to, such as out=outputs/tiny.\n{usage}")
    return Recipe(**given)


def make(recipe: Recipe) -> None:
    """The whole recipe: train, blur, then write the model (bfloat16) and its tokenizer to the folder `out`."""
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, recipe.seed)
    train(model, tokenizer, recipe)
    blur(model, recipe.blur, recipe.seed)
    model.to(torch.bfloat16).save_pretrained(recipe.out)
    tokenizer.save_pretrained(recipe.out)


def main(arguments: list[str]) -> None:
    recipe = parse(arguments)
    torch.set_num_threads(1)  # the order of float additions, and so the written bytes, depend on the number of threads
    make(recipe)
    written = load(recipe.out)
    print(f"{recipe.out}: {measure(*written, arithmetic('test', 256))}")


if __name__ == "__main__":
    main(sys.argv[1:])
