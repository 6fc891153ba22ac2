"""Processes that end whole: a killed parent's children die before they have imported anything, Ctrl-C is firm."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from s3r_testing import wait_until

# As SGLang does: the child imports the main module again, which takes long, before it runs anything of its own.
PARENT = """
import multiprocessing, time
if __name__ == "__main__":
    from s3r_sglang.processes import bind_children
    bind_children()
    multiprocessing.get_context("spawn").Process(target=print).start()
time.sleep(60)
"""
# Code that catches everything, such as the import of an optional module.
SWALLOWING = """
import multiprocessing, time
from s3r_sglang.processes import ended_by_interrupts
if __name__ == "__main__":
    with ended_by_interrupts("stopped", unless=lambda: {unless}):
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        child.start()
        try:
            print("ready", flush=True)
            time.sleep(60)
        except BaseException as error:
            child.kill()
            print(type(error).__name__)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal")
def test_a_child_that_is_still_importing_dies_with_its_killed_parent(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    parent = subprocess.Popen([sys.executable, script])
    started = psutil.Process(parent.pid)
    # Beside it there is the resource tracker, which ends by itself.
    wait_until(lambda: any("--multiprocessing-fork" in child.cmdline() for child in started.children()))
    (child,) = (child for child in started.children() if "--multiprocessing-fork" in child.cmdline())
    time.sleep(0.5)
    parent.kill()
    parent.wait()
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, seconds=5)


@pytest.mark.parametrize(
    ("unless", "status", "line"),
    [(False, 128 + signal.SIGINT, "stopped"), (True, 0, "KeyboardInterrupt")],
)
def test_ctrl_c_ends_the_process_and_its_children_whatever_catches_it(tmp_path, unless, status, line):
    script = tmp_path / "parent.py"
    script.write_text(SWALLOWING.format(unless=unless))
    out = subprocess.PIPE
    parent = subprocess.Popen([sys.executable, script], stdout=out, stderr=subprocess.STDOUT, text=True)
    assert parent.stdout.readline() == "ready\n"
    (child,) = psutil.Process(parent.pid).children()
    os.kill(parent.pid, signal.SIGINT)
    assert parent.wait(10) == status
    assert parent.stdout.read() == f"{line}\n"
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, seconds=5)
