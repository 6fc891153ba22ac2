"""The one SGLang release that this package is written for.

Imported by the plugin's entry point, so nothing here may import SGLang's internals at module level.
"""

TESTED_SGLANG = "0.5.17"


def require_tested_sglang() -> None:
    """Raise RuntimeError unless the installed SGLang is the release that the hooks were written for.

    They reach into private functions, so on another release they could be in place and yet do nothing.
    """
    from sglang.version import __version__

    if __version__ != TESTED_SGLANG:
        raise RuntimeError(
            f"s3r-sglang works with SGLang {TESTED_SGLANG} only, not {__version__}: "
            f"run pip install sglang=={TESTED_SGLANG}."
        )
