"""Imported by OpenRLHF's vLLM actor, which S3R's replaces."""


class TokensPrompt:
    """Never made."""
