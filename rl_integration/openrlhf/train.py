"""`python -m s3r_sglang.rl_integration.openrlhf.train`: OpenRLHF's `train_ppo_ray`, rollouts by S3R.

Runs in the trainer's environment.
"""

import os
import runpy
import sys
import time
import traceback
from collections.abc import Sequence

from s3r_sglang.rl_integration.openrlhf import compat, environment, options, runtime

MODULE = "openrlhf.cli.train_ppo_ray"
# Ray places actors by these; without a GPU they stand for nothing, and two cores must hold all actors of a run.
# The dashboard is six processes of 110 MB.
WITHOUT_GPU = {"num_cpus": 64, "num_gpus": 64, "include_dashboard": False}
# OpenRLHF's own for its workers, which it only sets if it starts Ray itself.
WORKER_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "true",
    "NCCL_DEBUG": "WARN",
    "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Train; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if argv == [options.HELP_ALL]:
        runtime.prepare_worker()
        # Ends by SystemExit, as argparse does.
        _run_openrlhf(["--help"])
    ours, theirs = options.parse(argv)
    started = time.time()
    run = None
    try:
        compat.require_tested_version()
        ours = environment.with_engine(ours)
        runtime.prepare_worker()
        from s3r_sglang.rl_integration.openrlhf import replace

        run = replace.install(ours, _start_ray)
        _run_openrlhf(theirs)
    except (compat.UnsupportedError, environment.SetupError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        traceback.print_exc()
        print(f"error: the run stopped: {_cause(error)}", file=sys.stderr)
        if run is not None and (checkpoint := run.checkpoint(started)):
            print(
                f"The newest checkpoint is {checkpoint}; --ckpt.load_enable goes on from it", file=sys.stderr
            )
        return 1
    return 0


def _run_openrlhf(argv: Sequence[str]) -> None:
    sys.argv = [MODULE, *argv]
    runpy.run_module(MODULE, run_name="__main__", alter_sys=True)


def _start_ray() -> None:
    """Start Ray or join the cluster of $RAY_ADDRESS, with our set-up in each worker."""
    import ray

    environ = {name: os.environ.get(name, value) for name, value in WORKER_ENVIRONMENT.items()}
    # Ray's default is 15, which the servers inherit: next to any other process they would starve.
    os.environ.setdefault("RAY_worker_niceness", "0")
    joins = "RAY_ADDRESS" in os.environ
    if not joins:
        # After a killed driver Ray's agents report to the control store, which is dead too, for 60 s by default.
        os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "10")
    hook = f"{runtime.__name__}.prepare_worker"
    ray.init(
        runtime_env={"env_vars": environ, "worker_process_setup_hook": hook},
        **({} if joins or runtime.has_gpu() else WITHOUT_GPU),
    )


def _cause(error: BaseException) -> str:
    """The innermost message of an error that crossed several Ray actors."""
    while (inner := getattr(error, "cause", None) or error.__cause__) is not None:
        error = inner
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    sys.exit(main())
