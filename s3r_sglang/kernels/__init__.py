"""Facade of the kernels: each name runs the Triton op on CUDA tensors and the plain PyTorch reference elsewhere.

The ops live in `s3r_sglang.kernels.ops`, the references under the same names in `s3r_sglang.kernels.reference`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch


def _dispatch(name: str) -> Callable[..., Any]:
    """Choose the implementation by the device of the first argument; import each on first use."""

    @functools.cache
    def implementation(kind: str) -> Callable[..., Any]:
        return getattr(importlib.import_module(f"s3r_sglang.kernels.{kind}.{name}"), name)

    def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return implementation("ops" if tensor.is_cuda else "reference")(tensor, *args, **kwargs)

    call.__name__ = call.__qualname__ = name
    return call


sparse_decode_attention = _dispatch("sparse_decode_attention")
attention_scores = _dispatch("attention_scores")
select_positions = _dispatch("select_positions")
verify_attention = _dispatch("verify_attention")
