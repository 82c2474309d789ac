#!/usr/bin/env python3
"""Copies of a manifest's recordings at other speeds: augmentation that a frozen encoder's feature cache can keep.

    python data/speed_copies.py speech/sft_train.jsonl --speeds 0.9 1.1 --out speech/speed

Speed and pitch change together, as on a tape (Ko et al. 2015). Writes OUT/NAME.jsonl with the copies alone, so give it
to --data.prompt_dataset beside the manifest itself.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import soundfile
import soxr

from speechrl.data.audio import load_audio
from speechrl.data.manifest import read_rows, write_manifest
from speechrl.types import AudioRef

RATE_HZ = 16000


def copy_of(row: dict, manifest: Path, speed: float, out: Path) -> dict:
    """Write one copy below `out`; return its line."""
    samples = load_audio(AudioRef(str(manifest.parent / row["audio"])), RATE_HZ, row["id"])
    faster = soxr.resample(samples, RATE_HZ * speed, RATE_HZ)
    path = Path(f"x{speed:g}") / Path(row["audio"].replace("../", "")).with_suffix(".flac")
    (out / path).parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(out / path, faster.clip(-1, 1), RATE_HZ, subtype="PCM_16")
    kept = {key: value for key, value in row.items() if key != "duration"}
    return kept | {"id": f"{row['id']}/x{speed:g}", "audio": str(path), "duration_s": round(len(faster) / RATE_HZ, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("manifest", type=Path, help="lines with `id` and `audio`")
    parser.add_argument("--speeds", type=float, nargs="+", default=[0.9, 1.1])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--max_duration_s", type=float, default=29.9, help="longer copies are left out")
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()

    rows = [row for _, _, row in read_rows(options.manifest)]
    jobs = [(row, options.manifest, speed, options.out) for speed in options.speeds for row in rows]
    with ProcessPoolExecutor(options.processes) as pool:
        copies = list(pool.map(copy_of, *zip(*jobs, strict=True), chunksize=32))
    kept = [row for row in copies if row["duration_s"] <= options.max_duration_s]
    write_manifest(options.out / options.manifest.name, kept)
    print(f"{options.out / options.manifest.name}: {len(kept)} copies, {len(copies) - len(kept)} too long")


if __name__ == "__main__":
    main()
