#!/usr/bin/env python3
"""Put the quickstart's numbers into RUN/summary.json and print its table.

python recipes/asr/quickstart_summary.py runs/quickstart --seed 0
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

COLUMNS = {
    "cer": "CER %",
    "mer": "MER %",
    "keyword_f1": "keyword F1 %",
    "insertion_rate": "insertions %",
    "reward": "reward",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--seed", type=int, required=True)
    arguments = parser.parse_args()

    models = json.loads((arguments.run / "eval" / "summary.json").read_text())["models"]
    seconds = dict(line.split("\t") for line in (arguments.run / "seconds.tsv").read_text().splitlines())
    summary: dict = {"seed": arguments.seed}
    for model, entry in models.items():
        noisy, clean = (entry["sets"][name]["metrics"] for name in ("noisy", "clean"))
        summary |= {
            f"cer_{model}": noisy["cer"]["value"],
            f"cer_clean_{model}": clean["cer"]["value"],
            f"mer_{model}": noisy["mer"]["value"],
            f"keyword_f1_{model}": noisy["keyword_f1"]["value"],
            f"insertion_rate_{model}": noisy["insertion_rate"]["value"],
            f"reward_{model}": noisy["reward"]["value"],
            f"reward_clean_{model}": clean["reward"]["value"],
        }
    summary["cer_relative_change"] = summary["cer_grpo"] / summary["cer_sft"] - 1
    summary["seconds_by_stage"] = {name: int(value) for name, value in seconds.items()}
    summary["intervals_95"] = {
        model: {
            name: {column: [part["metrics"][column][end] for end in ("low", "high")] for column in COLUMNS}
            for name, part in entry["sets"].items()
        }
        for model, entry in models.items()
    }
    (arguments.run / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")

    console = Console(width=130)
    for name in ("noisy", "clean"):
        number = next(iter(models.values()))["sets"][name]["utterances"]
        table = Table("model", *COLUMNS.values(), title=f"held-out {name} speech, {number} utterances, 95 % intervals")
        for model, entry in models.items():
            metrics = entry["sets"][name]["metrics"]
            table.add_row(model, *(_cell(metrics[column], 1 if column == "reward" else 100) for column in COLUMNS))
        console.print(table)
    total = sum(summary["seconds_by_stage"].values())
    console.print(
        f"GRPO against SFT on noisy speech: CER {100 * summary['cer_relative_change']:+.1f} % relative; "
        f"{total} s in all; {arguments.run / 'summary.json'}"
    )


def _cell(rate: dict, scale: float) -> str:
    value, low, high = (scale * rate[key] for key in ("value", "low", "high"))
    digits = 1 if scale == 100 else 3
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


if __name__ == "__main__":
    main()
