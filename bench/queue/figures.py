"""The tables and the picture of the queue measurement, from the rows of replay.py and holes.py.

``python bench/queue/figures.py KTH THETA KTH_HOLES THETA_HOLES KTH_RANGES``, each a CSV, prints the
tables; ``--picture FILE`` draws the first two.
"""

from __future__ import annotations

import argparse
import csv
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from replay import SCALING

DRAWS = 10_000
Rows = dict[tuple[int, str], list[dict[str, float]]]  # by nodes and variant, one a window


def read_rows(path: Path) -> Rows:
    """Return the rows of a CSV of replay.py, those of a variant in the order of the windows."""
    rows: Rows = defaultdict(list)
    with path.open() as file:
        for row in csv.DictReader(file):
            numbers = {key: float(value) for key, value in row.items() if key != "variant"}
            rows[int(row["nodes"]), row["variant"]].append(numbers)
    return rows


def interval(count: int, statistic: Callable[[Sequence[int]], float]) -> tuple[float, float]:
    """Return the 95 % interval of a statistic of windows: a percentile bootstrap over them."""
    draw = random.Random(0)
    values = sorted(statistic(draw.choices(range(count), k=count)) for _ in range(DRAWS))
    return values[int(DRAWS * 0.025)], values[int(DRAWS * 0.975) - 1]


def median_of(ratios: list[float]) -> tuple[float, float, float]:
    """Return the median of the windows' ratios, and the ends of its interval."""

    def median(windows: Sequence[int]) -> float:
        return statistics.median(ratios[window] for window in windows)

    return statistics.median(ratios), *interval(len(ratios), median)


def compare(fixed: list[dict[str, float]], fit: list[dict[str, float]]) -> dict[str, float]:
    """Return the figures of protocol.md, with their intervals, for one variant."""
    ratios = [a["hours"] / b["hours"] for a, b in zip(fixed, fit, strict=True)]

    def others(windows: Sequence[int]) -> float:
        waited = sum(fit[window]["waited_h"] for window in windows)
        return 100 * (waited / sum(fixed[window]["waited_h"] for window in windows) - 1)

    every = range(len(ratios))
    speedup, low, high = median_of(ratios)
    least, most = interval(len(ratios), others)
    return {
        "fixed_h": statistics.median(row["hours"] for row in fixed),
        "fit_h": statistics.median(row["hours"] for row in fit),
        "attempts": statistics.median(row["attempts"] for row in fit),
        "speedup": speedup,
        "speedup_low": low,
        "speedup_high": high,
        "others": others(every),
        "others_low": least,
        "others_high": most,
    }


def least_h(variant: str) -> float:
    """Return how long a variant's work takes that never waits, by its name."""
    most = float(variant.split()[-1]) if "nodes x" in variant else 1.0
    return float(float(variant.split()[0]) / most**SCALING)


def base_of(variant: str) -> str:
    """Return the name of the fixed request that a variant is compared to."""
    kept = ", rank kept" if "rank kept" in variant else ""
    return f"{variant.split(',')[0]}{kept}, fixed"


def table(rows: Rows) -> str:
    lines = [
        "| nodes | work, least time, form | fixed, h | `--time-min`, h | attempts | ceiling (95 %)"
        " | speed-up (95 %) | others' wait, % (95 %) |",
        "|--:|---|--:|--:|--:|--:|--:|--:|",
    ]
    for (nodes, variant), fit in rows.items():
        if variant.endswith("fixed"):
            continue
        figures = compare(rows[nodes, base_of(variant)], fit)
        fastest = [row["hours"] / least_h(variant) for row in rows[nodes, base_of(variant)]]
        ceiling, lowest, highest = median_of(fastest)
        lines.append(
            f"| {nodes} | {variant} | {figures['fixed_h']:.1f} | {figures['fit_h']:.1f}"
            f" | {figures['attempts']:.0f} | {ceiling:.2f} ({lowest:.2f} to {highest:.2f})"
            f" | {figures['speedup']:.2f}"
            f" ({figures['speedup_low']:.2f} to {figures['speedup_high']:.2f})"
            f" | {figures['others']:+.1f} ({figures['others_low']:+.1f} to"
            f" {figures['others_high']:+.1f}) |"
        )
    return "\n".join(lines)


def holes_table(holes: Path, rows: Rows) -> str:
    """Return the table of runs in all holes, beside the fixed request."""
    lines = ["| nodes | fixed, h | all holes, h | holes | sooner (95 %) |", "|--:|--:|--:|--:|--:|"]
    by_nodes = defaultdict(list)
    with holes.open() as file:
        for row in csv.DictReader(file):
            by_nodes[int(row["nodes"])].append((float(row["hours"]), float(row["holes"])))
    for nodes, windows in by_nodes.items():
        fixed = [row["hours"] for row in rows[nodes, "48 h, fixed"]]
        ratios = [hours / used_h for hours, (used_h, _) in zip(fixed, windows, strict=True)]
        sooner, low, high = median_of(ratios)
        used_h, count = (statistics.median(column) for column in zip(*windows, strict=True))
        lines.append(
            f"| {nodes} | {statistics.median(fixed):.1f} | {used_h:.1f} | {count:.0f}"
            f" | {sooner:.2f} ({low:.2f} to {high:.2f}) |"
        )
    return "\n".join(lines)


def draw(named: dict[str, Rows], path: Path) -> None:
    """Draw the main variants: each window's speed-up beside its ceiling, and the others' wait."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(named), figsize=(10, 6.4), layout="constrained")
    for column, (name, rows) in zip(axes.T, named.items(), strict=True):
        top, bottom = column
        sizes = sorted({nodes for nodes, _ in rows})
        ways = [f"48 h, 60 min, {form}" for form in ("exact", "stretched")]
        for place, nodes in enumerate(sizes):
            fixed = rows[nodes, "48 h, fixed"]
            ceilings = [row["hours"] / 48 for row in fixed]
            top.plot([place - 0.28] * len(fixed), ceilings, "_", color="grey", ms=9)
            for shift, color, way in zip((0, 0.28), ("C0", "C1"), ways, strict=True):
                fit = rows[nodes, way]
                figures = compare(fixed, fit)
                ratios = [a["hours"] / b["hours"] for a, b in zip(fixed, fit, strict=True)]
                label = f"48 h, {way.split(', ', 1)[1]}" if place == 0 else None
                top.plot([place + shift] * len(ratios), ratios, ".", color=color, alpha=0.5)
                top.plot(place + shift, figures["speedup"], "D", color=color, label=label)
                middle = figures["others"]
                spread = [[middle - figures["others_low"]], [figures["others_high"] - middle]]
                bottom.errorbar(place + shift, middle, spread, fmt="o", color=color, capsize=4)
        top.plot([], [], "_", color="grey", ms=9, label="ceiling: no wait at all")
        top.axhline(2, color="black", lw=0.8, ls="--")
        top.set_yscale("log", base=2)
        top.set_yticks([0.5, 1, 2, 4, 8], ["0.5", "1", "2", "4", "8"])
        top.set_title(name)
        bottom.axhline(2, color="black", lw=0.8, ls="--")
        bottom.axhline(0, color="grey", lw=0.8)
        for axis in column:
            axis.set_xticks([place + 0.1 for place in range(len(sizes))], map(str, sizes))
        bottom.set_xlabel("nodes of our run")
    axes[0, 0].set_ylabel("times sooner than fixed 12 h")
    axes[1, 0].set_ylabel("others' mean wait, % more (95 %)")
    axes[0, 0].legend(fontsize=8)
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kth", type=Path)
    parser.add_argument("theta", type=Path)
    parser.add_argument("holes", type=Path, nargs=2, help="of both traces, by holes.py")
    parser.add_argument("ranges", type=Path, help="of the KTH trace")
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    named = {"KTH-SP2, 100 nodes": options.kth, "Theta 2023, 4,392 nodes": options.theta}
    rows = {name: read_rows(path) for name, path in named.items()}
    for (name, of_trace), holes in zip(rows.items(), options.holes, strict=True):
        sys.stdout.write(f"### {name}\n{table(of_trace)}\n\n")
        sys.stdout.write(f"### All holes, {name}\n{holes_table(holes, of_trace)}\n\n")
    sys.stdout.write(f"### Ranges of nodes, KTH-SP2\n{table(read_rows(options.ranges))}\n")
    if options.picture:
        draw(rows, options.picture)


if __name__ == "__main__":
    main()
