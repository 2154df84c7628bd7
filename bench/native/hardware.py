"""What NVML shows round a killed process."""

from __future__ import annotations

from typing import Any

from bench.native.tables import table


def section(recording: dict[str, Any]) -> str:
    """Latency of NVML's answers, time from KILL to baseline, and receipts taken on the card."""
    calls = recording["latency_ns"]
    killed = [
        [
            f"{each['held_gib']} GiB",
            f"{each['holding']:,} B",
            "yes" if each["own_pid_listed"] else "no",
            f"{each['reaped_ns'] / 1e6:.0f} ms",
            f"{each['baseline_ns'] / 1e6:.0f} ms" if each["baseline_ns"] else "never",
        ]
        for each in recording["killed"]
    ]
    receipts = [
        [
            each["receipt"]["status"],
            each["exit"],
            len(each["receipt"]["swept"]),
            f"{sum(probe['duration_ms'] for probe in each['receipt']['probes'])} ms",
            f"{each['wall_s']:.1f} s",
        ]
        for each in recording["receipts"]
    ]
    return "\n\n".join(
        [
            "## Cleanup on a real card",
            f"{recording['name']}, driver {recording['driver']}: {recording['total']:,} B in all, "
            f"{recording['idle']:,} B used when idle.",
            table(
                ["NVML call", "median", "p99", "longest"],
                [[name, *(f"{value / 1e3:.1f} us" for value in each.values())] for name, each in calls.items()],
            ),
            "A process that held memory was killed; its memory was back at the idle baseline when it was reaped:",
            table(["held", "used while held", "its pid listed", "reaped after", "baseline after"], killed),
            "`qualify exec --gpu` round a command that ends by itself, and round one killed at its time limit:",
            table(["receipt", "exit", "swept", "all probes together", "whole command"], receipts),
        ]
    )
