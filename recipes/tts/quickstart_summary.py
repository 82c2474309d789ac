#!/usr/bin/env python3
"""Put the synthesis quickstart's numbers into RUN/summary.json and print its table.

python recipes/tts/quickstart_summary.py runs/tts_quickstart --seed 0
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

# metric of `speechrl eval` -> name in the summary
METRICS = {
    "cer": "cer",
    "wer": "wer",
    "reward": "reward",
    "part/speaker": "speaker_similarity",
    "part/duration": "duration_agreement",
    "part/spoken": "spoken",
    "part/melody": "melody",
    "overlong": "overlong",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--seed", type=int, required=True)
    arguments = parser.parse_args()
    summary: dict = {"seed": arguments.seed, "intervals_95": {}}
    table = Table(title="held-out texts, sampled at temperature 1, 95 % intervals")
    for column in ("listener", "model", *METRICS.values()):
        table.add_column(column, justify="right")
    for folder, prefix in (("eval", ""), ("judge", "judge_")):
        path = arguments.run / folder / "summary.json"
        if not path.exists():
            continue
        for model, entry in json.loads(path.read_text())["models"].items():
            metrics = entry["sets"]["test"]["metrics"]
            row = [folder, model]
            for metric, name in METRICS.items():
                rate = metrics.get(metric)
                if rate is None:
                    row.append("-")
                    continue
                key = f"{prefix}{name}_{model}"
                summary[key] = rate["value"]
                summary["intervals_95"][key] = [rate["low"], rate["high"]]
                row.append(f"{rate['value']:.3f} [{rate['low']:.3f}, {rate['high']:.3f}]")
            table.add_row(*row)
    for prefix in ("", "judge_"):
        before, after = (summary.get(f"{prefix}cer_{model}") for model in ("sft", "grpo"))
        if before and after is not None:
            summary[f"{prefix}cer_relative_change"] = after / before - 1
    seconds = (line.split("\t") for line in (arguments.run / "seconds.tsv").read_text().splitlines())
    summary["seconds_by_stage"] = {name: int(value) for name, value in seconds}
    (arguments.run / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    Console(width=200).print(table)
    print(f"{arguments.run / 'summary.json'}; listen to {arguments.run}/eval/*/test/wavs")


if __name__ == "__main__":
    main()
