#!/usr/bin/env python3
"""Metrics of several runs against the seconds that their steps took, one panel a metric: a PNG.

    python recipes/curves.py curves.png --runs sft=RUN/sft grpo=RUN/grpo --metrics eval/dev/cer train/loss reward/mean

Reads RUN/metrics.jsonl. A run that lacks a metric is left out of that panel.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

from matplotlib.figure import Figure

from speechrl.tracking import step_lines

Lines = Sequence[Mapping[str, float]]


def read_run(given: str) -> tuple[str, Lines]:
    """(name, one mapping per step) of NAME=FOLDER. Raises ValueError naming what can't be read."""
    name, _, folder = given.partition("=")
    path = Path(folder) / "metrics.jsonl"
    if not name or name.startswith("_") or not folder or not path.is_file():
        raise ValueError(f"--runs {given}: give NAME=FOLDER, a folder with metrics.jsonl")
    return name, [record for _, record in step_lines(path)]


def curve(lines: Lines, metric: str) -> list[tuple[float, float]]:
    """(seconds of all steps so far, value) of each step that has the metric."""
    seconds = accumulate(line.get("time/step_s") or 0.0 for line in lines)
    return [(at, line[metric]) for at, line in zip(seconds, lines, strict=True) if line.get(metric) is not None]


def draw(runs: Mapping[str, Lines], metrics: Sequence[str], out: Path) -> None:
    """Raises ValueError naming a metric that no run has."""
    colours = {name: f"C{index}" for index, name in enumerate(runs)}
    figure = Figure(figsize=(4 * len(metrics), 3.2), layout="constrained")
    for panel, metric in zip(figure.subplots(1, len(metrics), squeeze=False)[0], metrics, strict=True):
        curves = {name: points for name, lines in runs.items() if (points := curve(lines, metric))}
        if not curves:
            raise ValueError(f"--metrics {metric}: none of the runs has it")
        for name, points in curves.items():
            marker = "o" if len(points) < 20 else ""
            panel.plot(*zip(*points, strict=True), label=name, color=colours[name], marker=marker)
        panel.set(xlabel="seconds of training", title=metric)
        panel.grid(alpha=0.3)
        panel.legend()
    figure.savefig(out, dpi=100)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--runs", nargs="+", required=True)
    parser.add_argument("--metrics", nargs="+", required=True)
    options = parser.parse_args(argv)
    try:
        runs = [read_run(given) for given in options.runs]
        if len(dict(runs)) < len(runs):
            raise ValueError(f"--runs {' '.join(options.runs)}: give each name once")
        draw(dict(runs), options.metrics, options.out)
    except (ValueError, OSError) as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
