"""Speed and memory of the Megatron model."""

from __future__ import annotations

from typing import Any

from bench.native.tables import table

GIB = 1 << 30


def section(recording: dict[str, Any], *, adapters: bool) -> str:
    """Sizes, adapter overhead where ``adapters``, and retained memory, as far as they were recorded."""
    sections = {name: each["result"] for name, each in recording["sections"].items()}
    peak = recording["matrix_operations_per_s"]
    parts = [
        "## Speed and memory of the Megatron model",
        f"{recording['card']}, torch {recording['torch']}; BF16, full recompute of one layer, adapters of rank 1, "
        "forward and backward, two equal sequences. An 8192 x 8192 x 8192 BF16 product ran at "
        f"{peak / 1e12:.0f} TFLOP/s in the same run; the share counts the operations that the step needs at least.",
        _sizes([row for name, rows in sections.items() if name.startswith("sizes") for row in _rows(rows)], peak),
    ]
    if adapters and "overhead" in sections:
        parts.append(_overhead(sections["overhead"]))
    kept = [row for rows in sections.values() for row in _rows(rows) if "kept" in row]
    if kept:
        parts.append(_retention(kept))
    failed = {name: rows["failed"] for name, rows in sections.items() if isinstance(rows, dict) and "failed" in rows}
    parts.extend(f"Section `{name}` failed: {reason}." for name, reason in failed.items())
    return "\n\n".join(parts)


def _rows(result: Any) -> list[dict[str, Any]]:  # noqa: ANN401 - a section's result has its own shape
    return [row for row in result if isinstance(row, dict)] if isinstance(result, list) else []


def _sizes(rows: list[dict[str, Any]], peak: float) -> str:
    return table(
        [
            "layers", "tokens", "first step", "step", "tokens/s", "share of matrix peak", "retained", "peak allocated",
            "peak reserved", "outside PyTorch",
        ],
        [
            [
                row["layers"],
                f"{row['tokens']:,}",
                f"{row['first_step_s']:.1f} s",
                f"{row['step_s']:.3f} s",
                f"{row['tokens'] / row['step_s']:,.0f}",
                f"{100 * row['operations'] / row['step_s'] / peak:.1f} %",
                *(
                    f"{row[key] / GIB:.2f} GiB"
                    for key in ("retained", "peak_allocated", "peak_reserved", "outside_pytorch")
                ),
            ]
            for row in rows
            if "step_s" in row and "operations" in row
        ],
    )  # fmt: skip


def _overhead(rows: list[dict[str, Any]]) -> str:
    base = next(row["step_s"] for row in rows if row["variant"] == "frozen base")
    return "\n\n".join(
        [
            f"Adapters beside the frozen base, 4 layers, {rows[0]['tokens']:,} tokens, interleaved, medians:",
            table(
                ["variant", "step", "against the frozen base"],
                [[row["variant"], f"{row['step_s']:.4f} s", f"{row['step_s'] / base:.3f}"] for row in rows],
            ),
        ]
    )


def _retention(rows: list[dict[str, Any]]) -> str:
    return "\n\n".join(
        [
            "Bytes retained per token between forward and backward. Megatron's token dispatcher keeps the routing of "
            "each layer's last batch (probabilities 1,024 B, map 256 B, row map 2,052 B per token at 256 experts) "
            "beside the 4,096 B of the recompute boundary. Releasing it after each layer's forward changes nothing "
            "that is computed:",
            table(
                ["layers", "tokens", "routing kept", "routing released", "saved"],
                [
                    [
                        row["layers"],
                        f"{row['tokens']:,}",
                        f"{row['kept'] / row['tokens']:,.0f} B",
                        f"{row['released'] / row['tokens']:,.0f} B",
                        f"{100 * (1 - row['released'] / row['kept']):.0f} %",
                    ]
                    for row in rows
                ],
            ),
        ]
    )
