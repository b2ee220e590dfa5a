"""Loads the embedded policies, models of 1.2 M parameters that solve half of `specrl.run.tasks.arithmetic`.

`benchmarks/tiny_policy.py` trains the first, and `benchmarks/tiny_tools.py` the one that calls a calculator.
"""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from specrl.run.policy import TINY_PATH, TOOLS_PATH


def load(path: str | Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads a policy's directory as a float32 model in evaluation mode and its tokenizer, from local files only."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
    return model.eval(), AutoTokenizer.from_pretrained(path, local_files_only=True)


def load_tiny() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads the embedded policy."""
    return load(TINY_PATH)


def load_tiny_tools() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads the embedded policy that calls a calculator."""
    return load(TOOLS_PATH)
