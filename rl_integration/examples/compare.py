"""GRPO with S3R rollouts and with autoregressive ones, one after the other on the same machine.

    python -m s3r_sglang.rl_integration.examples.compare --model MODEL --out DIR -- --steps 4 --prompts 16

For each mode it starts a server, runs grpo.py with the arguments behind `--`, and stops the server. DIR gets the
measurements of every step (comparison.json), a plot (comparison.png) and the servers' logs.
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
from s3r_sglang.rl_integration.examples import grpo

from s3r_sglang import cpu, launch

MODES = ("s3r", "autoregressive", "direct")
PHASES = ("rollout", "reward", "sleep", "update", "wake", "sync")


@contextlib.contextmanager
def server(model: str, mode: str, flags: Sequence[str], log: Path, seconds: float) -> Iterator[str]:
    """A server of `model` in its own process group, ended on exit; gives its URL.

    Raises:
        SystemExit: it ended or was not ready in time; the message has the end of its log.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    argv = ["--model-path", model, "--port", str(port), *flags]
    if mode == "direct":
        argv += ["--s3r-mode", "direct"]
    on_gpu = cpu.has_gpu()
    if not on_gpu:
        # The trainer needs the core that an idle scheduler would spin on; costs a second at each sleep and sync.
        argv.append("--sleep-on-idle")
    # The rollout service without speculation, for the control.
    environ = {**os.environ, "S3R_ROLLOUT_SERVICE": "1"}
    if not on_gpu:
        cpu.prepare(environ)
    arguments = launch.arguments(argv, on_gpu, speculative=mode != "autoregressive")
    command = [sys.executable, "-m", "sglang.launch_server", *arguments]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environ, start_new_session=True)
    try:
        _wait(process, url, log, seconds)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(process: "subprocess.Popen[bytes]", url: str, log: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/s3r/ready", timeout=5).status_code == httpx.codes.OK:
                return
        time.sleep(0.5)
    state = "was not ready in time" if process.poll() is None else f"ended with status {process.poll()}"
    raise SystemExit(f"the server {state}, its log {log} ends with:\n{log.read_text()[-3000:]}")


def run(model: str, mode: str, url: str, arguments: Sequence[str]) -> list[dict[str, Any]]:
    """Train in a process of its own, whose GPU memory the next mode gets back; returns the steps."""
    command = [sys.executable, "-m", grpo.__name__, "--url", url, "--model", model, *arguments]
    if mode == "direct":
        command += ["--correction", "sparse-rl"]
    steps = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            steps.append(json.loads(line))
            seconds = {name: round(value, 2) for name, value in steps[-1]["seconds"].items()}
            print(f"{mode} step {steps[-1]['step']}: reward {steps[-1]['reward']:.3f}, {seconds}", flush=True)
    if process.returncode:
        raise SystemExit(f"training with {mode} rollouts ended with status {process.returncode}")
    return steps


def summary(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over the steps after the first, which warms up (with a single step: of that one)."""
    measured = steps[1:] or steps
    means = {
        name: sum(step["seconds"].get(name, 0.0) for step in measured) / len(measured) for name in PHASES
    }
    accepted = [step["accept_length"] for step in measured if step["accept_length"]]
    return {
        "steps": len(measured),
        "seconds": means,
        "step_seconds": sum(means.values()),
        "tokens_per_second": sum(step["tokens_per_second"] for step in measured) / len(measured),
        "accept_length": sum(accepted) / len(accepted) if accepted else None,
        "largest_mismatch": max(step["mismatch"] for step in measured),
        "mean_kl": sum(step["kl"] for step in measured) / len(measured),
    }


def plot(results: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Time of a step by phase, and the rewards."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    bottom = [0.0] * len(results)
    for phase in PHASES:
        heights = [summary(steps)["seconds"][phase] for steps in results.values()]
        left.bar(list(results), heights, bottom=bottom, label=phase, width=0.6)
        bottom = [low + high for low, high in zip(bottom, heights, strict=True)]
    left.set_ylabel("seconds per step")
    left.legend(loc="upper left", bbox_to_anchor=(1, 1))
    for mode, steps in results.items():
        right.plot(
            [step["step"] for step in steps], [step["reward"] for step in steps], marker="o", label=mode
        )
    right.set_xlabel("step")
    right.set_ylabel("mean reward")
    right.xaxis.get_major_locator().set_params(integer=True)
    right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run the modes, print and write the comparison."""
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    ours, theirs = sys.argv[1:at], sys.argv[at + 1 :]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["s3r", "autoregressive"])
    parser.add_argument("--server-args", default="", help="for both servers, in one word")
    parser.add_argument(
        "--start-seconds", type=float, default=600.0, help="how long a server may take to start"
    )
    args = parser.parse_args(ours)
    # A misspelt argument should fail before the first server starts.
    training = grpo.parser().parse_args(["--model", args.model, *theirs])
    args.out.mkdir(parents=True, exist_ok=True)
    # As an exception, so that the server is ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    results: dict[str, list[dict[str, Any]]] = {}
    for mode in args.modes:
        log = args.out / f"server-{mode}.log"
        flags = shlex.split(args.server_args)
        with server(args.model, mode, flags, log, args.start_seconds) as url:
            results[mode] = run(args.model, mode, url, theirs)
        report = {
            "model": args.model,
            "training": {name: str(value) for name, value in vars(training).items()},
            "server_args": args.server_args,
            "summary": {name: summary(steps) for name, steps in results.items()},
            "steps": results,
        }
        # After each mode, so that nothing is lost if the next one fails.
        (args.out / "comparison.json").write_text(json.dumps(report, indent=1))
    plot(results, args.out / "comparison.png")
    print(json.dumps(report["summary"], indent=1))


if __name__ == "__main__":
    main()
