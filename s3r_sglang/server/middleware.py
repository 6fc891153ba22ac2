"""Keeps SGLang's own generating endpoints off an engine that is asleep or whose weights are partly updated."""

from typing import Any

from starlette.responses import JSONResponse

from s3r_sglang.server.gate import Gate, asleep

# Endpoints of SGLang 0.5.17 that run the model. /health is not among them: a sleeping server is alive.
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
    """Answers 503 for `GENERATING` while the gate says so; ASGI, so that streams and bodies pass untouched."""

    def __init__(self, app: Any, gate: Gate) -> None:
        self.app = app
        self.gate = gate

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] in GENERATING and (reason := self._reason()):
            await error(503, reason, {"Retry-After": "1"})(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _reason(self) -> str | None:
        if self.gate.sleeping:
            return asleep(self.gate.sleeping).detail
        return "The weights are being updated: retry later." if self.gate.session else None


def error(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """An error in the shape of SGLang's native endpoints."""
    return JSONResponse({"error": {"message": message, "code": status}}, status, headers)
