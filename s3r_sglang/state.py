"""Device memory of the round, allocated once and sized from the configuration."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from s3r_sglang.config import S3RConfig
from s3r_sglang.index import SparseIndex
from s3r_sglang.sglang_symbols import ModelRunner, get_req_to_token_extra_context_len

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RoundState:
    """What the stages of a round share, apart from SGLang's pools.

    For the Qwen3-8B shape, 256 requests, k = 6, s = 0.05 and 40K tokens of context: index 0.60 GB, scores
    0.34 GB, normalisers 8 MB.

    Fields:
        config: the effective configuration.
        index: the sparse index of every request slot.
        block_size: k + 1.
        num_slots: request slots, the padding slot 0 included.
        draft_lse: [layers, B, k + 1, Hq] fp32, natural log-sum-exp of each draft query over its index; written
            by the draft steps, read by fused verification. The last query of a block is not drafted: -inf, "do
            not count", for ever.
        max_context: positions of a request at most.
        scores: [B, Hkv, S] fp32 with S at least `max_context`, refresh scores of the layer that is running. None
            on a CPU, where references allocate what they need.
        fused: whether verification scores the index while it attends (see `s3r_sglang.attention`).
    """

    config: S3RConfig
    index: SparseIndex
    block_size: int
    num_slots: int
    draft_lse: torch.Tensor
    max_context: int
    scores: torch.Tensor | None
    fused: bool

    @classmethod
    def allocate(cls, config: S3RConfig, model_runner: ModelRunner) -> RoundState:
        model, device = model_runner.model_config, torch.device(model_runner.device)
        server_args = model_runner.server_args
        max_batch = server_args.max_running_requests
        max_context = model.context_len + get_req_to_token_extra_context_len(server_args)
        num_kv_heads = model.get_num_kv_heads(model_runner.ps.tp_size)
        num_heads = model.num_attention_heads // model_runner.ps.tp_size
        layers, block_size = model.num_hidden_layers, config.draft_length + 1
        on_gpu = device.type == "cuda"
        # Selection reads 16 bytes at a time only of rows whose length is known to be a multiple of 16.
        row = -(-max_context // 16) * 16
        shape = (layers, max_batch, block_size, num_heads)
        return cls(
            config=config,
            index=SparseIndex(config, layers, max_batch + 1, num_kv_heads, max_context, device),
            block_size=block_size,
            num_slots=max_batch + 1,
            draft_lse=torch.full(shape, -torch.inf, dtype=torch.float32, device=device),
            max_context=max_context,
            scores=(
                torch.empty((max_batch, num_kv_heads, row), dtype=torch.float32, device=device)
                if on_gpu
                else None
            ),
            fused=on_gpu
            and not config.exact_scores
            and block_fits_a_tile(block_size, num_heads // num_kv_heads),
        )

    @property
    def nbytes(self) -> int:
        return self.index.nbytes + self.draft_lse.nbytes + (0 if self.scores is None else self.scores.nbytes)

    def check_fits(self, req_to_token: torch.Tensor) -> None:
        """Raise RuntimeError if SGLang's request table has more slots or longer rows than this state."""
        slots, context = req_to_token.shape
        longest = context if self.scores is None else self.max_context
        if slots > self.num_slots or context > longest:
            raise RuntimeError(
                f"S3R sized its state for {self.num_slots} request slots and {longest} positions, but SGLang "
                f"allocated {slots} and {context}: set --max-running-requests and --context-length explicitly."
            )


def block_fits_a_tile(block_size: int, group: int) -> bool:
    """Whether fused verification can hold a block's queries, for the `group` query heads of a KV head.

    If not, which takes a long draft (k > 31 for 4 heads, k > 15 for 8), the exact passes serve instead.
    """
    from s3r_sglang.kernels.ops.verify_attention import MAX_ROWS

    if block_size * group <= MAX_ROWS:
        return True
    logger.warning(
        "S3R: the index is scored after attention, which is slower: a draft of %d tokens for %d query heads per "
        "KV head exceeds the verify kernel's tile. --speculative-num-steps up to %d would fit.",
        block_size - 1,
        group,
        MAX_ROWS // group - 1,
    )
    return False
