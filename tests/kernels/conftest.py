"""Shared inputs of the kernel tests: NaN-poisoned paged caches, and the one table of tolerances.

Without a CUDA device the Triton kernels run under Triton's interpreter. The switch is read when Triton is
imported, so these tests need a pytest process in which nothing has imported Triton before them.
"""

import os
import sys
from dataclasses import dataclass

import pytest
import torch

if not torch.cuda.is_available():
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise pytest.UsageError("Triton was imported without its interpreter: run tests/kernels on its own")
    os.environ["TRITON_INTERPRET"] = "1"

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# Against a float64 oracle of the same (rounded) inputs. Half types also round the softmax weights before
# the product with V, and the output.
TOLERANCES = {
    torch.float32: {"rtol": 1e-4, "atol": 2e-5},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1.6e-2},
}
# Triton's interpreter multiplies bfloat16 tiles as raw bits, so that type is left to the GPU.
HALF_DTYPES = [torch.bfloat16, torch.float16] if DEVICE.type == "cuda" else [torch.float16]
GQA = [(3, 1), (2, 2), (3, 3), (2, 4), (1, 6)]


@dataclass(frozen=True)
class PagedBatch:
    """A batch whose every unused cache row is NaN, with scattered rows and slots out of order."""

    q: torch.Tensor  # [B, Q, Hq, D]
    k_cache: torch.Tensor  # [pool, Hkv, D], a strided view
    v_cache: torch.Tensor
    req_to_token: torch.Tensor  # [slots, W] int32
    req_pool_indices: torch.Tensor  # [B] int64
    seq_lens: torch.Tensor  # [B] int64
    scale: float

    @property
    def num_kv_heads(self) -> int:
        return self.k_cache.shape[1]

    def keys(self, b: int) -> torch.Tensor:
        """Float64 keys [seq_len, Hkv, D] of request b in order of position."""
        return self._rows(self.k_cache, b)

    def values(self, b: int) -> torch.Tensor:
        return self._rows(self.v_cache, b)

    def logits(self, b: int) -> torch.Tensor:
        """Float64 scale · q·k of all queries of request b over its positions, [Hkv, G, Q, seq_len]."""
        queries = self.q[b].double().unflatten(1, (self.num_kv_heads, -1))
        return torch.einsum("qhgd,nhd->hgqn", queries, self.keys(b)) * self.scale

    def _rows(self, cache: torch.Tensor, b: int) -> torch.Tensor:
        slot, seq_len = self.req_pool_indices[b], self.seq_lens[b]
        return cache[self.req_to_token[slot, :seq_len].long()].double()


def make_batch(
    seq_lens: list[int],
    num_queries: int = 1,
    num_kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> PagedBatch:
    generator = torch.Generator().manual_seed(seed)
    batch_size, width = len(seq_lens), max(seq_lens) + 8
    slots = batch_size + 2
    pool = sum(seq_lens) + 16
    caches = torch.full((pool, 2, num_kv_heads, head_dim), torch.nan)
    rows = torch.randperm(pool, generator=generator)
    req_to_token = torch.full((slots, width), int(rows[-1]), dtype=torch.int32)  # a NaN row
    req_pool_indices = torch.randperm(slots, generator=generator)[:batch_size]
    used = 0
    for slot, seq_len in zip(req_pool_indices.tolist(), seq_lens, strict=True):
        own = rows[used : used + seq_len]
        req_to_token[slot, :seq_len] = own.int()
        caches[own] = torch.randn(seq_len, 2, num_kv_heads, head_dim, generator=generator)
        used += seq_len
    # Peaked enough that a wrong weight, mask or scale shows.
    q = 2 * torch.randn(batch_size, num_queries, num_kv_heads * group, head_dim, generator=generator)
    caches = caches.to(DEVICE, dtype)
    return PagedBatch(
        q=q.to(DEVICE, dtype),
        k_cache=caches[:, 0],
        v_cache=caches[:, 1],
        req_to_token=req_to_token.to(DEVICE),
        req_pool_indices=req_pool_indices.to(DEVICE),
        seq_lens=torch.tensor(seq_lens, device=DEVICE),
        scale=head_dim**-0.5,
    )


@pytest.fixture(name="make_batch")
def make_batch_fixture():
    return make_batch


@pytest.fixture
def tolerance():
    """Tolerances of torch.testing.assert_close for a dtype of q and the caches."""
    return TOLERANCES.__getitem__


@pytest.fixture
def device() -> torch.device:
    return DEVICE


# (Hkv, Hq / Hkv, D, dtype): float32 for all, and each half type once per head size.
HEADS = [
    *((*heads, head_dim, torch.float32) for heads in GQA for head_dim in (64, 128)),
    *((*heads, dtype) for heads in ((3, 3, 64), (2, 4, 128)) for dtype in HALF_DTYPES),
]


@pytest.fixture(params=HEADS, ids=lambda heads: "-".join(map(str, heads)).replace("torch.", ""))
def heads(request) -> dict:
    """Head counts, head size and dtype as keyword arguments of make_batch."""
    return dict(zip(("num_kv_heads", "group", "head_dim", "dtype"), request.param, strict=True))


@pytest.fixture
def capture():
    """Capture a call in a CUDA graph, after an eager run, and return its replay."""
    if DEVICE.type != "cuda":
        pytest.skip("needs a CUDA device")

    def capture_call(call):
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay

    return capture_call
