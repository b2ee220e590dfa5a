"""The model card of a trained policy, model/README.md: the training, and the acceleration of its rollouts."""

from __future__ import annotations

from pathlib import Path

import yaml

from specrl.config.load import load_saved
from specrl.config.options import to_yaml
from specrl.config.schema import Config
from specrl.results.report import NO_PLOT, compared, learned, shown
from specrl.run import policy
from specrl.run.machine import anonymous

PLACE = ("name", "output_dir", "resume", "device", "report")  # omitted: they only apply to this run on this machine


def write_card(run_dir: Path, summary: dict) -> Path:
    """Writes the card of a finished run into its model directory.

    Args: summary: the content of report.json.
    """
    path = run_dir / "model" / "README.md"
    path.write_text(card(load_saved(run_dir), summary), encoding="utf-8")
    return path


def card(config: Config, summary: dict) -> str:
    """The card's text, with user names removed from paths."""
    algorithm, versions = config.trainer.algorithm.upper(), summary["environment"]["versions"]
    trained = "low-rank adapters of " if config.lora.rank else ""
    lines = ["---", yaml.safe_dump(_metadata(config), sort_keys=False).rstrip(), "---", "", f"# {config.name}", ""]
    task = f"trained by {algorithm} on {config.data} with specrl, {summary['steps']} steps"
    lines += [f"{trained}{config.model}, {task}.", ""]
    dtype = "float32" if config.lora.rank else policy.trained_dtype(config)
    drawn = f"responses were drawn with {policy.rollout_dtype(config)} weights"
    lines += [f"The saved weights are {dtype}, as trained; {drawn}.", ""]
    lines += [*_learning(summary), "", "## How the rollouts were accelerated", "", *_rollouts(summary), ""]
    lines += ["## How to repeat it", "", "Save as `run.yaml`, then `python -m specrl.train config=run.yaml`:", ""]
    lines += ["```yaml", settings(config).rstrip(), "```", ""]
    lines += [f"Versions: {', '.join(f'{name} {version}' for name, version in versions.items())}."]
    return anonymous("\n".join(lines)) + "\n"


def settings(config: Config) -> str:
    """The options that differ from their defaults, as YAML."""
    mine, default = (yaml.safe_load(to_yaml(each)) for each in (config, Config()))
    return yaml.safe_dump(_changed({k: v for k, v in mine.items() if k not in PLACE}, default), sort_keys=False)


def _changed(mine: dict, default: dict) -> dict:
    return {
        key: _changed(value, default[key]) if isinstance(value, dict) else value
        for key, value in mine.items()
        if value != default[key]
    }


def _metadata(config: Config) -> dict:
    """The hub's metadata fields. A base model or data set is named only if it is on the hub."""
    found: dict[str, str | list[str]] = {
        "library_name": "peft" if config.lora.rank else "transformers",
        "pipeline_tag": "text-generation",
    }
    if policy.on_hub(config.model):
        found["base_model"] = config.model
    if config.data != "arithmetic":
        from specrl.run.data import PRESETS, on_hub

        if on_hub(config.data):
            found["datasets"] = [PRESETS.get(config.data, config.data).partition(":")[0]]
    return found | {"tags": ["specrl", "reinforcement-learning", config.trainer.algorithm]}


def _learning(summary: dict) -> list[str]:
    lines = [f"- training {learned(summary)}"]
    held_out = [record["eval/reward"] for record in summary["eval"] if "eval/reward" in record]
    if held_out:
        lines.append(f"- reward on held-out prompts: {shown(held_out[0])} -> {shown(held_out[-1])}")
    return lines + [f"- note: {note}" for note in summary["notes"] if note != NO_PLOT]


def _rollouts(summary: dict) -> list[str]:
    """The figures that show whether the acceleration changed the training."""
    reuse, machine = summary["reuse"], summary["environment"]
    lines = [f"- rollout rule: {summary['rule']}"]
    for kind in ("measured", "paired"):
        if found := summary.get(kind):
            lines.append(f"- {found['title']}, net:")
            lines += [f"  - {claim}" for claim in found["claims"]]
    if len(lines) == 1:
        lines.append("- speedup: not measured")
    lines.append(f"- tokens reused from epoch 2 on: {_share(reuse['reused_ratio'])}")
    lines.append(f"- compared with plain decoding on control steps: {compared(summary)}")
    if reuse["reuse_gap"] is not None:
        lines.append(f"- reuse gap (reward of replayed rows minus fresh ones): {reuse['reuse_gap']:+.3f}")
    gpus = ", ".join(machine["gpus"]) or "none"
    return [*lines, f"- machine: {machine['cpu']}, {machine['cores']} cores; GPU: {gpus}"]


def _share(value: float | None) -> str:
    return "none" if value is None else f"{value:.0%}"
