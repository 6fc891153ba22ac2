"""What `s3r serve` becomes: SGLang's launcher, which Ctrl-C ends without a traceback of each of its processes.

A terminal sends Ctrl-C to all processes of the foreground. SGLang's main process ends the others itself, so
they need not hear it.
"""

import runpy
import signal
import sys
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess

INTERRUPTED = 128 + signal.SIGINT


def make_children_deaf_to_interrupts() -> None:
    """From now on, a process that this one starts inherits a mask that blocks SIGINT.

    Here it is blocked only for the moment of the start, in which a Ctrl-C stays pending instead of getting lost.
    """
    # Started with the first process otherwise, and it would unblock SIGINT just before that.
    resource_tracker.ensure_running()
    start = BaseProcess.start

    def start_masked(process: BaseProcess) -> None:
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            start(process)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)

    setattr(BaseProcess, "start", start_masked)  # noqa: B010


def main() -> None:
    """Run `python -m sglang.launch_server` with this process's arguments."""
    make_children_deaf_to_interrupts()
    try:
        runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
    except KeyboardInterrupt:
        # While it was starting; once it serves, uvicorn takes SIGINT as the wish for a clean end.
        print("stopped before the server was ready", file=sys.stderr)
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
