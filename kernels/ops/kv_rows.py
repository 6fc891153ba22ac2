"""KV rows of a request, scattered over the layers' pools, to and from contiguous blocks in one launch.

A launch per layer would be bound by the host: 0.7 ms of it for 256 tokens of 28 layers, longer than the block
takes over the host link (0.5 ms), and the scheduler waits that long (measured on an H200 machine).
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from s3r_sglang.kernels.ops import _checks

OP = "kv_rows"
# 8 KB a program for rows of 8 heads of size 128.
BLOCK_ROWS = 4


def gather_rows(
    layers: Sequence[torch.Tensor],
    pointers: torch.Tensor,
    pages: torch.Tensor,
    packed: torch.Tensor,
    block_tokens: int,
) -> None:
    """Copy the rows `pages` of all layers to `packed`, block by block.

    Block i holds the rows of the pages from i * block_tokens on, at most `block_tokens` (t in the last one), as
    [layers, t, row] from element i * layers * block_tokens * row on: contiguous, so that a block is one copy.
    The rest of `packed` is left as it is.

    Args:
        layers: [pages, row] each, alike in shape, dtype and strides, contiguous in a row.
        pointers: [layers] int64 on the same device, `data_ptr()` of each.
        pages: [n] int64; for `scatter_rows` all different.
        packed: flat, of the dtype of the layers, long enough.
        block_tokens: rows of a layer in a whole block.

    Raises:
        ValueError: a shape, dtype, stride or device does not fit.
        RuntimeError: the tensors are on the CPU and Triton's interpreter is off.
    """
    _launch_kernel(layers, pointers, pages, packed, block_tokens, gather=True)


def scatter_rows(
    layers: Sequence[torch.Tensor],
    pointers: torch.Tensor,
    pages: torch.Tensor,
    packed: torch.Tensor,
    block_tokens: int,
) -> None:
    """The inverse of `gather_rows`: copy `packed` to the rows `pages` of all layers; same arguments."""
    _launch_kernel(layers, pointers, pages, packed, block_tokens, gather=False)


def _launch_kernel(layers, pointers, pages, packed, block_tokens, gather):
    first = layers[0]
    _checks.check_device(OP, first, pointers, pages, packed)
    _checks.require(
        all(
            (layer.shape, layer.dtype, layer.stride()) == (first.shape, first.dtype, first.stride())
            for layer in layers
        )
        and first.dim() == 2
        and first.stride(1) == 1,
        f"{OP}: layers must be [pages, row], alike, and contiguous in a row",
    )
    _checks.check_output(OP, "pointers", pointers, (len(layers),), torch.int64)
    _checks.check_output(OP, "pages", pages, (len(pages),), torch.int64)
    _checks.require(block_tokens > 0, f"{OP}: block_tokens is {block_tokens}")
    needed = len(layers) * len(pages) * first.shape[1]
    _checks.require(
        packed.dim() == 1
        and packed.is_contiguous()
        and packed.dtype == first.dtype
        and len(packed) >= needed,
        f"{OP}: packed must be flat, of dtype {first.dtype} and at least {needed} long, "
        f"got {packed.dtype} {tuple(packed.shape)}",
    )
    if len(pages) == 0:
        return
    _copy_rows_kernel[(triton.cdiv(len(pages), BLOCK_ROWS), len(layers))](
        pointers, pages, packed, len(pages), block_tokens, first.shape[1], first.stride(0),
        BLOCK_ROWS=BLOCK_ROWS, BLOCK_ROW=triton.next_power_of_2(first.shape[1]), GATHER=gather,
    )  # fmt: skip


@triton.jit
def _copy_rows_kernel(
    pointers, pages, packed, num_rows, block_tokens, row, stride_row,
    BLOCK_ROWS: tl.constexpr, BLOCK_ROW: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    layer, num_layers = tl.program_id(1), tl.num_programs(1)
    element = tl.arange(0, BLOCK_ROW)
    number = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    page = tl.load(pages + number, mask=number < num_rows, other=0)
    block = number // block_tokens
    in_block = tl.minimum(num_rows - block * block_tokens, block_tokens)
    place = block.to(tl.int64) * block_tokens * num_layers + layer * in_block + number % block_tokens
    pool = tl.load(pointers + layer).to(tl.pointer_type(packed.dtype.element_ty))
    scattered = pool + page[:, None] * stride_row + element[None, :]
    contiguous = packed + place[:, None] * row + element[None, :]
    mask = (number < num_rows)[:, None] & (element < row)[None, :]
    if GATHER:
        tl.store(contiguous, tl.load(scattered, mask=mask), mask=mask)
    else:
        tl.store(scattered, tl.load(contiguous, mask=mask), mask=mask)
