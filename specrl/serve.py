"""A vLLM server whose requests can carry keys and drafts: `python -m specrl.serve --model MODEL [vLLM's options]`.

It is vLLM's own OpenAI server. Added are the arguments that keyed requests need, and those that TRL's trainers need to
send weights and to read log-probs; options on the command line replace them. Whoever reaches the endpoints for weights
can replace the model, so the server listens on this machine only, or asks for a token (`guard.py`).
"""

from __future__ import annotations

import ipaddress
import json
import os
import sys

from specrl.rollout.engines.vllm.guard import HEADER, TOKEN

SERVER = "vllm.entrypoints.openai.api_server"
"""The module that `vllm serve` runs; that command itself does not start from CPU wheels."""
LOOPBACK = "127.0.0.1"
ALWAYS = {"host", "middleware"}
"""Options that vLLM gets also where the user gives them: the address that was checked, and the guard."""


def arguments(options: list[str]) -> list[str]:
    """vLLM's arguments. Args: options: of the command line."""
    from specrl.rollout.engines.vllm.served import engine_args, weight_transfer

    added = {
        "host": host(options),
        "middleware": "specrl.rollout.engines.vllm.guard.Guard",
        "generation-config": "vllm",  # requests bring all sampling params
        "logprobs-mode": "processed_logprobs",
        "max-logprobs": "-1",
        "weight-transfer-config": json.dumps({"backend": weight_transfer()}),
        "worker-extension-cls": "specrl.rollout.engines.vllm.worker.WorkerExtension",
    }
    for name, value in engine_args().items():
        added[name.replace("_", "-")] = value if isinstance(value, str) else json.dumps(value)
    names = [option[2:].partition("=")[0].replace("_", "-") for option in options if option.startswith("--")]
    given = set(names) - ALWAYS
    rest = [word for name, value in added.items() if name not in given for word in (f"--{name}", value)]
    return [*options, *rest]


def host(options: list[str]) -> str:
    """The address that the server listens on, the last one given. Args: options: of the command line."""
    given = LOOPBACK
    for word, following in zip(options, [*options[1:], ""], strict=False):
        name, equals, value = word.partition("=")
        if name == "--host":
            given = value if equals else following
    return given


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def main() -> None:
    address = host(sys.argv[1:])
    token = os.environ.get(TOKEN, "")
    if not is_loopback(address) and not token:
        sys.exit(
            f"error: --host {address or '(empty)'} opens the endpoints that replace weights to the network. Set a "
            f"token for server and trainer, such as {TOKEN}=$(openssl rand -hex 32), or leave --host out."
        )
    guarded = f"requests other than /v1 and /health need the header {HEADER}" if token else "without a token"
    print(f"specrl.serve listens on {address}, {guarded}.", file=sys.stderr, flush=True)
    environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1"}  # opens the endpoints for weights and for the cache
    command = [sys.executable, "-m", SERVER, *arguments(sys.argv[1:])]
    os.execve(sys.executable, command, environment)


if __name__ == "__main__":
    main()
