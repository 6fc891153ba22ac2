"""Bench of the sampling kernels: python -m s3r_sglang.kernels.bench.chain_sampling.

Counted traffic is what an implementation must move at least: the logits once and q once, for verification
the logits once plus two rows per request for the residual. The plain variants are what a sampler made of
PyTorch operators and SGLang's chain kernel costs.
"""

from dataclasses import dataclass
from typing import Any

import torch
from s3r_sglang.kernels.bench import _harness
from s3r_sglang.kernels.ops import chain_sampling as ops
from s3r_sglang.kernels.reference import chain_sampling as reference
from sglang.kernels.ops.speculative.reject_sampling import chain_speculative_sampling_triton

OP = "chain_sampling"
NUM_DRAFTS = 6
VOCAB = 151_936  # Qwen3
TOP_K_ALL = 1 << 30
ROTATION = 2  # inputs of one call exceed the L2 cache from B = 64 on
SWEEP = _harness.grid(
    block=[1024, 2048, 4096], num_warps=[4, 8], programs_per_sm=[2, 4, 8], num_stages=[1, 3]
)
VARIANTS = ["draft", "draft plain", "verify", "verify plain"]


@dataclass(frozen=True)
class Shape:
    batch_size: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.batch_size} x {VOCAB} {str(self.dtype).removeprefix('torch.')}"


SHAPES = [Shape(batch, torch.bfloat16) for batch in (1, 8, 64, 256)]


class Inputs:
    """Logits [B, k + 1, V] of a peaked distribution, a draft of a nearby one, and its q."""

    def __init__(self, shape: Shape) -> None:
        batch, like = shape.batch_size, {"device": "cuda", "dtype": shape.dtype}
        self.shape = shape
        logits = 3 * torch.randn(batch * (NUM_DRAFTS + 1), VOCAB, **like)
        self.logits = logits.repeat(ROTATION, 1, 1)
        self.temperatures = torch.ones(batch, device="cuda")
        self.top_ks = torch.full((batch,), TOP_K_ALL, dtype=torch.int32, device="cuda")
        self.seeds = torch.randint(2**62, (batch,), device="cuda")
        self.rounds = torch.full((batch,), 8192, device="cuda")
        self.q = torch.empty(batch, NUM_DRAFTS, VOCAB, device="cuda")
        # Standard deviation 0.5 of the difference accepts about 80% of the drafts.
        self.draft_logits = logits.view(batch, NUM_DRAFTS + 1, VOCAB)[:, :NUM_DRAFTS].clone()
        self.draft_logits += 0.5 * torch.randn_like(self.draft_logits)
        self.tokens = torch.stack([self.draft(ops, 0, j, self.q[:, j]) for j in range(NUM_DRAFTS)], dim=1)

    def draft(self, kernels, turn: int, step: int, q_out: torch.Tensor) -> torch.Tensor:
        logits = self.draft_logits[:, (step + turn) % NUM_DRAFTS]
        return kernels.draft_sample(
            logits, self.temperatures, self.top_ks, self.seeds, self.rounds, step, q_out
        )

    def verify(self, kernels, turn: int):
        return kernels.verify_sample_from_logits(
            self.logits[turn], self.temperatures, self.top_ks, self.tokens, self.q, self.seeds, self.rounds
        )

    def plain_draft(self, turn: int, q_out: torch.Tensor) -> torch.Tensor:
        torch.softmax(self.draft_logits[:, turn] / self.temperatures[:, None], -1, torch.float32, out=q_out)
        return (q_out / torch.empty_like(q_out).exponential_()).argmax(dim=-1)

    def plain_verify(self, turn: int) -> torch.Tensor:
        batch, slots = len(self.tokens), NUM_DRAFTS + 1
        p = torch.softmax(self.logits[turn].view(batch, slots, VOCAB) / self.temperatures[:, None, None], -1)
        chain = torch.arange(batch * slots, dtype=torch.int32, device="cuda").view(batch, slots)
        predicts, accepted = torch.empty_like(chain).flatten(), torch.empty_like(chain)
        coins = torch.rand(batch, slots, device="cuda")
        candidates = torch.cat([self.tokens[:, :1], self.tokens], dim=1)
        chain_speculative_sampling_triton(
            predicts, accepted, accepted[:, 0].clone(), candidates, chain, None, None, coins, coins[:, 0],
            p.float(), self.q, 1.0, 1.0, True,
        )  # fmt: skip
        return predicts


def make_case(inputs: Inputs, variant: str, tiles: dict[str, Any]) -> _harness.Case:
    batch = inputs.shape.batch_size
    row_bytes, q_row_bytes = VOCAB * inputs.logits.element_size(), VOCAB * 4
    q_out = torch.empty(batch, VOCAB, device="cuda")
    draft_bytes = batch * (row_bytes + q_row_bytes)
    verify_bytes = batch * ((NUM_DRAFTS + 2) * row_bytes + q_row_bytes)

    def check_draft():
        want_q = torch.empty_like(q_out)
        tokens, want = inputs.draft(ops, 0, 1, q_out), inputs.draft(reference, 0, 1, want_q)
        torch.testing.assert_close(q_out, want_q, rtol=1e-5, atol=1e-9)
        check_tokens(tokens, want)

    def check_verify():
        (tokens, lens), (want, want_lens) = inputs.verify(ops, 0), inputs.verify(reference, 0)
        check_tokens(tokens.flatten(), want.flatten())
        check_tokens(lens, want_lens)

    calls, traffic, check = {
        "draft": (lambda turn: inputs.draft(ops, turn, turn, q_out), draft_bytes, check_draft),
        "draft plain": (lambda turn: inputs.plain_draft(turn, q_out), draft_bytes, lambda: None),
        "verify": (lambda turn: inputs.verify(ops, turn), verify_bytes, check_verify),
        "verify plain": (lambda turn: inputs.plain_verify(turn), verify_bytes, lambda: None),
    }[variant]

    def with_tiles(function, *args):
        ops._TILES = ops._Tiles(**tiles)
        function(*args)

    timed = [lambda turn=turn: with_tiles(calls, turn) for turn in range(ROTATION)]
    return _harness.Case(timed, traffic, lambda: with_tiles(check))


def check_tokens(got: torch.Tensor, want: torch.Tensor) -> None:
    """Races that tie within float rounding may differ: at most one token in a thousand."""
    differing = (got != want).float().mean().item()
    assert differing <= 1e-3, f"{differing:.2%} of the tokens differ"


BENCH = _harness.Bench(
    OP, SHAPES, Inputs, make_case, VARIANTS, SWEEP, baselines=("draft plain", "verify plain")
)

if __name__ == "__main__":
    _harness.main(BENCH)
