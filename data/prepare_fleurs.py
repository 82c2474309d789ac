#!/usr/bin/env python3
"""FLEURS (hub id google/fleurs), one language -> manifests: train, dev, test.

    python data/prepare_fleurs.py CORPUS/data/cmn_hans_cn --out data/fleurs_zh

Layout: {train,dev,test}.tsv without a header (sentence id, file, raw transcript, transcript, characters, samples at
16 kHz, gender) and audio/{train,dev,test}/*.wav: unpack audio/*.tar.gz there. A sentence was read by up to three
people, so utterances are named SENTENCE_FILE.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from speechrl.data.corpus import (
    CorpusError,
    LeftOut,
    Reader,
    corpus_parser,
    expect,
    language_of,
    recorded,
    run,
    text_lines,
)
from speechrl.types import Utterance

SPLITS = ("train", "dev", "test")
TEXT_COLUMN = {"raw": 2, "normalised": 3}
RATE_HZ = 16000


def read(folder: Path, split: str, column: int, language: str, left_out: LeftOut) -> Iterator[Utterance]:
    """The utterances of one split, in the order of its table."""
    for where, line in text_lines(folder / f"{split}.tsv"):
        fields = line.split("\t")
        if len(fields) != 7 or not fields[5].isdigit():
            raise CorpusError(f"{where}: {len(fields)} columns; expected 7, the sixth a number of samples")
        sentence, name = fields[0], fields[1]
        if not fields[column].strip():
            left_out["without text"] += 1
            continue
        yield Utterance(
            id=f"{sentence}_{Path(name).stem}",
            text=fields[column].strip(),
            audio=recorded(folder / "audio" / split / name),
            language=language,
            duration_s=int(fields[5]) / RATE_HZ,
            metadata={"sentence": sentence, "gender": fields[6].lower()},
            where=where,
        )


def splits(arguments: argparse.Namespace) -> dict[str, Reader]:
    folder = arguments.corpus
    needed = [name for split in arguments.splits for name in (f"{split}.tsv", f"audio/{split}")]
    expect(folder, needed, "the folder of one language of FLEURS (data/LANGUAGE, its audio/*.tar.gz unpacked)")
    language = arguments.language or language_of(folder.resolve().name)
    column = TEXT_COLUMN[arguments.text]
    return {split: partial(read, folder, split, column, language) for split in arguments.splits}


def main(argv: Sequence[str] | None = None) -> None:
    assert __doc__
    parser = corpus_parser(__doc__)
    parser.add_argument("--splits", nargs="+", choices=SPLITS, default=SPLITS)
    parser.add_argument(
        "--text", choices=tuple(TEXT_COLUMN), default="raw", help="with case and punctuation, or without"
    )
    parser.add_argument("--language", default="", help="by default as the folder's name says")
    arguments = parser.parse_args(argv)
    run(arguments, lambda: splits(arguments))


if __name__ == "__main__":
    main()
