"""Clients that go away at the worst moment, on a real event loop."""

import asyncio

import pytest
from starlette.requests import Request

from s3r_sglang.server.disconnect import ClientGoneError, unless_disconnected
from s3r_sglang.server.gate import Gate, gate_of
from s3r_sglang.server.groups import Plan
from s3r_sglang.server.jobs import Job
from s3r_sglang.server.protocol import Prompt
from s3r_sglang.server.routes import GroupStream, _body
from s3r_sglang.server.stats import Stats

SCOPE = {"type": "http", "method": "POST", "path": "/", "headers": [], "asgi": {"spec_version": "2.3"}}


async def gone():
    return {"type": "http.disconnect"}


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


class Manager:
    """Of SGLang's TokenizerManager what a job uses, without an engine: it notes what is asked of it."""

    is_pause = False

    def __init__(self):
        self.asked, self.aborted = [], []

    def config_value(self, name):
        return "first"

    def generate_request(self, request):
        self.asked.append(request.rid)
        raise AssertionError("sampled for nobody")

    def abort_request(self, rid):
        self.aborted.append(rid)  # and nothing else, as SGLang does for a request that it does not know yet


def test_a_group_that_is_aborted_before_it_begins_is_never_sampled():
    async def scenario():
        manager = Manager()
        plans = [Plan(n, Prompt(id=n, token_ids=[2]), [2], 1, {}) for n in range(3)]
        job = Job(manager, plans, Stats(), 6)
        await job.start()
        assert gate_of(manager).in_flight == 3
        job.abort()
        await settle()
        assert manager.asked == []
        assert gate_of(manager).in_flight == 0

    asyncio.run(scenario())


def test_a_stream_whose_client_left_before_its_first_line_aborts_its_groups():
    """Starlette then cancels the response without ever asking its generator for a line."""

    class Endless(Job):
        def __init__(self):
            self.aborted = False

        async def results(self):
            await asyncio.Event().wait()
            yield

        def abort(self):
            self.aborted = True

    async def scenario():
        job = Endless()

        async def send(message):
            await asyncio.sleep(0)

        await GroupStream(job)(SCOPE, gone, send)
        assert job.aborted

    asyncio.run(scenario())


def test_a_body_that_breaks_off_is_no_failure_of_the_server():
    with pytest.raises(ClientGoneError):
        asyncio.run(_body(Request(SCOPE, gone)))


def test_who_waits_for_an_update_and_leaves_changes_nothing():
    """Its session would have no owner, and hold all groups back until the next one."""

    async def scenario():
        gate = Gate()
        await gate.enter(1)
        with pytest.raises(ClientGoneError):
            await unless_disconnected(Request(SCOPE, gone), gate.open_session(wait=True))
        await settle()
        assert not gate.closed
        await gate.leave()
        await settle()
        assert (gate.session, gate.closed, gate.changing.locked()) == (None, False, False)

    asyncio.run(scenario())
