"""The Ray actor that stands in for OpenRLHF's vLLM actor: owns one S3R server and samples groups from it."""

import asyncio
import contextlib
import time
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import httpx
from s3r_sglang.rl_integration.client import AsyncRolloutClient, PlacedGroup, RolloutError
from s3r_sglang.rl_integration.openrlhf.metrics import Totals
from s3r_sglang.rl_integration.openrlhf.sampling import RequestOutput, output_of, sampling_of
from s3r_sglang.rl_integration.openrlhf.server import ServerError, ServerProcess

from s3r_sglang.server.protocol import Response, Sampling

# Key of the weights' version in OpenRLHF's `info` of a sample.
VERSION_KEY = "s3r/weight_version"
OBSERVE_SECONDS = 1.0


class GroupFailedError(RuntimeError):
    """A group cannot be completed; the message says why. The run must stop, for groups are positional."""


@dataclass(frozen=True)
class EngineState:
    """What the trainer must know of a server to send it weights.

    Attributes:
        life: number of the server's present life; a new life has the weights of the model's folder.
        version: of its weights as the trainer counts, or None if they never came from the trainer.
    """

    url: str
    api_key: str
    life: int
    version: int | None


class Group:
    """The samples of one prompt: the equal calls of a single-turn executor become one request for a group.

    All get the same future, whoever comes first starts it, and each takes the response of its own place.
    """

    def __init__(self, engine: "RolloutEngine", size: int) -> None:
        self._engine = engine
        self._size = size
        self._key: tuple[tuple[int, ...], Sampling] | None = None
        self._future: asyncio.Task[PlacedGroup] | None = None

    async def response(self, place: int, token_ids: list[int], sampling: Sampling) -> tuple[Response, int]:
        """The response of `place` and the version of its weights."""
        key = (tuple(token_ids), sampling)
        if self._future is None:
            self._key = key
            self._future = asyncio.create_task(self._engine.sample(token_ids, self._size, sampling))
        elif self._key != key:
            raise GroupFailedError(
                "the samples of one prompt were asked for with different prompts or parameters"
            )
        group = await self._future
        return group.responses[place], int(group.weight_version)


class Sample:
    """What an executor sees as `llm_engine` while it makes one sample; counts what the sample is made of."""

    def __init__(self, engine: "RolloutEngine", group: Group | None, place: int) -> None:
        self._engine = engine
        self._group = group
        self._place = place
        self.versions: set[int] = set()
        self.rounds = 0
        self.tokens = 0

    async def generate(
        self, prompt_token_ids: list[int], sampling_params: Any, multi_modal_data: Any = None
    ) -> RequestOutput:
        """OpenRLHF's interface: one response to `prompt_token_ids` in vLLM's form."""
        if multi_modal_data:
            raise GroupFailedError("S3R rollouts have no image or audio input")
        sampling = sampling_of(sampling_params)
        # A turn of an agent is a group of its own, because its prompt is.
        group, place = (self._group, self._place) if self._group else (Group(self._engine, 1), 0)
        response, version = await group.response(place, prompt_token_ids, sampling)
        self.versions.add(version)
        self.rounds += response.rounds
        self.tokens += len(response.token_ids)
        return output_of(response, sampling_params.logprobs is not None)


class RolloutEngine:
    """Owns a server; an asyncio Ray actor, so that its event loop's thread outlives the server.

    Args:
        server: how to start it; started by the first call of `ready`.
        executor: OpenRLHF's, which turns prompts into token ids and responses into rewards.
        single_turn: whether it asks once per sample, and the same for all samples of a prompt.
        rewards: whether it computes rewards.
        restarts: how often the server may be started again.
    """

    def __init__(
        self, server: ServerProcess, executor: Any, *, single_turn: bool, rewards: bool, restarts: int
    ) -> None:
        self._server = server
        self._executor = executor
        self._single_turn = single_turn
        self._rewards = rewards
        self._restarts = restarts
        self._client: AsyncRolloutClient | None = None
        self._version: int | None = None
        self._trainers: list[Any] = []
        # Two locks, because a revival asks the trainer for weights, and the trainer asks whether we are ready.
        self._starting = asyncio.Lock()
        self._revival = asyncio.Lock()
        self._fault: ServerError | None = None
        self._totals = Totals()
        self._in_flight = 0
        self._busy_since = 0.0
        self._watch: asyncio.Task[None] | None = None
        self._unfinished = 0

    # ---- sampling

    async def generate_responses(
        self,
        prompt: str,
        label: str,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        num_samples: int = 1,
        images: Any = None,
    ) -> list[dict[str, Any]]:
        """OpenRLHF's interface: exactly `num_samples` samples of `prompt`, all under one version of the weights.

        Raises:
            GroupFailedError: one of them cannot be had.
        """
        if images:
            raise GroupFailedError("S3R rollouts have no image or audio input")
        group = Group(self, num_samples) if self._single_turn else None
        samples = [Sample(self, group, place) for place in range(num_samples)]
        self._unfinished += num_samples
        try:
            results = await asyncio.gather(
                *(
                    self._executor.execute(
                        prompt=prompt,
                        label=label,
                        # An agent writes its remaining budget into them.
                        sampling_params=deepcopy(sampling_params),
                        max_length=max_length,
                        hf_tokenizer=hf_tokenizer,
                        llm_engine=sample,
                        images=None,
                    )
                    for sample in samples
                )
            )
        finally:
            self._unfinished -= num_samples
        return self._checked(prompt, results, samples)

    def _checked(
        self, prompt: str, results: list[dict[str, Any]], samples: list[Sample]
    ) -> list[dict[str, Any]]:
        versions = set().union(*(sample.versions for sample in samples))
        if len(versions) > 1:
            raise GroupFailedError(
                f"the group of {prompt[:80]!r} was sampled from the weights of steps {sorted(versions)}"
            )
        for result in results:
            # OpenRLHF logs a reward function that raised and goes on without a reward.
            if self._rewards and result["reward"] is None:
                raise GroupFailedError(f"no reward for a response to {prompt[:80]!r}; the log above says why")
            logs = dict(result.get("extra_logs") or {})
            logs[VERSION_KEY] = float(next(iter(versions), -1))
            result["extra_logs"] = logs
        return results

    async def sample(self, token_ids: list[int], size: int, sampling: Sampling) -> PlacedGroup:
        """One complete group; sampled again from its beginning if the server dies under it.

        Raises:
            GroupFailedError: the server refused it, or could not be revived.
        """
        prompt = {"id": "prompt", "token_ids": token_ids}
        while True:
            if self._client is None or self._version is None or not self._server.alive:
                await self._revive(self._server.lives)
                continue
            life, version = self._server.lives, self._version
            try:
                with self._flight():
                    rollout = await self._client.rollout([prompt], size, sampling)
            except RolloutError as error:
                if not await self._server.died(life):
                    raise GroupFailedError(str(error)) from error
                await self._revive(life)
                continue
            return self._complete(rollout, size, version)

    def _complete(self, rollout: Any, size: int, version: int | None) -> PlacedGroup:
        if rollout.errors:
            raise GroupFailedError(f"the server could not complete a group: {rollout.errors[0].message}")
        (group,) = rollout.groups
        if len(group.responses) != size:
            raise GroupFailedError(f"the server returned {len(group.responses)} responses instead of {size}")
        if group.weight_version != str(version):
            raise GroupFailedError(
                f"a group was sampled from weights {group.weight_version!r}, and the trainer is at step "
                f"{version}: somebody else sends weights to this server"
            )
        self._totals.add(group)
        return group

    @contextlib.contextmanager
    def _flight(self):
        if self._in_flight == 0:
            self._busy_since = time.monotonic()
            self._watch = asyncio.create_task(self._observe())
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1
            if self._in_flight == 0:
                self._totals.busy += time.monotonic() - self._busy_since
                self._watch.cancel()

    async def _observe(self) -> None:
        """Sample the state of the KV pool while groups are in flight."""
        while self._client is not None:
            # The server may just have died, which the groups in flight will notice.
            with contextlib.suppress(httpx.HTTPError):
                for stats in await self._client.stats():
                    self._totals.observe(stats)
            await asyncio.sleep(OBSERVE_SECONDS)

    def get_num_unfinished_requests(self) -> int:
        """OpenRLHF's interface: samples in progress, by which it balances engines."""
        return self._unfinished

    # ---- the server's life

    async def ready(self) -> EngineState:
        """Start the server unless it runs.

        Raises:
            ServerError: it does not start, or was restarted too often.
        """
        async with self._starting:
            if self._fault is not None:
                raise self._fault
            if not self._server.alive:
                try:
                    await self._start()
                except ServerError as error:
                    # Whoever asks next gets the same answer instead of another start.
                    self._fault = error
                    raise
        return EngineState(self._server.url, self._server.api_key, self._server.lives, self._version)

    async def _start(self) -> None:
        if self._server.lives > self._restarts:
            raise ServerError(
                f"the rollout server died again after {self._restarts} restarts (--s3r.restarts).\n"
                f"{self._server.tail()}"
            )
        if self._server.lives:
            self._totals.restarts += 1
            print(f"S3R: the rollout server {self._server.url} died and is started again", flush=True)
        self._version = None
        await self._server.start()
        # Lost connections must come up here, where the weights of the new life are seen to, not in the client.
        # The client of the last life is dropped as it is: groups may still be waiting for it to fail.
        self._client = AsyncRolloutClient(
            self._server.url, api_key=self._server.api_key, max_outstanding=1 << 16, max_attempts=1
        )

    async def _revive(self, life: int) -> None:
        """Start the server again unless somebody has since `life`, and have the trainer send its weights."""
        async with self._revival:
            if self._server.lives == life:
                await self.ready()
            if self._version is not None:
                return
            if not self._trainers:
                raise GroupFailedError("the rollout server has no weights of the trainer")
            await asyncio.gather(*(trainer.broadcast_to_vllm.remote() for trainer in self._trainers))
            if self._version is None:
                raise GroupFailedError(
                    "the trainer did not send its weights to a rollout server that was restarted"
                )

    async def set_trainers(self, trainers: list[Any]) -> None:
        """Handles of the policy actors of all ranks, to ask for the weights after a restart."""
        self._trainers = list(trainers)

    async def set_version(self, version: int) -> None:
        """The trainer has sent the weights of `version`."""
        self._version = version

    async def take_totals(self) -> Totals:
        """What was sampled since the last call."""
        totals, self._totals = self._totals, Totals()
        return totals

    # ---- sleep

    async def sleep(self, level: int = 1) -> None:
        """OpenRLHF's interface: give the GPU's memory to the trainer; weights are kept in host memory."""
        await self._post("/release_memory_occupation?wait=true", {})

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """OpenRLHF's interface: take memory back, all of it or what `tags` name."""
        await self._post("/resume_memory_occupation", {"tags": tags} if tags else {})

    async def reset_prefix_cache(self) -> None:
        """OpenRLHF's interface; every weight update drops the prefix cache."""

    async def _post(self, path: str, body: dict[str, Any]) -> None:
        await self.ready()
        headers = {"Authorization": f"Bearer {self._server.api_key}"}
        async with httpx.AsyncClient(headers=headers, timeout=600.0) as client:
            response = await client.post(f"{self._server.url}{path}", json=body)
        if response.status_code != httpx.codes.OK:
            raise ServerError(f"{path} answered {response.status_code}: {response.text[:500]}")
