"""Stand-in for SGLang's compiled `sgl_kernel` on a machine without a CUDA driver.

SGLang imports names from `sgl_kernel` in almost every module, but serving a dense decoder on a CPU calls few
of them, and the published wheel fails to import without libcuda. This package implements those few in
PyTorch. Any other name resolves to a function that raises `NotImplementedError` when it is called; submodules
are absent on purpose, so that the features SGLang guards with `except ImportError` stay off.

Signatures follow sgl_kernel 0.4.5. All location tensors are int32 or int64 on the CPU.
"""

import ctypes
from collections.abc import Callable
from typing import NoReturn

import torch

__version__ = "0.4.5+s3r.cpu"


def _ranges(start: torch.Tensor, end: torch.Tensor) -> list[tuple[int, int]]:
    return list(zip(start.tolist(), end.tolist(), strict=True))


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write newly allocated KV slots into the page table.

    `req_to_token[req_pool_indices[i], start_offset[i]:end_offset[i]]` takes the next `end - start` entries of
    `out_cache_loc` (flat, requests in order). `req_to_token` is [slots, pool_len] int32; the others are [batch].
    """
    taken = 0
    for slot, (start, end) in zip(req_pool_indices.tolist(), _ranges(start_offset, end_offset), strict=True):
        length = max(0, end - start)
        req_to_token[slot, start : start + length] = out_cache_loc[taken : taken + length].to(
            req_to_token.dtype
        )
        taken += length


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Read KV slots from the page table: the inverse of `assign_req_to_token_pool_cpu`, same shapes."""
    filled = 0
    for slot, (start, end) in zip(req_pool_indices.tolist(), _ranges(start_offset, end_offset), strict=True):
        length = max(0, end - start)
        out_cache_loc[filled : filled + length] = req_to_token[slot, start : start + length]
        filled += length


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """Copy KV rows `src_loc` to `tgt_loc` in every buffer; overlapping locations read before they write.

    `data_ptrs` [buffers] holds addresses, `strides` [buffers] the bytes of one row (one token).
    """
    if tgt_loc.numel() == 0:
        return
    rows = 1 + int(torch.maximum(tgt_loc.max(), src_loc.max()))
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (rows * stride)).from_address(address)
        buffer = torch.frombuffer(memory, dtype=torch.uint8).view(rows, stride)
        buffer[tgt_loc] = buffer[src_loc]


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def missing(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name} has no CPU implementation here; this feature of SGLang needs a GPU"
        )

    missing.__name__ = missing.__qualname__ = name
    return missing
