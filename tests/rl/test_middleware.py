"""The ASGI middleware around SGLang's application, driven by hand."""

import asyncio
import json

import pytest

from s3r_sglang.server.gate import Gate
from s3r_sglang.server.middleware import (
    GateMiddleware,
    PageMiddleware,
    StreamErrorMiddleware,
    UnfaithfulMiddleware,
)

START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream; charset=utf-8")],
}
FAULT = {"message": "no", "code": 400}


def body(event, more=True):
    return {"type": "http.response.body", "body": event, "more_body": more}


def answer(middleware, path, method="GET"):
    """(status, body) of one request, and what reached `send`."""
    sent = []

    async def send(message):
        sent.append(message)

    async def receive():
        await asyncio.Event().wait()  # the client neither sends more nor goes away

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": [],
        "query_string": b"",
        "root_path": "",
    }
    asyncio.run(middleware(scope, receive, send))
    text = b"".join(message.get("body", b"") for message in sent[1:])
    return sent[0]["status"], text, sent


def replay(*messages):
    """An application that sends these messages whatever it is asked."""

    async def app(scope, receive, send):
        for message in messages:
            await send(message)

    return app


def test_an_error_in_the_first_event_becomes_the_status():
    event = b"data: " + json.dumps({"error": FAULT}).encode() + b"\n\n"
    app = replay(START, body(event), body(b"data: [DONE]\n\n"), body(b"", more=False))
    status, text, sent = answer(StreamErrorMiddleware(app), "/generate")
    assert (status, json.loads(text)) == (400, {"error": FAULT})
    assert len(sent) == 2


@pytest.mark.parametrize(
    "first", [b'data: {"text": "error"}\n\n', b'data: {"error": {"message": "no code"}}\n\n', b": ping\n\n"]
)
def test_any_other_stream_passes_as_it_is(first):
    late = b"data: " + json.dumps({"error": FAULT}).encode() + b"\n\n"
    messages = [START, body(first), body(late), body(b"", more=False)]
    assert answer(StreamErrorMiddleware(replay(*messages)), "/generate")[2] == messages


def test_other_paths_and_plain_answers_are_not_held_back():
    messages = [START, body(b'data: {"error": {"code": 400}}\n\n', more=False)]
    assert answer(StreamErrorMiddleware(replay(*messages)), "/other")[2] == messages
    plain = [{**START, "headers": [(b"content-type", b"application/json")]}, body(b"{}", more=False)]
    assert answer(StreamErrorMiddleware(replay(*plain)), "/generate")[2] == plain


@pytest.mark.parametrize(("sleeping", "session"), [({"kv_cache"}, None), (set(), "key")])
def test_a_gated_server_is_alive_but_generates_nothing(sleeping, session):
    gate = Gate()
    gate.sleeping, gate.session = sleeping, session
    middleware = GateMiddleware(replay({**START, "status": 500}, body(b"reached", more=False)), gate)
    assert answer(middleware, "/health")[:2] == (200, b"")
    assert answer(middleware, "/generate", "POST")[0] == 503
    assert answer(middleware, "/health_generate")[0] == 503
    assert answer(middleware, "/flush_cache", "POST")[1] == b"reached"


def test_the_page_is_one_file_that_loads_nothing_else():
    middleware = PageMiddleware(replay(START, body(b"reached", more=False)))
    status, page, sent = answer(middleware, "/s3r/")
    assert (status, page) == (200, PageMiddleware.FILE.read_bytes())
    assert b"default-src 'none'" in dict(sent[0]["headers"])[b"content-security-policy"]
    assert b"http://" not in page
    assert b"https://" not in page
    assert dict(answer(middleware, "/s3r")[2][0]["headers"])[b"location"] == b"s3r/"
    assert answer(middleware, "/s3r/", "POST")[1] == b"reached"
    assert answer(middleware, "/s3r/stats")[1] == b"reached"


@pytest.mark.parametrize(
    ("path", "marked"), [("/v1/chat/completions", True), ("/generate", True), ("/health", False)]
)
def test_answers_of_mode_direct_are_marked(path, marked):
    app = UnfaithfulMiddleware(replay(START, body(b"data: {}\n\n"), body(b"", more=False)))
    _, text, sent = answer(app, path)
    assert text == b"data: {}\n\n"
    assert ((b"x-s3r-faithful", b"false") in sent[0]["headers"]) == marked
    assert len(sent[0]["headers"]) == 1 + marked
    assert len(START["headers"]) == 1, "the message of the application is left alone"
