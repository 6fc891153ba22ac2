"""What `s3r serve` becomes: SGLang's launcher, which Ctrl-C ends without a traceback of each of its processes."""

import runpy
import sys

from s3r_sglang.processes import INTERRUPTED, NOT_READY, bind_children, ended_by_interrupts


def main() -> None:
    """Run `python -m sglang.launch_server` with this process's arguments."""
    with ended_by_interrupts(NOT_READY, unless=_is_listening):
        bind_children()
        try:
            runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
        except KeyboardInterrupt:  # in the moment between
            print(NOT_READY, file=sys.stderr)
            sys.exit(INTERRUPTED)


def _is_listening() -> bool:
    """Whether Ctrl-C is uvicorn's, or about to be: it ends cleanly, and then raises the signal once more."""
    # Not there yet while the module is being imported.
    state = getattr(sys.modules.get("sglang.srt.entrypoints.http_server"), "_global_state", None)
    return state is not None


if __name__ == "__main__":
    main()
