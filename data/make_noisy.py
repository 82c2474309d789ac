#!/usr/bin/env python3
"""A fixed noisy copy of a manifest, to evaluate on: every utterance once at every level.

    python data/make_noisy.py data/mine/dev.jsonl --noise CORPUS/musan/noise --snr_db 0 10 --out data/mine/dev_noisy

Writes OUT/audio/*.flac (16 kHz) and OUT/noisy.jsonl, whose `snr_db` is for --eval.group_by snr_db. The noise of an
utterance depends on its id, the level and --seed. Training needs no such copy: --data.augment.noise draws anew each
epoch. Keep noise recordings that you train with out of it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from speechrl.data.audio import load_audio, write_wav
from speechrl.data.augment import Augmenter, augment
from speechrl.data.manifest import read_manifest, row_of, write_manifest
from speechrl.sections import Augment
from speechrl.types import AudioRef, Utterance

RATE_HZ = 16000


def noisy(utterance: Utterance, name: str, snr_db: float, options: argparse.Namespace) -> Utterance:
    """The utterance at one level, its audio written to a file."""
    assert utterance.audio is not None
    draw = Augment(
        noise=tuple(options.noise), noise_share=1.0, snr_db=(snr_db, snr_db), telephone_share=float(options.telephone)
    )
    changed = Augmenter(draw, float("inf"), options.seed)(replace(utterance, id=name), epoch=0)
    assert changed.augmentation is not None
    samples = augment(load_audio(utterance.audio, RATE_HZ, utterance.where), RATE_HZ, changed.augmentation)
    path = options.out / "audio" / f"{name.replace('/', '_')}.flac"
    write_wav(path, samples, RATE_HZ)
    metadata = dict(utterance.metadata) | {"snr_db": snr_db}
    return replace(utterance, id=name, audio=AudioRef(str(path)), metadata=metadata)


def main(argv: Sequence[str] | None = None) -> None:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--noise", nargs="+", default=["speech"], help="folders of recordings, or white, pink, speech")
    parser.add_argument("--snr_db", nargs="+", type=float, default=[0.0, 10.0], help="levels of speech over noise")
    parser.add_argument("--telephone", action="store_true", help="and through a telephone")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    (arguments.out / "audio").mkdir(parents=True, exist_ok=True)
    try:
        rows = [
            noisy(utterance, f"{utterance.id}@{snr_db:g}dB", snr_db, arguments)
            for utterance in read_manifest(arguments.manifest)
            for snr_db in arguments.snr_db
        ]
    except ValueError as error:
        print(f"make_noisy.py: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    path = arguments.out / "noisy.jsonl"
    write_manifest(path, (row_of(utterance, path.parent) for utterance in rows))
    print(f"{path}: {len(rows):,} utterances")


if __name__ == "__main__":
    main()
