"""Around SGLang's application: its generating endpoints kept off a gated engine, and the live page."""

import json
from pathlib import Path
from typing import Any, ClassVar

from starlette.responses import FileResponse, JSONResponse, RedirectResponse, Response

from s3r_sglang.server.gate import Gate, Refused

# Endpoints of SGLang 0.5.17 that run the model.
GENERATING = frozenset(
    {
        "/generate",
        "/health_generate",
        "/invocations",
        "/vertex_generate",
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/messages",
        "/v1/responses",
        "/v1/score",
        "/api/chat",
        "/api/generate",
    }
)


class GateMiddleware:
    """Answers 503 for `GENERATING` while the gate says so; ASGI, so that streams and bodies pass untouched.

    /health generates a token as well, and calls the server unhealthy if none comes within 20 s. One that is
    asleep, or takes weights for longer than that, or waits for new ones after a failure, is alive.
    """

    def __init__(self, app: Any, gate: Gate) -> None:
        self.app = app
        self.gate = gate

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"] if scope["type"] == "http" else None
        app = self.app
        if path in GENERATING:
            try:
                self.gate.refuse_generation()
            except Refused as refusal:
                app = error(refusal.status_code, refusal.detail, {"Retry-After": "1"})
        elif path == "/health" and (self.gate.sleeping or self.gate.closed or self.gate.mixed):
            app = Response()
        await app(scope, receive, send)


class UnfaithfulMiddleware:
    """Marks every answer of `GENERATING` in mode direct; OpenAI's formats have no place for `meta_info`. ASGI."""

    HEADER = (b"x-s3r-faithful", b"false")

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def marked(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], self.HEADER]}
            await send(message)

        generating = scope["type"] == "http" and scope["path"] in GENERATING
        await self.app(scope, receive, marked if generating else send)


class StreamErrorMiddleware:
    """Gives a stream that begins with an error the error's own status; ASGI.

    SGLang validates a request with `stream=true` inside the stream, so its refusals, and ours, would come as an
    event under HTTP 200. The status line waits for the first event, which SGLang's OpenAI endpoints do anyway.
    """

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] in GENERATING:
            send = _ErrorFirst(scope, receive, send)
        await self.app(scope, receive, send)


class _ErrorFirst:
    """An ASGI `send` that holds the start of an event stream back until its first event."""

    def __init__(self, scope: Any, receive: Any, send: Any) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._start: Any = None
        self._refused = False

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start" and _is_event_stream(message):
            self._start = message
        elif self._start is not None:
            start, self._start = self._start, None
            if fault := _error_event(message.get("body", b"")):
                self._refused = True
                await JSONResponse({"error": fault}, fault["code"])(self._scope, self._receive, self._send)
                return
            await self._send(start)
            await self._send(message)
        elif not self._refused:
            await self._send(message)


def _is_event_stream(start: Any) -> bool:
    kind = dict(start["headers"]).get(b"content-type", b"")
    return start["status"] == 200 and kind.startswith(b"text/event-stream")


def _error_event(event: bytes) -> dict[str, Any] | None:
    """The error of `data: {"error": {"code": …, …}}`, or None for any other event."""
    if not event.startswith(b'data: {"error"'):
        return None
    fault = json.loads(event.removeprefix(b"data: "))["error"]
    return fault if 400 <= fault.get("code", 0) < 600 else None


class PageMiddleware:
    """Answers `/s3r/` with the live page, one static file that polls `/s3r/stats`; ASGI."""

    FILE = Path(__file__).with_name("static") / "index.html"
    # Its own inline script and style, and answers of this server: nothing else is ever loaded.
    HEADERS: ClassVar = {
        "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
        "img-src data:; connect-src 'self'; form-action 'none'; frame-ancestors 'none'; base-uri 'none'",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-cache",
    }

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] not in ("GET", "HEAD"):
            await self.app(scope, receive, send)
        elif scope["path"] == "/s3r/":
            await FileResponse(self.FILE, headers=self.HEADERS)(scope, receive, send)
        elif scope["path"] == "/s3r":
            # Relative, so that a proxy's prefix stays; the page asks for `stats` beside itself.
            await RedirectResponse("s3r/")(scope, receive, send)
        else:
            await self.app(scope, receive, send)


def error(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """An error in the shape of SGLang's native endpoints."""
    return JSONResponse({"error": {"message": message, "code": status}}, status, headers)
