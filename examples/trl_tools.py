"""Reuse in TRL's example of tools: the two lines marked (1) and (2); everything else is TRL's.

python examples/trl_tools.py
"""

from datasets import Dataset
from specrl import reusing  # (1)
from specrl.run.tasks import arithmetic
from specrl.tiny import load_tiny_tools
from trl import GRPOConfig, GRPOTrainer


def calculate(expression: str) -> int:
    """Adds or subtracts two whole numbers.

    Args:
        expression: such as 12 + 30.

    Returns: the result.
    """
    left, sign, right = expression.split()
    return int(left) + int(right) if sign == "+" else int(left) - int(right)


def right(completions, answer, **_):
    """Sees whole conversations: each is the list of messages after the prompt."""
    return [float(messages[-1]["content"] == f"#### {a}") for messages, a in zip(completions, answer, strict=True)]


model, tokenizer = load_tiny_tools()  # stands for AutoModelForCausalLM.from_pretrained(...)
problems = arithmetic("train", 1, level="large")
data = [{"prompt": [{"role": "user", "content": p.prompt}], "answer": p.answer} for p in problems]
args = GRPOConfig(
    "outputs/trl_tools",
    num_generations=4,
    per_device_train_batch_size=4,
    num_train_epochs=2,
    max_completion_length=200,
    use_cpu=True,
    bf16=False,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
)
trainer = reusing(GRPOTrainer)(  # (2)
    model,
    reward_funcs=right,
    args=args,
    train_dataset=Dataset.from_list(data),
    processing_class=tokenizer,
    tools=[calculate],
)
trainer.train()

for number, turn in enumerate(trainer.specrl.turns):  # of the second epoch, which drafts with what the first one stored
    print(f"turn {number}: {turn.batch.stats.accepted} of {turn.tokens} tokens accepted from drafts in epoch 2")
