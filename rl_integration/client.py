"""HTTP client of the rollout service: complete groups from one or several replicas.

Every group is a request of its own, so that groups spread over replicas by load and a replica that dies costs
only its unfinished groups. Those are sampled again from the beginning elsewhere; since a group arrives in one
piece or not at all, none can appear twice or mix two replicas.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
from pydantic import ValidationError
from pydantic_core import PydanticSerializationError
from s3r_sglang.rl_integration.replicas import (
    HOPELESS,
    NOT_READY,
    PROBE_SECONDS,
    NotReadyError,
    Replica,
    Replicas,
    RolloutError,
    does_not_answer,
    message_of,
)
from s3r_sglang.rl_integration.urls import base_urls

from s3r_sglang.faults import sentence
from s3r_sglang.server.protocol import Group, GroupError, Prompt, RolloutRequest, Sampling, group_seed

T = TypeVar("T")

logger = logging.getLogger(__name__)


class PlacedGroup(Group):
    """A group and where it came from.

    Attributes:
        replica: base URL of the replica that sampled it.
        attempts: 1, or more if replicas were lost while they worked on it.
    """

    replica: str
    attempts: int


@dataclass(frozen=True)
class Rollout:
    """All groups in the order of the prompts, and the errors of the prompts that have none."""

    groups: list[PlacedGroup]
    errors: list[GroupError]

    @property
    def weight_versions(self) -> set[str]:
        """Versions that the groups were sampled under; more than one if weights changed during the rollout."""
        return {group.weight_version for group in self.groups}

    @property
    def faithful(self) -> bool:
        """Whether all groups are samples of the dense policy; not those of servers in mode direct."""
        return all(group.faithful for group in self.groups)


class AsyncRolloutClient:
    """Client for use inside an event loop; an async context manager.

    Args:
        urls: base URL of a server, or of several that serve the same weights.
        api_key: SGLang's --api-key.
        max_outstanding: groups in progress per replica.
        recover_seconds: how long to wait for a replica when none is ready, be it starting, asleep or lost; the
            log says meanwhile what is waited for.
        max_attempts: how often one group is tried when replicas are lost under it.
        silent_seconds: a replica with groups in progress is lost if it answers nothing at all for so long; one
            that is frozen, or whose host is gone, closes no connection.

    Raises:
        ValueError: no address, or one that is no URL.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        api_key: str | None = None,
        max_outstanding: int = 64,
        recover_seconds: float = 120.0,
        max_attempts: int = 5,
        silent_seconds: float = 60.0,
    ) -> None:
        self._replicas = Replicas(urls, api_key, recover_seconds, silent_seconds)
        self._slots = asyncio.Semaphore(max_outstanding * len(self._replicas))
        self._recover_seconds = recover_seconds
        self._max_attempts = max_attempts
        self._warned = False

    async def __aenter__(self) -> "AsyncRolloutClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._replicas.close()

    async def rollout(
        self,
        prompts: Iterable[Prompt | Mapping[str, Any]],
        group_size: int,
        sampling: Sampling | Mapping[str, Any] | None = None,
        seed: int | None = None,
    ) -> Rollout:
        """Sample one group per prompt and return them all, see `stream`."""
        results = [result async for result in self.stream(prompts, group_size, sampling, seed)]
        results.sort(key=lambda result: result.prompt_index)
        return Rollout(
            groups=[result for result in results if isinstance(result, PlacedGroup)],
            errors=[result for result in results if isinstance(result, GroupError)],
        )

    async def stream(
        self,
        prompts: Iterable[Prompt | Mapping[str, Any]],
        group_size: int,
        sampling: Sampling | Mapping[str, Any] | None = None,
        seed: int | None = None,
    ) -> AsyncIterator[PlacedGroup | GroupError]:
        """Sample one group per prompt and yield each as soon as it is complete.

        Args:
            prompts: `Prompt` or its fields; one of prompt, messages and token_ids, with an id.
            group_size: responses per prompt.
            sampling: `Sampling` or its fields.
            seed: makes the responses reproducible, whatever replica samples them.

        Raises:
            ValueError: malformed arguments, in one sentence; nothing has been sent.
            RolloutError: a server refused a request, no replica was ready in time, or what answers at an address
                is no rollout service.
        """
        fields = {"prompts": [_fields(prompt) for prompt in prompts], "group_size": group_size}
        try:
            body = RolloutRequest.model_validate(fields | {"sampling": _fields(sampling or {}), "seed": seed})
        except ValidationError as error:
            raise ValueError(sentence(error, RolloutRequest)) from None
        contents = [_content(body, index) for index in range(len(body.prompts))]
        tasks = [asyncio.create_task(self._group(content, index)) for index, content in enumerate(contents)]
        try:
            for next_done in asyncio.as_completed(tasks):
                yield await next_done
        finally:
            # Closing the connections makes the servers abort what is left.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _group(self, content: str, index: int) -> PlacedGroup | GroupError:
        async with self._slots:
            result, replica, attempts = await self._dispatch(content)
        placed = {**result, "prompt_index": index}
        if result["type"] == "error":
            return GroupError.model_validate(placed)
        group = PlacedGroup.model_validate({**placed, "replica": replica.url, "attempts": attempts})
        if not group.faithful and not self._warned:
            self._warned = True
            logger.warning("%s runs in mode direct: its responses are not the dense policy's", replica.url)
        return group

    async def _dispatch(self, content: str) -> tuple[dict[str, Any], Replica, int]:
        attempt = 1
        turned_away: float | None = None
        while True:
            replica = await self._replicas.least_loaded()
            replica.outstanding += 1
            try:
                return await self._post(replica, content), replica, attempt
            except NotReadyError as error:
                replica.up, replica.state = False, str(error)
                turned_away = turned_away or time.monotonic()
                if time.monotonic() - turned_away > self._recover_seconds:
                    raise RolloutError(f"{replica.url} {error}") from None
            except httpx.TransportError as error:
                replica.up, replica.state = False, does_not_answer(error)
                attempt, turned_away = attempt + 1, None
                if attempt > self._max_attempts:
                    raise RolloutError(
                        f"{self._max_attempts} replicas were lost under one group, the last with: {error!r}"
                    ) from error
            finally:
                replica.outstanding -= 1

    async def _post(self, replica: Replica, content: str) -> dict[str, Any]:
        """One group of `replica`; waits as long as it asks to when its queue is full, for nothing is sampled."""
        while True:
            response = await self._replicas.post(replica, content)
            if response.status_code != httpx.codes.TOO_MANY_REQUESTS:
                break
            await asyncio.sleep(float(response.headers.get("Retry-After", PROBE_SECONDS)))
        if response.status_code in NOT_READY:
            raise NotReadyError(f"answers {response.status_code}: {message_of(response)}")
        if response.status_code != httpx.codes.OK:
            advice = HOPELESS.get(response.status_code) or message_of(response)
            raise RolloutError(f"{replica.url} answered {response.status_code}: {advice}")
        return response.json()["groups"][0]

    async def stats(self) -> list[dict[str, Any]]:
        """`/s3r/stats` of every replica, in the order of the URLs."""
        responses = await asyncio.gather(
            *(self._replicas.http.get(f"{r.url}/s3r/stats") for r in self._replicas)
        )
        return [response.raise_for_status().json() for response in responses]


class RolloutClient:
    """The same for code without an event loop; takes the arguments of `AsyncRolloutClient`.

    Each call runs a loop and connections of its own, so an instance may be shared between threads.
    """

    def __init__(self, urls: str | Sequence[str], **options: Any) -> None:
        self._arguments = (base_urls(urls), options)

    def rollout(
        self,
        prompts: Iterable[Prompt | Mapping[str, Any]],
        group_size: int,
        sampling: Sampling | Mapping[str, Any] | None = None,
        seed: int | None = None,
    ) -> Rollout:
        """See `AsyncRolloutClient.rollout`."""

        async def run() -> Rollout:
            async with self._client() as client:
                return await client.rollout(prompts, group_size, sampling, seed)

        return _run(run)

    def stats(self) -> list[dict[str, Any]]:
        """See `AsyncRolloutClient.stats`."""

        async def run() -> list[dict[str, Any]]:
            async with self._client() as client:
                return await client.stats()

        return _run(run)

    def _client(self) -> AsyncRolloutClient:
        urls, options = self._arguments
        return AsyncRolloutClient(urls, **options)


def _run(call: Callable[[], Coroutine[Any, Any, T]]) -> T:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(call())
    raise RuntimeError(
        "RolloutClient cannot wait inside a running event loop, and a notebook has one: "
        "use AsyncRolloutClient and await."
    )


def _content(body: RolloutRequest, index: int) -> str:
    """The request for the group of one prompt of `body`; raises ValueError for metadata that JSON cannot hold."""
    prompt = body.prompts[index]
    if prompt.seed is None and body.seed is not None:
        prompt = prompt.model_copy(update={"seed": group_seed(body.seed, index)})
    try:
        single = body.model_copy(update={"prompts": [prompt], "seed": None})
        return single.model_dump_json(exclude_none=True)
    except PydanticSerializationError as error:
        raise ValueError(f"prompts.{index}.metadata: JSON cannot hold it ({error}).") from None


def _fields(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else value.model_dump(exclude_none=True)
