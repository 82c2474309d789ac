#!/usr/bin/env python3
"""The text quickstart's material: manifests of "3 7 1 ->" with the answer "1 3 7", and a tiny untrained language model.

    python data/make_sort_digits.py --out runs/text_quickstart/data --seed 0

Writes train.jsonl, dev.jsonl (no task of dev is in train) and model/.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from speechrl.data.manifest import write_manifest
from speechrl.models.tiny import build_causal_lm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/text_quickstart/data"))
    parser.add_argument("--train", type=int, default=1500, help="tasks to train on")
    parser.add_argument("--dev", type=int, default=200, help="tasks to evaluate on")
    parser.add_argument("--seed", type=int, default=0, help="of tasks and weights")
    arguments = parser.parse_args()

    random_stream = random.Random(arguments.seed)
    tasks: dict[str, str] = {}
    while len(tasks) < arguments.train + arguments.dev:
        digits = random_stream.choices("0123456789", k=random_stream.randint(3, 5))
        tasks[" ".join(digits) + " ->"] = " ".join(sorted(digits))
    rows = [
        {"id": f"sort-{index}", "prompt": prompt, "text": text} for index, (prompt, text) in enumerate(tasks.items())
    ]
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_manifest(arguments.out / "train.jsonl", rows[: arguments.train])
    write_manifest(arguments.out / "dev.jsonl", rows[arguments.train :])
    build_causal_lm(arguments.out / "model", "0123456789 ->", seed=arguments.seed)
    print(f"{arguments.out}: {arguments.train} train, {arguments.dev} dev, model/")


if __name__ == "__main__":
    main()
