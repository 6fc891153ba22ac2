"""A server process as its owner, a Ray actor, sees it: start, watch, stop."""

import asyncio
import contextlib
import os
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx

POLL_SECONDS = 0.5
# A server whose connection broke has usually died; its process takes a moment to go.
DEATH_SECONDS = 15.0
# Seeds of two lives of a server must differ, or their responses would share noise.
SEED_STRIDE = 1_000_003
TAIL_LINES = 30


class ServerError(RuntimeError):
    """A server did not start or has died; the message says why, with the end of its log."""


@dataclass
class ServerProcess:
    """One server, started again on demand.

    Attributes:
        arguments: SGLang's, without host, port, seed and key.
        mode, device: see `serve`.
        lives: how often it was started.
        url: base URL of the present life.
    """

    python: str
    mode: str
    device: str
    arguments: list[str]
    host: str
    port: int | None
    seed: int
    api_key: str
    log: Path
    start_timeout: float
    lives: int = 0
    url: str = ""
    _process: subprocess.Popen | None = field(default=None, repr=False)

    async def start(self) -> None:
        """Start the server and wait until it would sample.

        Raises:
            ServerError: it ended, or was not ready in time.
        """
        self.stop()
        port = self.port or _free_port(self.host)
        self.url = f"http://{self.host}:{port}"
        words = [self.python, "-m", "s3r_sglang.rl_integration.openrlhf.serve", self.mode, self.device]
        words += [str(os.getpid()), *self.arguments, "--host", self.host, "--port", str(port)]
        words += ["--random-seed", str((self.seed + SEED_STRIDE * self.lives) % 2**31)]
        words += ["--api-key", self.api_key]
        self.lives += 1
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as out:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=_environment(),
                start_new_session=True,
            )
        await self._wait_until_ready()

    async def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self.start_timeout
        headers = {"Authorization": f"Bearer {self.api_key}"}
        async with httpx.AsyncClient(headers=headers, timeout=10.0) as client:
            while time.monotonic() < deadline:
                if not self.alive:
                    raise ServerError(f"the rollout server ended while it started.\n{self.tail()}")
                with contextlib.suppress(httpx.TransportError):
                    if (await client.get(f"{self.url}/s3r/ready")).status_code == httpx.codes.OK:
                        return
                await asyncio.sleep(POLL_SECONDS)
        self.stop()
        raise ServerError(
            f"the rollout server was not ready after {self.start_timeout:g} seconds "
            f"(--s3r.start_timeout).\n{self.tail()}"
        )

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    async def died(self, life: int) -> bool:
        """Whether the process of `life` has ended, or ends within a moment; true if there is a new one already."""
        deadline = time.monotonic() + DEATH_SECONDS
        while self.lives == life and self.alive and time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)
        return self.lives != life or not self.alive

    def stop(self) -> None:
        """Stop the server, if it runs, and wait for its end."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None

    def tail(self) -> str:
        """The end of the log and where it is."""
        lines = self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        return "\n".join([f"The last lines of {self.log}:", *lines])


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def _environment() -> dict[str, str]:
    """Ours, less what belongs to the trainer's interpreter and to its process group."""
    drop = {
        "PYTHONPATH",
        "PYTHONHOME",
        "VIRTUAL_ENV",
        "MASTER_ADDR",
        "MASTER_PORT",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
    }
    return {name: value for name, value in os.environ.items() if name not in drop}
