#!/usr/bin/env python3
"""Metrics of several runs against the seconds that their steps took, one panel a metric: a PNG.

    python recipes/curves.py curves.png --runs sft=RUN/sft grpo=RUN/grpo --metrics eval/dev/cer train/loss reward/mean

Reads RUN/metrics.jsonl. A run that lacks a metric is left out of that panel.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

from matplotlib.figure import Figure

Lines = Sequence[Mapping[str, float]]


def read_run(given: str) -> tuple[str, Lines]:
    """(name, one mapping per step) of NAME=FOLDER. Raises SystemExit naming what can't be read."""
    name, _, folder = given.partition("=")
    path = Path(folder) / "metrics.jsonl"
    if not folder or not path.is_file():
        raise SystemExit(f"--runs {given}: give NAME=FOLDER, a folder with metrics.jsonl")
    return name, [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def curve(lines: Lines, metric: str) -> list[tuple[float, float]]:
    """(seconds of all steps so far, value) of each step that has the metric."""
    seconds = accumulate(line.get("time/step_s", 0.0) for line in lines)
    return [(at, line[metric]) for at, line in zip(seconds, lines, strict=True) if line.get(metric) is not None]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--runs", nargs="+", required=True)
    parser.add_argument("--metrics", nargs="+", required=True)
    options = parser.parse_args(argv)
    runs = dict(map(read_run, options.runs))
    colours = {name: f"C{index}" for index, name in enumerate(runs)}
    figure = Figure(figsize=(4 * len(options.metrics), 3.2), layout="constrained")
    for panel, metric in zip(figure.subplots(1, len(options.metrics), squeeze=False)[0], options.metrics, strict=True):
        curves = {name: points for name, lines in runs.items() if (points := curve(lines, metric))}
        if not curves:
            raise SystemExit(f"--metrics {metric}: none of the runs has it")
        for name, points in curves.items():
            panel.plot(
                *zip(*points, strict=True), label=name, color=colours[name], marker="o" if len(points) < 20 else ""
            )
        panel.set(xlabel="seconds of training", title=metric)
        panel.grid(alpha=0.3)
        panel.legend()
    figure.savefig(options.out, dpi=100)


if __name__ == "__main__":
    main()
