"""Reuse in a TRL script with vLLM in the trainer's process: the lines marked (1) and (2); everything else is TRL's.

python examples/trl_vllm.py
"""

from datasets import Dataset
from specrl import reusing  # (1)
from specrl.run.policy import TINY_PATH
from trl import GRPOConfig, GRPOTrainer

prompts = ("Tom has 30 pens. He buys 12, sells 20, finds 15. How many pens does Tom have now?\n",)
args = GRPOConfig(
    "outputs/trl",
    use_vllm=True,
    vllm_mode="colocate",
    vllm_max_model_length=512,
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
    str(TINY_PATH),  # stands for a model of the hub
    reward_funcs=lambda completions, **_: [float("#### 37" in text) for text in completions],
    args=args,
    train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
)
trainer.train()

(turn,) = trainer.specrl.turns  # of the second epoch, which drafts with what the first one stored
print(f"{turn.batch.stats.accepted} of {turn.tokens} tokens accepted from drafts in epoch 2")
