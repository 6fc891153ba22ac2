"""Bench of KV rows to and from blocks: python -m s3r_sglang.kernels.bench.kv_rows.

Counted traffic: every row read once and written once. Tokens of a request of the Qwen3-1.7B shape (28 layers,
K and V, rows of 2 KB), whose pages lie anywhere in a pool of 64K.
"""

from dataclasses import dataclass
from typing import Any

import torch
from s3r_sglang.kernels.bench import _harness
from s3r_sglang.kernels.ops import kv_rows as op
from s3r_sglang.kernels.reference import kv_rows as reference

OP = "kv_rows"
LAYERS, POOL_PAGES, BLOCK_TOKENS = 56, 65_536, 256


@dataclass(frozen=True)
class Shape:
    tokens: int
    row: int = 1024

    def __str__(self) -> str:
        return f"{self.tokens} tokens x {LAYERS} x {self.row}"


@dataclass(frozen=True, eq=False)
class Inputs:
    layers: list[torch.Tensor]
    pointers: torch.Tensor
    pages: torch.Tensor  # [ROTATION, tokens]
    packed: torch.Tensor


def make_inputs(shape: Shape) -> Inputs:
    layers = [torch.randn(POOL_PAGES, shape.row, dtype=torch.bfloat16, device="cuda") for _ in range(LAYERS)]
    order = torch.randperm(POOL_PAGES, device="cuda")[: _harness.ROTATION * shape.tokens]
    return Inputs(
        layers=layers,
        pointers=torch.tensor([layer.data_ptr() for layer in layers], device="cuda"),
        pages=order.view(_harness.ROTATION, -1),
        packed=torch.empty(LAYERS * shape.tokens * shape.row, dtype=torch.bfloat16, device="cuda"),
    )


def make_case(inputs: Inputs, variant: str, tiles: dict[str, Any]) -> _harness.Case:
    copy = getattr(op, f"{variant}_rows")

    def call(turn: int):
        copy(inputs.layers, inputs.pointers, inputs.pages[turn], inputs.packed, BLOCK_TOKENS)

    def check():
        op.gather_rows(inputs.layers, inputs.pointers, inputs.pages[0], inputs.packed, BLOCK_TOKENS)
        want = torch.empty_like(inputs.packed)
        reference.gather_rows(inputs.layers, inputs.pointers, inputs.pages[0], want, BLOCK_TOKENS)
        assert torch.equal(inputs.packed, want), "gathered rows differ"
        op.scatter_rows(inputs.layers, inputs.pointers, inputs.pages[1], inputs.packed, BLOCK_TOKENS)
        for layer in (inputs.layers[0], inputs.layers[-1]):
            assert torch.equal(layer[inputs.pages[1]], layer[inputs.pages[0]]), "scattered rows differ"

    return _harness.Case(
        calls=[lambda turn=turn: call(turn) for turn in range(_harness.ROTATION)],
        bytes_per_call=2 * inputs.packed.nbytes,
        check=check,
    )


BENCH = _harness.Bench(
    OP, [Shape(256), Shape(1024)], make_inputs, make_case, ["gather", "scatter"], [{}], small=Shape(13, 48)
)

if __name__ == "__main__":
    _harness.main(BENCH)
