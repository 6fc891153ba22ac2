"""KV rows of a request to and from contiguous blocks, in plain PyTorch, a copy per layer and block."""

from collections.abc import Iterator, Sequence

import torch


def gather_rows(
    layers: Sequence[torch.Tensor],
    pointers: torch.Tensor,
    pages: torch.Tensor,
    packed: torch.Tensor,
    block_tokens: int,
) -> None:
    """Contract of `s3r_sglang.kernels.ops.kv_rows.gather_rows`; reads `layers` and not `pointers`."""
    for layer, part, rows in _pieces(layers, pages, packed, block_tokens):
        torch.index_select(layer, 0, part, out=rows)


def scatter_rows(
    layers: Sequence[torch.Tensor],
    pointers: torch.Tensor,
    pages: torch.Tensor,
    packed: torch.Tensor,
    block_tokens: int,
) -> None:
    """Contract of `s3r_sglang.kernels.ops.kv_rows.scatter_rows`; writes `layers` and does not read `pointers`."""
    for layer, part, rows in _pieces(layers, pages, packed, block_tokens):
        layer.index_copy_(0, part, rows)


def _pieces(
    layers: Sequence[torch.Tensor], pages: torch.Tensor, packed: torch.Tensor, block_tokens: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(layer, its pages, their rows in `packed`) for each layer of each block."""
    row = layers[0].shape[1]
    for number, part in enumerate(pages.split(block_tokens)):
        begin = number * block_tokens * len(layers) * row
        block = packed[begin : begin + len(layers) * len(part) * row].view(len(layers), len(part), row)
        for layer, rows in zip(layers, block, strict=True):
            yield layer, part, rows
