"""Bench of the filtered target distributions: python -m s3r_sglang.kernels.bench.target_probs.

One draft step (B rows) and one verification (7 B rows). Counted traffic is what an implementation must move
at least: the logits once and the result once. The sort is the reference, made of PyTorch operators. FlashInfer
and sgl-kernel renormalise after a softmax, as in SGLang; their law is near ours, not equal to it: of equal
probabilities at the boundary they keep all, and top-p looks at what top-k left.
"""

from dataclasses import dataclass
from typing import Any

import torch
from s3r_sglang.kernels.bench import _harness
from s3r_sglang.kernels.ops import target_probs as ops
from s3r_sglang.kernels.reference.target_probs import target_probs as reference

OP = "target_probs"
VOCAB = 151_936  # Qwen3
TOP_K_ALL = 1 << 30
ROTATION = 8  # 17 MB and more of inputs and results, even of 7 rows
LIMITS = {"top-p": (TOP_K_ALL, 0.95, 0.0), "top-k top-p": (20, 0.95, 0.0), "min-p": (TOP_K_ALL, 1.0, 0.05)}
DEFAULTS = {name: getattr(ops, name) for name in ("BLOCK", "NUM_WARPS", "PIVOTS", "PLACES", "STAGES")}
SWEEP = [
    {"BLOCK": block, "NUM_WARPS": warps, "PIVOTS": pivots, "STAGES": stages}
    for block, warps in ((1024, 8), (2048, 16))
    for pivots in (3, 5, 7)
    for stages in (1, 3)
]


OTHERS = ("sort", "flashinfer", "sgl_kernel")
VARIANTS = [*LIMITS, *(f"{limits} sort" for limits in LIMITS)]
VARIANTS += [f"{limits} {library}" for limits in ("top-p", "top-k top-p") for library in OTHERS[1:]]


@dataclass(frozen=True)
class Shape:
    requests: int
    rows_per_request: int

    def __str__(self) -> str:
        return f"{self.requests * self.rows_per_request} x {VOCAB}"


@dataclass(frozen=True)
class Inputs:
    logits: torch.Tensor  # [ROTATION, requests * rows a request, V] bfloat16
    temperatures: torch.Tensor


SHAPES = [Shape(requests, rows) for requests in (1, 8, 64) for rows in (1, 7)]


def make_inputs(shape: Shape) -> Inputs:
    """A few hundred tokens hold 95% of the mass, on a tail of a language model's length."""
    rows = shape.requests * shape.rows_per_request
    logits = 3 * torch.randn(rows, VOCAB, device="cuda", dtype=torch.bfloat16)
    logits[:, torch.randperm(VOCAB, device="cuda")[:300]] += 12
    return Inputs(logits.repeat(ROTATION, 1, 1), torch.ones(shape.requests, device="cuda"))


def renormalise(library: str, logits: torch.Tensor, top_k: int, top_ps: torch.Tensor) -> torch.Tensor:
    """Softmax, top-k and top-p by the operators of FlashInfer (compiled on first use) or sgl-kernel."""
    if library == "flashinfer":
        from flashinfer.sampling import top_k_renorm_probs as by_rank
        from flashinfer.sampling import top_p_renorm_probs as by_mass
    else:
        from sgl_kernel import top_k_renorm_prob as by_rank
        from sgl_kernel import top_p_renorm_prob as by_mass
    probs = torch.softmax(logits.float(), dim=-1)
    if top_k < TOP_K_ALL:
        probs = by_rank(probs, top_k)
    return by_mass(probs, top_ps)


def make_case(inputs: Inputs, variant: str, tiles: dict[str, Any]) -> _harness.Case:
    limits = next(name for name in reversed(LIMITS) if variant.startswith(name))
    library = variant.removeprefix(limits).strip()
    top_k, top_p, min_p = LIMITS[limits]
    ones = inputs.temperatures
    arguments = (ones, (0 * ones).int() + top_k, top_p * ones, min_p * ones)
    out = torch.empty(inputs.logits.shape[1:], device="cuda")
    repeat = len(out) // len(ones)

    def call(turn: int):
        if library in OTHERS[1:]:
            renormalise(library, inputs.logits[turn], top_k, arguments[2].repeat_interleave(repeat))
        elif library == "sort":
            reference(inputs.logits[turn], *arguments, out)
        else:
            for name, value in (DEFAULTS | tiles).items():
                setattr(ops, name, value)
            ops.target_probs(inputs.logits[turn], *arguments, out)

    def check():
        call(0)
        if library in OTHERS[1:]:
            return
        want = reference(inputs.logits[0], *arguments, torch.empty_like(out))
        # Masses are summed in another order: where one meets top_p, a token more or less may be kept.
        assert (out - want).abs().sum(-1).max() < 1e-3, "probabilities differ"

    traffic = inputs.logits[0].nbytes + out.nbytes
    return _harness.Case([lambda turn=turn: call(turn) for turn in range(ROTATION)], traffic, check)


BENCH = _harness.Bench(
    OP,
    SHAPES,
    make_inputs,
    make_case,
    VARIANTS,
    SWEEP,
    baselines=tuple(v for v in VARIANTS if v.endswith(OTHERS)),
)

if __name__ == "__main__":
    _harness.main(BENCH)
