"""Facade of the kernels: each name runs the Triton op on CUDA tensors and the plain PyTorch reference elsewhere.

The ops live in `s3r_sglang.kernels.ops`, the references under the same names in `s3r_sglang.kernels.reference`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch


def implementation(tensor: torch.Tensor, stem: str) -> ModuleType:
    """The module `stem` of the ops if `tensor` is on a GPU, else that of the references."""
    return _module("ops" if tensor.is_cuda else "reference", stem)


@functools.cache
def _module(kind: str, stem: str) -> ModuleType:
    return importlib.import_module(f"s3r_sglang.kernels.{kind}.{stem}")


def _dispatch(name: str) -> Callable[..., Any]:
    """The function `name` of the module of that name, chosen by the device of its first argument."""

    def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return getattr(implementation(tensor, name), name)(tensor, *args, **kwargs)

    call.__name__ = call.__qualname__ = name
    return call


sparse_decode_attention = _dispatch("sparse_decode_attention")
attention_scores = _dispatch("attention_scores")
select_positions = _dispatch("select_positions")
verify_attention = _dispatch("verify_attention")
