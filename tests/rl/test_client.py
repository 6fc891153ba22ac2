"""The Python client against real replicas, one of which dies or restarts under it."""

import asyncio
import os
import signal
import threading
import time

import pytest
from s3r_sglang.rl_integration.client import AsyncRolloutClient, RolloutClient, RolloutError
from s3r_testing import wait_until
from support import SAMPLING, groups, prompt, stats

pytestmark = pytest.mark.slow


def tokens(rollout):
    return [[response.token_ids for response in group.responses] for group in rollout.groups]


def test_groups_come_back_typed_and_in_order(server):
    prompts = [prompt(n) for n in range(5)]
    rollout = RolloutClient(server.url).rollout(prompts, 3, SAMPLING, seed=2)
    assert [group.prompt_id for group in rollout.groups] == [p["id"] for p in prompts]
    assert [group.prompt_index for group in rollout.groups] == list(range(5))
    assert {(group.replica, group.attempts) for group in rollout.groups} == {(server.url, 1)}
    assert rollout.errors == []
    assert len(rollout.weight_versions) == 1
    assert all(len(response.logprobs) == 24 for group in rollout.groups for response in group.responses)


def test_the_seed_means_the_same_as_in_one_request(server):
    prompts = [prompt(n) for n in range(3)]
    direct = groups(server, prompts=prompts, seed=9)
    rollout = RolloutClient(server.url).rollout(prompts, 2, SAMPLING, seed=9)
    assert tokens(rollout) == [[r["token_ids"] for r in group["responses"]] for group in direct]


def test_faults_are_raised_before_and_after_sending(server):
    client = RolloutClient(server.url)
    with pytest.raises(ValueError, match="group_size: must be greater than or equal to 1"):
        client.rollout([prompt(0)], 0)
    with pytest.raises(RolloutError, match=r"400: prompts\.0: token id 99 is outside"):
        client.rollout([{"id": 1, "token_ids": [99]}], 1)
    with pytest.raises(RolloutError, match="no replica was ready for 1 seconds"):
        RolloutClient("http://127.0.0.1:9", recover_seconds=1).rollout([prompt(0)], 1)


def test_leaving_a_stream_aborts_the_rest(server):
    async def first():
        async with AsyncRolloutClient(server.url) as client:
            prompts = [{**prompt(0), "max_new_tokens": 2}, {**prompt(1), "max_new_tokens": 450}]
            stream = client.stream(prompts, 4, SAMPLING)
            group = await anext(stream)
            await stream.aclose()
            return group

    assert asyncio.run(first()).prompt_id == "p0"
    wait_until(lambda: stats(server)["groups_in_flight"] == 0, seconds=15)


@pytest.fixture(scope="module")
def victim(start):
    """A second replica; the last test of the file kills it."""
    return start().wait()


def test_a_frozen_replica_costs_no_group_and_samples_for_nobody(server, victim):
    prompts = [{**prompt(n), "max_new_tokens": 60} for n in range(12)]
    expected = tokens(RolloutClient(server.url).rollout(prompts, 4, SAMPLING, seed=4))
    client = RolloutClient([server.url, victim.url], max_outstanding=6, silent_seconds=5)

    def freeze():
        wait_until(lambda: stats(victim)["groups_in_flight"] >= 2)
        os.killpg(victim.process.pid, signal.SIGSTOP)

    freezer = threading.Thread(target=freeze)
    freezer.start()
    try:
        rollout = client.rollout(prompts, 4, SAMPLING, seed=4)
    finally:
        freezer.join()
        os.killpg(victim.process.pid, signal.SIGCONT)
    assert rollout.errors == []
    assert [group.prompt_id for group in rollout.groups] == [p["id"] for p in prompts]
    assert tokens(rollout) == expected
    assert {group.replica for group in rollout.groups if group.attempts > 1} == {server.url}
    wait_until(lambda: stats(victim)["groups_in_flight"] == 0, seconds=15)


def test_a_replica_killed_in_the_middle_costs_no_group_and_comes_back(server, victim, start):
    prompts = [{**prompt(n), "max_new_tokens": 60} for n in range(24)]
    expected = tokens(RolloutClient(server.url).rollout(prompts, 4, SAMPLING, seed=4))
    client = RolloutClient([server.url, victim.url], max_outstanding=6)
    before = stats(victim)["totals"]["groups"]

    def kill():
        wait_until(lambda: stats(victim)["totals"]["groups"] >= before + 2)
        victim.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    rollout = client.rollout(prompts, 4, SAMPLING, seed=4)
    killer.join()
    assert rollout.errors == []
    assert [group.prompt_id for group in rollout.groups] == [p["id"] for p in prompts]
    assert tokens(rollout) == expected
    assert {group.replica for group in rollout.groups} == {server.url, victim.url}
    resent = [group for group in rollout.groups if group.attempts > 1]
    assert resent
    assert {group.replica for group in resent} == {server.url}

    restarted = start(port=victim.port)
    lone = RolloutClient(restarted.url, recover_seconds=300)
    began = time.monotonic()
    assert len(lone.rollout([prompt(0)], 2, SAMPLING).groups) == 1
    assert time.monotonic() - began > 1
    assert lone.stats()[0]["totals"]["groups"] == 1
    restarted.kill()
