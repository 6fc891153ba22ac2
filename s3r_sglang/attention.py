"""The two attention backends of a round, over one model and one KV pool.

`DenseAttention` wraps the backend that SGLang chose (fa3, FlashInfer, Triton; plain PyTorch on a CPU). It serves
prefill and verification, and refreshes the sparse index of every layer from the queries it has just attended
with. `SparseAttention` serves the draft steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from s3r_sglang.index import Plan, SparseIndex
from s3r_sglang.kernels import attention_scores, sparse_decode_attention
from s3r_sglang.sglang_symbols import AttentionBackend, ForwardBatch, KVWriteLoc, RadixAttention


@dataclass(frozen=True)
class _Refresh:
    """What all layers of one dense forward share.

    Fields:
        plan: the split of every request's budget.
        query_rows: [B, Q] int64 rows of the packed queries, right-aligned; rows of absent queries are arbitrary.
        num_queries: [B] int32, how many of the Q are the request's.
        seq_lens: [B] int32, position of the last query, plus one.
        req_pool_indices: [B] int64.
    """

    plan: Plan
    query_rows: torch.Tensor
    num_queries: torch.Tensor
    seq_lens: torch.Tensor
    req_pool_indices: torch.Tensor


class DenseAttention(AttentionBackend):
    """Full attention by `base`, then the refresh of the index (arXiv 2610.13202, section 4 and B.1).

    The index is made of the positions that are certain to be committed: all of the prompt after a prefill, and
    0 … L after a verification. That holds whatever the sampler accepts, so each layer selects at once, inside
    the forward, and scores need memory for a single layer. Accepted drafts are in the tail that every draft
    query reads.

    Args:
        base: backend of the model runner.
        index: the index to refresh.
        block_size: k + 1.
        max_batch: largest number of requests in one forward.
        max_context: longest context in tokens.
    """

    def __init__(
        self,
        base: AttentionBackend,
        index: SparseIndex,
        block_size: int,
        max_batch: int,
        max_context: int,
    ) -> None:
        self.base = base
        self.index = index
        self.block_size = block_size
        self.needs_cpu_seq_lens = base.needs_cpu_seq_lens
        self.prefill_attention_backend_str = base.prefill_attention_backend_str
        self.decode_attention_backend_str = base.decode_attention_backend_str
        device = index.positions.device
        num_kv_heads = index.positions.shape[2]
        # On a CPU a reference allocates what it needs; the graphs of a GPU need one address for all layers.
        self.scores = (
            torch.empty((max_batch, num_kv_heads, max_context), dtype=torch.float32, device=device)
            if device.type == "cuda"
            else None
        )
        self._refresh: _Refresh | None = None

    def __getattr__(self, name: str):
        return getattr(self.base, name)

    # ---- metadata: the base backend's, and the plan of the refresh as graph-recordable tensor operations

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        self.base.init_forward_metadata(forward_batch)
        self._refresh = self._plan(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        self.base.init_forward_metadata_out_graph(forward_batch, in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        self.base.init_forward_metadata_in_graph(forward_batch)
        self._refresh = self._plan(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.base.init_cuda_graph_state(max_bs, max_num_tokens)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return self.base.get_cuda_graph_seq_len_fill_value()

    def on_after_cuda_graph_warmup(self) -> None:
        self.base.on_after_cuda_graph_warmup()

    def support_triton(self) -> bool:
        return self.base.support_triton()

    def _plan(self, forward_batch: ForwardBatch) -> _Refresh | None:
        mode = forward_batch.forward_mode
        if mode.is_target_verify():
            return self._plan_verify(forward_batch)
        if mode.is_extend():
            return self._plan_prefill(forward_batch)
        return None

    def _plan_verify(self, forward_batch: ForwardBatch) -> _Refresh:
        start = forward_batch.seq_lens
        rows = torch.arange(start.shape[0] * self.block_size, device=start.device)
        return _Refresh(
            plan=self.index.begin_refresh(forward_batch.req_pool_indices, start + 1),
            query_rows=rows.view(-1, self.block_size),
            num_queries=torch.full_like(start, self.block_size, dtype=torch.int32),
            seq_lens=(start + self.block_size).to(torch.int32),
            req_pool_indices=forward_batch.req_pool_indices,
        )

    def _plan_prefill(self, forward_batch: ForwardBatch) -> _Refresh:
        window = self.index.config.prompt_queries
        lengths = forward_batch.extend_seq_lens
        ends = lengths.cumsum(0).to(torch.int64)
        rows = ends[:, None] + torch.arange(-window, 0, device=ends.device)
        return _Refresh(
            plan=self.index.begin_refresh(forward_batch.req_pool_indices, forward_batch.seq_lens),
            query_rows=rows.clamp(min=0),
            num_queries=lengths.clamp(max=window).to(torch.int32),
            seq_lens=forward_batch.seq_lens.to(torch.int32),
            req_pool_indices=forward_batch.req_pool_indices,
        )

    # ---- attention

    def forward_decode(self, q, k, v, layer: RadixAttention, forward_batch: ForwardBatch, *args, **kwargs):
        return self.base.forward_decode(q, k, v, layer, forward_batch, *args, **kwargs)

    def forward_extend(self, q, k, v, layer: RadixAttention, forward_batch: ForwardBatch, *args, **kwargs):
        out = self.base.forward_extend(q, k, v, layer, forward_batch, *args, **kwargs)
        if self._refresh is not None:
            self._refresh_layer(q, layer, self._refresh)
        return out

    def _refresh_layer(self, q: torch.Tensor, layer: RadixAttention, refresh: _Refresh) -> None:
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)[refresh.query_rows]
        keys = self.base.token_to_kv_pool.get_key_buffer(layer.layer_id)
        scores = attention_scores(
            queries,
            keys,
            self.base.req_to_token_pool.req_to_token,
            refresh.req_pool_indices,
            refresh.seq_lens,
            refresh.num_queries,
            refresh.plan.num_older,
            layer.scaling,
            self._score_buffer(refresh),
        )
        self.index.select(layer.layer_id, scores, refresh.plan, refresh.req_pool_indices)

    def _score_buffer(self, refresh: _Refresh) -> torch.Tensor:
        batch = refresh.seq_lens.shape[0]
        if self.scores is not None:
            return self.scores[:batch]
        shape = (batch, self.index.positions.shape[2], int(refresh.seq_lens.max()))
        return torch.empty(shape, dtype=torch.float32)


class SparseAttention(AttentionBackend):
    """Attention of the draft steps: one query a request, over the index and its tail.

    It writes the provisional K and V of the fed token first, so that later steps of the block see it.
    """

    needs_cpu_seq_lens = False

    def __init__(self, base: AttentionBackend, index: SparseIndex) -> None:
        self.index = index
        self.token_to_kv_pool = base.token_to_kv_pool
        self.req_to_token_pool = base.req_to_token_pool

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Nothing to prepare: the kernel reads the index and the request table itself."""

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs,
    ) -> torch.Tensor:
        if save_kv_cache and k is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc), k, v)
        out = sparse_decode_attention(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            self.token_to_kv_pool.get_value_buffer(layer.layer_id),
            self.req_to_token_pool.req_to_token,
            forward_batch.req_pool_indices,
            forward_batch.seq_lens,
            self.index.positions[layer.layer_id],
            self.index.num_selected,
            self.index.tail_start,
            layer.scaling,
        )
        return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)
