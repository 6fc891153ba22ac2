"""Argument checks the attention kernels share: they fail before a kernel can read out of bounds."""

import torch
import triton

CACHE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INTEGER_DTYPES = (torch.int32, torch.int64)


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def check_device(op: str, *tensors: torch.Tensor | None) -> None:
    """Raise unless all tensors are on one device that Triton can run on.

    Raises:
        ValueError: the tensors are on different devices.
        RuntimeError: they are on the CPU and Triton's interpreter is off.
    """
    devices = {tensor.device for tensor in tensors if tensor is not None}
    require(len(devices) == 1, f"{op}: all tensors must be on one device, got {sorted(map(str, devices))}")
    if devices.pop().type == "cpu" and not triton.knobs.runtime.interpret:
        raise RuntimeError(
            f"{op} runs on CUDA devices; on CPU tensors call s3r_sglang.kernels.reference.{op}, or set "
            "TRITON_INTERPRET=1 before Triton is imported"
        )


def check_cache(op: str, q: torch.Tensor, *caches: torch.Tensor) -> None:
    """Raise ValueError unless q [..., Hq, D] and each cache [pool, Hkv, D] fit together."""
    num_heads, head_dim = q.shape[-2:]
    # tl.dot needs an inner dimension of at least 16.
    require(head_dim > 0 and head_dim % 16 == 0, f"{op}: head size {head_dim} is not a multiple of 16")
    require(q.dtype in CACHE_DTYPES, f"{op}: q has dtype {q.dtype}, want one of {CACHE_DTYPES}")
    require(q.stride(-1) == 1, f"{op}: q must be contiguous along the head size")
    for cache in caches:
        require(
            cache.dim() == 3 and cache.shape[2] == head_dim and num_heads % cache.shape[1] == 0,
            f"{op}: cache {tuple(cache.shape)} does not fit q {tuple(q.shape)}: want [pool, Hkv, D]",
        )
        require(cache.dtype == q.dtype, f"{op}: cache is {cache.dtype} but q is {q.dtype}")
        require(cache.stride(2) == 1, f"{op}: cache must be contiguous along the head size")


def check_requests(op: str, batch_size: int, req_to_token: torch.Tensor, **per_request: torch.Tensor) -> None:
    """Raise ValueError unless req_to_token is int32 [slots, W] and the others integer [B]."""
    require(
        req_to_token.dim() == 2 and req_to_token.dtype == torch.int32 and req_to_token.stride(1) == 1,
        f"{op}: req_to_token must be int32 [slots, W], contiguous along W",
    )
    check_vectors(op, batch_size, **per_request)


def check_vectors(op: str, length: int, **vectors: torch.Tensor) -> None:
    """Raise ValueError unless each tensor is a contiguous int32 or int64 vector of this length."""
    for name, vector in vectors.items():
        require(
            vector.shape == (length,) and vector.dtype in INTEGER_DTYPES and vector.is_contiguous(),
            f"{op}: {name} must be a contiguous int32 or int64 vector of {length} entries, "
            f"got {vector.dtype} {tuple(vector.shape)}",
        )


def check_output(op: str, name: str, out: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise ValueError unless `out` has this shape and dtype and is contiguous in its last dimension."""
    require(
        out.shape == shape and out.dtype == dtype and out.stride(-1) == 1,
        f"{op}: {name} must be {dtype} {shape}, contiguous in its last dimension, "
        f"got {out.dtype} {tuple(out.shape)}",
    )
