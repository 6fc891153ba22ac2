"""Send a trainer's weights to rollout servers: one call, all parameters, checked, and labelled.

A model takes more than one request. The whole update runs inside a session of the server (`/s3r/weights/…`),
which holds new groups back until the last bucket is in and the version is set, so that nothing is ever sampled
from weights that are partly old. An update that fails leaves the session open for the same reason: send again.
Of two senders at once, the one that began later wins, and the other is told so.
"""

import base64
import contextlib
import io
import itertools
import json
import pickle
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any

import httpx
import torch
import torch.multiprocessing  # teaches ForkingPickler to send tensors
from s3r_sglang.rl_integration.process_group import init_process_group, share_memory_like_servers
from s3r_sglang.rl_integration.urls import LIMITS, base_urls

from s3r_sglang.server.protocol import SESSION_HEADER

NamedTensors = Iterable[tuple[str, torch.Tensor]]
NamedBuckets = Iterator[list[tuple[str, torch.Tensor]]]


class WeightSyncError(RuntimeError):
    """A server did not take the weights; the message says which one and why."""


class WeightSender:
    """Sends weights to one or several replicas.

    Args:
        urls: base URLs of the servers.
        api_key: SGLang's --admin-api-key, or its --api-key if there is none.
        bucket_bytes: parameters are sent in buckets of about this size.
        timeout: seconds for one request; waiting for groups in flight counts.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        api_key: str | None = None,
        bucket_bytes: int = 512 << 20,
        timeout: float = 600.0,
    ) -> None:
        self.urls = base_urls(urls)
        self.bucket_bytes = bucket_bytes
        self._http = httpx.Client(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {}, timeout=timeout, limits=LIMITS
        )

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def send_path(self, path: str, version: str, *, wait: bool = True) -> None:
        """Let the servers load a Hugging Face folder that they can read at `path`.

        Args:
            version: label of the new weights, returned with every group.
            wait: wait for groups in flight; otherwise they make this raise.

        Raises:
            WeightSyncError: a server refused or failed.
        """
        sessions = self._begin(wait)
        self._post_all("/update_weights_from_disk", {"model_path": str(path)}, sessions)
        self._commit(sessions, version)

    def send(self, parameters: NamedTensors, version: str, *, wait: bool = True) -> None:
        """Send tensors, under the names that the model's Hugging Face checkpoint has.

        Tensors on a GPU travel as CUDA IPC handles, so trainer and server must share the machine. Tensors on
        the CPU travel as bytes.

        Args:
            parameters: `model.named_parameters()` or the like; a generator is consumed bucket by bucket.
            version, wait: as in `send_path`.

        Raises:
            ValueError: no parameters; nothing has been sent.
            WeightSyncError: a server refused or failed, or does not have a parameter of this name or shape.
        """
        parts = self._buckets(parameters)
        sessions = self._begin(wait)
        tp_sizes = self._tp_sizes()
        for bucket in parts:
            payload = serialize(bucket)
            for url, tp_size, session in zip(self.urls, tp_sizes, sessions, strict=True):
                body = {"serialized_named_tensors": [payload] * tp_size, "flush_cache": False}
                self._post(url, "/update_weights_from_tensor", body, session)
        self._commit(sessions, version)

    def _buckets(self, parameters: NamedTensors) -> NamedBuckets:
        """At least one bucket: without any, a commit would give the old weights a new label."""
        parts = buckets(parameters, self.bucket_bytes)
        first = next(parts, None)
        if first is None:
            raise ValueError("there are no parameters to send (a generator can be used only once)")
        return itertools.chain([first], parts)

    def _tp_sizes(self) -> list[int]:
        # Not from /server_info, which takes another key where the server has two.
        return [self._get(url, "/s3r/weights")["tp_size"] for url in self.urls]

    def _begin(self, wait: bool) -> list[str]:
        query = "?wait=true" if wait else ""
        return [reply["session"] for reply in self._post_all(f"/s3r/weights/begin{query}", {})]

    def _commit(self, sessions: list[str], version: str) -> None:
        for url, session in zip(self.urls, sessions, strict=True):
            self._post(url, "/s3r/weights/commit", {"session": session, "weight_version": version})

    def _post_all(
        self, path: str, body: dict[str, Any], sessions: Sequence[str | None] | None = None
    ) -> list[dict[str, Any]]:
        """POST to all servers at once; raises the first failure after all have answered."""
        with ThreadPoolExecutor(len(self.urls)) as pool:
            futures = self._submit(pool, path, [body] * len(self.urls), sessions)
        return [future.result() for future in futures]

    def _submit(
        self,
        pool: ThreadPoolExecutor,
        path: str,
        bodies: list[dict[str, Any]],
        sessions: Sequence[str | None] | None = None,
    ) -> list[Future[dict[str, Any]]]:
        arguments = zip(self.urls, bodies, sessions or [None] * len(self.urls), strict=True)
        return [pool.submit(self._post, url, path, body, session) for url, body, session in arguments]

    def _post(self, url: str, path: str, body: dict[str, Any], session: str | None = None) -> dict[str, Any]:
        content = json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Content-Length": str(len(content))}
        if session:
            headers[SESSION_HEADER] = session
        return self._checked(
            url, path, lambda: self._http.post(f"{url}{path}", content=_pieces(content), headers=headers)
        )

    def _get(self, url: str, path: str) -> dict[str, Any]:
        return self._checked(url, path, lambda: self._http.get(f"{url}{path}"))

    def _checked(self, url: str, path: str, call: Any) -> dict[str, Any]:
        try:
            response = call()
        except httpx.TransportError as error:
            raise WeightSyncError(f"{url}{path}: {error!r}") from error
        reply = (
            response.json() if response.headers.get("content-type", "").startswith("application/json") else {}
        )
        if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise WeightSyncError(
                f"{url}{path} answered {response.status_code}: give the server's --admin-api-key, or its "
                "--api-key if it has no other, as api_key"
            )
        if response.status_code != httpx.codes.OK or reply.get("success") is False:
            raise WeightSyncError(f"{url}{path} answered {response.status_code}: {response.text[:500]}")
        return reply


class DistributedSender(WeightSender):
    """Broadcasts weights over a process group (NCCL, or gloo between CPUs) that the servers join.

    The trainer's process is rank 0. Use `close` at the end, which also dissolves the group.

    Args:
        urls, options: as for `WeightSender`.
        address, port: where rank 0 listens for the rendezvous; reachable from the servers, and free.
        backend: "nccl" or "gloo". With NCCL, a trainer that has NCCL groups of its own must have been started with
            NCCL_CUMEM_ENABLE=0, as SGLang starts its servers; elsewhere the sender sets it.

    Raises:
        RuntimeError: NCCL runs in this process with another setting, and would hang.
        WeightSyncError: a server refused to join.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        address: str,
        port: int,
        backend: str = "nccl",
        group_name: str = "s3r_weights",
        **options: Any,
    ) -> None:
        if backend == "nccl":
            share_memory_like_servers()
        super().__init__(urls, **options)
        self._group_name = group_name
        tp_sizes = self._tp_sizes()
        common = {
            "master_address": address,
            "master_port": port,
            "world_size": 1 + sum(tp_sizes),
            "group_name": group_name,
            "backend": backend,
        }
        bodies = [{**common, "rank_offset": 1 + sum(tp_sizes[:i])} for i in range(len(tp_sizes))]
        with _pool(len(self.urls) + 1) as pool:
            joins = self._submit(pool, "/init_weights_update_group", bodies)
            # In a thread too, because it waits for all members, and a server that refuses never comes.
            group = pool.submit(
                init_process_group, backend, address, port, common["world_size"], rank=0, name=group_name
            )
            _first_failure([*joins, group])
            self._group = group.result()

    def send(self, parameters: NamedTensors, version: str, *, wait: bool = True) -> None:
        """Broadcast tensors; arguments and errors as in `WeightSender.send`."""
        parts = self._buckets(parameters)
        sessions = self._begin(wait)
        for bucket in parts:
            body = {
                "names": [name for name, _ in bucket],
                "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
                "shapes": [list(tensor.shape) for _, tensor in bucket],
                "group_name": self._group_name,
                "flush_cache": False,
            }
            tensors = [tensor.contiguous() for _, tensor in bucket]
            with _pool(len(self.urls)) as pool:
                replies = self._submit(
                    pool, "/update_weights_from_distributed", [body] * len(self.urls), sessions
                )
                # Waited for only after all servers have said that they took part.
                transfers = [
                    torch.distributed.broadcast(tensor, src=0, group=self._group, async_op=True)
                    for tensor in tensors
                ]
                _first_failure(replies)
                for transfer in transfers:
                    transfer.wait()
        self._commit(sessions, version)

    def close(self) -> None:
        """Dissolve the process group and close the connections."""
        bodies = [{"group_name": self._group_name}] * len(self.urls)
        with _pool(len(self.urls) + 1) as pool:
            replies = self._submit(pool, "/destroy_weights_update_group", bodies)
            # At the same time, as in joining: a member of an NCCL group that leaves waits for the others.
            left = pool.submit(torch.distributed.destroy_process_group, self._group)
            _first_failure([*replies, left])
        super().close()


@contextlib.contextmanager
def _pool(size: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that are not waited for at the end: after a failure, the others may wait for it for minutes."""
    pool = ThreadPoolExecutor(size)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False)


def _first_failure(futures: Sequence[Future[Any]]) -> None:
    """Wait until all have succeeded; raise as soon as one has not."""
    done, _ = wait(futures, return_when=FIRST_EXCEPTION)
    for future in done:
        future.result()


def buckets(parameters: NamedTensors, size: int) -> NamedBuckets:
    """Split (name, tensor) pairs into lists of at most `size` bytes, or of one tensor that is larger."""
    bucket: list[tuple[str, torch.Tensor]] = []
    filled = 0
    for name, tensor in parameters:
        tensor = tensor.detach()
        if bucket and filled + tensor.nbytes > size:
            yield bucket
            bucket, filled = [], 0
        bucket.append((name, tensor))
        filled += tensor.nbytes
    if bucket:
        yield bucket


def _pieces(content: bytes, size: int = 1 << 20) -> Iterator[bytes]:
    """A body in parts of `size` bytes.

    httpcore copies what is left of a part after every write to the socket, so the time of one large part grows
    with its square: 400 MB took 3.4 s to a reader that did nothing else, and 0.5 s in parts.
    """
    view = memoryview(content)
    for start in range(0, len(view), size):
        yield bytes(view[start : start + size])


def serialize(bucket: list[tuple[str, torch.Tensor]]) -> str:
    """Base64 text in SGLang's format: CUDA IPC handles of GPU tensors, the bytes of CPU tensors.

    SGLang's own serializer, which is the first half of this, would put CPU tensors into shared memory by file
    descriptor, which the server can fetch only while the sender answers, and not from another machine.
    """
    if any(tensor.is_cuda for _, tensor in bucket):
        buffer = io.BytesIO()
        ForkingPickler(buffer).dump(bucket)
        return base64.b64encode(buffer.getvalue()).decode()
    # A view would carry the whole storage it looks at.
    return base64.b64encode(pickle.dumps([(name, tensor.clone()) for name, tensor in bucket])).decode()
