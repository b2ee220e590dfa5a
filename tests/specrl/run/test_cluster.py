"""Starting and joining Ray: loopback only, authenticated, and errors that say what to do."""

import atexit
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from specrl.config.options import ConfigError
from specrl.rollout.sections import ClusterConfig
from specrl.run.cluster import check_resources, connect, private_folder

ROOT = Path(__file__).parents[3]


def listening():
    """(process name, address) of every TCP socket that this process and those it started listen on."""
    me = psutil.Process()
    sockets = []
    for process in [me, *me.children(recursive=True)]:
        try:
            connections = process.net_connections("tcp")
        except psutil.NoSuchProcess:
            continue
        sockets += [(process.name(), c.laddr.ip) for c in connections if c.status == psutil.CONN_LISTEN]
    return sockets


def exposed(sockets):
    return [(name, ip) for name, ip in sockets if ip.removeprefix("::ffff:") not in ("127.0.0.1", "::1")]


@pytest.fixture(scope="module")
def started():
    import ray

    with connect(ClusterConfig(num_workers=1)):
        yield ray


@pytest.mark.long
def test_a_ray_started_here_listens_on_loopback_only(started):
    @started.remote
    def serve():
        return [ip for _, ip in listening()]

    assert started.get(serve.remote()), "a worker has a socket too"
    sockets = listening()
    assert {"gcs_server", "raylet"} <= {name for name, _ in sockets}
    assert exposed(sockets) == []
    planted = [("gcs_server", ip) for ip in ("0.0.0.0", "::", "192.0.2.7", "::ffff:192.0.2.7")]
    assert exposed(planted) == planted


JOIN = "import ray; ray.init({address!r}, log_to_driver=False, logging_level='error'); print('joined'); ray.shutdown()"


def join(address, mode):
    code = JOIN.format(address=address)
    environment = {**os.environ, "RAY_AUTH_MODE": mode, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.long
def test_only_those_with_the_token_can_join(started):
    address = started.get_runtime_context().gcs_address
    assert "joined" in join(address, "token").stdout
    refused = join(address, "disabled")
    assert "joined" not in refused.stdout
    assert "Authentication" in refused.stderr


def test_what_killed_runs_left_is_removed_and_what_living_ones_use_is_not():
    hold = "from specrl.run.cluster import private_folder as f; c = f(); print(c.__enter__(), flush=True); input()"
    command = [sys.executable, "-c", hold]
    runs = [
        subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    left, used = (run.stdout.readline().strip() for run in runs)
    runs[0].kill()
    runs[0].wait()
    assert os.path.isdir(left), "nobody cleans up behind a killed process"
    with private_folder() as folder:
        assert [os.path.isdir(path) for path in (left, used, folder)] == [False, True, True]
    assert not os.path.isdir(folder)
    runs[1].communicate("done", timeout=30)


@pytest.mark.long
def test_a_ray_that_runs_already_is_used_and_left_alone(started):
    address = started.get_runtime_context().gcs_address
    with connect(ClusterConfig(num_workers=1, address="auto")):
        assert started.get_runtime_context().gcs_address == address
    assert started.is_initialized()


def node(cpus, gpus=0.0, alive=True):
    return {"Alive": alive, "Resources": {"CPU": cpus, "GPU": gpus, "memory": 1e9}}


@pytest.mark.parametrize(
    ("workers", "nodes", "capacity"),
    [
        ((2, 4.0, 0.0), [node(4.0), node(4.0)], 2),
        ((2, 4.0, 0.0), [node(6.0), node(2.0)], 1),
        ((2, 4.0, 0.0), [node(4.0), node(4.0, alive=False)], 1),
        ((2, 1.0, 1.0), [node(8.0)], 0),
        ((2, 1.0, 1.0), [node(8.0, 1.0), node(1.0, 4.0)], 2),
        ((5, 0.1, 0.25), [node(2.0, 1.0)], 4),
    ],
)
def test_workers_must_fit_node_by_node(workers, nodes, capacity):
    count, cpus, gpus = workers
    config = ClusterConfig(num_workers=count, cpus_per_worker=cpus, gpus_per_worker=gpus)
    if capacity >= count:
        check_resources(config, nodes)
        return
    with pytest.raises(ConfigError, match=rf"num_workers={count} .* enough for {capacity}\. Lower num_workers"):
        check_resources(config, nodes)


FAILS = """
from specrl.rollout.sections import ClusterConfig
from specrl.run.cluster import connect
from specrl.config.options import ConfigError
try:
    with connect(ClusterConfig(num_workers=1, address={address!r})):
        print("joined")
except ConfigError as error:
    print(error)
"""


@pytest.mark.parametrize(("address", "found"), [("auto", "127.0.0.1:1"), ("127.0.0.1:1", ""), ("nonsense", "")])
def test_no_cluster_at_the_address(address, found):
    done = subprocess.run(
        [sys.executable, "-c", FAILS.format(address=address)],
        cwd=ROOT,
        env=os.environ | {"RAY_ADDRESS": found},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert f"cluster.address={address}: no Ray cluster can be joined there: " in done.stdout, done
    assert "leave cluster.address empty" in done.stdout


@pytest.fixture
def unstarted(monkeypatch):
    """Ray before it is initialised, whatever other tests have started."""
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    return ray


def test_a_ray_that_does_not_start_in_time_is_one_line_and_leaves_nothing(unstarted, monkeypatch):
    started = []

    def init(_temp_dir, **_):
        program = "import os, sys, time\nwhile True: os.makedirs(sys.argv[1], exist_ok=True); time.sleep(0.01)"
        started.append((subprocess.Popen([sys.executable, "-c", program, _temp_dir]), Path(_temp_dir).parent))
        atexit.register(started[0][0].kill)
        while not os.path.isdir(_temp_dir):
            time.sleep(0.01)
        raise Exception("The current node timed out during startup. This could happen because ...")

    monkeypatch.setattr(unstarted, "init", init)
    with pytest.raises(ConfigError, match=r"^Ray cannot be started on this machine: The current node timed out .*busy"):  # noqa: SIM117
        with connect(ClusterConfig(num_workers=1)):
            pass
    process, folder = started[0]
    process.wait(30)
    assert not folder.exists(), "a process that lives would have made it anew"
