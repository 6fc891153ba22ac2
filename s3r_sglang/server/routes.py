"""The HTTP surface of the rollout service: `/s3r/…` on SGLang's application."""

import contextlib
from collections.abc import AsyncIterator
from enum import Enum
from typing import Any, TypeVar

import anyio.to_thread
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import Field, ValidationError
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect

from s3r_sglang.config import config_of, is_self_sparse
from s3r_sglang.faults import sentence
from s3r_sglang.server import groups
from s3r_sglang.server.disconnect import ClientGoneError, unless_disconnected
from s3r_sglang.server.gate import MIXED, Gate, Refused, gate_of, wants_wait
from s3r_sglang.server.jobs import Job
from s3r_sglang.server.middleware import (
    GateMiddleware,
    PageMiddleware,
    StreamErrorMiddleware,
    UnfaithfulMiddleware,
    error,
)
from s3r_sglang.server.openapi import WAIT, refusals, request_body
from s3r_sglang.server.protocol import (
    MAX_BODY_BYTES,
    RolloutRequest,
    RolloutResponse,
    Strict,
    repeated_key,
)
from s3r_sglang.server.stats import Stats

Model = TypeVar("Model", bound=Strict)
TAGS: list[str | Enum] = ["s3r"]
NDJSON = "application/x-ndjson"
# Line ends of Unicode that JSON does not escape, and that clients split lines at (httpx's iter_lines does).
LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}


class Commit(Strict):
    """End of an update session."""

    session: str = Field(min_length=1)
    weight_version: str | None = Field(None, min_length=1)


class Service:
    """Handlers over one replica's TokenizerManager."""

    def __init__(self, manager: Any, scheduler_info: dict[str, Any]) -> None:
        self.manager = manager
        self.gate: Gate = gate_of(manager)
        self.stats = Stats()
        self.speculative = is_self_sparse(manager.server_args.speculative_algorithm)
        self.draft_length = config_of(manager.server_args).draft_length if self.speculative else 0
        self.faithful = not self.speculative or config_of(manager.server_args).faithful
        context = manager.model_config.context_len
        self.limits = groups.Limits(
            context=context,
            input=scheduler_info.get("max_req_input_len") or context,
            vocab=manager.model_config.vocab_size,
        )

    async def rollout(self, request: Request) -> Response:
        """Sample complete groups, see RolloutRequest, RolloutResponse."""
        try:
            body = await _read(RolloutRequest, request)
            if len(body.prompts) > self.gate.max_groups:
                raise groups.BadRequestError(
                    f"prompts: the server takes at most {self.gate.max_groups} groups at a time."
                )
            if not self.speculative and (
                body.seed is not None or any(p.seed is not None for p in body.prompts)
            ):
                raise groups.BadRequestError(
                    "seed: a server without speculation gives all samples the same one."
                )
            # Tokenising 64 MB of text takes seconds, in which the event loop has other clients.
            plans = await anyio.to_thread.run_sync(
                groups.plan, body, self.manager.tokenizer, self.limits, abandon_on_cancel=True
            )
            job = Job(self.manager, plans, self.stats, self.draft_length)
            await unless_disconnected(request, job.start())
        except ValidationError as fault:
            return error(400, sentence(fault, RolloutRequest))
        except groups.BadRequestError as fault:
            return error(400, str(fault))
        except Refused as refusal:
            retry = (
                {"Retry-After": str(self.stats.retry_after())} if refusal.status_code in (429, 503) else {}
            )
            return error(refusal.status_code, refusal.detail, retry)
        if body.stream:
            return GroupStream(job)
        try:
            results = await unless_disconnected(request, _collect(job))
        except ClientGoneError as gone:
            return error(gone.status_code, gone.detail)
        finally:
            job.abort()
        return Response(RolloutResponse(groups=results).model_dump_json(), media_type="application/json")

    async def statistics(self) -> Response:
        """Groups, acceptance, weight version and engine load of this replica."""
        from sglang.srt.utils.json_response import orjson_response

        loads = await self.manager.get_loads(include=["core"])
        engines = [] if self.gate.sleeping else await self.manager.get_internal_state()
        # SGLang's loads hold numbers of NumPy's types, which the standard JSON encoder refuses.
        return orjson_response(
            {
                "status": self._status(),
                "model": self.manager.served_model_name,
                "groups_in_flight": self.gate.in_flight,
                "groups_held": self.gate.held,
                "max_groups": self.gate.max_groups,
                "sleeping": sorted(self.gate.sleeping),
                "weight_version": self.manager.config_value("weight_version"),
                "weight_updates": self.gate.weight_updates,
                "totals": self.stats.summary(),
                "acceptance": [state.get("s3r") for state in engines],
                "engine": [load.to_dict({"core"}) for load in loads],
            }
        )

    def _status(self) -> str:
        if self.gate.sleeping:
            return "asleep"
        if self.gate.closed:
            return "updating"
        if self.gate.mixed:
            return "mixed"
        return "paused" if self.gate.is_paused() else "ready"

    async def ready(self) -> Response:
        """200 if a rollout would be sampled now, else 503 with the reason; never runs the model."""
        from sglang.srt.managers.tokenizer_manager import ServerStatus

        if self.manager.gracefully_exit or self.manager.server_status != ServerStatus.Up:
            return error(503, "The server is starting, stopping or unhealthy.")
        status = self._status()
        if status == "mixed":
            return error(503, MIXED)
        return JSONResponse({"status": status}, 200 if status == "ready" else 503)

    def weights(self) -> JSONResponse:
        """What a sender of weights has to know: label, updates so far, and ranks that each need the tensors."""
        return JSONResponse(
            {
                "weight_version": self.manager.config_value("weight_version"),
                "weight_updates": self.gate.weight_updates,
                "updating": self.gate.session is not None,
                "tp_size": self.manager.server_args.tp_size,
            }
        )

    async def begin_update(self, request: Request) -> Response:
        """Close the gate for a weight update in several requests; 409 while groups are in flight."""
        try:
            opened = self.gate.open_session(wants_wait(request.query_params))
            return JSONResponse({"session": await unless_disconnected(request, opened)})
        except Refused as refusal:
            return error(refusal.status_code, refusal.detail)

    async def commit_update(self, request: Request) -> Response:
        """Label the new weights, drop the prefix cache of the old ones, and open the gate."""
        try:
            body = await _read(Commit, request)
            async with self.gate.closing(body.session):
                await self.manager.flush_cache(timeout_s=10)
                if body.weight_version is not None:
                    self.manager.record_config_updates("s3r.commit", weight_version=body.weight_version)
        except ValidationError as fault:
            return error(400, sentence(fault, Commit))
        except Refused as refusal:
            return error(refusal.status_code, refusal.detail)
        return JSONResponse({"weight_version": self.manager.config_value("weight_version")})


def mount(app: FastAPI, state: Any) -> None:
    """Add the routes and the middleware to SGLang's application, before it starts."""
    from sglang.srt.utils.auth import AuthLevel, auth_level

    service = Service(state.tokenizer_manager, state.scheduler_info)
    # On the application itself: SGLang does not find the auth level of a route behind an included router, and
    # would take the users' key for it.
    admin = auth_level(AuthLevel.ADMIN_OPTIONAL)

    @app.post(
        "/s3r/rollout",
        tags=TAGS,
        openapi_extra=request_body(RolloutRequest),
        response_model=RolloutResponse,
        responses={200: {"content": {NDJSON: {}}}, **refusals(400, 413, 429, 503)},
    )
    async def rollout(request: Request) -> Response:
        return await service.rollout(request)

    @app.get("/s3r/stats", tags=TAGS)
    async def stats() -> Response:
        return await service.statistics()

    @app.get("/s3r/ready", tags=TAGS, responses=refusals(503))
    async def ready() -> Response:
        return await service.ready()

    @app.get("/s3r/weights", tags=TAGS)
    @admin
    async def weights() -> Response:
        return service.weights()

    @app.post("/s3r/weights/begin", tags=TAGS, openapi_extra=WAIT, responses=refusals(400, 409))
    @admin
    async def begin(request: Request) -> Response:
        return await service.begin_update(request)

    @app.post(
        "/s3r/weights/commit",
        tags=TAGS,
        openapi_extra=request_body(Commit),
        responses=refusals(400, 409, 413),
    )
    @admin
    async def commit(request: Request) -> Response:
        return await service.commit_update(request)

    # First in the list is outermost: the page, which holds nothing but its code, is in front of SGLang's
    # authentication, because a browser cannot send a key before there is a page to ask for it.
    app.user_middleware.insert(0, Middleware(PageMiddleware))
    # The last are innermost: behind the authentication.
    app.user_middleware += [Middleware(StreamErrorMiddleware), Middleware(GateMiddleware, gate=service.gate)]
    if not service.faithful:
        app.user_middleware.append(Middleware(UnfaithfulMiddleware))


async def _read(model: type[Model], request: Request) -> Model:
    """The body as a `model`; raises ValidationError, or Refused if it is too large or has a key twice."""
    body = await _body(request)
    parsed = model.model_validate_json(body)
    # Of two values the parser keeps the last.
    if repeated := await anyio.to_thread.run_sync(repeated_key, body, abandon_on_cancel=True):
        raise Refused(400, f"The key {repeated[:80]!r} occurs twice in one object.")
    return parsed


async def _body(request: Request) -> bytes:
    """The body, read by hand so that its size and its faults are answered in our words."""
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > MAX_BODY_BYTES:
                raise Refused(
                    413, f"The body is larger than {MAX_BODY_BYTES} bytes: send fewer prompts at a time."
                )
            parts.append(part)
    except ClientDisconnect:
        raise ClientGoneError from None
    return b"".join(parts)


class GroupStream(StreamingResponse):
    """NDJSON, one line per group as it completes; what is left of `job` is aborted however the response ends."""

    def __init__(self, job: Job) -> None:
        super().__init__(_lines(job), media_type=NDJSON)
        self._job = job

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        # Not in _lines: a client that is gone by now cancels a generator that was never entered.
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.abort()


async def _collect(job: Job) -> list[Any]:
    results = [result async for result in job.results()]
    return sorted(results, key=lambda result: result.prompt_index)


async def _lines(job: Job) -> AsyncIterator[str]:
    async with contextlib.aclosing(job.results()) as results:
        async for result in results:
            yield result.model_dump_json().translate(LINE_ENDS) + "\n"
