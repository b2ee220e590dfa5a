"""Loading the embedded policy: 1.2 M parameters that solve half of `specrl.run.tasks.arithmetic`.

Its recipe is `benchmarks/tiny_policy.py`.
"""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from specrl.run.policy import TINY_PATH


def load(path: str | Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A policy folder as a float32 model in evaluation mode and its tokenizer. Reads local files only."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
    return model.eval(), AutoTokenizer.from_pretrained(path, local_files_only=True)


def load_tiny() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The shipped policy, as `load(TINY_PATH)`."""
    return load(TINY_PATH)
