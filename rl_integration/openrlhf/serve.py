"""Run one SGLang server for as long as its owner lives. Runs in the engine's environment.

    python -m s3r_sglang.rl_integration.openrlhf.serve MODE DEVICE OWNER [arguments of SGLang …]

OWNER is the process id of the Ray actor that started us. Its death, by SIGKILL too, makes it no longer our parent,
and the server is stopped then. (A parent-death signal would come when the *thread* ends that started us.)
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time

from s3r_sglang import cpu, launch

PR_SET_PDEATHSIG = 1
POLL_SECONDS = 0.5
STOP_SECONDS = 10.0
# Orphans stay in the process group until somebody reaps them; their memory is free before that.
REAP_SECONDS = 3.0


def command(mode: str, device: str, argv: list[str]) -> tuple[list[str], dict[str, str]]:
    """Command line and environment of the server."""
    environ = dict(os.environ)
    if device == "cpu":
        cpu.prepare(environ)
    if mode == "autoregressive":
        environ["S3R_ROLLOUT_SERVICE"] = "1"
    if mode == "direct":
        argv = [*argv, "--s3r-mode", "direct"]
    arguments = launch.arguments(argv, device != "cpu", speculative=mode != "autoregressive")
    # Not sglang.launch_server itself, whose processes stay if it is killed while they import SGLang.
    return [sys.executable, "-m", "s3r_sglang.commands.serve", *arguments], environ


def main() -> int:
    """Run the server; return its exit status."""
    mode, device, owner, *argv = sys.argv[1:]
    words, environ = command(mode, device, argv)
    # SystemExit at the next poll; the owner's `stop` sends this.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    server = subprocess.Popen(
        words, env=environ, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent, process_group=0
    )
    try:
        while os.getppid() == int(owner):
            with contextlib.suppress(subprocess.TimeoutExpired):
                return server.wait(POLL_SECONDS)
        return 1
    finally:
        _stop(server)


def _die_with_parent() -> None:
    """The server must not outlive us either. Called between fork and exec; we have a single thread."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _stop(server: subprocess.Popen) -> None:
    """End the server and what it leaves behind, so that the next life finds its memory free."""
    if server.poll() is None:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(STOP_SECONDS)
    deadline = time.monotonic() + REAP_SECONDS
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(server.pid, signal.SIGKILL)
            server.poll()
            time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
