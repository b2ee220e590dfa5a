"""`specrl.serve`: where it listens, and that nobody without the token reaches weights, cache and sleep."""

import subprocess
import sys
from itertools import pairwise

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from specrl.rollout.engines.vllm.guard import HEADER, TOKEN, Guard
from specrl.serve import LOOPBACK, arguments, host, is_loopback

GUARDED = "/update_weights", "/collective_rpc", "/sleep", "/reset_prefix_cache", "/server_info", "/metrics", "/v1x", "/"
OPEN = "/health", "/v1/completions", "/v1/models"
TRICKS = "//collective_rpc", "/v1/../collective_rpc", "/collective_rpc/", "/%63ollective_rpc", "/health/../sleep"


async def reached(request):
    return PlainTextResponse("reached")


async def talked(websocket):
    await websocket.accept()
    await websocket.send_text("reached")


def client(monkeypatch, token="secret", guard=Guard, root_path="") -> TestClient:
    monkeypatch.setenv(TOKEN, token)
    routes = [Route(path, reached, methods=["GET", "POST"]) for path in (*GUARDED, *OPEN)]
    routes += [WebSocketRoute("/realtime", talked), Mount("/admin", routes=[Route("/x", reached)])]
    app = Starlette(routes=routes)
    if guard:
        app.add_middleware(guard)
    return TestClient(app, root_path=root_path)


@pytest.mark.parametrize("method", ["get", "post"])
def test_only_the_token_opens_what_is_no_inference(monkeypatch, method):
    served = client(monkeypatch)
    ask = getattr(served, method)
    for path in (*GUARDED, "/admin/x", "/nothing"):
        for headers in ({}, {HEADER: "wrong"}, {HEADER: ""}, {"Authorization": "Bearer secret"}):
            assert ask(path, headers=headers).status_code == 401, path
        assert ask(path, headers={HEADER: "secret"}).status_code in (200, 404, 405)
    for path in OPEN:
        assert ask(path).text == "reached"


def test_paths_in_disguise_do_not_reach_anything(monkeypatch):
    served = client(monkeypatch)
    for path in TRICKS:
        assert "reached" not in served.get(path).text, path
    below = client(monkeypatch, root_path="/v1")
    assert below.get("/v1/collective_rpc").status_code == 401, "a root path is no part of the route"
    assert "reached" in client(monkeypatch, guard=None, root_path="/v1").get("/v1/collective_rpc").text, "control"


def test_a_websocket_needs_the_token_too(monkeypatch):
    served = client(monkeypatch)
    with pytest.raises(WebSocketDisconnect), served.websocket_connect("/realtime"):
        pass
    with served.websocket_connect("/realtime", headers={HEADER: "secret"}) as socket:
        assert socket.receive_text() == "reached"


def test_planted_fault_without_the_guard_or_a_token_all_is_open(monkeypatch):
    for served in (client(monkeypatch, guard=None), client(monkeypatch, token="")):
        assert served.post("/update_weights").text == "reached"


@pytest.mark.parametrize(
    ("options", "address", "loopback"),
    [
        ([], LOOPBACK, True),
        (["--model", "m", "--host", "::1"], "::1", True),
        (["--host=localhost"], "localhost", True),
        (["--host", "0.0.0.0"], "0.0.0.0", False),
        (["--host", "127.0.0.1", "--host=10.0.0.5"], "10.0.0.5", False),
        (["--host", ""], "", False),
        (["--hos", "0.0.0.0"], LOOPBACK, True),
    ],
)
def test_where_it_listens(options, address, loopback):
    """Whatever the user's words are, vLLM gets the address that was checked as its last one, and the guard."""
    pytest.importorskip("vllm")
    assert (host(options), is_loopback(address)) == (address, loopback)
    words = arguments(options)
    assert [value for name, value in pairwise(words) if name == "--host"][-1] == address
    assert f"{Guard.__module__}.{Guard.__name__}" in words


def test_the_network_needs_a_token(monkeypatch):
    monkeypatch.delenv(TOKEN, raising=False)
    done = subprocess.run([sys.executable, "-m", "specrl.serve", "--host", "0.0.0.0"], capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert TOKEN in done.stderr
