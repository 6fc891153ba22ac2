"""Philox4x32-10 random words in Triton, bit-equal to `s3r_sglang.kernels.reference.philox`.

The device functions are what the sampling kernels draw from; `random_words` exposes them for testing.
"""

import torch
import triton
import triton.language as tl
from s3r_sglang.kernels.ops._checks import check_device, check_vectors, require

_BELOW_ONE = tl.constexpr(1.0 - 2.0**-24)  # the largest float32 below one
_WORD_TO_UNIT = tl.constexpr(2.0**-32)


@triton.jit
def words_of_lanes(seed, round_, step, stream, first_lane, BLOCK: tl.constexpr):
    """Words of lanes first_lane .. first_lane + BLOCK - 1 as [BLOCK] uint32; first_lane % 4 == 0.

    One Philox call serves four neighbouring lanes: with a call per lane the draft kernel would be bound by
    integer multiplication, not by memory.
    """
    counters = first_lane // 4 + tl.arange(0, BLOCK // 4)
    zeros = counters * 0
    w0, w1, w2, w3 = tl.philox(seed, counters, zeros + round_.to(tl.int32), zeros + step, zeros + stream)
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def exponentials_of_lanes(seed, round_, step, stream, first_lane, BLOCK: tl.constexpr):
    """Standard exponentials -log(1 - U) of BLOCK lanes as fractions (numerator, denominator).

    Accurate for small U, where races are decided: 1 - U rounds, and U / (1 - (1 - U)) undoes the rounding
    (Kahan's log1p; Triton has no log1p outside libdevice, which its interpreter lacks). A fraction, because
    the race divides as well: a division takes about ten instructions.
    """
    words = words_of_lanes(seed, round_, step, stream, first_lane, BLOCK)
    uniform = tl.minimum((words.to(tl.float32) + 0.5) * _WORD_TO_UNIT, _BELOW_ONE)
    survival = 1.0 - uniform
    rounded = 1.0 - survival
    exact = rounded > 0.0
    return uniform * tl.where(exact, -tl.log(survival), 1.0), tl.where(exact, rounded, 1.0)


@triton.jit
def coin(seed, round_, step, stream):
    """One uniform float32 in [0, 1) from lane 0."""
    zero = round_.to(tl.int32) * 0
    word, _, _, _ = tl.philox(seed, zero, round_.to(tl.int32), zero + step, zero + stream)
    return tl.minimum(word.to(tl.float32) * _WORD_TO_UNIT, _BELOW_ONE)


@triton.jit
def _random_words_kernel(seeds, rounds, steps, out, num_lanes, stream, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    first_lane = tl.program_id(1) * BLOCK
    seed, round_, step = tl.load(seeds + row), tl.load(rounds + row), tl.load(steps + row)
    words = words_of_lanes(seed, round_, step.to(tl.int32), stream, first_lane, BLOCK)
    lanes = first_lane + tl.arange(0, BLOCK)
    tl.store(out + row.to(tl.int64) * num_lanes + lanes, words.to(tl.int64), mask=lanes < num_lanes)


def random_words(
    seeds: torch.Tensor, rounds: torch.Tensor, steps: torch.Tensor | int, stream: int, num_lanes: int
) -> torch.Tensor:
    """One random word per request and lane; see the reference of the same name.

    Raises:
        ValueError: seeds, rounds or steps are not contiguous integer vectors of one length.
        RuntimeError: CPU tensors without Triton's interpreter.
    """
    require(seeds.dtype == torch.int64, f"random_words: seeds must be int64, got {seeds.dtype}")
    steps = torch.as_tensor(steps, device=seeds.device, dtype=torch.int64).expand_as(seeds).contiguous()
    check_device("philox.random_words", seeds, rounds, steps)
    check_vectors("random_words", len(seeds), seeds=seeds, rounds=rounds, steps=steps)
    out = torch.empty(len(seeds), num_lanes, dtype=torch.int64, device=seeds.device)
    block = 1024
    grid = (len(seeds), triton.cdiv(num_lanes, block))
    _random_words_kernel[grid](seeds, rounds, steps, out, num_lanes, int(stream), BLOCK=block)
    return out
