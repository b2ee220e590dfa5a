"""How a pool's workers get the weights that they must have; the route depends on the GPUs. Knows nothing of Ray."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from specrl.rollout.engines.base import Probe, Source
from specrl.rollout.types import RolloutError
from specrl.rollout.workers.worker import Arrays, WorkerInfo, gpu_uuid, to_arrays

logger = logging.getLogger(__name__)

Route = Literal["ipc", "nccl", "memory"]


class Delivery:
    """Sends one version of the weights at a time, over a link between GPUs where possible, else through a store.

    It is the client of vLLM's sender in the trainer, which asks for the workers' part by the last four methods.

    Args:
        put: stores arrays where every worker can read them, and returns a reference to them.
        call: calls a method of each worker with its own arguments; raises RolloutError if one fails.
        address: of this node.
    """

    def __init__(self, put: Callable[[Arrays], Any], call: Callable[[str, Sequence[tuple]], None], address: str):
        self._put = put
        self._call = call
        self._address = address
        self.route: Route | None = None
        """Of the last update."""
        self._weights: Iterable[tuple[str, Tensor]] | None = None
        self._stored: Any = None
        self._ranks: list[int] = []
        self._link: Any = None
        self._version: int = 0
        self._probe: Probe | None = None

    def take(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """The weights to deliver from now on; nothing is sent yet."""
        self._weights = weights
        self._stored = None  # the store need not hold two versions

    def stored(self) -> Any:
        """A reference to the weights in the store, where the first call puts them; None before any update.

        Raises:
            RolloutError: they were sent over a link, and this process alone cannot gather them again.
        """
        if self._stored is None and self._weights is not None:
            if self.linked and isinstance(self._weights, Source) and self._weights.collective:
                raise RolloutError(
                    f"a worker was lost after its weights went by {self.route} from a policy that several processes "
                    "hold parts of: they cannot be gathered for one worker. Continue with resume=auto"
                )
            self._stored = self._put(to_arrays(self._weights))
        return self._stored

    @property
    def _source(self) -> Source:
        """The weights of an update over a link, which `choose` uses for a Source only."""
        assert isinstance(self._weights, Source)
        return self._weights

    @property
    def linked(self) -> bool:
        """The last update was sent from GPU to GPU."""
        return self.route in ("ipc", "nccl")

    def choose(self, workers: Sequence[WorkerInfo]) -> None:
        """Chooses the route to these workers, and logs it if it has changed."""
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        trainer = gpu_uuid()
        if isinstance(self._weights, Source):
            ranks = [uuid for worker in workers for uuid in worker.rank_gpus or ("",)]
            route, why = choose_route(trainer, ranks, torch.distributed.get_world_size() if distributed else 1)
        else:
            route, why = "memory", "these weights can be walked only once"
        if route != self.route:
            level = logging.WARNING if route == "memory" and trainer else logging.INFO
            logger.log(level, "weights reach %d workers by route %s: %s", len(workers), route, why)
            self.unlink()
        self.route = route
        self._ranks = [len(worker.rank_gpus) for worker in workers]

    def send(self, version: int, probe: Probe | None) -> None:
        """Sends the weights over the link, which is formed first if there is none.

        Raises:
            RolloutError: a worker failed. The link is then closed, so that no worker waits for it.
        """
        self._version, self._probe = version, probe
        if self._link is None:
            from specrl.rollout.engines.vllm.weights import open_link

            self._link = open_link(self.route, self, self._source, ranks=sum(self._ranks), address=self._address)
        self._link.source = self._source
        self._link.send_weights()

    def unlink(self) -> None:
        """Closes the link: a worker was replaced, or no update follows. The next update forms it again."""
        link, self._link = self._link, None
        if link is not None:
            link.shutdown()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Every worker joins; with NCCL its ranks come after those of the workers before it."""
        inits = [dict(init_info) for _ in self._ranks]
        if "rank_offset" in init_info:
            for i, init in enumerate(inits):
                init["rank_offset"] += sum(self._ranks[:i])
        self._call_each("join", [(self.route, init) for init in inits])

    def start_weight_update(self) -> None:
        self._call_all("begin_update", self._version, self._source.metadata())

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._call_all("receive", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call_all("finish_update", self._version, self._probe)

    def _call_all(self, method: str, *args: Any) -> None:
        self._call_each(method, [args] * len(self._ranks))

    def _call_each(self, method: str, args: Sequence[tuple]) -> None:
        try:
            self._call(method, args)
        except BaseException:
            self.unlink()  # or this process would wait in a collective for a worker that failed
            raise


def choose_route(trainer: str, ranks: Sequence[str], trainers: int) -> tuple[Route, str]:
    """The route for the weights, and why.

    ipc: the trainer's GPU memory, opened by the workers. nccl: broadcast from GPU to GPU. memory: a copy in the host's
    shared memory, which works everywhere.

    Args:
        trainer: UUID of the trainer's GPU; empty for none.
        ranks: of each rank of each worker; empty where the worker cannot receive.
        trainers: training processes.
    """
    if not trainer:
        return "memory", "the trainer has no GPU"
    if not all(ranks):
        return "memory", "there are workers without a GPU, or whose engine receives nothing"
    if set(ranks) == {trainer}:
        if trainers > 1:  # vLLM merges the handles of all processes, which need not all have chosen this way
            return "memory", f"CUDA IPC is used from one trainer process only, not from {trainers}"
        return "ipc", "all workers share the trainer's GPU"
    if len({trainer, *ranks}) == 1 + len(ranks):
        return "nccl", "every rank has a GPU of its own"
    return "memory", "NCCL needs a GPU for each rank, and only some of them share the trainer's"
