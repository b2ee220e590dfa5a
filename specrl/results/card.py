"""The model card of a trained policy, model/README.md: the report of its run, and the settings to repeat it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from specrl.config.load import load_saved
from specrl.config.options import to_yaml
from specrl.config.schema import Config
from specrl.results.report import Report
from specrl.run import policy
from specrl.run.hub import PRESETS, on_hub
from specrl.run.machine import anonymous

LOCAL = ("name", "output_dir", "resume", "device", "report")  # omitted: they only apply to this run on this machine


def write_card(run_dir: Path, report: Report) -> None:
    """Writes the card of a finished run into its model directory."""
    card(load_saved(run_dir), report).save(run_dir / "model" / "README.md")


def card(config: Config, report: Report) -> ModelCard:
    """The card, with user names removed from paths. It links a base model or data set only if that is on the hub."""
    data = ModelCardData(
        library_name="peft" if config.lora.rank else "transformers",
        pipeline_tag="text-generation",
        base_model=config.model if policy.on_hub(config.model) else None,
        datasets=[PRESETS.get(config.data, config.data).partition(":")[0]] if on_hub(config.data) else None,
        tags=["specrl", "reinforcement-learning", config.trainer.algorithm],
    )
    dtype = "float32" if config.lora.rank else policy.trained_dtype(config)
    kind = "Low-rank adapters" if config.lora.rank else "A policy"
    trained = f"{kind} trained by {config.trainer.algorithm.upper()} with specrl, saved as {dtype}"
    text = (
        f"---\n{data}\n---\n\n{report.page()}\n"
        f"## How to repeat it\n\n{trained}; responses were sampled with {policy.rollout_dtype(config)} weights.\n"
        "Save as `run.yaml`, then `python -m specrl.train config=run.yaml`:\n\n"
        f"```yaml\n{settings(config)}```\n"
    )
    return ModelCard(anonymous(text))


def settings(config: Config) -> str:
    """The options that differ from their defaults, as YAML."""
    defaults = Config()
    return to_yaml(replace(config, **{name: getattr(defaults, name) for name in LOCAL}), changed=True)
