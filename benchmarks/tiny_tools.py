"""The recipe of the embedded policy that uses a calculator, on word problems with numbers of up to five digits.

    python -m benchmarks.tiny_tools out=DIR [steps=N] [blur=X] [batch=N] [seed=N]
    python -m specrl.evaluate config=tools_math model=DIR

It begins as the embedded policy, which reads a story in order, with a few more tokens. Supervised training on generated
conversations teaches it to copy numbers into calls, as the tool calculates; then noise is added, as for that policy.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from benchmarks.tiny_policy import DATA_SEED, IGNORE, blur, build_model, build_tokenizer, train
from specrl.config import load as cli
from specrl.config.options import ConfigError
from specrl.rollout.sections import doc
from specrl.run.tasks import Problem, arithmetic
from specrl.tiny import load_tiny

USER, ASSISTANT, TOOL, CALL, END = "<user>", "<assistant>", "<tool>", "<call>", "</call>"
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<assistant>{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}<call>{{ c['function']['name'] }}"
    "{% for name, value in c['function']['arguments'].items() %}{{ '\\n' ~ name ~ ': ' ~ value }}{% endfor %}</call>"
    "{% endfor %}{{ eos_token }}{% elif m['role'] == 'tool' %}<tool>{{ m['content'] }}"
    "{% else %}<user>{{ m['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Tools are not described in it, as the policy knows only the one of its training."""
RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": ASSISTANT,
    "fields": {
        "content": {"close": "<eos>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"<call>(?P<name>\w+)",
            "close_pattern": r"</call>(?:<eos>)?",
            "repeats": True,
            "content": "kv-lines",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}


@dataclass
class Recipe:
    out: str = doc("", "directory to write the policy to")
    steps: int = doc(120, "optimiser steps", low=1)
    blur: float = doc(0.33, "noise on the weights afterwards, in units of a matrix's spread")
    batch: int = doc(16, "conversations in a step", low=1)
    seed: int = doc(0, "of new weights, problems and blur")


def build_tools_tokenizer() -> PreTrainedTokenizerFast:
    """The embedded policy's tokenizer with a chat template for tools, and the response template that parses calls."""
    tokenizer = build_tokenizer((USER, ASSISTANT, TOOL, CALL, END, "calculate", "expression"))
    tokenizer.chat_template = TEMPLATE
    tokenizer.response_template = RESPONSE
    return tokenizer


def conversation(problem: Problem) -> list[dict]:
    """A problem as the messages of a conversation: a call for each line of the solution, then the answer."""
    *lines, answer = problem.solution.splitlines()
    messages: list[dict] = [{"role": "user", "content": problem.prompt}]
    for line in lines:
        event, _, calculation = line.partition(": ")
        expression, _, result = calculation.partition(" = ")
        function = {"name": "calculate", "arguments": {"expression": expression}}
        call = {"type": "function", "function": function}
        messages.append({"role": "assistant", "content": f"{event}:", "tool_calls": [call]})
        messages.append({"role": "tool", "name": "calculate", "content": result})
    return [*messages, {"role": "assistant", "content": answer}]


def labelled(tokenizer: PreTrainedTokenizerFast, problem: Problem) -> tuple[list[int], list[int]]:
    """The ids of a conversation and their labels, IGNORE for those that the policy does not write."""
    ids = tokenizer.apply_chat_template(conversation(problem), return_dict=False)
    starts, eos = tokenizer.convert_tokens_to_ids(ASSISTANT), tokenizer.eos_token_id
    labels, writes = [], False
    for token in ids:
        labels.append(token if writes else IGNORE)
        writes = token == starts or (writes and token != eos)
    return ids, labels


def batches(tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Ids and labels of each step, int64 (batch, longest), padded on the right."""
    problems = arithmetic("train", recipe.steps * recipe.batch, DATA_SEED + recipe.seed, "large")
    for start in range(0, len(problems), recipe.batch):
        rows = [labelled(tokenizer, problem) for problem in problems[start : start + recipe.batch]]
        longest = max(len(ids) for ids, _ in rows)
        ids = torch.full((len(rows), longest), tokenizer.pad_token_id)
        labels = torch.full_like(ids, IGNORE)
        for row, (row_ids, row_labels) in enumerate(rows):
            ids[row, : len(row_ids)] = torch.tensor(row_ids)
            labels[row, : len(row_ids)] = torch.tensor(row_labels)
        yield ids, labels


@torch.no_grad()
def begin(model: Qwen3ForCausalLM) -> None:
    """Copies the embedded policy's weights, in place; the new tokens keep their random ones."""
    weights = load_tiny()[0].state_dict()
    for name, parameter in model.named_parameters():
        parameter[: len(weights[name])] = weights[name]


def make(recipe: Recipe) -> None:
    """The recipe: train, blur, then write the model (bfloat16) and its tokenizer to the folder `out`."""
    if not recipe.out:
        raise ConfigError("out is missing: the directory to write the policy to, such as out=outputs/tiny_tools")
    tokenizer = build_tools_tokenizer()
    model = build_model(tokenizer, recipe.seed)
    begin(model)
    train(model, recipe.steps, batches(tokenizer, recipe))
    blur(model, recipe.blur, recipe.seed)
    model.to(torch.bfloat16).save_pretrained(recipe.out)
    tokenizer.save_pretrained(recipe.out)


if __name__ == "__main__":
    torch.set_num_threads(1)  # as for benchmarks.tiny_policy
    raise SystemExit(cli.run(make, schema=Recipe))
