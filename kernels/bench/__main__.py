"""All kernel benches, as tables: python -m s3r_sglang.kernels.bench --out FOLDER (about three minutes)."""

import argparse
import json
from pathlib import Path

import torch
from s3r_sglang.kernels.bench import (
    _harness,
    attention_scores,
    chain_sampling,
    kv_rows,
    select_positions,
    sparse_decode_attention,
    target_probs,
    verify_attention,
)

BENCHES = [
    module.BENCH
    for module in (
        sparse_decode_attention,
        verify_attention,
        attention_scores,
        select_positions,
        chain_sampling,
        target_probs,
        kv_rows,
    )
]


def table(bench: _harness.Bench, rows: list[_harness.Row], ceiling: float) -> str:
    """Markdown: a line per shape and variant."""
    lines = [
        f"## {bench.op}",
        "",
        "| shape | variant | µs | TB/s | of a device copy |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        result = f"{row['us']:.1f} | {row['tb_per_s']:.2f} | {row['tb_per_s'] / ceiling:.0%}"
        lines.append(f"| {row['shape']} | {row['variant']} | {result} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Check and time all kernels with the tiles they use.")
    parser.add_argument("--out", type=Path, required=True, help="folder for kernels.md and kernels.json")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    ceiling = _harness.copy_ceiling()
    reports, tables = [], []
    for bench in BENCHES:
        rows = _harness.run(bench, bench.shapes, bench.variants, False, ceiling)
        _harness.refuse_wrong(rows)
        reports.append(_harness.report(bench.op, rows, ceiling))
        tables.append(table(bench, rows, ceiling))
        (out / "kernels.json").write_text(json.dumps(reports, indent=1))
    head = (
        f"# Kernels on {torch.cuda.get_device_name()}\n\n`python -m s3r_sglang.kernels.bench --out FOLDER`: each "
        "result is compared with its reference first. Medians within a CUDA graph; what traffic is counted, each "
        f"bench says. A device copy moves {ceiling:.2f} TB/s."
    )
    (out / "kernels.md").write_text("\n\n".join([head, *tables]) + "\n")


if __name__ == "__main__":
    main()
