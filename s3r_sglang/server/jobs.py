"""The groups of one HTTP request, from admission to the last result, independent of the connection."""

import asyncio
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from s3r_sglang.server.gate import gate_of
from s3r_sglang.server.groups import Plan, sample
from s3r_sglang.server.protocol import Group, GroupError
from s3r_sglang.server.stats import Stats


class Job:
    """Samples all groups of a request under one snapshot.

    The tasks are the server's, not the connection's: a client that goes away makes the job abort its requests,
    and the groups leave the gate when the engine has really let go of them. Cancelling the tasks instead would
    let a weight update reach a scheduler that still runs them.
    """

    def __init__(self, manager: Any, plans: list[Plan], stats: Stats, draft_length: int) -> None:
        self._manager = manager
        self._gate = gate_of(manager)
        self._stats = stats
        self._draft_length = draft_length
        self._rids = [f"s3r-{uuid.uuid4().hex}" for _ in plans]
        self._plans = plans
        self._results: asyncio.Queue[Group | GroupError] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._aborted = False

    async def start(self) -> None:
        """Enter the gate and start sampling; raises Refused if the gate does not admit the request."""
        await self._gate.enter(len(self._plans))
        self._stats.in_flight(self._gate.in_flight)
        updates = self._gate.weight_updates
        for group, rid in zip(self._plans, self._rids, strict=True):
            self._tasks.append(asyncio.create_task(self._run(group, rid, updates)))
            _running.add(self._tasks[-1])
            self._tasks[-1].add_done_callback(_running.discard)

    async def _run(self, group: Plan, rid: str, updates: int) -> None:
        started = asyncio.get_running_loop().time()
        try:
            if self._aborted:
                return  # before SGLang knew the request, so it could not abort it
            result = await sample(self._manager, group, rid, updates, self._draft_length)
        finally:
            await self._gate.leave()
            self._stats.in_flight(self._gate.in_flight)
        self._stats.add(result, asyncio.get_running_loop().time() - started)
        self._results.put_nowait(result)

    async def results(self) -> AsyncGenerator[Group | GroupError, None]:
        """The groups in the order in which they complete."""
        for _ in self._plans:
            yield await self._results.get()

    def abort(self) -> None:
        """Abort what is still running; harmless afterwards."""
        self._aborted = True
        for rid, task in zip(self._rids, self._tasks, strict=False):
            if not task.done():
                self._manager.abort_request(rid)


# The event loop keeps weak references to tasks only.
_running: set[asyncio.Task[None]] = set()
