"""64 clients at once: nothing is lost, nothing is left behind, memory stays flat.

S3R_LOAD_SECONDS sets the duration; the default keeps the suite short. With -s the figures are printed.
"""

import asyncio
import json
import os
import time

import psutil
import pytest
from s3r_sglang.rl_integration.client import AsyncRolloutClient
from support import prompt, stats

SECONDS = float(os.environ.get("S3R_LOAD_SECONDS", 15))
CLIENTS = 64


def resident_bytes(server):
    parent = psutil.Process(server.process.pid)
    return sum(process.memory_info().rss for process in [parent, *parent.children(recursive=True)])


async def drive(url, seconds):
    """Groups asked for and groups received by `CLIENTS` clients that ask again as soon as they are served."""
    asked = received = 0
    end = time.monotonic() + seconds

    async def one(number):
        nonlocal asked, received
        async with AsyncRolloutClient(url) as client:
            while time.monotonic() < end:
                asked += 1
                rollout = await client.rollout([prompt(number)], 2, {"max_new_tokens": 8, "ignore_eos": True})
                assert [len(response.token_ids) for response in rollout.groups[0].responses] == [8, 8]
                received += 1

    await asyncio.gather(*(one(number) for number in range(CLIENTS)))
    return asked, received


@pytest.mark.slow
def test_64_clients_lose_and_leak_nothing(server):
    asyncio.run(drive(server.url, SECONDS / 3))
    before, memory = stats(server)["totals"], resident_bytes(server)
    asked, received = asyncio.run(drive(server.url, SECONDS))
    after, grown = stats(server), resident_bytes(server) - memory
    figures = {"seconds": SECONDS, "clients": CLIENTS, "asked": asked, "received": received}
    figures |= {
        "errors": after["totals"]["errors"] - before["errors"],
        "resident_bytes": memory,
        "grown": grown,
    }
    print(json.dumps(figures))
    assert asked == received >= CLIENTS
    assert after["totals"]["groups"] - before["groups"] == received
    assert after["totals"]["errors"] == before["errors"]
    assert (after["groups_in_flight"], after["groups_held"]) == (0, 0)
    assert grown < 30 << 20
