"""What was measured, for people: rich tables."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from pagefleet.bench.workloads import TITLES

if TYPE_CHECKING:
    from pagefleet.bench.compare import Row, Series
    from pagefleet.bench.phases import PhaseCost
    from pagefleet.bench.roofline import OpCost, Profile
    from pagefleet.bench.static_batching import BatchingResult

WEIGHTS_TITLES: Mapping[str, str] = {"q8_0": "Q8_0", "auto": "file as it is"}


def comparison_table(rows: Sequence[Row], engines: Sequence[str]) -> Table:
    """A line a measure: each engine's median and range, and how many times less of it ours takes than the peer."""
    ours, peers = engines[0], engines[1:]
    reasons: dict[str, int] = {}
    shown = _table("Medians (lowest to highest)")
    shown.add_column("workload")
    shown.add_column("weights")
    shown.add_column("measure")
    for name in engines:
        shown.add_column(name, justify="right", overflow="fold")
    for name in peers:
        shown.add_column(f"{name} / {ours}", justify="right")
    shown.add_column("others", justify="right")
    for row in rows:
        cells = [_cell(row.series.get(name), reasons) for name in engines]
        ratios = [f"{ratio:.2f} x" if (ratio := row.ratio(name)) is not None else "" for name in peers]
        workload = f"{row.workload.upper()} {TITLES[row.workload]}" if row.workload in TITLES else row.workload
        weights = WEIGHTS_TITLES.get(row.weights, row.weights)
        others = f"{row.others:.0%}" if row.workload in TITLES and row.unit != "%" else ""
        shown.add_row(workload, weights, f"{row.measure}, {row.unit}", *cells, *ratios, others)
    shown.caption = "\n".join(f"refused ({number}): {reason}" for reason, number in reasons.items())
    return shown


def _cell(series: Series | None, reasons: dict[str, int]) -> str:
    """`reasons` numbers what is too long for a cell."""
    if series is None:
        return ""
    if not series.values:
        return f"refused ({reasons.setdefault(series.refused, len(reasons) + 1)})" if series.refused else ""
    text = _number(series.median)
    if len(series.values) > 1:
        text += f" ({_number(min(series.values))} to {_number(max(series.values))})"
    return text


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _table(title: str) -> Table:
    return Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1), title_justify="left", caption_justify="left")


def ceilings_table(found: Mapping[str, Any]) -> Table:
    """What the machine can do."""
    shown = _table(f"The machine's ceilings, as torch reaches them ({found['threads']} threads)")
    shown.add_column("what")
    shown.add_column("rate", justify="right")
    for threads, rate in found["bandwidth"].items():
        shown.add_row(f"read bandwidth, {threads} thread{'s' if threads != '1' else ''}", f"{rate / 1e9:.1f} GB/s")
    for name, rate in found["rates"].items():
        shown.add_row(f"matrix product, {name}", f"{rate / 1e9:.0f} {'GOP' if name == 'int8' else 'GFLOP'}/s")
    return shown


def roofline_table(title: str, profile: Profile) -> Table:
    """A line an op, the costliest first."""
    shown = _table(f"{title}, {profile.seconds:.2f} s")
    for name in ("op", "calls", "time", "us", "GB", "GFLOP", "GB/s", "GFLOP/s", "ceiling"):
        shown.add_column(name, justify="left" if name == "op" else "right", no_wrap=name == "op")
    in_ops = 0.0
    for name, cost in sorted(profile.ops.items(), key=lambda item: -item[1].seconds):
        shown.add_row(name, str(cost.calls), f"{cost.seconds / profile.seconds:.1%}", *_rates(cost))
        in_ops += cost.seconds
    shown.add_row("everything else", "", f"{1 - in_ops / profile.seconds:.1%}")
    return shown


def phases_table(title: str, phases: Mapping[str, PhaseCost]) -> Table:
    """A line a phase: what its steps took, what they had to move and compute, and the share of the ceilings."""
    shown = _table(title)
    for name in ("phase", "steps", "ms", "GB", "GFLOP", "GB/s", "GFLOP/s", "ceiling"):
        shown.add_column(name, justify="left" if name == "phase" else "right", no_wrap=name == "phase")
    for name, cost in phases.items():
        total, count = sum(cost.seconds), len(cost.seconds)
        each = f"{cost.num_bytes / count / 1e9:.3f}", f"{cost.flop / count / 1e9:.2f}"
        rates = f"{cost.num_bytes / total / 1e9:.1f}", f"{cost.flop / total / 1e9:.0f}"
        share = f"{cost.floor / total:.0%}" if cost.floor else ""
        shown.add_row(name, str(count), f"{statistics.median(cost.seconds) * 1e3:.2f}", *each, *rates, share)
    return shown


def _rates(cost: OpCost) -> list[str]:
    share = f"{cost.floor / cost.seconds:.0%}" if cost.floor and cost.seconds else ""
    return [
        f"{cost.seconds / cost.calls * 1e6:.0f}",
        f"{cost.num_bytes / 1e9:.2f}",
        f"{cost.flop / 1e9:.1f}" if cost.flop else "",
        f"{cost.num_bytes / cost.seconds / 1e9:.1f}",
        f"{cost.flop / cost.seconds / 1e9:.1f}" if cost.flop else "",
        share,
    ]


def step_summary(profile: Profile, num_streams: int) -> str:
    """The same run as it is outside of a table: how long, the share of the ceilings, and the host's share of a step."""
    floor = sum(cost.floor for cost in profile.ops.values())
    share = profile.host_share(num_streams)
    host = "not measured" if share is None else f"{share:.1%}"
    ceiling = f", {floor / profile.seconds:.0%} of the ceiling" if floor else ""
    return (
        f"The engine as it runs: {profile.seconds:.2f} s{ceiling}. "
        f"Host share of a decode step of {num_streams}: {host}.\n"
    )


def batching_table(title: str, results: Mapping[str, BatchingResult], slot_bytes: float | None) -> Table:
    """Ways of batching, and how many times better the last is than each."""
    shown = _table(title)
    for name in (
        "batching",
        "s",
        "tokens/s",
        "tokens computed",
        "KV reserved",
        "KV used",
        "of it",
        "throughput",
        "memory",
    ):
        shown.add_column(name, justify="left" if name == "batching" else "right")
    best = list(results.values())[-1]
    for name, result in results.items():
        shown.add_row(
            name,
            f"{result.seconds:.2f}",
            f"{result.throughput:.1f}",
            f"{result.num_computed:,}",
            _size(result.reserved, slot_bytes),
            _size(result.used, slot_bytes),
            f"{result.used / result.reserved:.0%}",
            f"{best.throughput / result.throughput:.2f} x",
            f"{result.reserved / best.reserved:.2f} x",
        )
    return shown


def _size(slots: int, slot_bytes: float | None) -> str:
    return f"{slots:,} tokens" if slot_bytes is None else f"{slots * slot_bytes / 2**20:.0f} MiB"
