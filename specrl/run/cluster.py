"""The Ray cluster of a run: started here on loopback, or joined."""

from __future__ import annotations

import fcntl
import logging
import math
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from specrl.config.options import ConfigError
from specrl.rollout.durable import open_lock
from specrl.rollout.sections import ClusterConfig

LOOPBACK = "127.0.0.1"
LOCK = "specrl.lock"


@contextmanager
def connect(cluster: ClusterConfig) -> Iterator[None]:
    """Connects this process to a Ray cluster with enough resources for the workers, for the duration of a `with` block.

    With an empty `cluster.address`, a cluster that only this machine can reach is started, with Ray's token
    authentication on, and shut down afterwards. `auto` or host:port joins a running cluster. A cluster that this
    process is already connected to is used and left running.

    Raises:
        ConfigError: Ray cannot be started or reached, or has too few CPUs or GPUs.
    """
    if (world := int(os.environ.get("WORLD_SIZE", 1))) > 1 and not cluster.address:
        raise ConfigError(
            f"{world} trainer processes cannot each start a Ray. Start one with "
            "`ray start --head` and set cluster.address=auto; each process then has cluster.num_workers workers."
        )
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read by Ray when it starts
    import ray

    if ray.is_initialized():
        check_resources(cluster, ray.nodes())
        yield
        return
    with private_folder() as folder:
        try:
            _join(ray, cluster) if cluster.address else _start(ray, cluster, folder)
            check_resources(cluster, ray.nodes())
            yield
        finally:
            ray.shutdown()
            _end_processes(folder)


@contextmanager
def private_folder() -> Iterator[str]:
    """A directory for Ray's sockets and logs, removed at the end. Directories of killed runs are removed first."""
    for lock in Path("/tmp").glob(f"ray-*/{LOCK}"):
        with suppress(OSError), open(open_lock(lock)) as file:  # in use, or another user's
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short, because a Unix socket's path has at most 107 bytes
    draft = Path(folder, "lock.tmp")
    with draft.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the kernel releases it when this process ends
        draft.rename(draft.with_name(LOCK))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def check_resources(cluster: ClusterConfig, nodes: list[dict[str, Any]]) -> None:
    """Raises ConfigError unless the nodes (as listed by `ray.nodes()`) have enough resources for every worker."""
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    needed = {"CPU": cluster.cpus_per_worker, "GPU": cluster.gpus_per_worker}
    capacity = sum(
        min(int(node.get(name, 0.0) / share) for name, share in needed.items() if share)  # a worker needs some CPU
        for node in alive
    )
    if capacity < cluster.num_workers:
        nodes_text = "; ".join(f"{node.get('CPU', 0):g} CPUs and {node.get('GPU', 0):g} GPUs" for node in alive)
        raise ConfigError(
            f"cluster.num_workers={cluster.num_workers} workers of {needed['CPU']:g} CPUs and {needed['GPU']:g} GPUs "
            f"do not fit: the cluster has {nodes_text} (node by node), enough for {capacity}. "
            "Lower num_workers, cpus_per_worker or gpus_per_worker, or use a larger cluster."
        )


def _start(ray: Any, cluster: ClusterConfig, folder: str) -> None:
    from ray._private import ray_constants

    # On Linux, Ray replaces 127.0.0.1 by an address that other machines can reach and listens there. With this constant
    # off, as it is on macOS and Windows, it stays on loopback.
    clusters, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        ray.init(
            address="local",
            num_cpus=max(1, math.ceil(cluster.num_workers * cluster.cpus_per_worker)),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}},
            _node_ip_address=LOOPBACK,
            _temp_dir=os.path.join(folder, "r"),  # Ray makes it accessible to every user, but `folder` is private
        )
    except Exception as error:  # Ray raises bare exceptions, for example when it does not start in time
        raise ConfigError(
            f"Ray cannot be started on this machine: {_one_line(error)}. Wait until the machine is less busy, ask for "
            "less in cluster.*, or join a running Ray by cluster.address."
        ) from error
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = clusters
    if (address := ray.nodes()[0]["NodeManagerAddress"]) != LOOPBACK:
        raise ConfigError(
            f"Ray {ray.__version__} listens on {address} although loopback was asked for. "
            "Use the Ray version of requirements/, or join a cluster of your own by cluster.address."
        )


def _join(ray: Any, cluster: ClusterConfig) -> None:
    from ray._private.services import canonicalize_bootstrap_address

    try:
        address = canonicalize_bootstrap_address(cluster.address) or cluster.address
        host, _, port = address.rpartition(":")
        socket.create_connection((host, int(port)), timeout=10).close()  # Ray itself would try for minutes
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        advice = (
            "Start one with `ray start --head`, check the address, set RAY_AUTH_MODE=token if the cluster asks for a "
            "token, or leave cluster.address empty for a local one."
        )
        if "Version mismatch" in str(error):
            advice = "Install the cluster's versions here, or start the cluster from this environment."
        raise ConfigError(
            f"cluster.address={cluster.address}: no Ray cluster can be joined there: {_one_line(error)}. {advice}"
        ) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def _end_processes(folder: str) -> None:
    """Kills the processes of a Ray that failed to start. They use files in `folder` and would create it again."""
    import psutil

    started = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if any(folder in word for word in process.cmdline()):
                process.kill()
                started.append(process)
    psutil.wait_procs(started, timeout=10)
