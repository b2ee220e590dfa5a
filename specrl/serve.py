"""A vLLM server whose requests can carry keys and drafts: `python -m specrl.serve --model MODEL [vLLM's options]`.

It is vLLM's own OpenAI server. Added are the arguments that keyed requests need, and those that TRL's trainers need to
send weights and to read log-probs; options on the command line replace them.
"""

from __future__ import annotations

import json
import os
import sys

SERVER = "vllm.entrypoints.openai.api_server"
"""The module that `vllm serve` runs; that command itself does not start from CPU wheels."""


def arguments(options: list[str]) -> list[str]:
    """vLLM's arguments. Args: options: of the command line."""
    from specrl.rollout.engines.vllm.served import engine_args, weight_transfer

    added = {
        "generation-config": "vllm",  # requests bring all sampling params
        "logprobs-mode": "processed_logprobs",
        "max-logprobs": "-1",
        "weight-transfer-config": json.dumps({"backend": weight_transfer()}),
        "worker-extension-cls": "specrl.rollout.engines.vllm.worker.WorkerExtension",
    }
    for name, value in engine_args().items():
        added[name.replace("_", "-")] = value if isinstance(value, str) else json.dumps(value)
    given = {option.removeprefix("--").partition("=")[0].replace("_", "-") for option in options}
    rest = [word for name, value in added.items() if name not in given for word in (f"--{name}", value)]
    return [*options, *rest]


def main() -> None:
    environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1"}  # opens the endpoints for weights and for the cache
    command = [sys.executable, "-m", SERVER, *arguments(sys.argv[1:])]
    os.execve(sys.executable, command, environment)


if __name__ == "__main__":
    main()
