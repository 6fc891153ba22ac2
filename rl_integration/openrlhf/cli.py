"""The console script `s3r-openrlhf`."""

import importlib.util
import os
import sys
from typing import NoReturn

from s3r_sglang.rl_integration.openrlhf import environment, options

TRAIN = "s3r_sglang.rl_integration.openrlhf.train"


def main() -> int:
    """`s3r-openrlhf setup`, or train: in this environment if it has OpenRLHF, else in the one that setup made."""
    argv = sys.argv[1:]
    try:
        if argv[:1] == ["setup"]:
            environment.setup(argv[1:])
            return 0
        if not argv or argv[0] in ("-h", "--help"):
            options.parser().print_help()
            print(f"\nOpenRLHF's flags: s3r-openrlhf {options.HELP_ALL}")
            return 0 if argv else 2
        if argv != [options.HELP_ALL]:
            # A wrong flag of ours is said before the trainer's environment is started.
            options.parse(argv)
        return _train(argv)
    except environment.SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _train(argv: list[str]) -> int:
    if importlib.util.find_spec("openrlhf") is None:
        _become_the_trainer(argv)
    from s3r_sglang.rl_integration.openrlhf import train

    return train.main(argv)


def _become_the_trainer(argv: list[str]) -> NoReturn:
    python = environment.python_of(environment.default_folder())
    if not python.exists():
        raise environment.SetupError(
            "run `s3r-openrlhf setup` first: OpenRLHF needs an environment of its own"
        )
    os.environ.setdefault("S3R_ENGINE_PYTHON", sys.executable)
    sys.stdout.flush()
    os.execv(python, [str(python), "-m", TRAIN, *argv])


if __name__ == "__main__":
    sys.exit(main())
