"""TRL's client of a vLLM server, with a key and drafts in each request."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any
from uuid import uuid4

import requests
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
SAMPLING = ("repetition_penalty", "temperature", "top_p", "top_k", "min_p")
"""Arguments of `VLLMClient.generate` that decide what is sampled."""
STOPS_WITHIN = 60.0
POLL_S = 0.2
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
        self._asked_for: dict[str, Any] = {}
        self._names: dict[int, str] = {}  # X-Request-Id of each row ahead, by key
        self._pending: dict[int, Future[tuple[list[int], bool]]] = {}
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
        self._asked_for = {name: options[name] for name in SAMPLING if name in options} | kwargs
        return {name: _joined([part[name] for part in parts]) for name in parts[0]}

    # Ahead ---------------------------------------------------------------------------------------------------------

    def begin(self, rows: Sequence[tuple[KeyedRequest, int, list[int]]]) -> None:
        """Sends rows of the next batch, and does not wait for them. They are sampled as the last `generate` was.

        Args: rows: key and drafts, cap, and prompt of each.
        """
        self._pool = ThreadPoolExecutor(max_workers=min(CONCURRENT, len(rows)))
        self._names = {keyed.key: f"specrl-{uuid4().hex}" for keyed, _, _ in rows}
        self._pending = {row[0].key: self._pool.submit(self._complete, *row) for row in rows}

    def _complete(self, keyed: KeyedRequest, cap: int, prompt: list[int]) -> tuple[list[int], bool]:
        """The tokens of a row, and whether it was aborted before its end."""
        own = {"max_tokens": cap, "vllm_xargs": keyed.extra_args(), "return_token_ids": True, "logprobs": None}
        body = {"model": self.model, "prompt": prompt, **self._asked_for, **own}
        name = {"X-Request-Id": self._names[keyed.key]}
        answer = self.session.post(f"{self.base_url}/v1/completions", json=body, headers=name)
        if not answer.ok:
            raise RolloutError(f"the vLLM server refused a row of the next batch ({answer.status_code}): {answer.text}")
        (choice,) = answer.json()["choices"]
        return choice["token_ids"] or [], choice["finish_reason"] == "abort"

    def stop(self) -> dict[int, tuple[list[int], bool]]:
        """Aborts the rows of `begin`; returns the tokens of each so far by key, and whether it was aborted.

        Every call has been answered then, so the server runs none of them.

        Raises:
            RolloutError: the server does not answer all of them within STOPS_WITHIN seconds, or has failed.
        """
        unsent = {key for key, call in self._pending.items() if call.cancel()}
        running = {key: call for key, call in self._pending.items() if key not in unsent}
        try:
            self._abort(running)
            texts = {key: call.result() for key, call in running.items()}
        except requests.RequestException as error:
            raise RolloutError(f"the vLLM server at {self.base_url} failed while it worked ahead: {error}") from error
        self._pool.shutdown()
        return texts | {key: ([], True) for key in unsent}

    def _abort(self, running: Mapping[int, Future]) -> None:
        """Aborts these rows until the server has answered the call of each, at most STOPS_WITHIN seconds."""
        deadline = time.monotonic() + STOPS_WITHIN
        while left := [key for key, call in running.items() if not call.done()]:
            if time.monotonic() > deadline:
                raise RolloutError(
                    f"the vLLM server at {self.base_url} has not stopped {len(left)} rows of the next batch within "
                    f"{STOPS_WITHIN:g} s. It gets no weights, as it would go on with what it computed from the old "
                    "ones. Start it again, and resume; RolloutConfig(ahead='off') begins no such rows"
                )
            # again and again: a row that vLLM does not know yet is not aborted
            names = [f"cmpl-{self._names[key]}-0" for key in left]
            self._post(f"{self.base_url}/abort_requests", json={"request_ids": names}, timeout=STOPS_WITHIN)
            wait([running[key] for key in left], timeout=POLL_S)

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
