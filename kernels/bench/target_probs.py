"""Bench of the filtered target distributions: python -m s3r_sglang.kernels.bench.target_probs.

One draft step (B rows) and one verification (7 B rows). Counted traffic is what an implementation must move
at least: the logits once and the result once. The sort is the reference, made of PyTorch operators.
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
LIMITS = {"top-p": (TOP_K_ALL, 0.95, 0.0), "top-k top-p": (20, 0.95, 0.0), "min-p": (TOP_K_ALL, 1.0, 0.05)}
SWEEP = [
    {"BLOCK": block, "NUM_WARPS": warps, "PIVOTS": pivots}
    for block, warps in ((1024, 8), (2048, 16))
    for pivots in (3, 5, 7)
]


@dataclass(frozen=True)
class Inputs:
    requests: int
    logits: torch.Tensor  # [requests * rows a request, V] bfloat16
    temperatures: torch.Tensor

    def __str__(self) -> str:
        return f"{len(self.logits)} x {VOCAB}"


def make_inputs(requests: int, rows_per_request: int) -> Inputs:
    """Logits of which about 100 tokens hold 95% of the mass, as a language model's do on average."""
    logits = 3 * torch.randn(requests * rows_per_request, VOCAB, device="cuda", dtype=torch.bfloat16)
    logits[:, torch.randperm(VOCAB, device="cuda")[:300]] += 12
    return Inputs(requests, logits, torch.ones(requests, device="cuda"))


def make_case(inputs: Inputs, variant: str, tiles: dict[str, Any]) -> _harness.Case:
    top_k, top_p, min_p = LIMITS[variant.removesuffix(" sort")]
    ones = inputs.temperatures
    arguments = (inputs.logits, ones, (0 * ones).int() + top_k, top_p * ones, min_p * ones)
    out = torch.empty(inputs.logits.shape, device="cuda")
    target_probs = reference if variant.endswith("sort") else ops.target_probs

    def call():
        for name, value in tiles.items():
            setattr(ops, name, value)
        target_probs(*arguments, out)

    def check():
        call()
        want = reference(*arguments, torch.empty_like(out))
        # Masses are summed in another order: where one meets top_p, a token more or less may be kept.
        assert (out - want).abs().sum(-1).max() < 1e-3, "probabilities differ"

    traffic = inputs.logits.nbytes + out.nbytes
    return _harness.Case([call], traffic, check)


def main() -> None:
    args = _harness.sampling_arguments(OP)
    ceiling = _harness.copy_ceiling()
    print(f"{OP} on {torch.cuda.get_device_name()}, device copy {ceiling:.2f} TB/s")
    defaults = {name: getattr(ops, name) for name in SWEEP[0]}
    rows = []
    for requests in args.batch_sizes or (1, 8, 64):
        for rows_per_request in (1, 7):
            inputs = make_inputs(requests, rows_per_request)
            for variant in LIMITS:
                choices = [(variant, tiles) for tiles in (SWEEP if args.sweep else [defaults])]
                for name, tiles in [*choices, (f"{variant} sort", {})]:
                    rows.append(_harness.measure(inputs, name, tiles, make_case(inputs, name, tiles)))
                    _harness.print_row(rows[-1], ceiling)
    _harness.finish(OP, rows, ceiling, args.json)


if __name__ == "__main__":
    main()
