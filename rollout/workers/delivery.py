"""The weights that a pool's workers must have, and the way they get there. Knows nothing of Ray."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from specrl.rollout.engines.base import Probe
from specrl.rollout.engines.transfer import Route, Source, Topology, choose_route
from specrl.rollout.types import RolloutError
from specrl.rollout.workers.worker import Arrays, Started, gpu, to_arrays

logger = logging.getLogger(__name__)


class Delivery:
    """One version of the weights at a time, over a link between GPUs where there can be one, else through a store.

    It is the client of vLLM's trainer end, which asks for the workers' part by the four methods at the end.

    Args:
        put: places arrays where every worker can read them, and returns what finds them there.
        ask: calls a method of each worker with arguments of its own; raises RolloutError if one fails.
        address: of this node.
    """

    def __init__(self, put: Callable[[Arrays], Any], ask: Callable[[str, Sequence[tuple]], None], address: str):
        self._put, self._ask, self._address = put, ask, address
        self.route: Route | None = None
        """Of the last update."""
        self._weights: Iterable[tuple[str, Tensor]] | None = None
        self._stored: Any = None
        self._ranks: list[int] = []
        self._trainer: Any = None
        self._version: tuple[int, Probe | None] = 0, None

    def take(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """From now on these are asked for; nothing travels yet."""
        self._weights, self._stored = weights, None  # the store need not hold two versions

    def stored(self) -> Any:
        """What finds the weights in the store, where they are put when first asked for; None before any update.

        Raises:
            RolloutError: they went over a link, and this process alone cannot gather them a second time.
        """
        if self._stored is None and self._weights is not None:
            if self.linked and self._weights.collective:
                raise RolloutError(
                    f"a worker was lost after its weights went by {self.route} from a policy that several processes "
                    "hold parts of: they cannot be gathered for one worker. Continue with resume=auto"
                )
            self._stored = self._put(to_arrays(self._weights))
        return self._stored

    @property
    def linked(self) -> bool:
        """The last update went from GPU to GPU."""
        return self.route in ("ipc", "nccl")

    def choose(self, started: Sequence[Started]) -> None:
        """Sets the route to these workers, and logs it when it is another."""
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        at = Topology(
            trainer=gpu(),
            workers=tuple(uuid for each in started for uuid in each.gpus or ("",)),
            num_workers=len(started),
            trainers=torch.distributed.get_world_size() if distributed else 1,
        )
        route, why = choose_route(at)
        if not isinstance(self._weights, Source):
            route, why = "memory", "these weights can be walked only once"
        if route != self.route:
            level = logging.WARNING if route == "memory" and at.trainer else logging.INFO
            logger.log(level, "weights reach %d workers by route %s: %s", len(started), route, why)
            self.unlink()
        self.route, self._ranks = route, [len(each.gpus) for each in started]

    def send(self, version: int, probe: Probe | None) -> None:
        """Brings the workers to the weights over the link, which is formed first if there is none.

        Raises:
            RolloutError: a worker failed; the link is closed, which ends what the others wait for.
        """
        self._version = version, probe
        if self._trainer is None:
            from specrl.rollout.engines.vllm.link import open_link

            self._trainer = open_link(self.route, self, self._weights, sum(self._ranks), self._address)
        self._trainer.source = self._weights
        self._trainer.send_weights()

    def unlink(self) -> None:
        """The next update forms the link anew, as a worker was replaced, or there is no next."""
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            trainer.shutdown()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Every worker joins; with NCCL its ranks come after those of the workers before it."""
        inits = [dict(init_info) for _ in self._ranks]
        if "rank_offset" in init_info:
            for i, init in enumerate(inits):
                init["rank_offset"] += sum(self._ranks[:i])
        self._each("join", [(self.route, init) for init in inits])

    def start_weight_update(self) -> None:
        self._all("begin_update", self._version[0], self._weights.metadata())

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._all("receive", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._all("finish_update", *self._version)

    def _all(self, method: str, *args: Any) -> None:
        self._each(method, [args] * len(self._ranks))

    def _each(self, method: str, args: Sequence[tuple]) -> None:
        try:
            self._ask(method, args)
        except BaseException:
            self.unlink()  # or this process would wait in a collective for a worker that does not come
            raise
