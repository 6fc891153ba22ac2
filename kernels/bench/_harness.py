"""What the attention benches share: shapes, paged inputs, timing in a CUDA graph, table and JSON.

A bench first checks the op against its reference on the very inputs it times, and reports no time for a
wrong result. Times are medians over replays of a CUDA graph that runs the op on rotating inputs, as the
layers of a model do, so gaps between launches count and the L2 cache (60 MB on an H200) does not help. The
graph holds hundreds of launches: starting one and writing the flushed cache back made each of eight launches
of 31 us look 0.6 us longer.
"""

import argparse
import itertools
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton.testing
from triton.runtime.errors import OutOfResources

Row = dict[str, Any]

ROTATION = 36  # layers of Qwen3-8B
# Relative error of a bfloat16 result (Frobenius norm): the output and the softmax weights are each rounded
# to 8 bits, about 2e-3 apiece.
MAX_RELATIVE_ERROR = 1e-2


@dataclass(frozen=True)
class Shape:
    batch_size: int
    seq_len: int
    num_kv_heads: int
    group: int
    head_dim: int = 128

    def __str__(self) -> str:
        heads = f"{self.num_kv_heads * self.group}/{self.num_kv_heads}x{self.head_dim}"
        return f"{self.batch_size}x{self.seq_len} {heads}"


SHAPES = [
    Shape(batch_size, seq_len, *heads)
    for heads in ((8, 4), (2, 6))  # Qwen3-8B, Qwen2.5-1.5B
    for batch_size, seq_len in ((64, 8192), (32, 16384), (16, 32768), (1, 8192))
]
SMALL = Shape(3, 300, 2, 4)


@dataclass(frozen=True, eq=False)
class PagedInputs:
    """Bfloat16 caches with every position of every request in a random pool row (page size 1)."""

    shape: Shape
    q: torch.Tensor  # [ROTATION, B, Q, Hq, D]
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    req_to_token: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor

    @property
    def scale(self) -> float:
        return self.shape.head_dim**-0.5


@dataclass(frozen=True)
class Case:
    """One configuration of an op: a call per rotating input, its counted traffic, and its check."""

    calls: list[Callable[[], Any]]
    bytes_per_call: int
    check: Callable[[], None]  # raises AssertionError


@dataclass(frozen=True)
class Bench:
    """What a bench module offers.

    Attributes:
        op: name of the op and of the modules.
        shapes: what to time; `str` of a shape names it in the tables.
        make_inputs: inputs of a shape.
        make_case: the case of (inputs, variant, tiles).
        variants: names of what is compared.
        sweep: tile choices.
        baselines: variants without tiles to sweep.
        small: a shape that is checked before anything is timed.
    """

    op: str
    shapes: list[Any]
    make_inputs: Callable[[Any], Any]
    make_case: Callable[[Any, str, dict[str, Any]], Case]
    variants: list[str]
    sweep: list[dict[str, Any]]
    baselines: tuple[str, ...] = ()
    small: Any = None


def paged_inputs(shape: Shape, num_queries: int) -> PagedInputs:
    rows = shape.batch_size * shape.seq_len
    cache = (rows, shape.num_kv_heads, shape.head_dim)
    heads = shape.num_kv_heads * shape.group
    like = {"device": "cuda", "dtype": torch.bfloat16}
    return PagedInputs(
        shape=shape,
        # Logits of standard deviation 2: a softmax neither flat nor one-hot.
        q=2 * torch.randn(ROTATION, shape.batch_size, num_queries, heads, shape.head_dim, **like),
        k_cache=torch.randn(cache, **like),
        v_cache=torch.randn(cache, **like),
        req_to_token=torch.randperm(rows, device="cuda").view(shape.batch_size, -1).int(),
        req_pool_indices=torch.arange(shape.batch_size, device="cuda"),
        seq_lens=torch.full((shape.batch_size,), shape.seq_len, device="cuda"),
    )


def assert_close(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    got, want = got.double(), want.double()
    error = ((got - want).norm() / want.norm()).item()
    assert error <= MAX_RELATIVE_ERROR, f"{name}: relative error {error:.2e}"


def copy_ceiling() -> float:
    """TB/s (read + written) of a device copy of 2 GiB."""
    source = torch.empty(2**30, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    milliseconds = triton.testing.do_bench(lambda: target.copy_(source), return_mode="median")
    return 2 * source.nbytes / milliseconds / 1e9


def microseconds_per_call(calls: list[Callable[[], Any]]) -> float:
    """Median device time of a call within a CUDA graph of all of them, many times over."""

    def run_all():
        for call in calls:
            call()

    return triton.testing.do_bench_cudagraph(run_all, return_mode="median") * 1e3 / len(calls)


def grid(**options: Iterable[Any]) -> list[dict[str, Any]]:
    """All combinations of tile options."""
    return [dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())]


def measure(shape: object, variant: str, tiles: dict[str, Any], case: Case) -> Row:
    row = {"shape": str(shape), "variant": variant, "tiles": tiles, "status": "ok"}
    try:
        case.check()
        row["us"] = microseconds_per_call(case.calls)
        row["tb_per_s"] = case.bytes_per_call / row["us"] / 1e6
    except AssertionError as error:
        row["status"] = f"WRONG: {error}"
    except OutOfResources:
        row["status"] = "tile does not fit"
    return row


def print_row(row: Row, ceiling: float) -> None:
    tiles = " ".join(f"{name}={value}" for name, value in row["tiles"].items()) or "default"
    result = row["status"]
    if "us" in row:
        share = row["tb_per_s"] / ceiling
        result = f"{row['us']:9.1f} us {row['tb_per_s']:6.2f} TB/s {share:5.0%} of copy"
    print(f"{row['shape']:>20}  {row['variant']:<12} {result}  {tiles}", flush=True)


def run(bench: Bench, shapes: list[Any], variants: list[str], sweep: bool, ceiling: float) -> list[Row]:
    """Check and time; prints the rows as they come, best tiles first, and returns them."""
    print(f"{bench.op} on {torch.cuda.get_device_name()}, device copy {ceiling:.2f} TB/s")
    if bench.small is not None:
        small = bench.make_inputs(bench.small)
        for variant in variants:
            bench.make_case(small, variant, {}).check()
    rows = []
    for shape in shapes:
        inputs = bench.make_inputs(shape)
        for variant in variants:
            choices = [{}, *(bench.sweep if sweep and variant not in bench.baselines else [])]
            found = [
                measure(shape, variant, tiles, bench.make_case(inputs, variant, tiles)) for tiles in choices
            ]
            for row in sorted(found, key=lambda row: row.get("us", float("inf"))):
                print_row(row, ceiling)
            rows += found
        del inputs
    return rows


def report(op: str, rows: list[Row], ceiling: float) -> dict[str, Any]:
    return {"op": op, "device": torch.cuda.get_device_name(), "copy_tb_per_s": ceiling, "rows": rows}


def refuse_wrong(rows: list[Row]) -> None:
    """SystemExit if a result was wrong: its times would say nothing."""
    wrong = [row for row in rows if row["status"].startswith("WRONG")]
    if wrong:
        raise SystemExit("\n".join(f"{row['shape']} {row['variant']}: {row['status']}" for row in wrong))


def main(bench: Bench) -> None:
    """Command line of one bench."""
    parser = argparse.ArgumentParser(description=f"Check and time {bench.op}.")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--sweep", action="store_true", help="time every tile choice, best first")
    parser.add_argument("--shapes", nargs="*", default=[""], help="only those that begin so, such as 64x8192")
    parser.add_argument("--variants", nargs="*", default=bench.variants, choices=bench.variants)
    args = parser.parse_args()
    ceiling = copy_ceiling()
    shapes = [shape for shape in bench.shapes if str(shape).startswith(tuple(args.shapes))]
    rows = run(bench, shapes, args.variants, args.sweep, ceiling)
    if args.json:
        args.json.write_text(json.dumps(report(bench.op, rows, ceiling), indent=1))
    refuse_wrong(rows)
