"""The driver's side of new weights, and the sleep between rollouts, which decides whether weights must be kept."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from vllm import LLM

from specrl.rollout.engines.base import DRAFTER, Probe
from specrl.rollout.engines.transfer import Meta, Route, Source, Topology, choose_route
from specrl.rollout.engines.vllm.weights import Weights, gpu_of, has_draft_model
from specrl.rollout.types import RolloutError

logger = logging.getLogger(__name__)
WEIGHTS, KV = "weights", "kv_cache"
"""What vLLM's sleep takes from a GPU."""


class Updates:
    """The weights of one LLM: which version, how they come, and whether they are there. See Receives.

    Asleep, vLLM keeps nothing (level 2) where the last update came from a Source: the next one takes back room for
    the weights, loads, then takes back room for KV. A rollout without an update before it has the same Source walked
    again, probe included. Where weights came otherwise, or a draft model's did not come, sleep keeps them (level 1).

    Args:
        llm: vLLM, awake, with weights of version 0.
        names: what an update must bring.
        tensor_parallel: ranks of the LLM.
        sleeps: it gives the GPU's memory back between rollouts.
        prove: forgets older KV, and checks the probe of a version.
    """

    def __init__(
        self, llm: LLM, names: Weights, tensor_parallel: int, sleeps: bool, prove: Callable[[int, Probe | None], None]
    ):
        self._llm, self._names, self._sleeps, self._prove = llm, names, sleeps, prove
        self.version, self.fault = 0, ""
        """Of the weights, and why nothing can be generated with them."""
        self.gpus: tuple[str, ...] = tuple(filter(None, llm.collective_rpc(gpu_of)))
        here = Topology(trainer="", workers=self.gpus, num_workers=0, tensor_parallel=tensor_parallel)
        self.route, why = choose_route(here)
        logger.info("new weights of this process reach vLLM by route %s: %s", self.route, why)
        self._draft_model = any(llm.collective_rpc(has_draft_model))
        self._source: tuple[Source, Probe | None] | None = None
        self._asleep: set[str] = set()
        self._dropped = False
        llm.init_weight_transfer_engine({"init_info": {}})

    def update(self, weights: Iterable[tuple[str, Tensor]], version: int, probe: Probe | None) -> None:
        """See Engine.update_weights."""
        source = weights if isinstance(weights, Source) else None
        self._announce(version, source and source.metadata())
        with self._handed_over(weights) as where, self._loading(version):
            self._start()
            self._llm.update_weights({"update_info": where})
        self.finish_update(version, probe)
        # ranks do not wake together, as walking parts of all of them again would need: sleep keeps such weights
        self._source = None if source is None or source.collective else (source, probe)

    def join(self, route: Route, init: dict[str, Any]) -> None:
        self._llm.init_weight_transfer_engine({"init_info": {"backend": route, "info": init}})

    def begin_update(self, version: int, metadata: Sequence[Meta]) -> None:
        self._announce(version, metadata)
        with self._loading(version):
            self._start()

    def receive(self, update: dict[str, Any]) -> None:
        self._llm.update_weights({"update_info": {"chunk": update}})

    def finish_update(self, version: int, probe: Probe | None) -> None:
        with self._loading(version):
            self._llm.finish_weight_update(weight_version=str(version))
        self._dropped = False
        self._take_back(KV)
        self._prove(version, probe)
        self.fault, self.version = "", version

    def wake(self) -> None:
        """Weights and KV are on the GPU afterwards."""
        if self._dropped:
            if self._source is None:
                raise RolloutError(f"{self.fault}; send the weights again")
            source, probe = self._source
            self.update(source, self.version, probe)
        self._take_back(WEIGHTS, KV)

    def sleep(self) -> None:
        """Gives the GPU's memory back, if it does so at all."""
        if self._sleeps:
            self._dropped = self._source is not None and self._whole(self._source[0])
            self._llm.sleep(level=2 if self._dropped else 1)
            self._asleep = {WEIGHTS, KV}

    def _whole(self, source: Source) -> bool:
        """It brings all that a sleep of level 2 drops."""
        return not self._draft_model or any(meta.name.startswith(DRAFTER) for meta in source.metadata())

    def _announce(self, version: int, metadata: Sequence[Meta] | None) -> None:
        if version < self.version:
            raise RolloutError(f"weight version {version} is older than the engine's {self.version}")
        self.fault, self._source = f"the update to weight version {version} failed", None
        if metadata is not None:
            self._names.check(metadata)

    @contextmanager
    def _handed_over(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Any]]:
        """What the workers are told."""
        if self.route == "process":
            yield {"weights": self._names.checked(weights)}
        else:
            with self._names.written(weights) as path:
                yield {"path": path}

    def _start(self) -> None:
        self._take_back(WEIGHTS)
        self._llm.start_weight_update()

    def _take_back(self, *tags: str) -> None:
        if wanted := [tag for tag in tags if tag in self._asleep]:
            awake = self._llm.wake_up(tags=wanted)
            self._asleep -= set(wanted)
            if not (awake or self._asleep):
                raise RolloutError("vLLM could not take back its GPU memory; set rollout.vllm.sleep=false")

    @contextmanager
    def _loading(self, version: int) -> Iterator[None]:
        try:
            yield
        except RolloutError:
            raise
        except Exception as error:
            raise RolloutError(f"vLLM could not load weight version {version}: {error}") from error
