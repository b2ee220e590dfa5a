"""TRL's client of a vLLM server, with a key and drafts in each request."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from trl.generation.vllm_client import VLLMClient

from specrl.rollout.engines.vllm.guard import HEADER, TOKEN
from specrl.rollout.engines.vllm.wire import KeyedRequest, acceptance_counts
from specrl.rollout.engines.weights import in_memory_files
from specrl.rollout.types import RolloutError

SCHEDULERS = "specrl.rollout.engines.vllm."
"""Where the scheduler classes of servers that serve keyed requests are."""
CONCURRENT = 64
"""Requests that wait for the server at a time, as in TRL's client."""
_COUNTER = re.compile(r"^(vllm:\w+?)(?:_total|_count)?(?:\{[^}]*\})? ([0-9.e+]+)$", re.MULTILINE)


class KeyedClient(VLLMClient):
    """TRL's client, for a server that serves keyed requests.

    Raises:
        RolloutError: the server was started without specrl's classes, and would ignore keys and drafts.
    """

    rows: Sequence[tuple[KeyedRequest, int]] | None = None
    """Key, drafts and cap of each prompt of the next `generate`; None: a request as TRL sends it."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.session.headers[HEADER] = os.environ.get(TOKEN, "")
        self._config = self._server_config()

    def _server_config(self) -> dict[str, Any]:
        config = self.get_server_info()
        scheduler = str(config["scheduler_config"].get("scheduler_cls"))
        if SCHEDULERS not in scheduler:
            raise RolloutError(
                f"the vLLM server at {self.base_url} runs with scheduler_cls={scheduler}, so it would ignore keys and "
                "drafts. Start it with `python -m specrl.serve`, which takes the options of `vllm serve`"
            )
        return config

    def limits(self) -> tuple[int, int]:
        """An upper bound of the vocabulary's size, and most tokens of a prompt and its response."""
        return 1 << 31, self._config["model_config"]["max_model_len"]  # the server drops ids that its model lacks

    def counters(self) -> tuple[int, int, int]:
        """See acceptance_counts. They count all clients of the server."""
        response = self.session.get(f"{self.base_url}/metrics")
        response.raise_for_status()
        values: dict[str, int] = {}
        for name, value in _COUNTER.findall(response.text):
            values[name] = values.get(name, 0) + int(float(value))
        return acceptance_counts(values)

    def generate(self, prompts: list, **options: Any) -> dict[str, Any]:  # type: ignore[override]  # TRL names all
        """As VLLMClient.generate; with `rows`, each prompt is a request with a key of its own."""
        rows = self.rows
        if rows is None:
            return super().generate(prompts, **options)
        kwargs = options.pop("generation_kwargs", None) or {}
        options["n"] = 1

        def send(i: int) -> dict[str, Any]:
            keyed, cap = rows[i]
            body = {**kwargs, "max_tokens": cap, "vllm_xargs": keyed.extra_args()}
            return VLLMClient.generate(self, [prompts[i]], generation_kwargs=body, **options)

        with ThreadPoolExecutor(max_workers=min(CONCURRENT, len(prompts))) as pool:
            parts = list(pool.map(send, range(len(prompts))))
        return {name: _joined([part[name] for part in parts]) for name in parts[0]}

    # Weights, for servers that take them as files -------------------------------------------------------------------

    @property
    def _takes_files(self) -> bool:
        return self._config["weight_transfer_config"]["backend"] == "specrl"

    def init_communicator(self, device: torch.device | str | int = 0) -> None:
        """As VLLMClient.init_communicator, which needs NCCL and a GPU; for a CPU start the server with
        `--weight-transfer-config '{"backend": "specrl"}'`."""
        if self._takes_files:
            self._post(f"{self.base_url}/init_weight_transfer_engine", json={"init_info": {}})
        else:
            super().init_communicator(device)

    def update_named_params(self, metadata: list, named_params: Iterator[tuple[str, torch.Tensor]]) -> None:
        """As VLLMClient.update_named_params; or through files in memory, for a server of this user on this machine."""
        if not self._takes_files:
            super().update_named_params(metadata, named_params)
            return
        with in_memory_files(named_params) as files:
            self._start_weight_update()
            self._post(f"{self.base_url}/update_weights", json={"update_info": {"files": files}})
            self._finish_weight_update()


def _joined(columns: Sequence[list | None]) -> list | None:
    """The rows of several answers; None where the server was asked for none."""
    return None if columns[0] is None else [row for column in columns for row in column or ()]
