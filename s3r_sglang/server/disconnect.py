"""Work that is given up when the client that asked for it has gone."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request

from s3r_sglang.server.gate import Refused

T = TypeVar("T")


class ClientGoneError(Refused):
    """The client closed the connection before it had its answer; nobody receives this, the access log shows it."""

    def __init__(self) -> None:
        super().__init__(499, "The client closed the connection.")  # nginx's code for it


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; cancels it and raises ClientGoneError if the client goes away first.

    Args:
        request: one whose body has been read; what is left to receive of it is the disconnect.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        gone.cancel()
        task.cancel()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
