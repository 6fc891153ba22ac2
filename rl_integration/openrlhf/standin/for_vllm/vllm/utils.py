"""Imported by OpenRLHF's vLLM actor, which S3R's replaces."""


def random_uuid() -> str:
    """Never called."""
    raise NotImplementedError("vLLM is not installed")
