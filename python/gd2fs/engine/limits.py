"""The size of a request body, enforced before anything is parsed."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

# A full context of ids and a plan with hundreds of layouts fit many times over.
BODY_BYTES_MAX = 8 << 20
_REFUSAL = b'{"error":{"message":"the body is over 8 MiB","type":"invalid_request_error","code":413}}'


class BodyLimit:
    """ASGI middleware: a body over the limit is answered 413, whether or not its length was announced."""

    def __init__(self, app: ASGIApp, bytes_max: int = BODY_BYTES_MAX) -> None:
        self._app = app
        self._bytes_max = bytes_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = bytearray()
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self._bytes_max:
                headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
                await send({"type": "http.response.start", "status": 413, "headers": headers})
                await send({"type": "http.response.body", "body": _REFUSAL})
                return
        first: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replay() -> Message:
            return first.pop() if first else await receive()

        await self._app(scope, replay, send)
