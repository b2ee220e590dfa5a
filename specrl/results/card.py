"""The model card of a trained policy, model/README.md: the report of its run, and the settings to repeat it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import yaml

from specrl.config.load import load_saved
from specrl.config.options import to_yaml
from specrl.config.schema import Config
from specrl.results.report import Report
from specrl.run import policy
from specrl.run.hub import PRESETS, on_hub
from specrl.run.machine import anonymous

LOCAL = ("name", "output_dir", "resume", "device", "report")  # omitted: they only apply to this run on this machine


def write_card(run_dir: Path, report: Report) -> Path:
    """Writes the card of a finished run into its model directory."""
    path = run_dir / "model" / "README.md"
    path.write_text(card(load_saved(run_dir), report), encoding="utf-8")
    return path


def card(config: Config, report: Report) -> str:
    """The card's text, with user names removed from paths."""
    dtype = "float32" if config.lora.rank else policy.trained_dtype(config)
    kind = "Low-rank adapters" if config.lora.rank else "A policy"
    trained = f"{kind} trained by {config.trainer.algorithm.upper()} with specrl, saved as {dtype}"
    return anonymous(
        f"---\n{yaml.safe_dump(_metadata(config), sort_keys=False)}---\n\n{report.page()}\n"
        f"## How to repeat it\n\n{trained}; responses were sampled with {policy.rollout_dtype(config)} weights.\n"
        "Save as `run.yaml`, then `python -m specrl.train config=run.yaml`:\n\n"
        f"```yaml\n{settings(config)}```\n"
    )


def settings(config: Config) -> str:
    """The options that differ from their defaults, as YAML."""
    defaults = Config()
    return to_yaml(replace(config, **{name: getattr(defaults, name) for name in LOCAL}), changed=True)


def _metadata(config: Config) -> dict:
    """The hub's metadata fields. A base model or data set is named only if it is on the hub."""
    metadata: dict[str, str | list[str]] = {
        "library_name": "peft" if config.lora.rank else "transformers",
        "pipeline_tag": "text-generation",
    }
    if policy.on_hub(config.model):
        metadata["base_model"] = config.model
    if on_hub(config.data):
        metadata["datasets"] = [PRESETS.get(config.data, config.data).partition(":")[0]]
    return metadata | {"tags": ["specrl", "reinforcement-learning", config.trainer.algorithm]}
