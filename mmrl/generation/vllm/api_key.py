"""The key without which a server of vLLM does not answer."""

from __future__ import annotations

import hmac
import os
from typing import Any

KEY = "VLLM_API_KEY"  # vLLM's own name for it, in the environment of servers and of whoever talks to them


class Keyed:
    """ASGI middleware: no path is answered without the key. vLLM asks for it below /v1 alone, while other paths
    load weights, call methods and stop the engine."""

    def __init__(self, app: Any) -> None:
        self.app, self.expected = app, f"Bearer {os.environ[KEY]}".encode()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        header = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["type"] == "lifespan" or hmac.compare_digest(header, self.expected):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error": "Unauthorized"}'})
