"""Responses to a few prompts: `python -m specrl.generate run=DIR|config=NAME [prompt=TEXT] [model=PATH]`.

With run=DIR, the trained model of that run responds with the run's config.
With `rollout.acceptance=judged` or `routed`, the draft model's text is printed dim and the policy's bright.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from specrl.config import load as cli
from specrl.config.schema import Config
from specrl.evaluate import of_run
from specrl.rollout.sections import doc


@dataclass
class GenerateConfig(Config):
    run: str = doc("", "run directory, or the name of a run in outputs: its config and, without model=, its model")
    prompt: str = doc("", "text to answer; empty takes prompts of the test split")
    prompts: int = doc(2, "prompts of the test split to answer")

    scores: ClassVar[bool] = False

    @property
    def splits(self) -> tuple[Literal["train", "test"], ...]:
        return () if self.prompt else ("test",)


def main(config: GenerateConfig) -> int:
    from rich.console import Console

    from specrl.evaluate import serving
    from specrl.run import preflight
    from specrl.run.accuracy import requests
    from specrl.run.completions import pieces
    from specrl.run.data import Example, framed
    from specrl.run.prompts import render

    read = preflight.check(config, training=False)
    asked = Example("prompt", config.prompt, None, {})
    examples = [framed(asked, config.dataset)] if config.prompt else read["test"][: config.prompts]
    with serving(config) as served:
        tokenizer = served.tokenizer
        if config.dataset.tools:
            from specrl.run.toolbox import conversations

            done = [c.whole() for c in conversations(served.engine, tokenizer, examples, config, "generate")[0]]
        else:
            done, _ = served.engine.generate(requests(examples, tokenizer, config, "generate"))
    console = Console(highlight=False)
    for example, c in zip(examples, done, strict=True):
        console.print(render(example, tokenizer, config.dataset).text, markup=False, style="bold")
        for text, drafted in pieces(c, tokenizer):
            console.print(text, markup=False, style="dim" if drafted else None, end="")
        console.print("\n")
    return 0


def command(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    return cli.run(main, argv, GenerateConfig, training=False, words=of_run)


if __name__ == "__main__":
    raise SystemExit(command())
