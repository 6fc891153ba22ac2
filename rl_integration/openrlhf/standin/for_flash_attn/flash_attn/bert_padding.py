"""Names that OpenRLHF's packing imports."""


def _missing(*args, **kwargs):
    raise ImportError("flash-attn is not installed: drop --ds.packing_samples")


index_first_axis = pad_input = rearrange = unpad_input = _missing
