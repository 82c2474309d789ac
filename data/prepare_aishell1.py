#!/usr/bin/env python3
"""AISHELL-1 (openslr.org/33) -> manifests: train, dev, test.

    python data/prepare_aishell1.py CORPUS/data_aishell --out data/aishell1

Layout: wav/{train,dev,test}/SPEAKER/UTTERANCE.wav (unpack the archive of each speaker in wav/ first) and
transcript/aishell_transcript_v0.8.txt, whose lines are an utterance and its words. The spaces between words are taken
out. Some recordings have no transcript; they are left out and counted.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from speechrl.data.corpus import LeftOut, Reader, corpus_parser, expect, recorded, run, table, without_spaces
from speechrl.types import Utterance

TRANSCRIPT = "transcript/aishell_transcript_v0.8.txt"
SPLITS = ("train", "dev", "test")


def read(folder: Path, split: str, left_out: LeftOut) -> Iterator[Utterance]:
    """The utterances of one split, by speaker and name."""
    transcripts = table(folder / TRANSCRIPT)
    for path in sorted((folder / "wav" / split).glob("*/*.wav")):
        if path.stem not in transcripts:
            left_out["without a transcript"] += 1
            continue
        where, words = transcripts[path.stem]
        yield Utterance(
            id=path.stem,
            text=without_spaces(words),
            audio=recorded(path),
            language="Chinese",
            metadata={"speaker": path.parent.name},
            where=where,
        )


def splits(arguments: argparse.Namespace) -> dict[str, Reader]:
    expect(arguments.corpus, [TRANSCRIPT, *(f"wav/{split}" for split in arguments.splits)], "AISHELL-1's data_aishell")
    return {split: partial(read, arguments.corpus, split) for split in arguments.splits}


def main(argv: Sequence[str] | None = None) -> None:
    assert __doc__
    parser = corpus_parser(__doc__)
    parser.add_argument("--splits", nargs="+", choices=SPLITS, default=SPLITS)
    arguments = parser.parse_args(argv)
    run(arguments, lambda: splits(arguments))


if __name__ == "__main__":
    main()
