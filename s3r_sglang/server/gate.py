"""When groups may be sampled and when weights may change: the snapshot rule of one replica."""

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncIterator, Callable, Mapping

from fastapi import HTTPException

# Beyond it, waiting costs more memory than the engine can use: 4,096 groups of 16 keep 256 running requests
# busy for 256 batches.
MAX_GROUPS = int(os.environ.get("S3R_MAX_GROUPS", 4096))


MIXED = (
    "A weight update has failed half-way, so the weights are neither the old nor the new ones: send all of them "
    "again, by /update_weights_from_disk or between /s3r/weights/begin and commit."
)


class Refused(HTTPException):
    """An operation that the gate does not allow now; `detail` is one sentence for the caller."""

    def __str__(self) -> str:
        # Without the status in front, which SGLang's endpoints for memory would pass on.
        return self.detail


def asleep(tags: set[str]) -> Refused:
    names = " and ".join(sorted(tags))
    return Refused(503, f"The engine is asleep ({names} released): call /resume_memory_occupation first.")


def wants_wait(query: Mapping[str, str]) -> bool:
    """The parameter `wait` of a request that changes weights or memory; raises Refused (400) for nonsense."""
    value = query.get("wait", "false").lower()
    if value not in ("true", "1", "false", "0"):
        raise Refused(400, f"wait: must be true or false, not {value[:20]!r}.")
    return value in ("true", "1")


class Gate:
    """Counts the groups in flight, and lets weights change only while there are none.

    All methods run on the event loop of the HTTP server.

    Args:
        max_groups: groups that may be in progress at a time.
        is_paused: whether /pause_generation has paused the engine; `notify` has to be called after its end.

    Attributes:
        in_flight: groups that are being sampled.
        held: groups that wait for a weight update, or a pause, to end.
        sleeping: names of the memory regions that are released.
        weight_updates: weight updates taken since the start.
        mixed: whether an update has failed on the way, so that the weights are neither the old nor the new ones.
        session: key of the open update session, within which the weights may be partly updated, or None.
        changing: held by whoever changes weights or memory; one after the other, in the order of arrival.
    """

    def __init__(self, max_groups: int = MAX_GROUPS, is_paused: Callable[[], bool] = lambda: False) -> None:
        self.max_groups = max_groups
        self.is_paused = is_paused
        self.in_flight = 0
        self.held = 0
        self.sleeping: set[str] = set()
        self.weight_updates = 0
        self.mixed = False
        self.session: str | None = None
        self._updates_of_session: int | None = 0  # None after a failure
        self.changing = asyncio.Lock()
        self._exclusive = 0
        self._changed = asyncio.Condition()

    @property
    def closed(self) -> bool:
        """Whether groups have to wait because weights are changing."""
        return self._exclusive > 0 or self.session is not None

    def refuse_if_asleep(self) -> None:
        """Raise Refused (503) if the engine is asleep."""
        if self.sleeping:
            raise asleep(self.sleeping)

    def refuse_if_mixed(self) -> None:
        """Raise Refused (503) if the weights are a mixture that no update in progress is going to mend."""
        if self.mixed and self.session is None:
            raise Refused(503, MIXED)

    def refuse_generation(self) -> None:
        """Raise Refused (503) if nothing may be sampled now: asleep, or the weights may be partly updated."""
        self.refuse_if_asleep()
        self.refuse_if_mixed()
        if self.session is not None:
            raise Refused(503, "The weights are being updated: retry later.")

    async def enter(self, groups: int) -> None:
        """Admit `groups` groups at once, so that they share one snapshot; waits for an update or a pause to end.

        Raises:
            Refused: 503 if the engine is asleep or an update has failed, 429 if too many groups are in
                flight or held.
        """
        self.refuse_if_asleep()
        if not self.closed:
            self.refuse_if_mixed()
        if self.in_flight + self.held + groups > self.max_groups:
            raise Refused(
                429, f"{self.in_flight + self.held} of {self.max_groups} groups are in progress: retry later."
            )
        self.held += groups
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: not self.closed and not self.is_paused())
                self.refuse_if_asleep()
                self.refuse_if_mixed()
                self.in_flight += groups
        finally:
            self.held -= groups

    async def leave(self) -> None:
        """One group has finished in the engine."""
        async with self._changed:
            self.in_flight -= 1
            self._changed.notify_all()

    async def notify(self) -> None:
        """Let in what was held, if nothing holds it any more."""
        async with self._changed:
            self._changed.notify_all()

    async def drained(self, seconds: float) -> None:
        """Wait until no group is in flight, but no longer than `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(lambda: self.in_flight == 0)

    @contextlib.asynccontextmanager
    async def exclusive(self, wait: bool) -> AsyncIterator[None]:
        """Hold new groups back and run with none in flight, and with no other change under way.

        Args:
            wait: wait for the groups in flight instead of refusing.

        Raises:
            Refused: 409 with the number of groups in flight; on a paused engine, where they do not end, always.
        """
        if self.in_flight and (not wait or self.is_paused()):
            raise self.busy()
        self._exclusive += 1
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: self.in_flight == 0)
            async with self.changing:
                yield
        finally:
            # No await before the count is down: this also runs when the caller is cancelled.
            self._exclusive -= 1
            async with self._changed:
                self._changed.notify_all()

    def busy(self) -> Refused:
        """The refusal of a change while groups are in flight."""
        advice = (
            "the engine is paused, so call /continue_generation, or /pause_generation with mode abort."
            if self.is_paused()
            else "retry later, or add ?wait=true."
        )
        return Refused(
            409,
            f"{self.in_flight} groups are in flight and must end under the weights they began with: {advice}",
        )

    async def open_session(self, wait: bool) -> str:
        """Close the gate for an update in several requests, and return the session's key.

        It stays closed until the session is committed, because weights that are partly updated are no
        policy. A new session takes over from one that its trainer has left open.
        """
        async with self.exclusive(wait):
            self.session = secrets.token_hex(8)
            self._updates_of_session = 0
            return self.session

    def updated(self, success: bool, mixed: bool) -> None:
        """An update has ended, within the open session if there is one, and may have left a mixture behind."""
        self.mixed = mixed
        if not success:
            self._updates_of_session = None
        elif self._updates_of_session is not None:
            self._updates_of_session += 1

    def check_session(self, key: str) -> None:
        """Raise Refused (409) if `key` is not that of the open session."""
        if key != self.session:
            raise Refused(409, "This update session is not open: another one took over, or it has ended.")

    @contextlib.asynccontextmanager
    async def closing(self, key: str) -> AsyncIterator[None]:
        """Run, then end the session and let groups in; no other trainer can take over meanwhile.

        Raises:
            Refused: 409 if `key` is not that of the open session, or an update has failed and not been repeated.
        """
        async with self.changing:
            self.check_session(key)
            if self._updates_of_session is None or (self.mixed and not self._updates_of_session):
                raise Refused(409, "An update has failed: begin a new session and send all weights again.")
            yield
            async with self._changed:
                self.mixed = False
                self.session = None
                self._changed.notify_all()


def gate_of(tokenizer_manager: object) -> Gate:
    """The gate of the replica that `tokenizer_manager` (SGLang's TokenizerManager) talks to."""
    gate = vars(tokenizer_manager).get("s3r_gate")
    if gate is None:
        gate = Gate(is_paused=lambda: tokenizer_manager.is_pause)  # type: ignore[attr-defined]
        tokenizer_manager.s3r_gate = gate  # type: ignore[attr-defined]
    return gate
