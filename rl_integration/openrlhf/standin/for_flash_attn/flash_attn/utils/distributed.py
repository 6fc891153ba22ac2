"""Names that OpenRLHF's ring attention imports."""


def all_gather(*args, **kwargs):
    """Never called without ring attention."""
    raise ImportError("flash-attn is not installed: drop --ds.ring_attn_size")
