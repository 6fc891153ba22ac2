"""The replicas behind a client: which of them takes the next group, and which is lost, asleep or none at all."""

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import httpx
from s3r_sglang.rl_integration.urls import LIMITS, base_urls

# A replica that was lost is asked again this often, and a 503 of a sleeping one is not hammered either.
PROBE_SECONDS = 1.0
# While no replica is ready, the log says so this often.
WAITING_SECONDS = 10.0
# A replica with groups in progress is asked this often whether it is still there.
WATCH_SECONDS = 10.0
# Answers that no waiting will change, and what to do about them.
HOPELESS = {
    401: "give the server's --api-key as api_key",
    403: "give the server's --api-key as api_key",
    404: "it serves no rollouts; start it with --speculative-algorithm self-sparse",
}
# Answers of a replica that is asleep, or of a proxy before one that is starting: nothing was sampled.
NOT_READY = (502, 503, 504)

logger = logging.getLogger(__name__)


class RolloutError(RuntimeError):
    """A rollout could not be completed; the message says at which replica and why."""


class NotReadyError(Exception):
    """A replica cannot take a group now."""


@dataclass
class Replica:
    """`state` is what the last probe found, for people; `watch` asks for a sign of life, for all its groups."""

    url: str
    outstanding: int = 0
    up: bool = True
    probed: float = field(default=0.0)
    state: str = ""
    watch: asyncio.Task[httpx.TransportError | None] | None = None


class Replicas:
    """Where groups go: to the replica with the fewest outstanding ones, of those that are up.

    Args:
        urls, api_key, recover_seconds, silent_seconds: as of `AsyncRolloutClient`.

    Attributes:
        http: the connections.
    """

    def __init__(
        self, urls: str | Sequence[str], api_key: str | None, recover_seconds: float, silent_seconds: float
    ) -> None:
        self._replicas = [Replica(url) for url in base_urls(urls)]
        self._recover_seconds = recover_seconds
        self._silent_seconds = silent_seconds
        self._said = -WAITING_SECONDS
        # Sampling takes as long as it takes; only connecting is bounded.
        self.http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(None, connect=10.0),
            limits=LIMITS,
        )

    def __len__(self) -> int:
        return len(self._replicas)

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas)

    async def close(self) -> None:
        """Close the connections."""
        for replica in self._replicas:
            if replica.watch is not None:
                replica.watch.cancel()
        await self.http.aclose()

    async def least_loaded(self) -> Replica:
        """Waits for one if none is up; raises RolloutError if that takes too long, or has no prospect."""
        started = time.monotonic()
        while True:
            await asyncio.gather(*(self._probe(replica) for replica in self._replicas if not replica.up))
            alive = [replica for replica in self._replicas if replica.up]
            if alive:
                return min(alive, key=lambda replica: replica.outstanding)
            waited = time.monotonic() - started
            if waited > self._recover_seconds:
                raise RolloutError(
                    f"no replica was ready for {self._recover_seconds:g} seconds ({self._states()})"
                )
            self._say_what_is_waited_for(self._recover_seconds - waited)
            await asyncio.sleep(PROBE_SECONDS)

    def _say_what_is_waited_for(self, left: float) -> None:
        """Once for all groups that wait, and not again for `WAITING_SECONDS`."""
        if time.monotonic() - self._said > WAITING_SECONDS:
            self._said = time.monotonic()
            logger.warning("no replica is ready, waiting %.0f s more: %s", left, self._states())

    def _states(self) -> str:
        return "; ".join(f"{replica.url} {replica.state}" for replica in self._replicas)

    async def _probe(self, replica: Replica) -> None:
        """Take a lost replica back once it is ready; raise RolloutError if it never will be."""
        if time.monotonic() - replica.probed < PROBE_SECONDS:
            return
        replica.probed = time.monotonic()
        try:
            timeout = min(5.0, self._silent_seconds)
            response = await self.http.get(f"{replica.url}/s3r/ready", timeout=timeout)
        except httpx.TransportError as error:
            replica.state = does_not_answer(error)
            return
        replica.up = response.status_code == httpx.codes.OK
        replica.state = f"answers {response.status_code}: {message_of(response)}"
        if advice := HOPELESS.get(response.status_code):
            raise RolloutError(f"{replica.url} answered {response.status_code}: {advice}")

    async def post(self, replica: Replica, content: str) -> httpx.Response:
        """The answer to a request for a group; raises httpx.TransportError if the replica is lost meanwhile."""
        headers = {"Content-Type": "application/json"}
        post = asyncio.create_task(
            self.http.post(f"{replica.url}/s3r/rollout", content=content, headers=headers)
        )
        try:
            while not (await asyncio.wait({post}, timeout=min(WATCH_SECONDS, self._silent_seconds)))[0]:
                # Held here: another group may start the next watch before this one is woken by its end.
                watch = self._watch(replica)
                await asyncio.wait({post, watch}, return_when=asyncio.FIRST_COMPLETED)
                if not post.done() and (silence := watch.result()) is not None:
                    raise silence
            return post.result()
        finally:
            post.cancel()

    def _watch(self, replica: Replica) -> asyncio.Task[httpx.TransportError | None]:
        if replica.watch is None or replica.watch.done():
            replica.watch = asyncio.create_task(self._sign_of_life(replica))
        return replica.watch

    async def _sign_of_life(self, replica: Replica) -> httpx.TransportError | None:
        """None if there is one, which any answer is, whatever it says."""
        try:
            response = await self.http.get(f"{replica.url}/s3r/ready", timeout=self._silent_seconds)
        except httpx.TransportError as error:
            return error
        if response.status_code != httpx.codes.OK:
            # An update that its trainer never commits would hold the groups back for ever.
            logger.warning("%s has groups to sample, but: %s", replica.url, message_of(response))
        return None


def does_not_answer(error: httpx.TransportError) -> str:
    """What a lost replica does, for people."""
    return f"does not answer ({str(error) or type(error).__name__})"


def message_of(response: httpx.Response) -> str:
    """The sentence of a refusal, or the text of an answer in another form."""
    try:
        body = response.json()
        return body.get("error", body).get("message", response.text)
    except (ValueError, AttributeError):
        return response.text[:500]
