"""Engines that end whole: at Ctrl-C while they start, and when the process that started them is killed.

A terminal sends Ctrl-C to all processes of the foreground. SGLang's main process ends the others itself, so they
need not hear it. While it imports SGLang, code that catches everything may swallow a KeyboardInterrupt, so that a
handler has to end it. SGLang's processes ask to die with their parent, but only once they have imported SGLang,
seconds after their start: one whose parent is killed before that would stay for ever.
"""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker, spawn
from multiprocessing.process import BaseProcess
from typing import Any

NOT_READY = "stopped before the server was ready"
INTERRUPTED = 128 + signal.SIGINT
PR_SET_PDEATHSIG = 1
SHOW_CURSOR = "\x1b[?25h"  # which a progress line may have hidden


def bind_children() -> None:
    """From now on, a process that this one starts by `multiprocessing` ignores Ctrl-C and dies with this one."""
    _make_children_deaf_to_interrupts()
    describe = spawn.get_preparation_data

    def with_owner(name: str) -> dict[str, Any]:
        # The signal comes when the thread ends that started the process.
        mortal = threading.current_thread() is threading.main_thread()
        return {**describe(name), **({"s3r_owner": _Owner()} if mortal else {})}

    setattr(spawn, "get_preparation_data", with_owner)  # noqa: B010


class _Owner:
    """Part of what a child reads first, before it imports the main module: reading it binds the child to us."""

    def __reduce__(self) -> tuple[Callable[[int], None], tuple[int]]:
        return die_with, (os.getpid(),)


def die_with(parent: int) -> None:
    """Let the kernel kill this process once `parent`, its parent, is gone, or the thread that started it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # gone already
            os._exit(1)


def _make_children_deaf_to_interrupts() -> None:
    """A child inherits a mask that blocks SIGINT.

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


@contextmanager
def ended_by_interrupts(message: str, unless: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Within it, Ctrl-C ends this process and its children at once, with one line and exit status 130.

    Args:
        unless: if it is true by then, Ctrl-C is a KeyboardInterrupt as always.
    """
    import psutil

    def end(signum: int, frame: Any) -> None:
        if unless():
            raise KeyboardInterrupt
        for child in psutil.Process().children(recursive=True):
            child.kill()
        # Not by print: the signal may have come in the middle of one.
        os.write(2, f"{SHOW_CURSOR if os.isatty(2) else ''}{message}\n".encode())
        os._exit(INTERRUPTED)

    previous = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
