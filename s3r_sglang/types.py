"""Records that cross a stage boundary of the round, and who fills which field.

Notation of this package: a request has a committed prefix of L + 1 tokens. Positions 0 … L-1 have dense KV
(L is `seq_lens` of a speculative decode batch in SGLang); the token at position L, the last bonus token,
has none yet. One round drafts k tokens, verifies k + 1 positions and emits 1 … k + 1 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from s3r_sglang.sglang_symbols import DFlashVerifyInput, SpecInput, SpecInputType


@dataclass
class S3RDraftInput(SpecInput):
    """What one round hands to the next (SGLang carries it as `batch.spec_info`).

    Under overlap scheduling SGLang relays `bonus_tokens` through its future map, indexed by request slot,
    so between rounds only `future_indices` follows the batch; without overlap the tensors follow it.

    Fields:
        bonus_tokens: [B] int64, the last committed token of each request. Filled by verify or prefill.
        new_seq_lens: [B] int64, positions with dense KV after the round.
        future_indices: [B] int64, request slots. Filled by SGLang's scheduler.
    """

    bonus_tokens: torch.Tensor
    new_seq_lens: torch.Tensor
    future_indices: torch.Tensor | None = None
    # The future map of SGLang reads these of every draft input; a drafter without hidden states has none.
    topk_p: None = None
    topk_index: None = None
    hidden_states: None = None

    def __post_init__(self) -> None:
        super().__init__(SpecInputType.EAGLE_DRAFT)
        self.num_tokens_per_req = 1
        self.num_tokens_for_logprob_per_req = 1

    def filter_batch(self, new_indices: torch.Tensor, new_indices_cpu: list[int] | None = None) -> None:
        if self.future_indices is not None:
            self.future_indices = self.future_indices[new_indices]
            return
        self.bonus_tokens = self.bonus_tokens[new_indices]
        self.new_seq_lens = self.new_seq_lens[new_indices]

    def merge_batch(self, other: S3RDraftInput) -> None:
        if self.future_indices is not None:
            self.future_indices = torch.cat([self.future_indices, other.future_indices])
            return
        self.bonus_tokens = torch.cat([self.bonus_tokens, other.bonus_tokens])
        self.new_seq_lens = torch.cat([self.new_seq_lens, other.new_seq_lens])


@dataclass
class S3RVerifyInput(SpecInput):
    """Metadata of the verify forward: a chain of `draft_token_num` = k + 1 tokens for each request.

    Fields:
        draft_token: [B * (k + 1)] int64, bonus token and drafts of each request.
        positions: [B * (k + 1)] int64.
        draft_token_num: k + 1.
        custom_mask: always None; a chain needs the causal mask alone. Backends look it up by this name.
    """

    draft_token: torch.Tensor | None
    positions: torch.Tensor | None
    draft_token_num: int
    custom_mask: None = None
    topk: int = 1
    ragged_verify_layout: None = None

    def __post_init__(self) -> None:
        super().__init__(SpecInputType.DFLASH_VERIFY)
        self.num_tokens_per_req = self.draft_token_num
        self.num_tokens_for_logprob_per_req = self.draft_token_num

    # FlashInfer asks the spec input for its plan; DFlash verifies chains of one length too.
    generate_attn_arg_prefill = DFlashVerifyInput.generate_attn_arg_prefill


@dataclass(frozen=True)
class Block:
    """The positions L … L + k of every request of a round, and where their KV goes.

    Fields (filled by the worker before drafting):
        req_pool_indices: [B] int64 request slots.
        start: [B] int64, L of each request.
        positions: [B, k + 1] int64.
        cache_locs: [B, k + 1] int64 rows of the KV pool.
        bonus_tokens: [B] int64, the tokens at position L.
        seeds: [B] int64, the requests' random seeds.
    """

    req_pool_indices: torch.Tensor
    start: torch.Tensor
    positions: torch.Tensor
    cache_locs: torch.Tensor
    bonus_tokens: torch.Tensor
    seeds: torch.Tensor


@dataclass(frozen=True)
class Draft:
    """Filled by the draft stage.

    Fields:
        tokens: [B, k] int64.
        probs: [B, k, V] fp32, the very tensors that `tokens` were sampled from (q of the paper, Eq. 3).
    """

    tokens: torch.Tensor
    probs: torch.Tensor
