"""Reuse in an existing TRL script: the two lines marked (1) and (2); everything else is TRL's.

python examples/trl_reusing.py
"""

from datasets import Dataset
from specrl import reusing  # (1)
from specrl.tiny import load_tiny
from trl import GRPOConfig, GRPOTrainer

model, tokenizer = load_tiny()  # stands for AutoModelForCausalLM.from_pretrained(...)
prompts = ("Tom has 30 pens. He buys 12, sells 20, finds 15. How many pens does Tom have now?\n",)
args = GRPOConfig(
    "outputs/trl",
    num_generations=4,
    per_device_train_batch_size=4,
    num_train_epochs=2,
    max_completion_length=100,
    use_cpu=True,
    bf16=False,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
)
trainer = reusing(GRPOTrainer)(  # (2)
    model,
    reward_funcs=lambda completions, **_: [float("#### 37" in text) for text in completions],
    args=args,
    train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
    processing_class=tokenizer,
)
trainer.train()

(turn,) = trainer.specrl.turns  # of the second epoch, which drafts with what the first one stored
print(f"{turn.batch.stats.accepted} of {turn.tokens} tokens accepted from drafts in epoch 2")
