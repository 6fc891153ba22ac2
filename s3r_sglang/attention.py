"""The two attention backends of a round, over one model and one KV pool.

`SparseAttention` serves the draft steps. `DenseAttention` wraps the backend that SGLang chose (fa3, FlashInfer,
Triton; plain PyTorch on a CPU), serves prefill and verification, and refreshes the sparse index of every layer
from the queries it has just attended with.

The refresh scores a position by its mean attention weight, which needs every query's softmax normaliser before
K is read. There are two ways. Exact: attend, then read K twice more, once for the normalisers and once for the
scores. Fused: the draft step of the same token, layer and head has just computed a normaliser over the index,
which holds most of the attention mass; with it the verify kernel writes the scores while it attends. The
selection never changes what is sampled, so this is a question of speed and acceptance alone. On an H200, 64
requests of 8K tokens and the heads of Qwen3-8B, a layer takes 493 us in FA3 alone, 518 us fused, and 1,089 us
with the exact passes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from s3r_sglang.index import Plan
from s3r_sglang.kernels import attention_scores, sparse_decode_attention, verify_attention
from s3r_sglang.sglang_symbols import AttentionBackend, ForwardBatch, KVWriteLoc, RadixAttention
from s3r_sglang.state import RoundState


@dataclass(frozen=True)
class _Refresh:
    """What all layers of one dense forward share.

    Fields:
        plan: the split of every request's budget.
        query_rows: [B, Q] int64 rows of the packed queries, right-aligned; absent queries have any row.
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

    The index is made of the positions that are certain to be committed: all of the prompt after a prefill,
    and 0 … L after a verification. That holds whatever the sampler accepts, so each layer selects at once,
    inside the forward, and scores need memory for a single layer. Accepted drafts are in the tail that every
    draft query reads.

    Args:
        base: backend of the model runner.
        state: holds the index to refresh, and what the refresh needs.
    """

    def __init__(self, base: AttentionBackend, state: RoundState) -> None:
        self.base = base
        self.state = state
        self.index = state.index
        # Lengths on the host would make it wait for every round (FlashInfer plans with them); fused
        # verification has no use for them, and a prefill brings its own.
        self.needs_cpu_seq_lens = base.needs_cpu_seq_lens and not state.fused
        self.prefill_attention_backend_str = base.prefill_attention_backend_str
        self.decode_attention_backend_str = base.decode_attention_backend_str
        self._refresh: _Refresh | None = None

    def __getattr__(self, name: str):
        return getattr(self.base, name)

    # ---- metadata: the base backend's, and the plan of the refresh as graph-recordable tensor operations

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        if not self._is_fused(forward_batch):
            self.base.init_forward_metadata(forward_batch)
        self._refresh = self._plan(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        if not self._is_fused(forward_batch):
            self.base.init_forward_metadata_out_graph(forward_batch, in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        if not self._is_fused(forward_batch):
            self.base.init_forward_metadata_in_graph(forward_batch)
        self._refresh = self._plan(forward_batch)

    def _is_fused(self, forward_batch: ForwardBatch) -> bool:
        return self.state.fused and forward_batch.forward_mode.is_target_verify()

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
        rows = torch.arange(start.shape[0] * self.state.block_size, device=start.device)
        return _Refresh(
            plan=self.index.begin_refresh(forward_batch.req_pool_indices, start + 1),
            query_rows=rows.view(-1, self.state.block_size),
            num_queries=torch.full_like(start, self.state.block_size, dtype=torch.int32),
            seq_lens=(start + self.state.block_size).to(torch.int32),
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

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs,
    ) -> torch.Tensor:
        if self._is_fused(forward_batch):
            _refuse_options(layer, kwargs)
            if save_kv_cache and k is not None:
                self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc), k, v)
            return self._verify_layer(q, layer, self._refresh)
        out = self.base.forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        if self._refresh is not None:
            self._refresh_layer(q, layer, self._refresh)
        return out

    def _verify_layer(self, q: torch.Tensor, layer: RadixAttention, refresh: _Refresh) -> torch.Tensor:
        """Attend and score in one pass, then select."""
        batch = refresh.seq_lens.shape[0]
        scores = self._score_buffer(refresh)
        out = verify_attention(
            q.view(batch, self.state.block_size, layer.tp_q_head_num, layer.qk_head_dim),
            self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            self.token_to_kv_pool.get_value_buffer(layer.layer_id),
            self.req_to_token_pool.req_to_token,
            refresh.req_pool_indices,
            refresh.seq_lens,
            layer.scaling,
            self.state.draft_lse[layer.layer_id, :batch],
            refresh.plan.num_older,
            scores,
        )
        self.index.select(layer.layer_id, scores, refresh.plan, refresh.req_pool_indices)
        return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)

    def _refresh_layer(self, q: torch.Tensor, layer: RadixAttention, refresh: _Refresh) -> None:
        """Score by the exact rule, then select."""
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)[refresh.query_rows]
        scores = attention_scores(
            queries,
            self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            self.req_to_token_pool.req_to_token,
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
        if self.state.scores is not None:
            return self.state.scores[:batch]
        shape = (batch, self.index.positions.shape[2], int(refresh.seq_lens.max()))
        return torch.empty(shape, dtype=torch.float32, device=refresh.seq_lens.device)


class SparseAttention(AttentionBackend):
    """Attention of the draft steps: one query a request, over the index and its tail.

    It writes the provisional K and V of the fed token on the way, so that later steps of the block see it.

    Args:
        base: backend of the model runner, for its pools.
        state: holds the index to read and the normalisers to write.

    Attributes:
        step: number of the draft step that is running; the drafter sets it.
    """

    needs_cpu_seq_lens = False

    def __init__(self, base: AttentionBackend, state: RoundState) -> None:
        self.index = state.index
        self.draft_lse = state.draft_lse
        self.token_to_kv_pool = base.token_to_kv_pool
        self.req_to_token_pool = base.req_to_token_pool
        self.step = 0

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
        _refuse_options(layer, kwargs)
        new_k = new_v = None
        # A layer that shares another's KV, or has stored it with its rotary embedding, brings none to store.
        if save_kv_cache and k is not None and v is not None:
            new_k = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim)
            new_v = v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
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
            lse=self.draft_lse[layer.layer_id, : q.shape[0], self.step],
            new_k=new_k,
            new_v=new_v,
        )
        return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)


def _refuse_options(layer: RadixAttention, options: dict[str, object]) -> None:
    """Raise NotImplementedError if the model passes its attention something (sinks, say) that our kernels lack."""
    unknown = sorted(name for name, value in options.items() if value is not None)
    if unknown:
        raise NotImplementedError(
            f"layer {layer.layer_id} calls its attention with {', '.join(unknown)}, which self-sparse decoding "
            "does not support: choose a model with plain causal attention"
        )
