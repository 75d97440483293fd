"""The API key that requests to a vLLM server need."""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable
from typing import Any

KEY = "VLLM_API_KEY"  # the environment variable with the key, in servers (vLLM's own name) and in clients
Message = dict[str, Any]  # in ASGI, a message or the scope of a connection
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class Keyed:
    """ASGI middleware that answers no path without the key. vLLM itself checks it only below /v1, while other paths
    load weights, call methods and stop the engine."""

    def __init__(self, app: App) -> None:
        self.app, self.expected = app, f"Bearer {os.environ[KEY]}".encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Passes a request with the key on to the app. Others get the status 401, or 1008 (policy violation) for a
        websocket."""
        header = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["type"] == "lifespan" or hmac.compare_digest(header, self.expected):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error": "Unauthorized"}'})
