"""The snapshot rule, on a real event loop."""

import asyncio

import pytest

from s3r_sglang.server.gate import Gate, Refused, wants_wait


async def commit(gate, session):
    async with gate.closing(session):
        pass


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


def test_an_update_is_refused_with_the_number_of_groups_in_flight():
    async def scenario():
        gate = Gate()
        await gate.enter(3)
        with pytest.raises(Refused, match="3 groups are in flight") as refusal:
            async with gate.exclusive(wait=False):
                pytest.fail("the update ran beside three groups")
        assert refusal.value.status_code == 409
        assert not gate.closed

    asyncio.run(scenario())


def test_a_waiting_update_runs_between_the_old_groups_and_the_new():
    async def scenario():
        gate, events = Gate(), []

        async def update():
            async with gate.exclusive(wait=True):
                events.append(("update", gate.in_flight))

        async def late():
            await gate.enter(1)
            events.append(("late", gate.in_flight))

        await gate.enter(2)
        tasks = [asyncio.create_task(update()), asyncio.create_task(late())]
        await settle()
        assert (events, gate.held) == ([], 1)
        await gate.leave()
        await settle()
        assert events == []
        await gate.leave()
        await asyncio.gather(*tasks)
        assert events == [("update", 0), ("late", 1)]
        assert gate.held == 0

    asyncio.run(scenario())


def test_a_cancelled_update_lets_the_held_groups_in():
    async def scenario():
        gate = Gate()
        await gate.enter(1)

        async def update():
            async with gate.exclusive(wait=True):
                pytest.fail("the update ran beside a group")

        task = asyncio.create_task(update())
        late = asyncio.create_task(gate.enter(1))
        await settle()
        assert not late.done()
        task.cancel()
        await asyncio.wait_for(late, 1)
        assert gate.in_flight == 2

    asyncio.run(scenario())


def test_a_group_whose_client_left_while_it_was_held_is_not_counted():
    async def scenario():
        gate = Gate()
        session = await gate.open_session(wait=False)
        held = asyncio.create_task(gate.enter(5))
        await settle()
        assert gate.held == 5
        held.cancel()
        await asyncio.gather(held, return_exceptions=True)
        await commit(gate, session)
        assert (gate.held, gate.in_flight) == (0, 0)

    asyncio.run(scenario())


def test_the_queue_is_bounded_and_counts_what_is_held():
    async def scenario():
        gate = Gate(max_groups=4)
        await gate.enter(2)
        update = asyncio.create_task(gate.open_session(wait=True))
        await settle()
        held = asyncio.create_task(gate.enter(2))
        await settle()
        with pytest.raises(Refused, match="4 of 4 groups") as refusal:
            await gate.enter(1)
        assert refusal.value.status_code == 429
        await gate.leave()
        await gate.leave()
        await commit(gate, await update)
        await held
        assert gate.in_flight == 2

    asyncio.run(scenario())


def test_a_session_holds_groups_back_until_it_is_committed_by_its_own_key():
    async def scenario():
        gate = Gate()
        first = await gate.open_session(wait=False)
        held = asyncio.create_task(gate.enter(1))
        second = await gate.open_session(wait=False)
        with pytest.raises(Refused, match="another one took over"):
            await commit(gate, first)
        await settle()
        assert not held.done()
        await commit(gate, second)
        await asyncio.wait_for(held, 1)

    asyncio.run(scenario())


def test_no_other_session_begins_while_one_is_being_closed():
    """Its label would name the weights of the other."""

    async def scenario():
        gate = Gate()
        first = await gate.open_session(wait=False)
        async with gate.closing(first):
            second = asyncio.create_task(gate.open_session(wait=False))
            await settle()
            assert not second.done()
        assert await second == gate.session != first

    asyncio.run(scenario())


def test_changes_come_one_after_the_other():
    async def scenario():
        gate, order = Gate(), []

        async def change(name):
            async with gate.exclusive(wait=True):
                order.append(name)
                await settle()
                order.append(name)

        await gate.enter(1)
        tasks = [asyncio.create_task(change(name)) for name in "ab"]
        await settle()
        await gate.leave()
        await asyncio.gather(*tasks)
        assert order == ["a", "a", "b", "b"]
        assert not gate.closed

    asyncio.run(scenario())


def test_a_sleeping_engine_refuses_at_once_and_those_it_held():
    async def scenario():
        gate = Gate()
        session = await gate.open_session(wait=False)
        held = asyncio.create_task(gate.enter(1))
        await settle()
        gate.sleeping = {"kv_cache"}
        with pytest.raises(Refused, match="asleep \\(kv_cache released\\)") as refusal:
            await gate.enter(1)
        assert refusal.value.status_code == 503
        await commit(gate, session)
        with pytest.raises(Refused, match="asleep"):
            await held
        assert (gate.held, gate.in_flight) == (0, 0)

    asyncio.run(scenario())


def test_nothing_is_generated_asleep_or_between_old_and_new_weights():
    async def scenario():
        gate = Gate()
        gate.refuse_generation()
        gate.sleeping = {"weights"}
        with pytest.raises(Refused, match="asleep"):
            gate.refuse_generation()
        gate.sleeping = set()
        session = await gate.open_session(wait=False)
        with pytest.raises(Refused, match="being updated") as refusal:
            gate.refuse_generation()
        assert refusal.value.status_code == 503
        await commit(gate, session)
        gate.refuse_generation()

    asyncio.run(scenario())


def test_a_mixture_of_weights_is_not_sampled_from_until_an_update_mends_it():
    async def scenario():
        gate = Gate()
        await gate.enter(1)
        update = asyncio.create_task(fail(gate))
        await settle()
        held = asyncio.create_task(gate.enter(1))
        await settle()
        await gate.leave()
        await update
        for refused in (held, gate.enter(1)):
            with pytest.raises(Refused, match=r"failed half-way.*send all of them again") as refusal:
                await refused
            assert refusal.value.status_code == 503
        with pytest.raises(Refused, match="failed half-way"):
            gate.refuse_generation()
        async with gate.exclusive(wait=False):
            held = asyncio.create_task(gate.enter(1))
            await settle()
            assert gate.held == 1, "an update is under way"
            gate.updated(True, mixed=False)
        await asyncio.wait_for(held, 1)
        gate.refuse_generation()

    asyncio.run(scenario())


async def fail(gate):
    async with gate.exclusive(wait=True):
        gate.updated(False, mixed=True)


def test_a_paused_engine_holds_groups_until_it_goes_on_and_changes_refuse_those_in_flight():
    async def scenario():
        paused = [False]
        gate = Gate(is_paused=lambda: paused[0])
        await gate.enter(1)
        paused[0] = True
        held = asyncio.create_task(gate.enter(1))
        await settle()
        assert gate.held == 1
        for wait in (False, True):
            with pytest.raises(Refused, match=r"1 groups are in flight.*the engine is paused, so call"):
                await gate.open_session(wait)
        started = asyncio.get_running_loop().time()
        await gate.drained(0.05)
        assert asyncio.get_running_loop().time() - started >= 0.05
        await gate.leave()
        await gate.drained(5)
        async with gate.exclusive(wait=False):
            pass
        await settle()
        assert gate.held == 1
        paused[0] = False
        await gate.notify()
        await asyncio.wait_for(held, 1)

    asyncio.run(scenario())


def test_a_session_ends_well_only_without_a_failure():
    """Else a trainer that does not look at the answers gets a new label on old weights, or on a mixture."""

    async def scenario():
        gate = Gate()
        session = await gate.open_session(wait=False)
        gate.updated(True, mixed=False)
        gate.updated(False, mixed=True)
        gate.updated(True, mixed=True)
        with pytest.raises(Refused, match="An update has failed: begin a new session") as refusal:
            await commit(gate, session)
        assert refusal.value.status_code == 409
        session = await gate.open_session(wait=False)
        with pytest.raises(Refused, match="begin a new session"):
            await commit(gate, session)
        assert gate.closed
        gate.updated(True, mixed=True)
        await commit(gate, session)
        await gate.enter(1)

    asyncio.run(scenario())


@pytest.mark.parametrize(("value", "wait"), [("true", True), ("1", True), ("False", False), ("0", False)])
def test_wait_is_a_boolean(value, wait):
    assert wants_wait({"wait": value}) is wait
    assert wants_wait({}) is False


@pytest.mark.parametrize("value", ["", "yes", "2", "null"])
def test_any_other_wait_is_refused(value):
    with pytest.raises(Refused, match="wait: must be true or false") as refusal:
        wants_wait({"wait": value})
    assert refusal.value.status_code == 400
