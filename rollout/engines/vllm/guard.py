"""Guards a server's endpoints for weights, cache and sleep, which vLLM's own `--api-key` leaves open."""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

TOKEN = "SPECRL_SERVER_TOKEN"
"""Environment variable with the token, of server and client; without one a server on loopback is open."""
HEADER = "x-specrl-token"
OPEN = "/v1", "/health", "/ping"
"""Paths that need no token, with all below them: inference, which `--api-key` guards, and health."""

Scope = MutableMapping[str, Any]
Channel = Callable[..., Awaitable[Any]]


class Guard:
    """ASGI middleware that answers 401, or closes a websocket, where the path needs a token that does not come."""

    def __init__(self, app: Callable[[Scope, Channel, Channel], Awaitable[None]]):
        self._app = app
        self._token = os.environ.get(TOKEN, "").encode()

    async def __call__(self, scope: Scope, receive: Channel, send: Channel) -> None:
        if scope["type"] not in ("http", "websocket") or self._allowed(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            body = json.dumps({"error": f"this endpoint needs the header {HEADER}: the server's {TOKEN}"}).encode()
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    def _allowed(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name.lower() == HEADER.encode()]
        path = scope["path"].removeprefix(scope.get("root_path", ""))  # as routes are matched
        return (
            not self._token
            or any(hmac.compare_digest(value, self._token) for value in given)
            or any(path == open_path or path.startswith(f"{open_path}/") for open_path in OPEN)
        )
