"""Entry point that SGLang loads, in the main process and in every scheduler process."""

from s3r_sglang import compat


def register() -> None:
    """Install everything we change in SGLang; the algorithm last, so that a failure leaves it unknown."""
    compat.require_tested_sglang()

    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from s3r_sglang.algorithm import register_algorithm
    from s3r_sglang.patches import server_args

    server_args.add_fields()
    HookRegistry.register(
        "sglang.srt.server_args.ServerArgs.__init__", server_args.init_with_s3r_fields, HookType.AROUND
    )
    register_algorithm()


def assert_installed() -> None:
    pass
